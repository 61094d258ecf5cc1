"""The digest of a sequence of rows: it depends on the rows and their order, and not on how they are cut into chunks.

A polynomial in the SHA-256 hashes of the rows, h0 * B^(n-1) + ... + h(n-1) modulo a prime, so that two digests of
neighbouring runs of rows make that of both. It tells versions of a set apart; it is no defence against somebody who forges one.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

PRIME = (1 << 255) - 19
BASE = int.from_bytes(hashlib.sha256(b"rows").digest())


@dataclass
class RowsDigest:
    count: int = 0
    value: int = 0

    def add(self, row: bytes) -> None:
        """Appends a row."""
        self.count += 1
        self.value = (self.value * BASE + int.from_bytes(hashlib.sha256(row).digest())) % PRIME

    def extend(self, other: "RowsDigest") -> None:
        """Appends the rows of another digest."""
        self.count += other.count
        self.value = (self.value * pow(BASE, other.count, PRIME) + other.value) % PRIME


def joined(digests: Iterable[RowsDigest]) -> RowsDigest:
    whole = RowsDigest()
    for one in digests:
        whole.extend(one)
    return whole
