"""Counts the rows that a task reads and drops. `sum_counts` sums the counts over all tasks, a split, or a source."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.chunks import FileChunk
from pipeline.data.values import Dropped, Reason, RowError

FIRST = 10  # maximum number of error reasons that a message lists
# {kind of row comparison: number of 64-bit hashes per row}. `rows` hashes the bytes of a row. `records` uses Record.digests.
WIDTH = {"rows": 1, "records": 2}


@dataclass
class RowsDigest:
    """The digest of a sequence of rows. The digest depends on the rows and their order, but not on their chunks.

    The digest is a polynomial in the SHA-256 hashes of the rows: h0 * B^(n-1) + ... + h(n-1), modulo a prime. Therefore, the
    digest of a sequence can be computed from the digests of its parts. The digest does not protect against deliberate collisions.
    """

    count: int = 0
    value: int = 0

    PRIME = (1 << 255) - 19
    BASE = int.from_bytes(hashlib.sha256(b"rows").digest())

    def add(self, row: bytes) -> None:
        self.extend(RowsDigest(1, int.from_bytes(hashlib.sha256(row).digest())))

    def extend(self, other: "RowsDigest") -> None:
        """Updates this digest as if the rows of another digest were appended."""
        self.count += other.count
        self.value = (self.value * pow(self.BASE, other.count, self.PRIME) + other.value) % self.PRIME


@dataclass
class Counts:
    """The counts of one chunk. Only `keys` grows with the number of rows."""

    chunk: FileChunk
    # (split, label, detail) -> rows or tokens, such as ("train", "dropped", "overlong") -> 3
    tally: Counter[tuple[str, str, Any]] = field(default_factory=Counter)
    # split -> (file, rows)
    parts: dict[str, tuple[str, int]] = field(default_factory=dict)
    # {reason: first error with this reason}
    errors: dict[Reason, RowError] = field(default_factory=dict)
    # the error after which the task could not read the rest of the chunk, or None
    unread: RowError | None = None
    samples: list[str] = field(default_factory=list)
    digest: RowsDigest = field(default_factory=RowsDigest)  # digest of the chunk's rows
    # {key of WIDTH: hashes of the rows, which are equal for equal rows}
    keys: dict[str, bytearray] = field(default_factory=lambda: {name: bytearray() for name in WIDTH})

    def add(self, split: str, label: str, detail: Any = "", number: int = 1) -> None:
        self.tally[split, label, detail] += number

    def leave_out(self, split: str, number: int, problem: RowError | Dropped) -> None:
        """Counts a dropped row, for example a row that has an error or is too long."""
        error = problem if isinstance(problem, RowError) else problem.error
        self.add(split, "dropped", problem.kind if isinstance(problem, RowError) else problem.reason)
        if error is None:
            return
        if error is problem:
            self.add(split, "bad", error.kind)
        error.line = number
        if error.rest:
            self.unread = error
        self.errors.setdefault(error.reason(), error)
        self.add(split, "reasons", error.reason())


def sum_counts(
    counts: Iterable[Counts], split: str | None = None, source: int | None = None
) -> dict[str, Counter]:
    """Returns {label: {detail: number}}: sums over all splits and sources, or over one split or one source."""
    total: dict[str, Counter] = defaultdict(Counter)
    for chunk_counts in counts:
        if source in (None, chunk_counts.chunk.source):
            for (name, label, detail), number in chunk_counts.tally.items():
                if split in (None, name):
                    total[label][detail] += number
    return total


def of_split(split: str, counts: Iterable[Counts]) -> list[Counts]:
    """Returns the counts of all chunks of a split."""
    return [chunk_counts for chunk_counts in counts if chunk_counts.chunk.split == split]


def first_errors(counts: Iterable[Counts]) -> list[tuple[RowError, int]]:
    """Returns (first error, number of dropped rows) for each of the most frequent error reasons."""
    rows, first_of = sum_counts(counts)["reasons"], dict[Reason, RowError]()
    for chunk_counts in counts:
        for reason, error in chunk_counts.errors.items():
            first_of.setdefault(reason, error)
    frequent = sorted(first_of, key=lambda reason: -rows[reason])[:FIRST]
    return [(error, rows[reason]) for reason, error in first_of.items() if reason in frequent]


# ---- comparing rows -----------------------------------------------------------------------------------------------------


def hashes_of_rows(name: str, counts: Iterable[Counts], split: str) -> Any:
    """Returns an array [rows, WIDTH] with the hashes of the rows of a split. Equal rows have equal hashes."""
    import numpy as np

    hashes = b"".join(chunk_counts.keys[name] for chunk_counts in of_split(split, counts))
    return np.frombuffer(hashes, dtype=np.uint64).reshape(-1, WIDTH[name])


def count_duplicates(counts: Sequence[Counts]) -> int:
    """Returns the number of rows that equal an earlier row of the same split."""
    import numpy as np

    splits = [hashes_of_rows("rows", counts, split) for split in ("train", "eval")]
    return sum(len(rows) - len(np.unique(rows)) for rows in splits)


def count_overlap(counts: Sequence[Counts]) -> tuple[int, int] | None:
    """Counts eval rows whose prompt also occurs in `train`, and eval rows whose prompt and completions both occur in `train`.

    Returns None if there are no eval rows.
    """
    import numpy as np

    if not of_split("eval", counts):
        return None
    train, evaluated = (hashes_of_rows("records", counts, split) for split in ("train", "eval"))
    prompts, rows = (int(np.isin(evaluated[:, column], train[:, column]).sum()) for column in (0, 1))
    return prompts, rows


# ---- texts for numbers ------------------------------------------------------------------------------------------------


def with_unit(number: int, unit: str = "row") -> str:
    """Returns a number and its unit, such as `1 row` and `2,000 rows`."""
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


def most_frequent(counts: Mapping[str, int], limit: int) -> dict[str, int]:
    """Returns the `limit` largest counts in descending order, and the sum of all smaller counts as `others`."""
    entries = [item for item in counts.items() if item[0] != "others"]
    largest = dict(sorted(entries, key=lambda item: (-item[1], item[0]))[:limit])
    others = sum(counts.values()) - sum(largest.values())
    return largest | ({"others": others} if others else {})


def versions_in_words(versions: Mapping[str, int], kept: int) -> str:
    """Describes which model versions generated `kept` rows: `300 rows from models:/demo-ppo/3, 12 without a version`."""
    phrases = [f"{with_unit(rows)} from {version}" for version, rows in most_frequent(versions, 8).items()]
    unversioned = kept - sum(versions.values())
    return ", ".join([*phrases, *([f"{unversioned:,} without a version"] if unversioned else [])])
