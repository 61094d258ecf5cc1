"""The column `version` of rows from a model's conversations: counted where it is pinned, a column like others where it is not."""

import json

import pytest
from toy_data import make, write

from pipeline.data import versions
from pipeline.data.report import Report
from pipeline.data.shapes import kind_of, parse

PPO3, SFT1 = "models:/demo-ppo/3", "models:/demo-sft/1"


@pytest.mark.parametrize(
    ("value", "counts"),
    [(PPO3, True), ("models:/a b (x)/12", True), ("models:/demo-ppo@champion", False), ("models:/demo-ppo/latest", False),
     ("1.0", False), (3, False), (None, False), (["models:/a/1"], False), ("models:/a/b/1", False), ("models:/a/1\n", False)],
)  # fmt: skip
def test_only_a_pinned_version_is_one(value, counts):
    record = parse({"prompt": "q", "completion": "a", "version": value}, kind_of("sft"))
    assert record.version == (value if counts else None)
    assert ("version" in record.unread) != counts


def test_those_beyond_the_most_frequent_are_counted_together():
    counts = {}
    for number in (1, 2, 2, 3, 4, 5, 5, 2):
        versions.add(counts, {f"models:/m/{number}": 1})
    assert versions.most_frequent(counts, 2) == {"models:/m/2": 3, "models:/m/5": 2, "others": 3}
    assert versions.in_words({PPO3: 1}, 3) == f"1 row from {PPO3}, 2 without a version"


def test_rows_are_counted_by_version_and_source(tmp_path, embedded_ray):
    def pair(i, **more):
        return {"prompt": f"q{i}", "chosen": f"a{i}", "rejected": "b", **more}

    one = write(tmp_path / "one.jsonl", [pair(i, version=PPO3) for i in range(5)])
    two = write(
        tmp_path / "two.jsonl", [pair(9, version=SFT1), pair(10, version=PPO3), pair(11, version="v2")]
    )
    report = make(tmp_path, "dpo", train=[one, two]).report
    split, sources = report.splits["train"], report.sources["train"]
    assert split.versions == {PPO3: 6, SFT1: 1} and split.unread == {"version": 1}
    assert [source.versions for source in sources] == [{PPO3: 5}, {SFT1: 1, PPO3: 1}]
    text = report.render()
    assert f"versions    6 rows from {PPO3}, 1 row from {SFT1}, 1 without a version" in text
    assert f"of the rows; 5 rows from {PPO3}\n" in text
    again = make(tmp_path, "dpo", train=[one, two]).report
    assert again.reused and again.splits["train"].versions == split.versions
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    skipped = write(tmp_path / "bad.jsonl", [pair(1, version=PPO3), {**pair(2, version=SFT1), "chosen": "b"}])
    report = make(tmp_path, "dpo", train=skipped, on_error="skip").report
    assert report.splits["train"].versions == {PPO3: 1}  # of the rows that are kept
