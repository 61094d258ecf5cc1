"""Which files a job names."""

import pytest
from toy_data import read_rows

from pipeline.data import files
from pipeline.data.values import RowError
from pipeline.errors import InputError


def test_links_to_a_folder_above(tmp_path):
    deep = tmp_path / "tree" / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "rows.jsonl").write_text("{}\n")
    (deep / "up").symlink_to(tmp_path / "tree")
    for spec in ("tree", "tree/**/*.jsonl", "tree/**", "**/b/*.jsonl", "tree/a/*/*.jsonl"):
        (file,) = files.find(str(tmp_path / spec), "data.train")
        assert file.path.endswith("b/rows.jsonl")


@pytest.mark.parametrize(
    "name", ["a b.jsonl", "%20.jsonl", "a?.jsonl", "[x].jsonl", "'.jsonl", "é東\n\x1b[2J.jsonl", "#&;.jsonl"]
)
def test_file_names_of_any_kind(tmp_path, name):
    (tmp_path / name).write_text('{"a": 1}\n')
    for spec in (name, ".", "*.jsonl"):
        (file,) = files.find(str(tmp_path / spec), "data.train")
        assert read_rows(file.path) == [(1, {"a": 1})]
    where = RowError("null", "\x1b[2J", "null", "a text", file=name, line=3).where()
    assert "\n" not in where and "\x1b" not in where


def test_files_that_are_not_there(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl.zst").write_text("")
    for spec, expected in [
        ("row.jsonl", "rows.jsonl"),
        ("*.txt", "matches no file"),
        ("empty", "holds no data file"),
        ("rows.jsonl.zst", "unpack it"),
    ]:
        with pytest.raises(InputError, match=expected) as caught:
            files.find(str(tmp_path / spec), "data.train")
        assert "data.train" in str(caught.value)
    assert len(files.find([str(tmp_path), str(tmp_path / "*.jsonl")], "data.train")) == 2
