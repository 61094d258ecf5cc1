"""The cache of tokenised parts: what is reused, and what is made again."""

import json

import pytest
from toy_data import ROWS, make, rows_of, write


def test_a_half_written_cache_is_not_used(tmp_path, embedded_ray):
    path = write(tmp_path / "rows.jsonl", ROWS)
    make(tmp_path, train=path)
    (manifest,) = (tmp_path / "cache").glob("*/manifest.json")
    (part,) = manifest.parent.glob("*.parquet")
    manifest.unlink()
    part.write_bytes(part.read_bytes()[:40])
    again = make(tmp_path, train=path)
    assert not again.report.reused and len(rows_of(again.train)) == 50
    part = manifest.parent / json.loads(manifest.read_text())["parts"]["train"][0][0]
    part.unlink()
    assert not make(tmp_path, train=path).report.reused


@pytest.mark.parametrize("damage", ["{", "[]", '{"parts": 1}', '{"parts": {"train": [["gone.parquet", 1]]}}'])
def test_a_damaged_cache_is_made_again(tmp_path, embedded_ray, damage):
    path = write(tmp_path / "rows.jsonl", ROWS)
    make(tmp_path, train=path)
    (manifest,) = (tmp_path / "cache").glob("*/manifest.json")
    manifest.write_text(damage)
    assert not make(tmp_path, train=path).report.reused
    (part, *_) = manifest.parent.glob("*.parquet")
    for part in manifest.parent.glob("*.parquet"):
        part.write_bytes(part.read_bytes()[:-9])
    assert make(tmp_path, train=path).train.count() == 50
