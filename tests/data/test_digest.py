"""The digest of rows: of what they are and of their order, not of how their file is cut."""

from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_data import ROWS, tokenizer, write

from pipeline.config import Data
from pipeline.data import chunks, files
from pipeline.data.digest import RowsDigest, joined
from pipeline.data.merge import content_digest
from pipeline.data.read import options_of
from pipeline.data.tasks import tokenise


def of(rows):
    digest = RowsDigest()
    for row in rows:
        digest.add(row)
    return digest


@given(st.lists(st.binary(max_size=3)), st.lists(st.integers(0, 30)))
def test_two_runs_of_rows_make_the_digest_of_both(rows, cuts):
    cuts = [0, *sorted(cuts), len(rows)]
    assert joined(of(rows[start:stop]) for start, stop in pairwise(cuts)) == of(rows)


@given(st.lists(st.binary(max_size=3), min_size=2, unique=True))
def test_order_and_number_count(rows):
    assert len({(one.count, one.value) for one in map(of, (rows, rows[::-1], rows[:-1], [*rows, b""]))}) == 4


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_however_a_file_is_cut(tmp_path, format):
    options = options_of("sft", Data(), tokenizer(), 400, False)
    digests = set()
    for number, (rows, chunk_bytes) in enumerate([(ROWS, 1 << 20), (ROWS, 300), (ROWS[1:], 300)]):
        path = tmp_path / f"rows{number}.{format}"
        if format == "jsonl":
            write(path, rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7 + number)
        planned = chunks.plan(files.find(str(path), "data.train"), "train", options.kind, chunk_bytes)
        assert (len(planned) > 1) == bool(number)
        stats = [tokenise(one, i, tokenizer(), options, str(tmp_path)) for i, one in enumerate(planned)]
        digests.add(content_digest("train", stats, planned, options))
    assert len(digests) == 2
