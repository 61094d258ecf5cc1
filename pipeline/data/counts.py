"""Counts the rows of a task. `totals` sums the counts over all tasks, over a split, or over a source."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.chunks import Chunk
from pipeline.data.values import Dropped, Reason, RowError

FIRST = 10  # number of reasons for bad rows that a message lists
# {name of a comparison: number of 64-bit hashes of a row}: `rows` has a hash of the row's bytes, `records` has Record.digests
WIDTH = {"rows": 1, "records": 2}


@dataclass
class RowsDigest:
    """The digest of a sequence of rows. The digest depends on the rows and their order, but not on their chunks.

    The digest is a polynomial in the SHA-256 hashes of the rows: h0 * B^(n-1) + ... + h(n-1), modulo a prime. Therefore, the
    digests of two consecutive sequences combine to the digest of both. An attacker could find other rows with the same digest.
    """

    count: int = 0
    value: int = 0

    PRIME = (1 << 255) - 19
    BASE = int.from_bytes(hashlib.sha256(b"rows").digest())

    def add(self, row: bytes) -> None:
        self.extend(RowsDigest(1, int.from_bytes(hashlib.sha256(row).digest())))

    def extend(self, other: "RowsDigest") -> None:
        """Appends the rows of another digest."""
        self.count += other.count
        self.value = (self.value * pow(self.BASE, other.count, self.PRIME) + other.value) % self.PRIME


@dataclass
class Counts:
    """The counts of one chunk. The size of this object does not grow with the chunk."""

    chunk: Chunk
    # (split, label, detail) -> rows or tokens, such as ("train", "dropped", "overlong") -> 3
    tally: Counter[tuple[str, str, Any]] = field(default_factory=Counter)
    # split -> (file, rows)
    parts: dict[str, tuple[str, int]] = field(default_factory=dict)
    # the first row dropped for each reason
    errors: dict[Reason, RowError] = field(default_factory=dict)
    # why the task stopped before the end of the chunk, or None
    unread: RowError | None = None
    samples: list[str] = field(default_factory=list)
    digest: RowsDigest = field(default_factory=RowsDigest)  # digest of the chunk's rows
    # name in WIDTH -> hashes by which rows are compared
    keys: dict[str, bytearray] = field(default_factory=lambda: {name: bytearray() for name in WIDTH})

    def add(self, split: str, label: str, detail: Any = "", number: int = 1) -> None:
        self.tally[split, label, detail] += number

    def leave_out(self, split: str, number: int, why: RowError | Dropped) -> None:
        """Counts a dropped row, which is bad, or for example too long."""
        error = why if isinstance(why, RowError) else why.error
        self.add(split, "dropped", why.kind if isinstance(why, RowError) else why.reason)
        if error is None:
            return
        if error is why:
            self.add(split, "bad", error.kind)
        error.line = number
        if error.rest:
            self.unread = error
        self.errors.setdefault(error.reason(), error)
        self.add(split, "reasons", error.reason())


def totals(
    counts: Iterable[Counts], split: str | None = None, source: int | None = None
) -> dict[str, Counter]:
    """Returns {label: {detail: number}}, summed over all counts, or over the counts of one split or source."""
    total: dict[str, Counter] = defaultdict(Counter)
    for one in counts:
        if source in (None, one.chunk.source):
            for (name, label, detail), number in one.tally.items():
                if split in (None, name):
                    total[label][detail] += number
    return total


def of_split(name: str, counts: Iterable[Counts]) -> list[Counts]:
    """Returns the counts of the chunks in files of `train` or `eval`."""
    return [one for one in counts if one.chunk.split == name]


def first_errors(counts: Iterable[Counts]) -> list[tuple[RowError, int]]:
    """Returns (the first row dropped for a reason, number of such rows) for the most frequent reasons."""
    rows, first = totals(counts)["reasons"], dict[Reason, RowError]()
    for one in counts:
        for reason, error in one.errors.items():
            first.setdefault(reason, error)
    often = sorted(first, key=lambda reason: -rows[reason])[:FIRST]
    return [(error, rows[reason]) for reason, error in first.items() if reason in often]


# ---- rows that are compared with each other --------------------------------------------------------------------------


def compared(name: str, counts: Iterable[Counts], split: str) -> Any:
    """Returns the hashes by which the rows of a split are compared, as an array [rows, WIDTH]."""
    import numpy as np

    whole = b"".join(one.keys[name] for one in of_split(split, counts))
    return np.frombuffer(whole, dtype=np.uint64).reshape(-1, WIDTH[name])


def duplicates(counts: Sequence[Counts]) -> int:
    """Returns the number of rows equal to an earlier row of their split."""
    import numpy as np

    splits = [compared("rows", counts, split) for split in ("train", "eval")]
    return sum(len(rows) - len(np.unique(rows)) for rows in splits)


def overlap(counts: Sequence[Counts]) -> tuple[int, int] | None:
    """Counts the eval rows with a prompt that is also in `train`, and the eval rows whose completions are there, too.

    Returns None if there are no eval rows.
    """
    import numpy as np

    if not of_split("eval", counts):
        return None
    train, evaluated = (compared("records", counts, split) for split in ("train", "eval"))
    prompts, rows = (int(np.isin(evaluated[:, side], train[:, side]).sum()) for side in (0, 1))
    return prompts, rows


# ---- numbers in words ------------------------------------------------------------------------------------------------


def count(number: int, what: str = "row") -> str:
    """Returns a number and its unit, such as `1 row` and `2,000 rows`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def most_frequent(counts: Mapping[str, int], most: int) -> dict[str, int]:
    """Returns the `most` largest counts, the largest first. The entry `others` is the sum of all other counts."""
    named = [item for item in counts.items() if item[0] != "others"]
    kept = dict(sorted(named, key=lambda item: (-item[1], item[0]))[:most])
    others = sum(counts.values()) - sum(kept.values())
    return kept | ({"others": others} if others else {})


def versions_in_words(versions: Mapping[str, int], kept: int) -> str:
    """Describes which versions wrote `kept` rows: `300 rows from models:/demo-ppo/3, 12 without a version`."""
    named = [f"{count(rows)} from {version}" for version, rows in most_frequent(versions, 8).items()]
    rest = kept - sum(versions.values())
    return ", ".join([*named, *([f"{rest:,} without a version"] if rest else [])])
