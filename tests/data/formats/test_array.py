"""JSON arrays, read block by block."""

import io
import json

import pytest
from toy_data import read_rows

from pipeline.data.formats import array
from pipeline.data.values import RowError


def test_arrays_longer_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(array, "BLOCK", 64)
    rows = [{"prompt": "p" * (i % 200), "n": i} for i in range(200)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert [row for _, row in read_rows(tmp_path / "a.json")] == rows


def test_an_array_without_end_is_not_decoded_again_and_again(tmp_path, monkeypatch):
    calls, decode = [], array.read_value
    monkeypatch.setattr(array, "BLOCK", 1 << 10)
    monkeypatch.setattr(
        array, "read_value", lambda text, at=0: (calls.append(len(text)), decode(text, at))[1]
    )
    (tmp_path / "a.json").write_bytes(b'[{"a": "' + b"x" * (1 << 20))
    ((_, error),) = read_rows(tmp_path / "a.json")
    assert error.kind == "not_json" and sum(calls) < 5 << 20, "each block decodes all that was read before it"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[{},,{}]", "behind a comma"),
        ("[{} {}]", "behind an element"),
        ("[{},]", "behind a comma"),
        ("[,{}]", "behind the bracket"),
    ],
)
def test_an_array_is_json_to_its_last_comma(text, expected):
    *_, (_, error, _) = array.elements(io.BytesIO(text.encode()))
    assert isinstance(error, RowError) and expected in str(error)
    good = array.elements(io.BytesIO(b"[{} ,\n {}, []]"))
    assert [value for _, value, _ in good] == [{}, {}, []]
