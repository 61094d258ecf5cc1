"""Tests results that are combined from chunks: digests, overlap of train and eval rows, and versions that wrote rows."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from toy_data import ROWS, make, tokenizer, write

from pipeline.data import chunks, files, read, tasks
from pipeline.data.report import Report
from pipeline.job import Data

PPO3, SFT1 = "models:/demo-ppo/3", "models:/demo-sft/1"


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_digest_does_not_depend_on_how_a_file_is_cut(tmp_path, format):
    options = read.options_of("sft", Data(train="rows.jsonl"), tokenizer(), 400, False)
    digests = []
    for number, (rows, chunk_bytes) in enumerate(
        [(ROWS, 1 << 20), (ROWS, 300), (ROWS[1:], 300), (ROWS[::-1], 300)]
    ):
        path = tmp_path / f"rows{number}.{format}"
        if format == "jsonl":
            write(path, rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7 + number)
        planned = chunks.plan_chunks(
            *files.find_files(str(path), "data.train"), "train", options.kind, chunk_bytes
        )
        assert (len(planned) > 1) == bool(number)
        made = [
            tasks.tokenize_chunk(one, i, tokenizer(), options, str(tmp_path)) for i, one in enumerate(planned)
        ]
        digests.append(read.content_digest("train", made, options))
    # A missing row changes the digest, and so does a different order of rows.
    assert digests[0] == digests[1] and len({*digests}) == 3
    if format == "jsonl":  # the digest must not change, because older versions stored it in runs
        assert digests[0] == "48aacbd301174b29a5ef432321f39e2c47c5da5f2fd90bab84fdea340bcb8449"


CHAT = {"messages": [{"role": "user", "content": "question 7"}, {"role": "assistant", "content": "answer 7"}]}


@pytest.mark.parametrize(
    ("rows", "overlap", "warning"),
    [
        ([ROWS[3], {**ROWS[4], "completion": " no"}, ROWS[30]], (2, 1), "2 rows of data.eval with a prompt that is"),
        ([CHAT], (1, 1), "1 row of data.eval with a prompt that is"),  # the same text in another format
        (ROWS[20:], (0, 0), None),
    ],
)  # fmt: skip
def test_eval_rows_that_are_also_in_train(tmp_path, rows, overlap, warning):
    train, eval = write(tmp_path / "train.jsonl", ROWS[:20]), write(tmp_path / "eval.jsonl", rows)
    report = make(tmp_path, train=train, eval=eval, apply_chat_template=True).report
    assert (report.overlap, report.duplicates) == (overlap, 0)
    expected = f"{warning} also in data.train ({overlap[1]} with the same completion); metrics on these rows"
    assert (expected in report.render()) == bool(warning)
    assert make(tmp_path, train=train).report.overlap is None
    report = make(tmp_path, "ppo", train=train, eval=train).report
    assert report.overlap == (20, 20)
    assert "20 rows of data.eval with a prompt that is also in data.train" in report.render()


def test_rows_are_counted_by_version_and_source(tmp_path):
    def pair(i, version, **more):
        row = {"prompt": f"q{i}", "chosen": f"a{i}", "rejected": "b", "version": version}
        return row | more

    one = write(tmp_path / "one.jsonl", [pair(i, PPO3) for i in range(5)])
    two = write(tmp_path / "two.jsonl", [pair(9, SFT1), pair(10, PPO3), pair(11, "v2")])
    report = make(tmp_path, "dpo", train=[one, two]).report
    split, sources = report.splits["train"], report.sources["train"]
    assert split.versions == {PPO3: 6, SFT1: 1} and split.unread == {"version": 1}
    assert [source.versions for source in sources] == [{PPO3: 5}, {SFT1: 1, PPO3: 1}]
    text = report.render()
    assert f"versions    6 rows from {PPO3}, 1 row from {SFT1}, 1 without a version" in text
    assert f"of the rows; 5 rows from {PPO3}\n" in text
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    skipped = write(tmp_path / "bad.jsonl", [pair(1, PPO3), pair(2, SFT1, chosen="b")])
    report = make(tmp_path, "dpo", train=skipped, on_error="skip").report
    # dropped rows are not counted for the versions that wrote them
    assert report.splits["train"].versions == {PPO3: 1}


def test_rows_are_counted_by_the_judges_that_scored_them(tmp_path):
    judge, version = "judge:judges/a.yaml@0123456789abcdef", "models:/rlhf-rm/3"
    scored = [judge, [version, judge], version, None]
    rows = [
        {"prompt": f"q{i}", "chosen": "a", "rejected": "b", "reward_version": one}
        for i, one in enumerate(scored)
    ]
    report = make(tmp_path, "dpo", train=write(tmp_path / "rows.jsonl", rows)).report
    assert report.splits["train"].judges == {judge: 2}
    assert f"judges      2 rows by {judge}" in report.render()
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report
