"""What the statistics of all tasks say together: duplicates, overlap of train and eval, contradictions, notes."""

import pytest
from toy_data import CHATML, ROWS, make, tokenizer, write

from pipeline.config import Data
from pipeline.data import merge, read
from pipeline.data.read import prepare
from pipeline.models.tokenizer import eos_ids


def test_duplicates_are_counted_over_chunks():
    assert merge.duplicates([b"a" * 8 + b"b" * 8, b"a" * 8]) == 1
    assert merge.duplicates([b"", None]) is None


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
    monkeypatch.setattr(read, "plan", lambda *args, plan=read.plan: plan(*args, 300))  # several chunks
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
        warning = "1 pair of completions in both orders, A preferred to B and B to A for the same prompt"
        assert warning in report.render() and f"first: {path}:4 and {other}:1" in report.render()
    chats = write(tmp_path / "chats.jsonl", [{**swapped, "prompt": turns}, {**rows[7], "prompt": turns}])
    path = write(
        tmp_path / "pairs.jsonl",
        [*rows, *(swapped for _ in range(3)), {**rows[5], "chosen": "b5", "rejected": "a "}],
    )
    report = make(tmp_path, "rm", train=[path, chats], apply_chat_template=True).report
    assert report.splits["train"].contradictions == 2 and f"first: {path}:4 and {path}:41" in report.render()


def test_millions_of_rows_are_compared_in_seconds():
    import numpy as np

    train = np.arange(2_000_000, dtype=np.uint64)
    held_out = np.array([[1, 7], [5, 5], [9_999_999, 1]], dtype=np.uint64)
    pairs = np.stack([train, train], axis=1)
    assert merge.overlap([bytearray(pairs.tobytes())], [bytearray(held_out.tobytes())]) == (2, 2 + 1)
    assert merge.overlap([None], [bytearray()]) is None


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
        report = prepare(stage, Data(train=path), tok, 400, str(tmp_path / "cache")).report
        warning = 'the chat template ends a completion with "<|stop|>\\n", generation stops on </s> (id '
        assert (warning in report.render()) == (not known and stage != "rm"), report.render()
        assert ("only at the end of a row" in report.render()) == (not known and stage in ("sft", "dpo"))
    tok.generation_eos = [1]  # of generation_config.json
    assert 1 in eos_ids(tok)
