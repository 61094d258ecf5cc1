"""What a report says of the rows, and that none of their text is a command to the terminal."""

import io
import json
import sys

import pytest
from toy_data import CHATML, ROWS, make, tokenizer, write

from pipeline.__main__ import main
from pipeline.commands.chat import Writer
from pipeline.config import Data
from pipeline.data import source
from pipeline.data.formats import RowError, show
from pipeline.data.read import overlap, prepare
from pipeline.data.report import Report
from pipeline.errors import InputError, visible
from pipeline.models.tokenizer import eos_ids
from pipeline.runtime.summary import sample_table
from pipeline.system import console

EVIL = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\x7f\x08\u202eolleh\u2066\u200f\ufeff\U000e0041\ud800"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\r\x9b31m\x7f\x08\u202eolleh\u2066\u200f\ufeff\U000e0041\ud800"


def commands(text: str) -> list[str]:
    """Characters of a text that a terminal would obey, or could not be sent to one."""
    return [
        c for c in text if c != "\n" and ((not c.isprintable() and c != "\t") or "\ud800" <= c <= "\udfff")
    ]


def test_what_a_terminal_obeys_is_shown():
    assert visible(EVIL) == SHOWN and not commands(visible(EVIL))
    assert visible("é 東京 🦙 👨‍👩‍👧 \t\n") == "é 東京 🦙 👨‍👩‍👧 \t\n"  # joined pictures, tabs and lines stay
    assert visible("a\nb\tc", lines=False) == r"a\nb\tc"
    assert str(InputError(EVIL)) == SHOWN
    error = RowError("null", f"x{EVIL}\n", show(EVIL), "a text", file=f"{EVIL}\nerror: no", line=1)
    assert not commands(str(error)) and "\n" not in str(error)


def test_whatever_shows_text_of_rows_shows_it_so(capsys):
    report = Report("sft", 9, skipped=[f"a.jsonl:1: {EVIL}\n"], samples=[f"one {EVIL}\ntwo"])
    assert SHOWN in report.render() and not commands(report.render())
    assert json.loads(json.dumps(report.to_dict()))["samples"] == [f"one {EVIL}\ntwo"], (
        "a file keeps what was"
    )
    side = {"completion": EVIL, "reward": 1.0}
    table = sample_table([{"prompt": EVIL, "before": side, "after": side}], width=200)
    assert r"\x1b]0;owned" in table and not commands(table)

    class Tokenizer:
        decode = staticmethod(lambda tokens, **_: "".join(tokens))

    writer = Writer(Tokenizer())
    writer.show([EVIL])
    assert writer.close([EVIL, " \x1b[0m"]) == f"{EVIL} \x1b[0m"
    assert capsys.readouterr().out == rf"{SHOWN} \x1b[0m"


def test_a_terminal_without_the_characters(monkeypatch):
    sink = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", sink)
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # restored after the test
    console.wrap_streams()
    assert main(["sft", "nowhere.yaml"]) == 2
    print(Report("sft", 9, samples=["é"]).render(), flush=True)
    assert rb"between \u27e6 and \u27e7" in sink.buffer.getvalue()


def test_held_out_rows_that_train_has(tmp_path, embedded_ray):
    chat = {
        "messages": [{"role": "user", "content": "question 7"}, {"role": "assistant", "content": "answer 7"}]
    }
    train = write(tmp_path / "train.jsonl", ROWS[:20])
    for rows, counts in (
        ([ROWS[3], {**ROWS[4], "completion": " no"}, ROWS[30]], (2, 1)),
        ([chat], (1, 1)),  # the same words in another form
        (ROWS[20:], (0, 0)),
    ):
        held_out = write(tmp_path / "eval.jsonl", rows)
        report = make(tmp_path, train=train, eval=held_out, apply_chat_template=True).report
        assert report.overlap == counts and report.duplicates == 0
        verb = (
            "row of data.eval has a prompt that is"
            if counts[0] == 1
            else "rows of data.eval have prompts that are"
        )
        warned = (
            f"{counts[0]} {verb} also in data.train ({counts[1]} with the same completion): metrics on them"
        )
        assert (warned in report.render()) == bool(counts[0])
        again = make(tmp_path, train=train, eval=held_out, apply_chat_template=True).report
        assert again.reused and again.overlap == counts
    report = make(tmp_path, "ppo", train=train, eval=train).report
    assert (
        report.overlap == (20, 20)
        and "20 rows of data.eval have prompts that are also in data.train: metrics" in report.render()
    )
    assert make(tmp_path, train=train).report.overlap is None


def test_pairs_in_both_orders_are_named(tmp_path, embedded_ray, monkeypatch):
    monkeypatch.setattr(source, "plan", lambda *args, plan=source.plan: plan(*args, 300))  # several chunks
    rows = [{"prompt": f"q{i}", "chosen": "a", "rejected": f"b{i}"} for i in range(40)]
    turns = [{"role": "user", "content": "q3"}]
    path = write(tmp_path / "pairs.jsonl", rows)
    assert "both orders" not in make(tmp_path, "rm", train=path).report.render()
    swapped = {"prompt": "q3", "chosen": "b3", "rejected": "a"}
    other = write(
        tmp_path / "more.jsonl", [{**swapped, "prompt": "q2"}, {**swapped, "prompt": turns}, swapped][2:]
    )
    for stage in ("rm", "dpo"):
        report = make(tmp_path, stage, train=[path, other]).report
        assert report.splits["train"].contradictions == 1
        said = "1 pair of completions in both orders, A preferred to B and B to A for the same prompt"
        assert said in report.render() and f"first: {path}:4 and {other}:1" in report.render()
    chats = write(tmp_path / "chats.jsonl", [{**swapped, "prompt": turns}, {**rows[7], "prompt": turns}])
    path = write(
        tmp_path / "pairs.jsonl",
        [*rows, *(swapped for _ in range(3)), {**rows[5], "chosen": "b5", "rejected": "a "}],
    )
    report = make(tmp_path, "rm", train=[path, chats], apply_chat_template=True).report
    assert report.splits["train"].contradictions == 2 and f"first: {path}:4 and {path}:41" in report.render()


