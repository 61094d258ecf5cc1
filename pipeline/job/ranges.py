"""Defines types for numbers with a range, which several sections of a job use. Most upper bounds only prevent overflows."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from pipeline.errors import InputError, shorten

Seed = Annotated[int, Ge(0), Le(2**32 - 1)]  # range of numpy's seeds
Rows = Annotated[int, Ge(1), Le(2**20)]  # range of batch sizes and token counts
Count = Annotated[int, Ge(1), Le(10**9)]
Steps = Annotated[int, Ge(0), Le(10**9)]
Share = Annotated[float, Ge(0), Le(1)]
Fraction = Annotated[float, Ge(0), Lt(1)]
Rate = Annotated[float, Gt(0), Le(100)]
Factor = Annotated[float, Gt(0), Le(10**6)]
Weight = Annotated[float, Ge(0), Le(10**6)]
# maximum gradient norm; smaller values would underflow
Norm = Literal[0] | Annotated[float, Ge(1e-6), Le(10**6)]
Seconds = Annotated[float, Gt(0), Le(86_400)]
Patience = Literal[-1] | Annotated[float, Ge(0), Le(365 * 86_400)]  # seconds, or -1 for no limit


def require_value(settings: Any, key: str, allowed: bool, expected: str) -> None:
    """Raises InputError about the value of a key if `allowed` is false."""
    if not allowed:
        raise InputError(f"found {shorten(repr(getattr(settings, key)))}, expected {expected}", key=key)
