"""What a report says of the rows, and that none of their text is a command to the terminal."""

import io
import json
import sys

import pytest

from pipeline import console
from pipeline.__main__ import main
from pipeline.data.formats import RowError, show
from pipeline.data.read import overlap
from pipeline.data.report import Report
from pipeline.errors import InputError, visible
from pipeline.stages.chat import Writer
from tests.test_data_read import ROWS, make, write

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
    table = console.sample_table([{"prompt": EVIL, "before": side, "after": side}], width=200)
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
    console.own()
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
        warned = f"{counts[0]} rows whose prompt stands in data.train too, {counts[1]} of them with the same completion"
        assert (warned in report.render()) == bool(counts[0])
        again = make(tmp_path, train=train, eval=held_out, apply_chat_template=True).report
        assert again.reused and again.overlap == counts
    report = make(tmp_path, "ppo", train=train, eval=train).report
    assert (
        report.overlap == (20, 20)
        and "20 rows whose prompt stands in data.train too: held-out" in report.render()
    )
    assert make(tmp_path, train=train).report.overlap is None


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
