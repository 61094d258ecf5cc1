"""Defines `CheckResult`, the result of a self-check. A run stops if a self-check fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import SelfCheckFailed


@dataclass(frozen=True)
class CheckResult:
    """The result of one check: the condition, what the check found, and whether the condition holds.

    `holds` is None if the check does not apply to the job.
    """

    check: str
    found: str
    holds: bool | None


def same_tensors(name: str, loaded: Mapping[str, Any], stored: Mapping[str, Any], folder: str) -> CheckResult:
    """Checks that the tensors in memory are bit-identical to the tensors of the files in `folder`."""
    different = sorted(loaded.keys() ^ stored.keys())
    different = different or [key for key in loaded if not loaded[key].equal(stored[key])]
    summary = (
        f"{len(different)} tensors differ, {different[0]} for one" if different else f"{len(loaded)} tensors"
    )
    return CheckResult(name, f"{summary} ({folder})", not different)


def raise_if_failed(results: Sequence[CheckResult]) -> None:
    """Raises SelfCheckFailed if any check failed. The error lists all failed checks."""
    if failures := [f"{result.check}: {result.found}" for result in results if result.holds is False]:
        raise SelfCheckFailed("self-check failed:\n  " + "\n  ".join(failures))