def test_a_margin_that_dpo_does_not_use(tmp_path, embedded_ray):
    path = write(tmp_path / "pairs.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1}])
    assert "dpo does not use the column `margin`" in make(tmp_path, "dpo", train=path).report.render()
    assert "does not use" not in make(tmp_path, "rm", train=path).report.render()


@pytest.mark.parametrize("stage", ["sft", "dpo", "ppo", "rm"])
def test_an_end_that_generation_does_not_know(tmp_path, embedded_ray, stage):
    """The template's end of turn is text to a tokenizer without that token, or a token that is no eos."""
    turns = [{"role": "user", "content": "hi"}]
    row = {
        "sft": {"messages": [*turns, {"role": "assistant", "content": "yo"}]},
        "ppo": {"prompt": turns},
    }.get(stage, {"prompt": turns, "chosen": "yo", "rejected": "no"})
    path = write(tmp_path / "rows.jsonl", [row])
    for end, known in (("<|stop|>\n", False), ("<|im_end|>\n", True), ("</s>\n", True)):
        tok = tokenizer(CHATML.replace("<|im_end|>\n", end))
        found = prepare(stage, Data(train=path), tok, 400, str(tmp_path / "cache")).report
        said = 'the chat template ends a completion with "<|stop|>\\n", generation stops on </s> (id '
        assert (said in found.render()) == (not known and stage != "rm"), found.render()
        assert ("only at the end of a row" in found.render()) == (not known and stage in ("sft", "dpo"))
    tok.generation_eos = [1]  # of generation_config.json
    assert 1 in eos_ids(tok)


def test_no_completion_is_trained_to_end(tmp_path, embedded_ray):
    rows = write(
        tmp_path / "rows.jsonl",
        [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}],
    )
    apart = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %} </s>{% endfor %}"
    found = prepare("sft", Data(train=rows), tokenizer(apart), 400, str(tmp_path / "cache")).report
    assert "no completion is trained with a token that generation stops on" in found.render()
    assert "the chat template leaves it out (model.chat_template)" in found.render()
    path = write(tmp_path / "long.jsonl", ROWS)
    said = make(tmp_path, train=path, max_length=15, too_long="truncate").report.render()
    assert "all of them are truncated (data.max_length)" in said
    assert "stops on" not in make(tmp_path, train=path).report.render()


def test_one_of_a_kind_is_not_plural(tmp_path, embedded_ray):
    path = write(tmp_path / "rows.jsonl", [ROWS[0]])
    assert "read        1 row\n" in make(tmp_path, train=path).report.render()
    path = write(tmp_path / "rows.jsonl", [ROWS[0], ROWS[0], {**ROWS[1], "completion": "a</s>"}])
    said = make(tmp_path, train=path).report.render()
    assert "1 row repeats an earlier row (not removed)" in said
    assert "1 row contains special tokens in its text (</s> in 1); they are encoded as ordinary text" in said


def test_truncation_is_not_advised_to_those_who_truncate(tmp_path, embedded_ray):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "p" * 50, "chosen": "a", "rejected": "b"}])
    for too_long, said in (
        ("truncate", "their prompts alone fill the 20 tokens"),
        ("drop", "data.too_long=truncate"),
    ):
        with pytest.raises(InputError, match=r"no row is left of 1 read \(1 too long\)") as caught:
            make(tmp_path, "dpo", train=path, max_length=20, too_long=too_long)
        assert said in str(caught.value) and ("data.too_long=truncate" in said) == (
            "too_long=" in str(caught.value)
        )


def test_millions_of_rows_are_compared_in_seconds():
    import numpy as np

    train = np.arange(2_000_000, dtype=np.uint64)
    held_out = np.array([[1, 7], [5, 5], [9_999_999, 1]], dtype=np.uint64)
    pairs = np.stack([train, train], axis=1)
    assert overlap([bytearray(pairs.tobytes())], [bytearray(held_out.tobytes())]) == (2, 2 + 1)
    assert overlap([None], [bytearray()]) is None


@pytest.mark.parametrize("damage", ["{", "[]", '{"parts": 1}', '{"parts": {"train": [["gone.parquet", 1]]}}'])
def test_a_damaged_cache_is_made_again(tmp_path, embedded_ray, damage):
    path = write(tmp_path / "rows.jsonl", ROWS)
    make(tmp_path, train=path)
    (manifest,) = (tmp_path / "cache").glob("*/manifest.json")
    manifest.write_text(damage)
    assert not make(tmp_path, train=path).report.reused
    (part, *_) = manifest.parent.glob("*.parquet")
    for part in manifest.parent.glob("*.parquet"):
        part.write_bytes(part.read_bytes()[:-9])
    assert make(tmp_path, train=path).train.count() == 50
