"""Gzip streams that unpack to much, and to nothing."""

import gzip
import json

import pytest
from toy_data import (
    read_rows,
)

from pipeline.data.formats import array, gunzip, lines
from pipeline.data.values import RowError


def test_repeated_rows_pack_well_and_are_read(tmp_path):
    row = {"prompt": "a " * 400, "completion": "b"}
    content = (json.dumps(row).encode() + b"\n") * 32_000
    for name, unpacked in (
        ("a.jsonl.gz", content),
        ("a.json.gz", b"[" + content[:-1].replace(b"\n", b",") + b"]"),
    ):
        packed = gzip.compress(unpacked, 9)
        assert len(unpacked) > 200 * len(packed) and len(unpacked) > 24 << 20
        (tmp_path / name).write_bytes(packed)
        numbered = read_rows(tmp_path / name)
        assert len(numbered) == 32_000 and numbered[-1] == (32_000, row)


@pytest.mark.parametrize("content", [b"\n", b" ", b" \n", b"\0", b"[" + b" " * 99, b'{"a": "' + b"b" * 99])
def test_a_gzip_stream_without_rows_is_not_read_to_its_end(tmp_path, monkeypatch, content):
    monkeypatch.setattr(gunzip, "BARREN", 1 << 19)
    for module in (lines, array):
        monkeypatch.setattr(module, "ROW", 1 << 18)
        monkeypatch.setattr(module, "BLOCK", 1 << 14)
    rows = [json.dumps({"a": i}) for i in range(5000)]
    good = ("[" + ",".join(rows) if content[:1] == b"[" else "\n".join(rows) + "\n").encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(good + content * ((64 << 20) // len(content))))
    unpacked = []
    monkeypatch.setattr(
        gzip.GzipFile,
        "read1",
        lambda self, size, was=gzip.GzipFile.read1: unpacked.append(was(self, size)) or unpacked[-1],
    )
    numbered = read_rows(tmp_path / "a.jsonl.gz")
    errors = [error for _, error in numbered if isinstance(error, RowError)]
    assert len(numbered) - len(errors) == 5000 and 1 <= len(errors) <= 2, numbered[-3:]
    assert errors[-1].kind in ("truncated_gzip", "too_large", "not_json", "nested")
    assert sum(map(len, unpacked)) < 2 << 20
