"""Lists of sources, with weights or without."""

import pytest

from pipeline.config import load_job
from pipeline.config.job import Source, completed, sources_of, transforms
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
        ("data.train=[{path: a, weight: -1}]", "data.train.0.weight: found -1, expected above 0 and at most 1000000000"),
        ("data.train=[{path: a, weight: .inf}]", "data.train.0.weight: found inf, expected"),
        ("data.train=[{path: a, weight: true}]", "data.train.0.weight: found true"),
        ("data.train=[{path: a, wieght: 1}]", "data.train.0.wieght: unknown key; did you mean weight"),
        ("data.train=[{weight: 1}]", "data.train.0.path: missing, expected text"),
        ("data.train=[{path: 3}]", "data.train.0.path: found 3, expected text"),
        ("data.eval=[{path: a, weight: 1}]", "only data.train is mixed by weights"),
        ("data.train=[{path: a, columns: {label: ['']}}]", "data.train"),
        ("data.train=[a, {path: b, columns: q}]", "data.train.1.columns: found 'q', expected a mapping"),
        ("data.train=[a, {path: b, label: {first: 1}}]", "data.train.1.label: found"),
        ("data.train=[a, {path: b, transform: f.py}]", "data.train.1.transform: found 'f.py', expected python:MODULE"),
        ("data.train=[a, {path: b, group_by: q}]", "data.train.1.group_by: found 'q'; only a transform"),
        ("data.group_by=q", "data.group_by: found 'q'; only a transform"),
        ("data.train=[{path: a, revision: main}]", "data.train.0.revision: found 'main' for 'a'; only a dataset on the hub"),
        ("data.train=[{path: 'hf://datasets/a/b@x', revision: main}]", "it is given once"),
        ("data.stopping_strategy=all_exhausted", "no source of data.train has a weight"),
    ],
)  # fmt: skip
def test_sources_that_cannot_be_mixed(in_root, override, said):
    with pytest.raises(InputError) as caught:
        load_job(JOB, [override])
    assert said in str(caught.value) and "data." in str(caught.value)


def test_a_source_says_itself_what_its_rows_become_or_the_section_does(in_root):
    own = "{path: b, columns: {prompt: q}, transform: python:m:f, group_by: tree}"
    job = load_job(
        JOB, [f"data.train=[a, {own}]", "data.columns={prompt: text}", "data.transform=python:m:g"]
    )
    first, second = completed(job.data, "train")
    assert first == Source("a", columns={"prompt": "text"}, transform="python:m:g")
    assert second == Source("b", columns={"prompt": "q"}, transform="python:m:f", group_by="tree")
    assert transforms(job.data) == {"data.transform": "python:m:g", "data.train.1.transform": "python:m:f"}


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("hf://datasets/o/n", "hf://datasets/o/n@v1"),
        ("hf://datasets/o/n:config/train", "hf://datasets/o/n@v1:config/train"),
    ],
)
def test_the_revision_of_a_set_on_the_hub_is_a_part_of_its_location(path, location):
    assert Source(path, revision="v1").location == location and Source(path).location == path


def test_a_job_that_reads_each_row_once_takes_no_weights(in_root):
    with pytest.raises(InputError, match="`generate` reads every row once"):
        load_job("jobs/demo/generate.yaml", ["data.train=[{path: a, weight: 1}]"])
