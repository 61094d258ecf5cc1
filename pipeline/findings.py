"""What a check found: `Finding`. Runs stop where one does not hold; `doctor` prints them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import SelfCheckFailed


@dataclass(frozen=True)
class Finding:
    """One check: what must hold, what was found, and whether it holds; None where it does not apply to this job."""

    check: str
    found: str
    holds: bool | None


def require(findings: Sequence[Finding]) -> None:
    """Raises SelfCheckFailed with every finding that does not hold."""
    if wrong := [f"{finding.check}: {finding.found}" for finding in findings if finding.holds is False]:
        raise SelfCheckFailed("self-check failed:\n  " + "\n  ".join(wrong))
