"""Checks the first rows of a job's files: columns, the meaning of labels, and whether the stage can read them."""

import contextlib
import difflib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.data import chunks, guess, reshape
from pipeline.data.files import File
from pipeline.data.messages import is_printed_list
from pipeline.data.reshape import Preprocess
from pipeline.data.shapes import (
    LABELS,
    Kind,
    are_clear,
    are_mostly,
    is_good,
    kind_of,
    parse_demonstration,
    shape_of,
)
from pipeline.data.values import RowError, setting, show, some
from pipeline.errors import InputError, visible
from pipeline.job.job import Source, sources_of, sources_with_defaults
from pipeline.system import functions

FILES = 16  # number of files of a source whose first rows are read
ROWS = 1000  # number of first rows to read from each file
TEXTS = ("prompt", "completion", "chosen", "rejected", "first", "second")  # fields that hold one text


def preprocessing(stage: str, data: Any) -> dict[str, tuple[Preprocess, ...]]:
    """Returns {split: the preprocessing of each source}, as far as it is known without the rows.

    Raises InputError if the stage does not read a field, or if a column would become two fields.
    """
    made = {}
    for name in ("train", "eval"):
        sources = zip(sources_of(getattr(data, name)), sources_with_defaults(data, name), strict=True)
        made[name] = tuple(
            _preprocess(stage, full, f"data.{name}.{index}" if own.columns else "data", data.pairs)
            for index, (own, full) in enumerate(sources)
        )
    return made


def _preprocess(stage: str, source: Source, key: str, pairs: Any) -> Preprocess:
    """Returns the preprocessing of one source. `key` names the section that sets its columns."""
    columns, kind = source.columns or {}, kind_of(stage)
    if stage in ("evaluate", "pairs"):  # eval and pairs have different formats, with their own fields
        other = kind_of("pairs" if stage == "evaluate" else "evaluate")
        others = {*known_fields(other)} - {*known_fields(kind)}
        others |= {"chosen", "rejected"} if stage == "evaluate" and pairs else set()
        columns = {field: column for field, column in columns.items() if field not in others}
    check_columns(columns, kind, f"{key}.columns")
    if source.label and "good" in source.label and "label" not in kind.further.union(*kind.shapes.values()):
        wanted = "expected {first: VALUE, second: VALUE}"
        raise InputError(f"`{stage}` reads no ratings; {wanted}", key=f"{key}.label")
    rule = reshape.Rule.of(source.label) if source.label else None
    digest = functions.digest_functions([source.transform]) if source.transform else ""
    return Preprocess(columns, rule, source.transform, digest, source.group_by)


def known_fields(kind: Kind) -> list[str]:
    """Returns the fields that rows of a kind may have, beginning with the fields of its formats."""
    needs = [name for shape in kind.shapes.values() for name in shape]
    pair = reshape.UNORDERED if kind.has_pairs else ()
    input_of = ("input", "history") if "instruction" in needs else ()
    of_all = ("system", "tools", "chat_template_kwargs")
    return [*dict.fromkeys([*needs, *pair, *sorted(kind.further), *input_of, *of_all])]


def check_columns(columns: reshape.Columns, kind: Kind, key: str = "data.columns") -> None:
    """Raises InputError for fields that the stage does not read or never reads in one row, and for a column given twice."""
    known, taken = known_fields(kind), dict[str, str]()
    for field, column in columns.items():
        near = difflib.get_close_matches(field, known, 1)
        if field not in known and (near or "row" not in kind.columns):
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
            raise InputError(f"`{kind.stage}` reads no field of this name; {hint}", key=f"{key}.{field}")
        if isinstance(column, list) and field != "label":
            raise InputError(f"found {len(column)} columns, expected one", key=f"{key}.{field}")
        for one in reshape.listed(column):
            if one in taken:
                found = f"found {one!r}, which is {key}.{taken[one]} already"
                raise InputError(f"{found}; a column can be only one field", key=f"{key}.{field}")
            taken[one] = field
    if not reshape.shapes_with(columns, kind.shapes):
        one_of = " | ".join(kind.shapes)
        found = f"no row of `{kind.stage}` has {' and '.join(columns)}"
        raise InputError(f"{found}; expected fields of one of {one_of}", key=key)


def check_there(
    columns: reshape.Columns, rows: Sequence[dict[str, Any]], file: str, key: str = "data.columns"
) -> None:
    """Raises InputError for a column that none of a file's first rows has."""

    def has(row: dict[str, Any], path: str) -> bool:
        with contextlib.suppress(KeyError):
            reshape.value_at(row, path)
            return True
        return False

    for field, column in columns.items():
        for one in reshape.listed(column):
            if rows and not any(has(row, one) for row in rows):
                names = dict.fromkeys(name for row in rows for name in some(row))
                shown = visible(", ".join([*names][:30]), lines=False)
                found = f"{file}: rows 1-{len(rows):,} have no column {one!r}; their columns are {shown}"
                raise InputError(found, key=f"{key}.{field}")


@dataclass(frozen=True)
class Head:
    """The first rows of a file."""

    split: str
    section: str  # the section of the job that describes the rows: data, or data.train.0
    path: str
    preprocess: Preprocess
    rows: list[dict[str, Any]]


