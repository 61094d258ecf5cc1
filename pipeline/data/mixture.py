"""Which rows of several weighted sources make an epoch.

An epoch draws from each source in proportion to its weight, exact to one row. data.stopping_strategy, named as in
datasets.interleave_datasets, says when the epoch ends:

- `first_exhausted`: when one source is used up. No row occurs twice in an epoch; some rows of the other sources are left out.
- `all_exhausted`: when every source is used up. No row is left out. Rows of the smaller sources occur several times, with
  counts that differ by at most one within a source.

Each epoch leaves out or repeats other rows, so over several epochs, all rows of a source are drawn equally often.
The draw is a function of seed and epoch. It is the same for any number of workers and for a resumed run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from pipeline.config.job import sources_of
from pipeline.errors import InputError


@dataclass(frozen=True)
class Mixture:
    """The sources of a token table, which has the rows of one source after another."""

    sizes: tuple[int, ...]  # rows of each source
    draws: tuple[int, ...]  # rows that an epoch draws from each

    def __len__(self) -> int:
        """Returns the number of rows of an epoch."""
        return sum(self.draws)

    def rows(self, epoch: int, seed: int) -> Any:
        """Returns the row numbers of an epoch in the table, source by source, as a numpy array of int64."""
        import numpy as np

        parts, start = [], 0
        for source, (size, draws) in enumerate(zip(self.sizes, self.draws, strict=True)):
            # One order for all epochs. Each epoch continues after the previous one, and wraps around at the end.
            order = np.random.default_rng([seed, source]).permutation(size)
            parts.append(start + order[(epoch * draws + np.arange(draws)) % size])
            start += size
        return np.concatenate(parts)


def mixture_of(data: Any, sizes: Sequence[int]) -> Mixture | None:
    """Returns the mixture of the sources of data.train, which have these rows, or None without weights."""
    sources = sources_of(data.train)
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        return None
    return mix([source.path for source in sources], sizes, weights, data.stopping_strategy)


def mix(
    names: Sequence[str],
    sizes: Sequence[int],
    weights: Sequence[float],
    strategy: Literal["first_exhausted", "all_exhausted"],
) -> Mixture:
    """Returns the mixture of sources with these sizes, in rows.

    Raises:
        InputError: if the weights leave a source without a row in an epoch.
    """
    shares = [Fraction(str(weight)) for weight in weights]
    shares = [share / sum(shares) for share in shares]
    lengths = [size / share for size, share in zip(sizes, shares, strict=True)]
    total = math.floor(min(lengths)) if strategy == "first_exhausted" else math.ceil(max(lengths))
    # Each share is rounded up or down: the largest remainders are rounded up
    draws = [math.floor(share * total) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: draws[index] - shares[index] * total)
    for index in by_remainder[: total - sum(draws)]:
        draws[index] += 1
    empty = [name for name, size in zip(names, sizes, strict=True) if not size]
    if empty := empty or [name for name, draw in zip(names, draws, strict=True) if not draw]:
        raise InputError(
            f"no row of {empty[0]} is in an epoch of {total:,} rows; remove it, or change the weights",
            key="data.train",
        )
    return Mixture(tuple(sizes), tuple(draws))
