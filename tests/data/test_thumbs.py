"""Thumbs: single completions with a label, and pairs, which are two of them."""

import pytest
from toy_data import BOT, NO, PREFERENCES, USER, encoded, make, parsed, rows_of, write

from pipeline.data.values import Dropped

SINGLE = [  # one row of each shape, all of the same completion
    {"prompt": [USER], "completion": "yo"},
    {"prompt": [USER], "completion": [BOT]},
    {"prompt": [USER], "answer": "yo"},
    {"messages": [USER, BOT]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    {"instruction": "hi", "output": "yo"},
]


@pytest.mark.parametrize("name", ["label", "kto_tag"])
@pytest.mark.parametrize("row", SINGLE, ids=lambda row: "+".join(row))
def test_every_shape_of_a_single_completion(row, name):
    for value, label in ((True, True), (0, False)):
        record = parsed({**row, name: value}, "kto")
        assert (record.prompt, record.pairs, record.labels) == ([USER], [([BOT],)], (label,))
        assert not record.unread


@pytest.mark.parametrize("row", PREFERENCES, ids=lambda row: "+".join(row))
def test_a_pair_is_two_thumbs(row):
    record = parsed(row, "kto")
    assert (record.prompt, record.pairs, record.labels) == ([USER], [([BOT],), ([NO],)], (True, False))


@pytest.mark.parametrize(
    ("value", "label"),
    [(True, True), (1, True), (1.0, True), ("1", True), ("True", True), ("thumbs up", True), ("up", True), ("\U0001f44d", True),
     (False, False), (0, False), (-1, False), ("-1", False), ("false", False), ("Thumbs down", False), ("\U0001f44e", False)],
)  # fmt: skip
def test_what_a_label_may_be(value, label):
    assert parsed({"prompt": "a", "completion": "b", "label": value}, "kto").labels == (label,)


def test_prompt_and_completion_are_in_columns_of_their_own():
    tok, (example,) = encoded("kto", {"prompt": [USER], "completion": [BOT], "label": "bad"})
    columns = example.columns
    assert columns["label"] is False and tok.decode(columns["completion_ids"]).strip() == "yo</s>"
    assert "hi" in tok.decode(columns["prompt_ids"]) and "yo" not in tok.decode(columns["prompt_ids"])
    _, both = encoded("kto", {"prompt": [USER], "chosen": "yo", "rejected": "no"})
    assert [one.columns["label"] for one in both] == [True, False]
    assert both[0].columns["prompt_ids"] == both[1].columns["prompt_ids"] == columns["prompt_ids"]
    _, (cut,) = encoded(
        "kto", {"prompt": "hi", "completion": " abcdef", "label": 1}, max_length=6, too_long="truncate"
    )
    assert cut.truncated and len(cut.columns["prompt_ids"] + cut.columns["completion_ids"]) == 6


def test_a_file_of_thumbs_and_its_report(tmp_path):
    rows = [{"prompt": f"q {i}", "completion": f" a {i}", "label": i % 4 == 0} for i in range(20)]
    prepared = make(tmp_path, "kto", train=write(tmp_path / "a.jsonl", rows), eval_fraction=0.2)
    kept = rows_of(prepared.train)
    assert set(kept[0]) == {"prompt_ids", "completion_ids", "label"} and kept[0]["label"] in (True, False)
    splits = prepared.report.splits
    assert splits["train"].desirable + splits["eval"].desirable == 5
    assert f"{splits['train'].desirable} desirable, " in prepared.report.render()
    assert "both labels" not in prepared.report.render()
    rows.append({**rows[3], "label": not rows[3]["label"]})
    report = make(tmp_path, "kto", train=write(tmp_path / "c.jsonl", rows)).report.render()
    assert "1 completion with both labels for the same prompt" in report and "c.jsonl:4 and" in report
    pairs = [{"prompt": f"q {i}", "chosen": f" a {i}", "rejected": " no"} for i in range(6)]
    prepared = make(tmp_path, "kto", train=write(tmp_path / "b.jsonl", pairs))
    assert [row["label"] for row in rows_of(prepared.train)] == [True, False] * 6
    assert "labels      6 desirable, 6 undesirable" in prepared.report.render()


def test_a_pair_that_is_equal_after_truncation_is_no_pair_of_thumbs():
    pair = {"prompt": "p", "chosen": "x" * 30 + "a", "rejected": "x" * 30 + "b"}
    _, made = encoded("kto", pair, max_length=20, too_long="truncate")
    assert made == [Dropped("equal_after_truncation")]
    _, made = encoded("kto", pair, max_length=60, too_long="truncate")
    assert [one.columns["label"] for one in made] == [True, False]
    answers = {"prompt": "p", "pos_answers": ["x" * 30 + "a", "y"], "neg_answers": ["x" * 30 + "b", "z"]}
    _, made = encoded("kto", answers, max_length=20, too_long="truncate")
    assert made[0] == Dropped("equal_after_truncation") and [one.columns["label"] for one in made[1:]] == [
        True,
        False,
    ]
