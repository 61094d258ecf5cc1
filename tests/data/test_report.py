"""What a report says of the rows, and that none of their text is a command to the terminal."""

import io
import json
import sys

from tokenizers import Tokenizer, decoders, models
from toy_data import ROWS, make, tokenizer, write
from transformers import PreTrainedTokenizerFast

from pipeline.__main__ import main
from pipeline.commands.chat import Writer
from pipeline.config import Data
from pipeline.data.read import prepare
from pipeline.data.report import Report, sample
from pipeline.data.values import RowError, show
from pipeline.errors import InputError, visible
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


def test_no_completion_is_trained_to_end(tmp_path, embedded_ray):
    rows = write(
        tmp_path / "rows.jsonl",
        [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}],
    )
    apart = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %} </s>{% endfor %}"
    report = prepare("sft", Data(train=rows), tokenizer(apart), 400, str(tmp_path / "cache")).report
    assert "no completion is trained with a token that generation stops on" in report.render()
    assert "the chat template leaves it out (model.chat_template)" in report.render()
    path = write(tmp_path / "long.jsonl", ROWS)
    text = make(tmp_path, train=path, max_length=15, too_long="truncate").report.render()
    assert "all of them are truncated (data.max_length)" in text
    assert "stops on" not in make(tmp_path, train=path).report.render()


def test_one_of_a_kind_is_not_plural(tmp_path, embedded_ray):
    path = write(tmp_path / "rows.jsonl", [ROWS[0]])
    assert "read        1 row\n" in make(tmp_path, train=path).report.render()
    path = write(tmp_path / "rows.jsonl", [ROWS[0], ROWS[0], {**ROWS[1], "completion": "a</s>"}])
    text = make(tmp_path, train=path).report.render()
    assert "1 row repeats an earlier row (not removed)" in text
    assert "1 row contains special tokens in its text (</s> in 1); they are encoded as ordinary text" in text


def test_a_shared_prefix_that_cuts_a_character_is_shown_whole():
    """Without the cut at a character, a run of byte tokens that is no UTF-8 decodes to nothing but replacement characters."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Tokenizer(
        models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tok = PreTrainedTokenizerFast(tokenizer_object=backend)
    prompt, chosen, rejected = (list(text.encode()) for text in ("Farbe? ", "übel", "ölig"))
    text = sample(tok, {"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}, len(prompt) + 1)
    assert text == "Farbe? \n  chosen   ⟦übel⟧\n  rejected ⟦ölig⟧"
    apart = {"prompt_ids": prompt + chosen[:1], "chosen_ids": chosen[1:], "rejected_ids": rejected[1:]}
    assert sample(tok, apart) == text
    assert sample(tok, {**apart, "rejected_ids": None}) == "Farbe? ⟦übel⟧"
