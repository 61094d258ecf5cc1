"""Renders the page: one self-contained HTML file about one run or several. All content is escaped."""

import re
from collections.abc import Iterable
from typing import Any

import jinja2
import yaml
from markupsafe import Markup, escape

from pipeline.config.stages import STAGE
from pipeline.data.counts import count, versions_in_words
from pipeline.data.report import name_of
from pipeline.report import evaluations, headline, plots, preferences, timeline
from pipeline.report.gather import Node, Run, lineage
from pipeline.report.panels import GROUPS
from pipeline.report.plots import Drawing

MAX_PANELS_WITHOUT_HEADINGS = 8
BOX, GAP, ROW = 178, 74, 104  # pixels of the lineage graph: width of a box, gap between columns, row height


def render(runs: list[Run], table: list[list[str]] | None = None) -> str:
    """Returns the page as text. `table` comes first; its first row is its head."""
    sections = [section(run, f"r{i}") for i, run in enumerate(runs)]
    stages = list(dict.fromkeys(run.stage for run in runs))
    by_stage = [[run for run in runs if run.stage == stage] for stage in stages]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pipeline.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.jinja").render(
        title=runs[0].name if len(runs) == 1 else " → ".join(stages),
        runs=sections,
        rounds=table or [],
        first=next((one for one in reversed(sections) if one["samples"]), None),  # its samples come first
        cards=headline.overview(runs) if len(runs) > 1 else headline.cards(runs[0]),
        compared=[comparison(same) for same in by_stage if len(same) > 1],
        graph=graph(lineage(runs)),
    )


def stage_title(stage: str) -> str:
    """Returns `Reward model` for `rm`, or the stage's name if it has no title."""
    return (STAGE[stage].title if stage in STAGE else "") or stage


def section(run: Run, anchor: str) -> dict[str, Any]:
    """Returns the content about one run, as plain data for the template."""
    return {
        "run": run,
        "anchor": anchor,
        "stage": stage_title(run.stage),
        "cards": headline.cards(run),
        "facts": headline.facts(run),
        "gate": headline.gate(run),
        "groups": groups(run, anchor),
        "samples": run.result.get("samples", []),
        "doubtful": run.doubtful,
        "examples": evaluations.examples(run.evaluation),
        "benchmarks": evaluations.benchmarks(run.evaluation),
        "data": data_tables(run),
        # As the model saw them, with the trained tokens (between ⟦ and ⟧) marked
        "rows": [
            Markup(re.sub("⟦([^⟦⟧]*)⟧", r"<mark>\1</mark>", str(escape(text))))
            for text in run.data.get("samples", [])
        ],
        "job": as_yaml(run.job),
        "versions": run.result.get("versions") or {},
    }


# ------------------------------------------------------------------------------------------------------ plots


def drawn(runs: dict[str, Run]) -> dict[str, tuple[str, list[Drawing]]]:
    """Returns {group: (its question, its drawings)} of one run, or of several runs of one stage by their names."""
    first, alone = next(iter(runs.values())), len(runs) == 1
    axis = "update" if first.stage == "ppo" else "step"  # PPO logs once an update
    histories = {name: run.history for name, run in runs.items()}
    groups: dict[str, tuple[str, list[Drawing]]] = {}
    if alone and first.pairs:
        question = f"What do {len(first.pairs):,} held-out pairs say about the scores?"
        groups["pairs"] = (question, preferences.drawings(first.pairs))
    if alone:
        trust = evaluations.drawings(first.evaluation)
        trust += evaluations.over_optimization(first.history, first.metrics.get("before_judge"))
        groups["evaluation"] = ("Can the score be trusted?", trust)
    for name, (question, panels) in GROUPS.items():
        draws = [(one, plots.curve(one, histories, axis, first.kept if alone else None)) for one in panels]
        groups[name] = (question, [Drawing(one.title, one.note, draw) for one, draw in draws if draw])
    if alone:
        groups["cost"][1].extend(timeline.drawings(first.result.get("timeline")))
    return {name: group for name, group in groups.items() if group[1]}


def picture(runs: dict[str, Run], group: str) -> bytes:
    """Returns a group of drawings as a PNG, of one run or of several runs of one stage by their names."""
    return plots.png([one.draw for one in drawn(runs)[group][1]])


def pictures(run: Run) -> dict[str, bytes]:
    """Returns {file name: PNG} of a run, one for each group of drawings."""
    return {
        f"{name}.png": plots.png([one.draw for one in group]) for name, (_, group) in drawn({"": run}).items()
    }


