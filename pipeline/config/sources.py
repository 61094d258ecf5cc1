"""The sources of rows that a job names under data.train, data.eval and data.pairs: what their rows become, and their shares."""

from __future__ import annotations

import contextlib
import difflib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.config import schema
from pipeline.config.jobfile import Tree
from pipeline.config.stages import STAGE
from pipeline.errors import show
from pipeline.references import Ref

if TYPE_CHECKING:
    from pipeline.config import Data, Job

HUB = "hf://datasets/"
# Keys of a source that say what its rows become; one that is not given is that of the section.
PREPROCESSING = ("columns", "label", "transform", "group_by")


@dataclass(frozen=True)
class Source:
    """One entry of such a list: a path alone, or a mapping with these keys."""

    path: str  # a path, a glob, a folder, s3:// gs:// hf://
    # Of data.train: the share of an epoch that is drawn from this source, in proportion to the weights of the others.
    weight: float | None = None
    # Of a set on the hub: a commit, tag or branch, as @REVISION in its path.
    revision: str | None = None
    # As data.columns, data.label, data.transform and data.group_by, for the rows of this source; None: what these say.
    columns: dict[str, str | list[str]] | None = None
    label: dict[str, Any] | None = None
    transform: str | None = None
    group_by: str | None = None

    @property
    def location(self) -> str:
        """The path, of a set on the hub with its revision."""
        if self.revision is None:
            return self.path
        name, colon, split = self.path.removeprefix(HUB).partition(":")
        return f"{HUB}{name}@{self.revision}{colon}{split}"


def sources_of(spec: str | list[str | dict[str, Any]] | None) -> list[Source]:
    """The sources of data.train, data.eval or data.pairs, in their order."""
    items = [spec] if isinstance(spec, str) else spec or []
    return [Source(item) if isinstance(item, str) else Source(**item) for item in items]


def completed(data: Data, name: str) -> list[Source]:
    """The sources of data.train, data.eval or data.pairs, each with what the section says of all where it says nothing."""
    return [
        replace(
            source,
            **{key: getattr(data, key) for key in PREPROCESSING if getattr(source, key) is None},
        )
        for source in sources_of(getattr(data, name))
    ]


def transforms(data: Data) -> dict[str, str]:
    """{key of the job: python:module:function} of all functions that rows go through, each once."""
    found = {"data.transform": data.transform}
    for name in ("train", "eval", "pairs"):
        for index, source in enumerate(sources_of(getattr(data, name))):
            found[f"data.{name}.{index}.transform"] = source.transform
    first = {source: key for key, source in reversed(found.items()) if source is not None}
    return {key: source for source, key in first.items()}


def check(tree: Tree, job: Job) -> None:
    """Refuses unknown keys of a source, what its rows cannot become, and weights that fit neither each other nor the stage."""
    for name in ("train", "eval", "pairs"):
        spec = getattr(job.data, name)
        for index, item in enumerate(spec if isinstance(spec, list) else []):
            if isinstance(item, dict):
                _check_keys(tree, f"data.{name}.{index}", item)
    check_preprocessing(tree, "data", job.data)
    for name in ("train", "eval", "pairs"):
        whole = completed(job.data, name)
        for index, source in enumerate(sources_of(getattr(job.data, name))):
            check_preprocessing(tree, key := f"data.{name}.{index}", source)
            if source.revision is not None and (not source.path.startswith(HUB) or "@" in source.path):
                raise tree.error(
                    f"{key}.revision",
                    f"found {show(source.revision)} for {show(source.path)}; a revision is of a set on the hub, {HUB}NAME, and is "
                    "named once",
                )
            if whole[index].group_by and not whole[index].transform:
                at = f"{key}.group_by" if source.group_by else "data.group_by"
                raise tree.error(
                    at,
                    f"found {show(whole[index].group_by)}; only a transform can read several rows at once: give "
                    "transform: python:MODULE:FUNCTION, too",
                )
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
    known = schema.keys("pipeline.config.sources.Source")
    for name, value in item.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), list(known), 1, 0.7)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
            raise tree.error(f"{key}.{name}", f"unknown key of a source; {hint}")
        if problem := schema.problem(value, known[name]):
            raise tree.error(f"{key}.{name}", problem)
    if "path" not in item:
        raise tree.error(
            key, f"a source without a path, {show(item)}; for example {{path: rows.jsonl, weight: 0.7}}"
        )


def check_preprocessing(tree: Tree, key: str, said: Data | Source) -> None:
    """Refuses what transform, columns and label, of the section or of a source, cannot mean.

    The fields of each stage are checked later (data/reshape.py).
    """
    if said.transform is not None and not Ref.parse(said.transform).is_function:
        raise tree.error(
            f"{key}.transform",
            f"found {show(said.transform)}, expected python:MODULE:FUNCTION, for example python:my_rows:pairs",
        )
    for field, column in (said.columns or {}).items():
        if not column or not all([column] if isinstance(column, str) else column):
            raise tree.error(f"{key}.columns.{field}", f"found {show(column)}, expected the name of a column")
    if said.label is None:
        return
    values = {name: value if isinstance(value, list) else [value] for name, value in said.label.items()}
    if values.keys() not in ({"good", "bad"}, {"first", "second"}, {"first", "second", "tie"}):
        raise tree.error(
            f"{key}.label",
            f"found {show(said.label)}, expected {{first: VALUE, second: VALUE}} and perhaps tie: VALUE, or {{good: VALUE, bad: VALUE}} for "
            "ratings",
        )
    several = [_compared(one) for some in values.values() for one in some]
    if len(set(several)) < len(several) or any(
        isinstance(one, list | dict) for some in values.values() for one in some
    ):
        raise tree.error(
            f"{key}.label",
            f"found {show(said.label)}, expected different texts or numbers for each of its keys",
        )


def _compared(value: Any) -> str:
    """A label as it is compared with those of the rows: 1, 1.0 and "1" are one."""
    text = str(float(value) if isinstance(value, bool) else value).strip().lower()
    with contextlib.suppress(ValueError):
        text = str(float(text))
    return text
