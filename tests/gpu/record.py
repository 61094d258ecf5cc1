"""What one experiment found: figures, checks, and whether it passed. Plain data, so that it passes between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class Skipped(Exception):
    """The experiment does not apply to this machine; the message says why."""


@dataclass
class Check:
    """A statement that must hold, and the number that was found."""

    what: str
    found: str
    holds: bool


@dataclass
class Record:
    """The record of an experiment, which fills it in while it runs."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)  # figures; the rows of a table
    checks: list[Check] = field(default_factory=list)
    skipped: str = ""  # why
    error: str = ""
    seconds: float = 0.0

    def row(self, **figures: Any) -> None:
        """Adds a row to the experiment's table."""
        self.rows.append(figures)

    def check(self, what: str, found: Any, holds: Any) -> None:
        """Adds a check; the experiment goes on either way."""
        self.checks.append(Check(what, show(found), bool(holds)))

    @property
    def outcome(self) -> str:
        if self.skipped:
            return "skipped"
        passed = self.checks and not self.error and all(check.holds for check in self.checks)
        return "passed" if passed else "FAILED"

    @property
    def reason(self) -> str:
        """Why it was skipped or failed, on one line."""
        if self.skipped or self.error:
            return self.skipped or self.error.strip().splitlines()[-1][:160]
        return "; ".join(f"{check.what} ({check.found})" for check in self.checks if not check.holds)

    def summary(self) -> dict[str, Any]:
        """Returns the record's line in the table of all experiments."""
        hold = f"{sum(check.holds for check in self.checks)} of {len(self.checks)}" if self.checks else ""
        times = {"experiment": self.name, "outcome": self.outcome, "seconds": round(self.seconds, 1)}
        return {**times, "checks": hold, "why": self.reason}


def show(value: Any) -> str:
    """A figure with four digits, anything else as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(one)}" for key, one in value.items())
    return str(value)


def markdown(about: dict[str, Any], records: list[Record]) -> str:
    """The page of a run: the machine, one line for each experiment, then figures and checks of each."""
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
    """A Markdown table of rows with any keys."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[show(row.get(key, "")).replace("|", "\\|").replace("\n", " ") for key in keys] for row in rows]
    return [" | ".join(["", *line, ""]).strip() for line in (keys, ["---"] * len(keys), *cells)]
