"""Checks a new model version against the job's gate, and compares it with the champion.

The champion is the version that the job's alias points to when the check runs.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.job import OPERATORS, parse_gate
from pipeline.job.job import SPLITS
from pipeline.registry.store import metric_key, search_filter


@dataclass(frozen=True)
class Gate:
    """The conditions that a version must meet to get the alias, and the metric that compares the version with the champion."""

    model: str | None  # mlflow.registered_model, or None if nothing is registered
    alias: str
    conditions: dict[str, str]  # metric -> ">= 0.95"
    metric: str
    greater_is_better: bool
    settings: dict[str, Any]  # {key of the job: value} for the keys that affect how metrics are measured


@dataclass(frozen=True)
class Champion:
    """The champion's metrics. `metrics` is empty if there is no champion, or if its metrics cannot be compared with the run's."""

    metrics: dict[str, float] = field(default_factory=dict)
    note: str = ""  # message that the run is worse, or why it cannot be compared with the champion


def champion_of(
    mlflow: Any,
    gate: Gate,
    name: str,
    own_version: str | None,
    metrics: dict[str, float],
    measured: dict[str, str],
    prefix: str = "",
) -> Champion:
    """Returns the champion of a registered model, compared with a run that has the given metrics.

    Args:
        own_version: number of the version that has these metrics, or None. If this version is the champion, returns an
            empty Champion.
        measured: tags that describe what the metrics depend on, such as eval rows, reward and tokenizer. The metrics are
            compared only if the champion has the same tags.
        prefix: prefix of the champion's tags to compare, `evaluate.` for tags that `evaluate` has set.
    """
    models = mlflow.search_registered_models(search_filter("name", name))
    number = next((model.aliases.get(gate.alias) for model in models if model.name == name), None)
    if number is None or str(number) == own_version:
        return Champion()
    version = f"v{number}, which was {gate.alias}"
    tags = mlflow.get_model_version(name, number).tags
    parts, measured = _parts(tags, prefix), _parts(measured)
    if differences := [key for key in {**measured, **parts} if measured.get(key) != parts.get(key)]:
        return Champion(note=f"not compared with {version}: different {differences[0]}")
    values = {key: float(tags.get(prefix + metric_key(key), "nan")) for key in metrics}
    values = {key: value for key, value in values.items() if not math.isnan(value)}
    metric = gate.metric
    if metric not in values:
        return Champion(values)
    before, now = values[metric], _rounded(metrics[metric])
    worse = now < before if gate.greater_is_better else now > before
    return Champion(values, f"worse than {version}: {metric} {now:.4g}, not {before:.4g}" if worse else "")


def measured_on(digests: dict[str, str], inputs: dict[str, str], gate: Gate) -> dict[str, str]:
    """Returns tags that record what metrics depend on: digests of rows and functions, versions of models, and settings."""
    data = {name: digest[:12] for name, digest in digests.items()}
    tags = {"data": data, "parents": inputs, "measured_with": gate.settings}
    return {key: json.dumps(value) for key, value in tags.items()}


def _parts(tags: Mapping[str, str], prefix: str = "") -> dict[str, str]:
    """Returns {name: value} for the tags of a version that its eval metrics depend on, such as digests, inputs and settings."""
    parts = {name: tags[prefix + name] for name in ("tokenizer", "chat_template") if prefix + name in tags}
    data, inputs, settings = (
        json.loads(tags.get(prefix + key, "{}")) for key in ("data", "parents", "measured_with")
    )
    for key in data:
        if not key.startswith("train"):
            parts[f"{key} rows" if key in SPLITS else f"code of {key}"] = data[key]
    return parts | inputs | settings


def _rounded(value: float) -> float:
    """Rounds a value to six digits, so that a metric equals its value in a version's tags, which have six digits."""
    return float(f"{value:.6g}")


def check_conditions(
    gate: dict[str, str], metrics: dict[str, float], champion: dict[str, float]
) -> Iterator[tuple[str, str, float | None, bool]]:
    """Yields (metric, condition, value, whether the condition is met). A missing metric and NaN do not meet a condition.

    If the champion lacks a metric, every value except NaN passes the comparison with the champion.
    """
    for name, condition in gate.items():
        symbol, threshold = parse_gate(condition)
        value = compared = metrics.get(name)
        if threshold is None:
            compared = None if value is None else _rounded(value)
            threshold = champion.get(name, -math.inf if ">" in symbol else math.inf)
            condition += f" ({threshold:.4g})" if name in champion else ""
        yield name, condition, value, compared is not None and OPERATORS[symbol](compared, threshold)


def evaluate_gate(
    gate: dict[str, str], metrics: dict[str, float], champion: Champion = Champion()
) -> tuple[bool, str]:
    """Returns whether all conditions are met, and a text with the reason."""
    failures = [
        f"{name} = {'missing' if value is None else f'{value:.4g}'}, required {condition}"
        for name, condition, value, is_met in check_conditions(gate, metrics, champion.metrics)
        if not is_met
    ]
    if failures:
        return False, "failed: " + "; ".join(failures)
    keys = [key for key, rule in gate.items() if parse_gate(rule)[1] is None and key not in champion.metrics]
    why = "the champion has no such metric" if champion.metrics else champion.note or "no champion yet"
    return True, f"passed; {', '.join(keys)}: {why}" if keys else "passed" if gate else "none set"
