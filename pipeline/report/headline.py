"""Selects what the top of a report shows: cards with a run's most important metrics, and a list of facts."""

from pipeline.job.stages import headline_metrics
from pipeline.metrics import Metric
from pipeline.report import preferences
from pipeline.report.gather import ReportedRun
from pipeline.run.summary import how_it_ended
from pipeline.system import prices
from pipeline.system.terminal import duration
from pipeline.text import number


def cards_of_run(run: ReportedRun) -> list[dict[str, str]]:
    """Returns the cards of one run: the stage's main metrics, metrics on held-out pairs, and the wall-clock time."""
    cards = [_card(run, metric) for metric in headline_metrics(run.stage, run.metrics)]
    if run.pairs:
        held_out = preferences.preference_numbers(run.pairs)
        for label, is_share in (("calibration error", True), ("margin to length, correlation", False)):
            if (value := held_out[label]) is not None:
                cards.append({"label": label, "value": _shown(value, is_share), "was": ""})
    if seconds := run.result.get("seconds") or run.failure.get("seconds"):
        cards.append({"label": "wall clock", "value": duration(seconds), "was": ""})
    return cards


def cards_of_runs(runs: list[ReportedRun]) -> list[dict[str, str]]:
    """Returns the cards of several runs: the first metric of each stage, and the total wall-clock time."""
    cards = []
    for stage, run in {run.stage: run for run in runs}.items():
        for metric in headline_metrics(stage, run.metrics)[:1]:
            card = _card(run, metric)
            cards.append({**card, "label": f"{stage}: {card['label']}"})
    seconds = sum(run.result.get("seconds", 0.0) for run in runs)
    return [*cards, {"label": "wall clock", "value": duration(seconds), "was": ""}]


def _card(run: ReportedRun, metric: Metric) -> dict[str, str]:
    was, value = (
        _shown(run.metrics[name], metric.is_share) if name in run.metrics else ""
        for name in (metric.before, metric.name)
    )
    label = metric.label if "held-out" in metric.label else f"held-out {metric.label}"
    return {
        "label": f"{label}, {metric.unit_shown}" if metric.unit_shown else label,
        "value": value,
        "was": was,
    }


def _shown(value: float, is_share: bool) -> str:
    return f"{value:.1%}" if is_share else number(value)


def facts_of_run(run: ReportedRun) -> list[tuple[str, str]]:
    """Returns facts about the run as (name, value) pairs."""
    model, scaling, result = run.job["model"], run.job.get("scaling", {}), run.result
    registered = None
    if result.get("version"):
        alias = f"@{result['alias']}" if result.get("alias") else "(the alias was not moved)"
        registered = f"{result['registered_model']} v{result['version']} {alias}"
    workers = scaling.get("num_workers", 1) or "in process,"
    peak, cost = result.get("peak_memory_bytes"), result.get("cost")
    entries = [
        ("base", " ".join(filter(None, (model["name_or_path"], model.get("revision"))))),
        ("registered", registered),
        ("ended", how_it_ended(result)),
        ("workers", f"{workers} {'with a GPU each' if scaling.get('use_gpu') else 'on CPUs'}"),
        ("peak memory", peak and f"{peak / 2**30:.2f} GiB in the largest worker"),
        ("cost", cost and prices.cost_in_words(cost)),
        ("MLflow run", run.run_id),
        ("folder", run.folder),
    ]
    return [(name, value) for name, value in entries if value]
