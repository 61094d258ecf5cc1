"""The results of one experiment: metrics, checks and outcome. Plain data, so that processes can exchange it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class Skipped(Exception):
    """Raised if the experiment does not apply to this machine. The message gives the reason."""


@dataclass
class Check:
    """A condition that must hold, and the measured value."""

    what: str
    found: str
    holds: bool


@dataclass
class Record:
    """The record of an experiment, filled in while it runs."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)  # metrics, as rows of a table
    checks: list[Check] = field(default_factory=list)
    skipped: str = ""  # reason
    error: str = ""
    seconds: float = 0.0

    def row(self, **figures: Any) -> None:
        """Adds a row to the experiment's table."""
        self.rows.append(figures)

    def check(self, what: str, found: Any, holds: Any) -> None:
        """Adds a check. The experiment continues even if the check fails."""
        self.checks.append(Check(what, show(found), bool(holds)))

    @property
    def outcome(self) -> str:
        if self.skipped:
            return "skipped"
        passed = self.checks and not self.error and all(check.holds for check in self.checks)
        return "passed" if passed else "FAILED"

    @property
    def reason(self) -> str:
        """Returns on one line why the experiment was skipped or failed."""
        if self.skipped or self.error:
            return self.skipped or self.error.strip().splitlines()[-1][:160]
        return "; ".join(f"{check.what} ({check.found})" for check in self.checks if not check.holds)

    def summary(self) -> dict[str, Any]:
        """Returns the record's line in the table of all experiments."""
        hold = f"{sum(check.holds for check in self.checks)} of {len(self.checks)}" if self.checks else ""
        times = {"experiment": self.name, "outcome": self.outcome, "seconds": round(self.seconds, 1)}
        return {**times, "checks": hold, "why": self.reason}


def show(value: Any) -> str:
    """Returns a number with four digits, or any other value as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(one)}" for key, one in value.items())
    return str(value)


def markdown(about: dict[str, Any], records: list[Record]) -> str:
    """Returns the page of a run: the machine, a line per experiment, and each experiment's metrics and checks."""
    lines = [f"# {about['device']}", "", ", ".join(f"{key} {value}" for key, value in about.items()), ""]
    lines += table([one.summary() for one in records])
    for one in records:
        if one.skipped:
            continue
        lines += ["", f"## {one.name}", ""]
        words = {True: "holds", False: "**does not hold**"}
        lines += [f"- {words[check.holds]}: {check.what} ({check.found})" for check in one.checks]
        if one.rows:
            lines += ["", *table(one.rows)]
        if one.error:
            lines += ["", "```", one.error.strip(), "```"]
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns a Markdown table of rows with any keys."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[show(row.get(key, "")).replace("|", "\\|").replace("\n", " ") for key in keys] for row in rows]
    return [" | ".join(["", *line, ""]).strip() for line in (keys, ["---"] * len(keys), *cells)]
