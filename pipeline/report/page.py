"""Renders a report about one or more runs as one self-contained HTML page. All content is escaped."""

import re
from collections.abc import Iterable
from typing import Any

import jinja2
import yaml
from markupsafe import Markup, escape

from pipeline import text
from pipeline.data.counts import versions_in_words
from pipeline.data.report import error_kind_name
from pipeline.input_uri import short_title
from pipeline.job.stages import time_axis, title_of
from pipeline.registry.store import flatten
from pipeline.report import evaluations, gather, headline, plots, preferences
from pipeline.report.gather import ReportedRun
from pipeline.report.panels import GROUPS
from pipeline.report.plots import Drawing


def render_page(runs: list[ReportedRun]) -> str:
    """Returns the HTML of the report."""
    by_stage: dict[str, list[ReportedRun]] = {}
    for run in runs:
        by_stage.setdefault(run.stage, []).append(run)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pipeline.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions = (
        text.number,
        versions_in_words,
        error_kind_name,
        title_of,
        short_title,
        mark_trained_tokens,
        as_yaml,
    )
    environment.globals.update({function.__name__: function for function in functions})
    environment.globals.update(headline=headline, evaluations=evaluations, gather=gather)
    sampled = [run for run in runs if run.result.get("samples")]
    return environment.get_template("page.jinja").render(
        title=runs[0].name if len(runs) == 1 else " → ".join(by_stage),
        runs=[
            {"run": run, "anchor": f"r{i}", "groups": groups_for_template(run, f"r{i}")}
            for i, run in enumerate(runs)
        ],
        first=sampled[-1] if sampled else None,  # the run whose samples are at the top of the page
        cards=headline.cards_of_runs(runs) if len(runs) > 1 else headline.cards_of_run(runs[0]),
        anchors={run.version: f"r{i}" for i, run in enumerate(runs) if run.version},
        compared=[compare_runs(stage_runs) for stage_runs in by_stage.values() if len(stage_runs) > 1],
    )


def mark_trained_tokens(row_text: str) -> Markup:
    """Escapes the text of a row for HTML, and puts the tokens that contribute to the loss (between ⟦ and ⟧) inside <mark>."""
    return Markup(re.sub("⟦([^⟦⟧]*)⟧", r"<mark>\1</mark>", str(escape(row_text))))


def as_yaml(job: dict[str, Any]) -> str:
    """Returns the job as YAML, without keys that are empty or not set."""
    sections: dict[str, Any] = {
        key: value for key, value in job.items() if value not in (None, {}, []) and key != "source"
    }
    for section in ("model", "data", "run", "mlflow"):
        sections[section] = {key: value for key, value in job.get(section, {}).items() if value is not None}
    return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True, width=100)


# ------------------------------------------------------------------------------------------------------ plots


def grouped_drawings(runs: dict[str, ReportedRun]) -> dict[str, tuple[str, list[Drawing]]]:
    """Returns {group: (heading, drawings)}. Each heading is a question that the drawings below it answer.

    Args:
        runs: {name: run} for one run, or for several runs of the same stage.
    """
    first, single = next(iter(runs.values())), len(runs) == 1
    axis = time_axis(first.stage)
    best = first.result.get("kept") or {}
    best_step = best.get("step") if single and best.get("by") else None
    histories = {name: run.history for name, run in runs.items()}
    groups: dict[str, tuple[str, list[Drawing]]] = {}
    if single and first.pairs:
        question = f"What do {len(first.pairs):,} held-out pairs say about the scores?"
        groups["pairs"] = (question, preferences.preference_drawings(first.pairs))
    if single:
        groups["evaluation"] = (
            "Can the score be trusted?",
            evaluations.evaluation_drawings(first.evaluation),
        )
    for name, (question, panels) in GROUPS.items():
        draws = [(panel, plots.curve_drawer(panel, histories, axis, best_step)) for panel in panels]
        groups[name] = (question, [Drawing(panel.title, panel.note, draw) for panel, draw in draws if draw])
    return {name: group for name, group in groups.items() if group[1]}


def group_png(runs: dict[str, ReportedRun], group: str) -> bytes:
    """Returns a group of drawings as a PNG. `runs` is {name: run} for one run, or for several runs of the same stage."""
    return plots.figure_png([drawing.draw for drawing in grouped_drawings(runs)[group][1]])


def groups_for_template(run: ReportedRun, anchor: str) -> list[dict[str, Any]]:
    """Returns the groups of drawings of a run for the template."""
    return [
        {"question": question, "panels": _panels(drawings, f"{anchor}-{name}")}
        for name, (question, drawings) in grouped_drawings({"": run}).items()
    ]


def compare_runs(runs: list[ReportedRun]) -> dict[str, Any]:
    """Compares runs of the same stage. Returns their metrics, the job keys that differ, and panels with one line per run."""
    runs_by_name = {str(number): run for number, run in enumerate(runs, 1)}
    cards = [{card["label"]: card["value"] for card in headline.cards_of_run(run)} for run in runs]
    jobs = [flatten(run.job) for run in runs]
    keys = sorted({key for job in jobs for key in job} - {"run.name"})
    groups = grouped_drawings(runs_by_name).values()
    return {
        "stage": runs[0].stage,
        "panels": _panels((drawing for _, drawings in groups for drawing in drawings), f"c-{runs[0].stage}"),
        "rows": list(zip(runs, cards, jobs, strict=True)),
        "columns": list(dict.fromkeys(label for card in cards for label in card)),
        "differ": [key for key in keys if any(job.get(key) != jobs[0].get(key) for job in jobs)],
    }


def _panels(drawings: Iterable[Drawing], prefix: str) -> list[dict[str, Any]]:
    return [
        {
            "svg": Markup(plots.panel_svg(plot.draw, f"{prefix}-{i}", f"{plot.title}. {plot.note}")),
            "note": plot.note,
        }
        for i, plot in enumerate(drawings)
    ]
