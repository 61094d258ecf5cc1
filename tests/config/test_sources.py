"""Lists of sources, with weights or without."""

import pytest

from pipeline.config import load_job
from pipeline.config.sources import Source, sources_of
from pipeline.errors import InputError

JOB = "jobs/demo/sft.yaml"


def test_paths_and_mappings(in_root):
    text = "data.train=[{path: a.jsonl, weight: 0.7}, {path: b.parquet, weight: 3}]"
    job = load_job(JOB, [text, "data.stopping_strategy=all_exhausted"])
    assert sources_of(job.data.train) == [Source("a.jsonl", 0.7), Source("b.parquet", 3)]
    assert (
        sources_of("a") == [Source("a")]
        and sources_of(None) == []
        and sources_of(["a", {"path": "b"}])[1] == Source("b")
    )


@pytest.mark.parametrize(
    "override,said",
    [
        ("data.train=[{path: a, weight: 1}, {path: b}]", "1 of 2 sources have a weight"),
        ("data.train=[{path: a, weight: 1}, b]", "1 of 2 sources have a weight"),
        ("data.train=[{path: a, weight: -1}]", "data.train.0.weight: found -1, expected a number above 0"),
        ("data.train=[{path: a, weight: 0}]", "data.train.0.weight: found 0, expected"),
        ("data.train=[{path: a, weight: .inf}]", "data.train.0.weight: found inf, expected"),
        ("data.train=[{path: a, weight: .nan}]", "data.train.0.weight: found nan, expected"),
        ("data.train=[{path: a, weight: much}]", "data.train.0.weight: found 'much', expected a number"),
        ("data.train=[{path: a, weight: true}]", "data.train.0.weight: found true"),
        (
            "data.train=[{path: a, wieght: 1}]",
            "data.train.0.wieght: unknown key of a source; did you mean weight",
        ),
        ("data.train=[{weight: 1}]", "a source without a path"),
        ("data.train=[{path: 3}]", "data.train.0.path: found 3, expected text"),
        ("data.train=[{path: ''}]", "found empty text"),
        ("data.eval=[{path: a, weight: 1}]", "only data.train is mixed by weights"),
        ("data.stopping_strategy=all_exhausted", "no source of data.train has a weight"),
        ("data.stopping_strategy=first", "expected one of first_exhausted, all_exhausted"),
    ],
)
def test_sources_that_cannot_be_mixed(in_root, override, said):
    with pytest.raises(InputError) as caught:
        load_job(JOB, [override])
    assert said in str(caught.value) and "data." in str(caught.value)


def test_a_job_that_reads_each_row_once_takes_no_weights(in_root):
    with pytest.raises(InputError, match="`generate` reads every row once"):
        load_job("jobs/demo/generate.yaml", ["data.train=[{path: a, weight: 1}]"])
