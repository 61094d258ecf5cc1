"""The results of an iteration: a row for each round, in iterate.json and as a table on the terminal."""

from typing import Any

from pipeline.references import Ref, title
from pipeline.report.gather import folders
from pipeline.runtime import resume
from pipeline.system import storage
from pipeline.text import number, table

FILE = "iterate.json"
KEYS = ("plan", "pinned", "rounds", "goes_on", "ended", "version")


def row(
    number: int, collected: dict[str, Any], trained: dict[str, Any], evaluated: dict[str, Any]
) -> dict[str, Any]:
    """Returns the row of a round from three result.json files."""
    metrics, gates = evaluated["metrics"], (trained["gate"], evaluated["gate"])
    failed, passed = ([gate for gate in gates if str(gate).startswith(how)] for how in ("failed", "passed"))
    return {
        "round": number,
        "policy": collected["inputs"].get("policy", "base"),  # the policy that the round began with
        "prompts": collected["rows"],
        "rows": collected["counts"]["rows"],
        "score": collected["metrics"]["score"],
        "score_best": collected["metrics"]["score_best"],
        **{name: metrics.get(f"eval_{name}") for name in ("reward", "judge", "win_rate", "judge_win_rate")},
        **{f"{name}_before": metrics.get(f"before_{name}") for name in ("reward", "judge")},
        "version": str(Ref(trained["registered_model"], version=trained["version"])),
        "passed": not failed,
        "gate": (failed or passed or ["none set"])[0],
        "seconds": round(sum(one["seconds"] for one in (collected, trained, evaluated)), 2),
        "folders": [one["folder"] for one in (collected, trained, evaluated)],
    }


def recorded(reference: str, runs: str = "runs") -> tuple[str, list[dict[str, Any]]] | None:
    """Returns (folder, rounds) of the iteration in a folder, or with a name under `runs`, or None if it is no iteration."""
    for folder in folders(reference, runs):
        if left := resume.left_in(folder, FILE, False, *KEYS):
            return storage.absolute(folder), left["rounds"]
    return None


def drawn(rounds: list[dict[str, Any]]) -> list[str]:
    """Returns the folders of the runs that have a report: training and evaluate."""
    return [folder for one in rounds for folder in one["folders"][1:]]


def cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Returns the header, a line for the policy that the first round began with, and a line for each round."""
    lines = ["round|prompts|rows|score|best|reward|judge|win rate|version|gate|seconds".split("|")]
    if rows:
        first = rows[0]
        before = [number(first[f"{name}_before"]) for name in ("reward", "judge")]
        lines.append(["0", "", "", "", "", *before, "", title(first["policy"]), "", ""])
    for one in rows:
        won = one["judge_win_rate"] if one["judge_win_rate"] is not None else one["win_rate"]
        figures = [number(one[name]) for name in ("score", "score_best", "reward", "judge")]
        gate = one["gate"] if one["passed"] else "failed"
        counts = [str(one["round"]), str(one["prompts"]), str(one["rows"])]
        lines.append([*counts, *figures, number(won), title(one["version"]), gate, f"{one['seconds']:.0f}"])
    return lines


def text(rows: list[dict[str, Any]]) -> str:
    header, *lines = cells(rows)
    return table(header, lines)
