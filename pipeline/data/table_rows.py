"""Reads the rows of Parquet and Arrow files, a few at a time, and converts their values to JSON values.

Null fields of structs are removed, because Parquet and Arrow store missing fields as null. NaN, which pandas writes for a missing
value, becomes null. Dates, bytes and decimals keep their Python types. messages.require_text rejects dates, bytes and decimals if
the stage reads the column. Code in a file is never run.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pipeline.data.files import map_file, unreadable_file
from pipeline.data.text_rows import Row, repeated_column
from pipeline.data.values import RowError, parse_json
from pipeline.errors import in_brief
from pipeline.system import storage

ROWS = 256  # maximum number of rows to read at a time
BYTES = 4 << 20  # maximum bytes of a batch of rows; a row may contain an image
BUFFER = 1 << 20  # bytes buffered per column; without a buffer, pyarrow would read the full row group

Piece = tuple[int, int, int]  # (first row, row after the last row or -1 for the end of the file, bytes)


def split_table_file(path: str, format: str, size: int, chunk_bytes: int) -> list[Piece]:
    """Splits a file of `size` bytes into pieces for tasks. A damaged file may become a single piece.

    A piece consists of full Parquet row groups or Arrow record batches. All pieces except the last have at least `chunk_bytes`.
    """
    whole = [(0, -1, size)]
    if format == "arrow" and storage.is_remote(path):
        return whole  # an Arrow stream does not store the positions of its batches
    pieces: list[Piece] = []
    start = stop = pending = 0
    with contextlib.suppress(*_damage()), map_file(path) as file:
        for rows, group_bytes, _ in _groups(file, format):
            stop, pending = stop + rows, pending + group_bytes
            if pending >= chunk_bytes:
                pieces.append((start, stop, pending))
                start, pending = stop, 0
        return [*pieces, (start, stop, pending)] if stop > start else pieces or whole
    return whole


def table_rows(path: str, format: str, start: int, stop: int) -> Iterator[Row]:
    """Yields rows [start, stop) of a file, numbered from 1.

    If the file is damaged, yields a RowError instead of the next row, and then stops.
    """
    number = position = 0
    try:
        with map_file(path) as file:
            for size, _, read_batches in _groups(file, format):
                # Read one row group at a time, so that an error names the row at which the damage begins.
                for batch in read_batches() if start <= position and (stop < 0 or position < stop) else ():
                    if error := repeated_column(batch.schema.names):
                        yield 1, error, b""
                        return
                    for row in _rows(batch):
                        number += 1
                        yield number, row, b"" if isinstance(row, RowError) else _canonical(row)
                position += size
    except _damage() as error:
        if isinstance(error, OSError) and (error.errno is not None or type(error) is not OSError):
            raise unreadable_file(path, error) from error  # the disk or the network failed
        description = {"parquet": "a Parquet file", "arrow": "an Arrow file"}[format]
        found = f"{description} that is truncated or damaged here ({in_brief(error)})"
        lost = f"{stop - start - number:,} rows" if stop >= 0 else "all later rows"
        yield number + 1, RowError("damaged", "", found, f"{description} that is complete", rest=lost), b""


def _damage() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    return pa.ArrowException, OSError


def _groups(file: Any, format: str) -> Iterator[tuple[int, int, Callable[[], Iterator[Any]]]]:
    """Yields (rows, bytes, function that reads the rows in batches) for each Parquet row group or Arrow record batch."""
    import pyarrow.parquet as pq

    def at_a_time(rows: int, size: int) -> int:
        return max(1, min(ROWS, BYTES * rows // max(1, size)))

    def slices(batch: Any) -> Iterator[Any]:
        try:
            batch.validate(full=True)  # without this check, a damaged file could crash the process
        except ValueError as error:
            if "UTF8" not in str(error):
                raise
        size = at_a_time(batch.num_rows, batch.nbytes)
        yield from (batch.slice(offset, size) for offset in range(0, batch.num_rows, size))

    if format == "arrow":
        for batch in _record_batches(file):
            yield batch.num_rows, batch.nbytes, partial(slices, batch)
        return
    table = pq.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)
    for index in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(index)
        rows, size = group.num_rows, group.total_byte_size
        yield rows, size, partial(table.iter_batches, at_a_time(rows, size), row_groups=[index])


def _record_batches(file: Any) -> Iterator[Any]:
    """Yields the batches of an Arrow file or stream. The datasets library writes streams with the suffix .arrow, too."""
    import pyarrow as pa

    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if is_file:
        reader = pa.ipc.open_file(file)
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(file)


# ---- conversion to JSON values ---------------------------------------------------------------------------------


def _rows(batch: Any) -> Iterator[Any]:
    """Yields the rows of a batch, and a RowError instead of a row that Python cannot represent."""
    import pyarrow as pa

    columns = zip(batch.schema.names, batch.schema.types, strict=True)
    json_columns = [name for name, arrow_type in columns if isinstance(arrow_type, pa.JsonType)]
    try:
        for row in batch.to_pylist(maps_as_pydicts="lossy"):
            yield {
                name: parse_json(value) if name in json_columns else without_nulls(value)
                for name, value in row.items()
            }
    # Python cannot represent text that is not UTF-8, or a date before the year 1
    except (
        ValueError,
        OverflowError,
    ) as error:
        if batch.num_rows > 1:
            for index in range(batch.num_rows):
                yield from _rows(batch.slice(index, 1))
            return
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column.to_pylist(maps_as_pydicts="lossy")
            except (ValueError, OverflowError):
                kind = "not_utf8" if isinstance(error, UnicodeDecodeError) else "wrong_type"
                yield RowError(kind, name, in_brief(error), "a value that Python can represent")
                return


def without_nulls(value: Any) -> Any:
    """Removes null fields of structs from a value, and replaces NaN with null."""
    if isinstance(value, dict):
        return {str(key): without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return None if isinstance(value, float) and value != value else value


def _canonical(row: dict[str, Any]) -> bytes:
    """Returns the row as bytes. Equal rows have equal bytes, even if their files are compressed differently."""

    def short(value: Any) -> str:
        return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)

    return json.dumps(row, ensure_ascii=False, default=short).encode("utf-8", "surrogatepass")
