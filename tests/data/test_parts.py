"""Parts: packed rows and the columns of the token tables."""

import json

from toy_data import ROWS, make, rows_of, write


def test_packing_keeps_whole_rows(tmp_path, embedded_ray):
    path = write(tmp_path / "rows.jsonl", ROWS)
    made = make(tmp_path, train=path, packing=True, max_length=100)
    packed = rows_of(made.train)
    alone = sorted(
        tuple(row["input_ids"]) for row in rows_of(make(tmp_path, train=path, max_length=100).train)
    )
    pieces = []
    for row in packed:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"]) <= 100
        start = 0
        for length in row["seq_lengths"]:
            pieces.append(tuple(row["input_ids"][start : start + length]))
            start += length
    assert sorted(pieces) == alone and made.report.packed == len(packed)
    assert len(packed) == -(-50 // (100 // max(map(len, alone))))  # as few as rows of this length allow
    assert made.report.splits["train"].kept == 50


def test_margins_and_prompt_columns(tmp_path, embedded_ray):
    pair = {"prompt": "p", "chosen": "a", "rejected": "b"}
    path = write(tmp_path / "rows.jsonl", [{**pair, "margin": 0.5}, pair])
    assert [row["margin"] for row in rows_of(make(tmp_path, "rm", train=path).train)] == [0.5, 0.0]
    path = write(tmp_path / "plain.jsonl", [pair])
    assert set(rows_of(make(tmp_path, "rm", train=path).train)[0]) == {"chosen_ids", "rejected_ids"}
    path = write(tmp_path / "prompts.jsonl", [{"prompt": "p", "gold": 1}])
    (row,) = rows_of(make(tmp_path, "ppo", train=path).train)
    assert json.loads(row["row"]) == {"prompt": "p", "gold": 1}
