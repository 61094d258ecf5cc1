"""Gzip streams that unpack to much."""

import gzip
import json

from toy_data import read_rows


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
