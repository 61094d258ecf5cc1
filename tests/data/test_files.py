"""Tests which files a path, a glob pattern or a folder in a job selects."""

import gzip
import os

import pytest
from toy_data import read_rows

from pipeline.data import files
from pipeline.data.values import RowError
from pipeline.errors import InputError


@pytest.mark.parametrize(
    "name", ["a b.jsonl", "%20.jsonl", "a?.jsonl", "[x].jsonl", "'.jsonl", "é東\n\x1b[2J.jsonl", "#&;.jsonl"]
)
def test_file_names_of_any_kind(tmp_path, name):
    (tmp_path / name).write_text('{"a": 1}\n')
    for spec in (name, ".", "*.jsonl"):
        (file,) = files.find_files(str(tmp_path / spec), "data.train")
        assert read_rows(file.path) == [(1, {"a": 1})]
    where = RowError("null", "\x1b[2J", "null", "a text", file=name, line=3).where()
    assert "\n" not in where and "\x1b" not in where


def test_files_that_are_not_there(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "empty").mkdir()
    for spec, expected in [
        ("row.jsonl", "rows.jsonl"),
        ("*.txt", "matches no file"),
        ("empty", "has no data file"),
    ]:
        with pytest.raises(InputError, match=expected) as caught:
            files.find_files(str(tmp_path / spec), "data.train")
        assert "data.train" in str(caught.value)
    assert len(files.find_files([str(tmp_path), str(tmp_path / "*.jsonl")], "data.train")) == 2


def test_a_link_to_a_folder_above_repeats_no_file(tmp_path):
    (tmp_path / "tree/a").mkdir(parents=True)
    (tmp_path / "tree/a/rows.jsonl").write_text("{}\n")
    (tmp_path / "tree/a/up").symlink_to(tmp_path / "tree")
    for spec in ("tree", "tree/**/*.jsonl", "**/a/*.jsonl"):
        (file,) = files.find_files(str(tmp_path / spec), "data.train")
        assert file.path.endswith("a/rows.jsonl")


def folder_of(tmp_path, *names):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"a": 1}\n')
    return str(tmp_path)


def names_in(folder, key, aside=None):
    return [os.path.relpath(file.path, folder) for file in files.find_files(folder, key, aside)]


def test_a_folder_is_split_by_the_names_of_its_files_and_folders(tmp_path):
    held = ["a.dev.json", "data/test-00000-of-00001.parquet", "eval/rows.csv", "VALIDATION_1.jsonl"]
    held += ["gold-heldout.jsonl", "held_out.jsonl", "hold-out/rows.jsonl", "holdout.jsonl"]
    held += ["testset.csv", "validate.csv"]
    folder = folder_of(tmp_path, *held, "train.jsonl", "contest.jsonl", "devices/latest.jsonl", "notes.xlsx")
    aside = {}
    assert names_in(folder, "data.train", aside) == ["contest.jsonl", "devices/latest.jsonl", "train.jsonl"]
    by_name = {os.path.join(folder, name): files.BY_NAME for name in held}
    assert aside == {**by_name, os.path.join(folder, "notes.xlsx"): "not a data file"}
    assert names_in(folder, "data.eval") == sorted(held)
    assert len(names_in(folder, "data")) == 13
    assert names_in(folder_of(tmp_path / "one", "train.jsonl"), "data.eval") == ["train.jsonl"]


def test_a_folder_with_only_eval_files_is_not_trained_on(tmp_path):
    folder = folder_of(tmp_path / "test", "dev.jsonl", "test.jsonl")
    with pytest.raises(
        InputError, match=r"as evaluation data; list the training files: .*dev\.jsonl, .*test\.jsonl"
    ):
        files.find_files(folder, "data.train")
    # A glob pattern may match eval files.
    assert len(files.find_files(f"{folder}/*.jsonl", "data.train")) == 2
    assert names_in(folder_of(tmp_path / "test" / "more", "rows.jsonl"), "data.train") == ["rows.jsonl"]


def test_suffixes_of_any_case_and_files_that_describe_others(tmp_path):
    aside, rows = {}, ["A.CSV", "B.JSONL.GZ", "C.Parquet", "d.jsonl"]
    others = ["README.md", "dataset_info.json", "data/dataset_infos.json", "LICENSE"]
    folder = folder_of(tmp_path, *rows, *others, "x.PKL")
    assert names_in(folder, "data.train", aside) == rows and [*aside] == [os.path.join(folder, "x.PKL")]
    for name in ("a.csv", "A.CSV", "A.CSV.GZ"):
        text = b"a,b\n1,2\n"
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("GZ") else text)
        assert read_rows(tmp_path / name) == [(2, {"a": "1", "b": "2"})]


def test_a_pipe_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(InputError, match=r"rows\.jsonl' is a pipe or a device; write the rows to a file"):
        files.find_files(str(tmp_path / "rows.jsonl"), "data.train")