def groups(run: Run, anchor: str) -> list[dict[str, Any]]:
    """Returns the drawings of a run for the template. Few curves share one heading."""
    made = drawn({"": run})
    curves = {name: made.pop(name) for name in GROUPS if name in made}
    few = [one for _, drawings in curves.values() for one in drawings]
    if few and len(few) <= MAX_PANELS_WITHOUT_HEADINGS:
        curves = {"curves": ("Curves", few)}
    return [
        {"question": question, "panels": _panels(drawings, f"{anchor}-{name}")}
        for name, (question, drawings) in (made | curves).items()
    ]


def comparison(runs: list[Run]) -> dict[str, Any]:
    """Returns panels that compare runs of one stage; letters replace long names."""
    letters = max(len(run.name) for run in runs) > 14
    labels = [chr(ord("A") + i) if letters else run.name for i, run in enumerate(runs)]
    groups = drawn(dict(zip(labels, runs, strict=True))).values()
    rows = [
        {
            "name": run.name,
            "label": label if letters else "",
            "colour": f"var(--c{i % len(plots.COLOURS)})",
            "cards": {card["label"]: card["value"] for card in headline.cards(run)},
        }
        for i, (label, run) in enumerate(zip(labels, runs, strict=True))
    ]
    return {
        "stage": stage_title(runs[0].stage),
        "panels": _panels((one for _, drawings in groups for one in drawings), f"c-{runs[0].stage}"),
        "rows": rows,
        "columns": list(dict.fromkeys(label for row in rows for label in row["cards"])),
    }


def _panels(drawings: Iterable[Drawing], prefix: str) -> list[dict[str, Any]]:
    return [
        {"svg": Markup(plots.svg(one.draw, f"{prefix}-{i}", f"{one.title}. {one.note}")), "note": one.note}
        for i, one in enumerate(drawings)
    ]


# ------------------------------------------------------------------------------------------- data, job, lineage


def data_tables(run: Run) -> list[dict[str, Any]]:
    """Returns an entry for each split: rows read, kept, dropped and why, and their lengths."""
    tables = []
    for name, split in run.data.get("splits", {}).items():
        lengths = {"prompt": split["prompt_tokens"], "completion": split["completion_tokens"]}
        sources = run.data.get("sources", {}).get(name, [])
        job, several = run.job.get("data", {}), len(sources) > 1
        tables.append(
            {
                **{key: split[key] for key in ("read", "kept", "truncated", "tokens")},
                "name": name,
                "source": f"{len(sources)} sources" if several else job.get(name) or job.get("train"),
                "sources": [_counted(one) for one in sources] if several else [],
                "digest": run.result["data"].get("digests", {}).get(name, "")[:12],
                "versions": versions_in_words(found, split["kept"])
                if (found := split.get("versions"))
                else "",
                "dropped": [(name_of(why), count) for why, count in sorted(split["dropped"].items())],
                "lengths": {label: values for label, values in lengths.items() if values.get("max")},
            }
        )
    return tables


def _counted(source: dict[str, Any]) -> str:
    """Returns the row counts of one of several sources, and how many an epoch draws if it has a weight."""
    drawn = "" if source["drawn"] is None else f", {source['drawn']:,} of {source['rows']:,} drawn an epoch"
    return f"{source['path']}: {source['kept']:,} of {source['read']:,} kept{drawn}"


def as_yaml(job: dict[str, Any]) -> str:
    """Returns the job as a file that runs it again, without empty keys."""
    sections: dict[str, Any] = {
        key: value for key, value in job.items() if value not in (None, {}, []) and key != "source"
    }
    for section in ("model", "data", "run", "mlflow"):
        sections[section] = {key: value for key, value in job.get(section, {}).items() if value is not None}
    return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True, width=100)


def graph(nodes: list[Node]) -> dict[str, Any]:
    """Returns the lineage as boxes and arrows with coordinates, for the template's <svg>."""
    boxes: dict[str, dict[str, Any]] = {
        node.key: {
            "x": 8 + node.depth * (BOX + GAP), "y": 8 + node.row * ROW, "height": 28 + 16 * len(node.lines),
            "title": _short(node.title), "kind": node.kind, "full": node.key,
            "lines": [_short(line, 22) for line in node.lines],
        }
        for node in nodes
    }  # fmt: skip
    arrows = []
    for node in nodes:
        for key in node.parents | node.rows_from:
            rows = [count(node.rows_from[key])] if key in node.rows_from else []
            arrows.append(
                {
                    "parent": boxes[key],
                    "child": boxes[node.key],
                    "role": ", ".join(filter(None, [node.parents.get(key), *rows])),
                    "kind": "rows" if rows else "parent",
                }
            )
    return {
        "boxes": list(boxes.values()),
        "arrows": arrows,
        "box": BOX,
        "width": max(box["x"] + BOX + 8 for box in boxes.values()),
        "height": max(box["y"] + box["height"] + 8 for box in boxes.values()),
    }


def _short(text: str, width: int = 25) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
