"""The sources of rows that a job names under data.train, data.eval and data.pairs, and the shares in which they are mixed."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config.fields import fields_of, show
from pipeline.config.jobfile import Tree
from pipeline.config.stages import STAGE

if TYPE_CHECKING:
    from pipeline.config import Job


@dataclass(frozen=True)
class Source:
    """One entry of such a list: a path alone, or a mapping with these keys."""

    path: str  # a path, a glob, a folder, s3:// gs:// hf://
    # Of data.train: the share of an epoch that is drawn from this source, in proportion to the weights of the others.
    weight: float | None = None


def sources_of(spec: str | list[str | dict[str, Any]] | None) -> list[Source]:
    """The sources of data.train, data.eval or data.pairs, in their order."""
    items = [spec] if isinstance(spec, str) else spec or []
    return [Source(item) if isinstance(item, str) else Source(**item) for item in items]


def check(tree: Tree, job: Job) -> None:
    """Refuses unknown keys of a source, and weights that fit neither each other nor the stage."""
    for name in ("train", "eval", "pairs"):
        spec = getattr(job.data, name)
        for index, item in enumerate(spec if isinstance(spec, list) else []):
            if isinstance(item, dict):
                _check_keys(tree, f"data.{name}.{index}", item)
    for name in ("eval", "pairs"):
        if any(source.weight is not None for source in sources_of(getattr(job.data, name))):
            raise tree.error(
                f"data.{name}", "found a weight; only data.train is mixed by weights: take it out"
            )
    weights = [source.weight for source in sources_of(job.data.train)]
    given = [weight for weight in weights if weight is not None]
    if not given:
        if job.data.stopping_strategy != "first_exhausted":
            raise tree.error(
                "data.stopping_strategy",
                "no source of data.train has a weight: there is nothing to draw from",
            )
        return
    if not STAGE[job.stage].learns:
        raise tree.error("data.train", f"found a weight; `{job.stage}` reads every row once: take it out")
    if len(given) < len(weights):
        raise tree.error(
            "data.train",
            f"{len(given)} of {len(weights)} sources have a weight; expected one for each, or for none",
        )
    for index, weight in enumerate(given):
        if not 0 < weight <= 1e9:
            expected = "a number above 0, for example 0.3"
            raise tree.error(f"data.train.{index}.weight", f"found {show(weight)}, expected {expected}")


def _check_keys(tree: Tree, key: str, item: dict[str, Any]) -> None:
    fields = fields_of("pipeline.config.sources.Source")
    for name, value in item.items():
        if name not in fields:
            near = difflib.get_close_matches(str(name), list(fields), 1, 0.7)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(fields)}"
            raise tree.error(f"{key}.{name}", f"unknown key of a source; {hint}")
        if problem := fields[name].problem(value):
            raise tree.error(f"{key}.{name}", problem)
    if "path" not in item:
        raise tree.error(
            key, f"a source without a path, {show(item)}; for example {{path: rows.jsonl, weight: 0.7}}"
        )