def resolve_labels(
    preprocess: Mapping[str, Sequence[Preprocess]], files: Mapping[str, Sequence[File]], stage: str
) -> dict[str, tuple[Preprocess, ...]]:
    """Returns the preprocessing of a stage's files, with label rules derived from the rows if the job sets none.

    Raises InputError if a file lacks a column, if labels are ambiguous, or if the rows of a file fit another stage.
    """
    heads = []
    for name, sources in preprocess.items():
        for index, one in enumerate(sources):
            section = f"data.{name}.{index}" if len(sources) > 1 else "data"
            for file in [file for file in files.get(name, ()) if file.source == index][:FILES]:
                rows, _ = first_rows(file, kind_of(stage, one))
                heads.append(Head(name, section, file.path, one, rows))
    labels: dict[str, list[Any]] = {}  # preprocessing -> labels; sources may share a preprocessing
    for head in heads:
        check_there(head.preprocess.columns, head.rows, head.path, f"{head.section}.columns")
        found = labels.setdefault(repr(head.preprocess), [])
        for row in head.rows:
            with contextlib.suppress(RowError):  # reading the row reports a missing column
                row = reshape.renamed(row, head.preprocess.columns, ())
                if {"first", "second", "label"} <= row.keys() and "first_score" not in row:
                    found.append(row["label"])
        check_ratings(head, stage)

    def with_rule(one: Preprocess) -> Preprocess:
        if not kind_of(stage, one).has_pairs or one.rule is not None or not labels.get(repr(one)):
            return one
        head = next(head for head in heads if head.preprocess == one)
        return replace(one, rule=reshape.derived(labels[repr(one)], one.columns, f"{head.section}.label"))

    made = {name: tuple(map(with_rule, some)) for name, some in preprocess.items()}
    for head in heads:
        kind = kind_of(stage, replace(with_rule(head.preprocess), transform=None))
        if head.rows and not any(fits(row, kind) for row in head.rows):
            problem = guess.misfit(head.rows, stage, head.path, head.section)
            raise InputError(problem, key=f"data.{head.split}")
        check_beside(head, kind)
        check_lists(head)
    return made


def check_ratings(head: Head, stage: str) -> None:
    """Raises InputError if labels without a data.label are 0 and -1, or have values that mean neither good nor bad."""
    kind, columns = kind_of(stage, head.preprocess), head.preprocess.columns
    pair = {"first", "chosen"} & {*columns, *itertools.chain(*head.rows[:1])}
    read = not pair and "label" in kind.further.union(*kind.shapes.values())
    found = guess.labels_of(columns, head.rows)
    if read and head.preprocess.rule is None and are_mostly(found) and not are_clear(found):
        other = next((show(one) for one in found if is_good(one) is None), "")
        why = f"{other}, which means neither good nor bad" if other else "0 and -1, and one may mean unrated"
        said = setting(
            f"{head.section}.label", "{good: VALUE, bad: VALUE}" if other else "{good: 1, bad: -1}"
        )
        problem = f"{head.path}: the column {columns.get('label', 'label')!r} has {why}; set {said}"
        raise InputError(problem, key=f"{head.section}.label")


def check_beside(head: Head, kind: Kind) -> None:
    """Raises InputError if sft reads no label, and a column that it does not read looks like one."""
    columns = head.preprocess.columns
    rated = "label" in columns or are_mostly(guess.labels_of({"label": [*LABELS]}, head.rows))
    used = {*itertools.chain(*map(reshape.listed, columns.values())), *known_fields(kind)}
    if (
        kind.parse is parse_demonstration
        and not rated
        and (problem := guess.beside(head.rows, columns, used, head.section))
    ):
        raise InputError(f"{head.path}: {problem}", key=f"{head.section}.columns")


def check_lists(head: Head) -> None:
    """Raises InputError if all cells of a CSV column hold a list as pandas prints it. A single such cell may be text."""
    for field in TEXTS if re.search(r"\.[ct]sv(\.gz)?$", head.path.lower()) else ():
        column = head.preprocess.columns.get(field, field)
        cells = [row.get(column) for row in head.rows] if isinstance(column, str) else []
        if len(cells) > 1 and all(map(is_printed_list, cells)):
            found = f"{head.path}: each {column!r} is the text of a list, such as {show(cells[0])}"
            raise InputError(f"{found}; save the rows with to_json or to_parquet", key=f"data.{head.split}")


def first_rows(file: File, kind: Kind) -> tuple[list[dict[str, Any]], list[RowError]]:
    """Returns the first rows of a file after data.transform, and the errors of unreadable parts of the file."""
    (chunk, *_) = chunks.plan(file, "train", kind)
    rows, errors = list[dict[str, Any]](), list[RowError]()
    for number, decoded, _ in itertools.islice(chunks.rows(chunk), ROWS):
        if isinstance(decoded, RowError):
            errors.append(replace(decoded, line=number))
        else:
            rows += [row for row in kind.preprocess.transformed(decoded) if isinstance(row, dict)]
    chunks.locate(errors, chunk)
    return rows, errors


def fits(row: dict[str, Any], kind: Kind) -> bool:
    """Returns True if a row has a format of a kind, or fails for a reason other than its format."""
    return any(not isinstance(made, dict) or shape_of(made, kind) is not None for made in kind.rows(row))
