"""Parquet files of token rows: what one data task writes and what the trainers' shards are made of."""

import uuid
from typing import TYPE_CHECKING, Any

from pipeline.system import storage

if TYPE_CHECKING:
    from pipeline.data.tasks import Options

GROUP_TOKENS = 1 << 18  # of a parquet row group
PACK_ROWS = 4096  # rows packed together: bounded, and importing TRL for its packing costs 6 s in every task


class PartWriter:
    """One parquet file, written a bounded row group at a time. Its name is unique: a retried task writes another file."""

    def __init__(self, folder: str, stem: str, options: "Options"):
        import pyarrow.parquet as pq

        self.name, self.options = f"{stem}-{uuid.uuid4().hex[:8]}.parquet", options
        self.rows: list[dict[str, Any]] = []
        self.tokens = self.count = 0
        fs, inner = storage.filesystem(storage.join(folder, self.name))
        self.schema = schema(options)
        self.stream = fs.open_output_stream(inner)
        self.writer = pq.ParquetWriter(self.stream, self.schema, compression="lz4")

    def add(self, columns: dict[str, Any]) -> None:
        self.rows.append(columns)
        self.tokens += sum(len(value) for value in columns.values() if isinstance(value, list | str))
        if self.tokens >= GROUP_TOKENS if not self.options.packing else len(self.rows) >= PACK_ROWS:
            self.write()

    def write(self) -> None:
        import pyarrow as pa

        rows = pack(self.rows, self.options.max_length) if self.options.packing else self.rows
        columns = [
            pa.array([row.get(name) for row in rows], type)
            for name, type in zip(self.schema.names, self.schema.types, strict=True)
        ]
        if "margin" in self.schema.names:
            columns[-1] = columns[-1].fill_null(0.0)  # what a row without a margin means
        self.writer.write_table(pa.table(columns, schema=self.schema))
        self.count += len(rows)
        self.rows, self.tokens = [], 0

    def close(self) -> tuple[str, int]:
        """(name of the file, rows in it)."""
        if self.rows:
            self.write()
        self.writer.close()
        self.stream.close()
        return self.name, self.count


def columns_of(options: "Options") -> dict[str, type]:
    """Columns of the token table, in order."""
    return {**options.kind.columns, **({"seq_lengths": list} if options.packing else {})}


def schema(options: "Options") -> Any:
    import pyarrow as pa

    types = {list: pa.list_(pa.int32()), float: pa.float32(), str: pa.string(), bool: pa.bool_()}
    return pa.schema([(name, types[kind]) for name, kind in columns_of(options).items()])


def pack(rows: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Best-fit decreasing: whole rows joined into bins of at most `size` tokens; `seq_lengths` keeps the borders."""
    free: dict[int, list[list[dict[str, Any]]]] = {}  # room left -> bins
    bins: list[list[dict[str, Any]]] = []
    for row in sorted(rows, key=lambda row: -len(row["input_ids"])):
        need = len(row["input_ids"])
        room = min((space for space in free if space >= need), default=None)
        if room is None:
            room = size
            target: list[dict[str, Any]] = []
            bins.append(target)
        else:
            target = free[room].pop()
            if not free[room]:
                del free[room]
        target.append(row)
        free.setdefault(room - need, []).append(target)
    return [
        {
            "input_ids": [token for row in group for token in row["input_ids"]],
            "labels": [label for row in group for label in row["labels"]],
            "seq_lengths": [len(row["input_ids"]) for row in group],
        }
        for group in bins
    ]
