"""What a job makes of a raw row before its shape is looked at: data.transform, then data.columns, then the sides of a pair.

Row by row, without a tokenizer or Ray. lookahead.py looks at the first rows of the files, before all are read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.data.columns import Columns, renamed
from pipeline.data.encode import Dropped
from pipeline.data.sides import Rule, graded, ordered
from pipeline.data.transform import transformed
from pipeline.data.values import RowError

if TYPE_CHECKING:
    from pipeline.data.shapes import Kind


@dataclass(frozen=True)
class Preprocess:
    """What is done to each row of a job; all of it is part of the cache key."""

    columns: Columns = field(default_factory=dict)
    rule: Rule | None = None  # None: not known, or no labels
    transform: str | None = None
    transform_digest: str = ""
    group_by: str | None = (
        None  # `transform` gets the rows in succession that have the same value in this column
    )

    def rows(self, row: Any, kind: "Kind") -> Iterator[Any]:
        """The rows that a decoded row stands for: each a row, a RowError, or Dropped."""
        for made in self.transformed(row):
            try:
                yield self._fields(made, kind) if isinstance(made, dict) else made
            except RowError as error:
                yield error

    def transformed(self, row: Any) -> Iterator[Any]:
        """The rows that data.transform makes of a decoded row: each a row, a RowError, or Dropped."""
        if self.transform is None or isinstance(row, RowError):
            yield row
            return
        try:
            yield from transformed(row, self.transform)
        except RowError as error:
            yield error

    def _fields(self, row: dict[str, Any], kind: "Kind") -> Any:
        if self.columns:
            row = renamed(row, self.columns, kind.needed)
        if self.rule and self.rule.good and "label" in row:
            return graded(row, self.rule) or Dropped("tie")
        if kind.has_pairs and "first" in row and "second" in row:
            return ordered(row, self.rule) or Dropped("tie")
        return row


NOTHING = Preprocess()
