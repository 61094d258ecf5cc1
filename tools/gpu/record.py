"""The results of one experiment, as plain data that one process can send to another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class Skipped(Exception):
    """Raised if this machine cannot run the experiment. The message gives the reason."""


@dataclass
class Check:
    """A condition that must hold, and the measured value."""

    what: str
    found: str
    holds: bool


@dataclass
class Record:
    """What an experiment measured and checked so far."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)  # metrics, as rows of a table
    checks: list[Check] = field(default_factory=list)
    skipped: str = ""  # reason
    error: str = ""  # traceback
    seconds: float = 0.0

    def row(self, **metrics: Any) -> None:
        """Adds a row to the experiment's table."""
        self.rows.append(metrics)

    def check(self, what: str, found: Any, holds: Any) -> None:
        """Adds a check. The experiment continues if the check fails."""
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


def show(value: Any) -> str:
    """Returns a number with four digits, or any other value as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(one)}" for key, one in value.items())
    return str(value)


def markdown(machine: dict[str, Any], records: list[Record]) -> str:
    """Returns the page of a run: the machine, a line per experiment, and each experiment's checks and metrics."""
    lines = [f"# {machine['device']}", "", show(machine), ""]
    lines += table(
        [
            {"experiment": one.name, "outcome": one.outcome, "seconds": round(one.seconds), "why": one.reason}
            for one in records
        ]
    )
    words = {True: "holds", False: "**does not hold**"}
    for one in records:
        if not one.skipped:
            lines += ["", f"## {one.name}", ""]
            lines += [f"- {words[check.holds]}: {check.what} ({check.found})" for check in one.checks]
            lines += ["", *table(one.rows)] if one.rows else []
            lines += ["", "```", one.error.strip(), "```"] if one.error else []
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns a Markdown table. Rows may have different keys."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[show(row.get(key, "")).replace("|", "\\|").replace("\n", " ") for key in keys] for row in rows]
    return [" | ".join(["", *line, ""]).strip() for line in (keys, ["---"] * len(keys), *cells)]
