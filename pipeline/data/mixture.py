"""Selects the rows of an epoch from weighted sources.

The number of rows that an epoch draws from a source is proportional to the source's weight, up to rounding to whole rows.
data.stopping_strategy has the same values as in datasets.interleave_datasets:

- `first_exhausted`: an epoch ends when one source has no more rows. No row is drawn twice. Some rows of the other sources are not
  drawn.
- `all_exhausted`: an epoch ends when all rows of all sources have been drawn. Rows of smaller sources are drawn several times.
  The numbers of draws of two rows of a source differ by at most one.

Different epochs omit or repeat different rows, so over several epochs all rows of a source are drawn equally often. The rows of
an epoch depend only on the seed and the epoch, so they are the same for any number of workers and after a resume.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pipeline.errors import InputError
from pipeline.job.job import Source


@dataclass(frozen=True)
class Mixture:
    """The weighted sources of a token table. The rows of the table are in the order of the sources."""

    sizes: tuple[int, ...]  # rows of each source
    draws: tuple[int, ...]  # rows that an epoch draws from each source

    def __len__(self) -> int:
        """Returns the number of rows of an epoch."""
        return sum(self.draws)

    def rows(self, epoch: int, seed: int) -> Any:
        """Returns the indices of an epoch's rows in the table, source by source, as a numpy array of int64."""
        import numpy as np

        parts, start = [], 0
        for source, (size, draws) in enumerate(zip(self.sizes, self.draws, strict=True)):
            # All epochs share one random order of rows. Each epoch continues where the previous one ended, and wraps around.
            order = np.random.default_rng([seed, source]).permutation(size)
            parts.append(start + order[(epoch * draws + np.arange(draws)) % size])
            start += size
        return np.concatenate(parts)


def mix_sources(sources: Sequence[Source], sizes: Sequence[int], strategy: str) -> Mixture | None:
    """Returns the mixture of the sources, or None if the sources have no weights.

    `sizes` has the number of rows of each source. `strategy` is data.stopping_strategy. Raises InputError if an epoch would draw
    no row from a source.
    """
    weights = [Fraction(str(source.weight)) for source in sources if source.weight is not None]
    if not weights:
        return None
    shares = [weight / sum(weights) for weight in weights]
    lengths = [size / share for size, share in zip(sizes, shares, strict=True)]
    total = math.floor(min(lengths)) if strategy == "first_exhausted" else math.ceil(max(lengths))
    # Round each source's number of rows down, then add 1 to the numbers with the largest remainders.
    draws = [math.floor(share * total) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: draws[index] - shares[index] * total)
    for index in by_remainder[: total - sum(draws)]:
        draws[index] += 1
    for numbers in (sizes, draws):
        if empty := [source.path for source, number in zip(sources, numbers, strict=True) if not number]:
            problem = f"no row of {empty[0]} is in an epoch of {total:,} rows; remove this source, or change the weights"
            raise InputError(problem, key="data.train")
    return Mixture(tuple(sizes), tuple(draws))
