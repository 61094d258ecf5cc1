"""Checks in the first rows of each file whether columns exist, labels are unambiguous, and the stage can read the rows."""

import contextlib
import difflib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.data import chunks, guess
from pipeline.data.files import File
from pipeline.data.formats import Kind, field_names, format_of, kind_of, parse_imitated
from pipeline.data.labels import (
    LABEL_FIELDS,
    Rule,
    are_clear,
    are_mostly_ratings,
    as_list,
    derive_rule,
    is_blank,
    is_good_label,
)
from pipeline.data.messages import is_printed_list
from pipeline.data.reshape import UNORDERED, Columns, Preprocess, formats_with, rename_columns, value_at
from pipeline.data.values import RowError, how_to_set, show_json, some_keys
from pipeline.errors import InputError, escape_controls
from pipeline.job.job import Source, sources_of, sources_with_defaults
from pipeline.system import functions

FILES = 16  # maximum number of files to preview per source
ROWS = 1000  # maximum number of rows to read from the start of each file
TEXTS = ("prompt", "completion", "chosen", "rejected", "first", "second")  # fields whose value is one text


def source_kinds(stage: str, data: Any) -> dict[str, tuple[Kind, ...]]:
    """Returns {split: the kind of rows in each source}, without reading any rows.

    Raises InputError if the stage does not read a field, or if the job maps a column to two fields.
    """
    kinds = {}
    for split in ("train", "eval"):
        sources = zip(sources_of(getattr(data, split)), sources_with_defaults(data, split), strict=True)
        kinds[split] = tuple(
            _source_kind(stage, resolved, f"data.{split}.{index}" if source.columns else "data", data.pairs)
            for index, (source, resolved) in enumerate(sources)
        )
    return kinds


def _source_kind(stage: str, source: Source, key: str, pairs: Any) -> Kind:
    """Returns the kind of the rows of one source. `key` is the section of the job that sets the source's columns."""
    columns, kind = source.columns or {}, kind_of(stage)
    if stage in ("evaluate", "pairs"):  # rows of data.eval and data.pairs have different formats
        other_kind = kind_of("pairs" if stage == "evaluate" else "evaluate")
        unread_fields = {*known_fields(other_kind)} - {*known_fields(kind)}
        unread_fields |= {"chosen", "rejected"} if stage == "evaluate" and pairs else set()
        columns = {field: column for field, column in columns.items() if field not in unread_fields}
    check_column_names(columns, kind, f"{key}.columns")
    if source.label and "good" in source.label and not kind.reads_label:
        expected = "expected {first: VALUE, second: VALUE}"
        raise InputError(f"`{stage}` reads no ratings; {expected}", key=f"{key}.label")
    rule = Rule.from_job(source.label) if source.label else None
    digest = functions.digest_functions([source.transform]) if source.transform else ""
    return kind.with_preprocess(Preprocess(columns, rule, source.transform, digest, source.group_by))


def known_fields(kind: Kind) -> list[str]:
    """Returns the fields that rows of a kind may have: first the fields of all formats, then optional fields."""
    format_fields = [name for format in kind.formats for name in field_names(format)]
    pair_fields = UNORDERED if kind.has_pairs else ()
    input_fields = ("input", "history") if "instruction" in format_fields else ()
    common = ("system", "tools", "chat_template_kwargs")
    return [*dict.fromkeys([*format_fields, *pair_fields, *sorted(kind.further), *input_fields, *common])]


def check_column_names(columns: Columns, kind: Kind, key: str = "data.columns") -> None:
    """Raises InputError for fields that the stage never reads or never reads together, and for a column mapped to two fields."""
    allowed, mapped = known_fields(kind), dict[str, str]()
    for field, column in columns.items():
        matches = difflib.get_close_matches(field, allowed, 1)
        if field not in allowed and (matches or "row" not in kind.columns):
            hint = f"did you mean {matches[0]}?" if matches else f"expected one of {', '.join(allowed)}"
            raise InputError(f"`{kind.stage}` reads no field of this name; {hint}", key=f"{key}.{field}")
        if isinstance(column, list) and field != "label":
            raise InputError(f"found {len(column)} columns, expected one", key=f"{key}.{field}")
        for name in as_list(column):
            if name in mapped:
                problem = f"found {name!r}, which is {key}.{mapped[name]} already"
                raise InputError(f"{problem}; map each column to only one field", key=f"{key}.{field}")
            mapped[name] = field
    if not formats_with(columns, kind.formats):
        formats = " | ".join(kind.formats)
        problem = f"no row of `{kind.stage}` has {' and '.join(columns)}"
        raise InputError(f"{problem}; expected fields of one of {formats}", key=key)


def check_columns_exist(
    columns: Columns, rows: Sequence[dict[str, Any]], file: str, key: str = "data.columns"
) -> None:
    """Raises InputError if a column is missing in all of a file's first rows."""

    def has(row: dict[str, Any], path: str) -> bool:
        with contextlib.suppress(KeyError):
            value_at(row, path)
            return True
        return False

    for field, column in columns.items():
        for path in as_list(column):
            if rows and not any(has(row, path) for row in rows):
                names = dict.fromkeys(name for row in rows for name in some_keys(row))
                shown = escape_controls(", ".join([*names][:30]), lines=False)
                problem = f"{file}: rows 1-{len(rows):,} have no column {path!r}; the columns are {shown}"
                raise InputError(problem, key=f"{key}.{field}")


@dataclass(frozen=True)
class Head:
    """The first rows of a file."""

    split: str
    section: str  # the section of the job that describes the rows: data, or data.train.0
    path: str
    kind: Kind
    rows: list[dict[str, Any]]


def resolve_labels(
    kinds: Mapping[str, Sequence[Kind]], files: Mapping[str, Sequence[File]]
) -> dict[str, tuple[Kind, ...]]:
    """Returns the kinds of the sources, with label rules from the job or derived from the first rows.

    Raises InputError if a file lacks a column, if labels are ambiguous, or if the rows of a file fit another stage.
    """
    heads = []
    for split, sources in kinds.items():
        for index, kind in enumerate(sources):
            section = f"data.{split}.{index}" if len(sources) > 1 else "data"
            for file in [file for file in files.get(split, ()) if file.source == index][:FILES]:
                heads.append(Head(split, section, file.path, kind, first_rows(file, kind)[0]))
    labels: dict[str, list[Any]] = {}  # {preprocessing: labels of all sources with this preprocessing}
    for head in heads:
        columns = head.kind.preprocess.columns
        check_columns_exist(columns, head.rows, head.path, f"{head.section}.columns")
        head_labels = labels.setdefault(repr(head.kind.preprocess), [])
        for row in head.rows:
            with contextlib.suppress(RowError):  # the task that reads this row later reports the error
                row = rename_columns(row, columns, ())
                if {"first", "second", "label"} <= row.keys() and "first_score" not in row:
                    head_labels.append(row["label"])
        check_ratings(head)

    def with_rule(kind: Kind) -> Kind:
        preprocess = kind.preprocess
        if not kind.has_pairs or preprocess.rule is not None or not labels.get(repr(preprocess)):
            return kind
        head = next(head for head in heads if head.kind.preprocess == preprocess)
        rule = derive_rule(labels[repr(preprocess)], preprocess.columns, f"{head.section}.label")
        return kind.with_preprocess(replace(preprocess, rule=rule))

    resolved = {split: tuple(map(with_rule, sources)) for split, sources in kinds.items()}
    for head in heads:
        kind = with_rule(head.kind)
        # head.rows are already the results of data.transform
        kind = kind.with_preprocess(replace(kind.preprocess, transform=None))
        if head.rows and not any(fits_kind(row, kind) for row in head.rows):
            problem = guess.explain_misfit(head.rows, kind_of(kind.stage), head.path, head.section)
            raise InputError(problem, key=f"data.{head.split}")
        check_unread_label(head)
        check_printed_lists(head)
    return resolved


def check_ratings(head: Head) -> None:
    """Raises InputError if data.label is not set although labels are 0 and -1, or some labels mean neither good nor bad."""
    columns = head.kind.preprocess.columns
    pair = {"first", "chosen"} & {*columns, *itertools.chain(*head.rows[:1])}
    labels = guess.labels_in_rows(columns, head.rows)
    if pair or not head.kind.reads_label or head.kind.preprocess.rule is not None:
        return
    if are_mostly_ratings(labels) and not are_clear(labels):
        unclear = next((show_json(label) for label in labels if is_good_label(label) is None), "")
        reason = (
            f"{unclear}, which means neither good nor bad"
            if unclear
            else "0 and -1, one of which may mean unrated"
        )
        values = "{good: VALUE, bad: VALUE}" if unclear else "{good: 1, bad: -1}"
        key = f"{head.section}.label"
        column = columns.get("label", "label")
        problem = f"{head.path}: the column {column!r} has {reason}; set {how_to_set(key, values)}"
        raise InputError(problem, key=key)


def check_unread_label(head: Head) -> None:
    """Raises InputError if sft reads no label although an unread column, or an unread key of messages, looks like a label."""
    columns = head.kind.preprocess.columns
    if head.kind.parse is not parse_imitated:
        return
    used = {*itertools.chain(*map(as_list, columns.values())), *known_fields(head.kind)}
    if problem := guess.message_label_note(head.rows, used, head.section):
        raise InputError(f"{head.path}: {problem}", key=f"{head.section}.transform")
    if "label" in columns:
        return
    if are_mostly_ratings(guess.labels_in_rows({"label": [*LABEL_FIELDS]}, head.rows)):
        return
    if any("reward_version" in row for row in head.rows[:1]):
        used.add("score")  # rows of `collect`, which has chosen them by their score
    if problem := guess.unread_label_note(head.rows, columns, used, head.section):
        raise InputError(f"{head.path}: {problem}", key=f"{head.section}.columns")


def check_printed_lists(head: Head) -> None:
    """Raises InputError if all cells of a CSV column are lists in Python's notation. A single cell with a list may be ordinary
    text."""
    for field in TEXTS if re.search(r"\.[ct]sv(\.gz)?$", head.path.lower()) else ():
        column = head.kind.preprocess.columns.get(field, field)
        cells = [row.get(column) for row in head.rows] if isinstance(column, str) else []
        if len(cells) > 1 and all(map(is_printed_list, cells)):
            problem = (
                f"{head.path}: each {column!r} is a list in Python's notation, such as {show_json(cells[0])}"
            )
            raise InputError(f"{problem}; save the rows with to_json or to_parquet", key=f"data.{head.split}")


def first_rows(file: File, kind: Kind) -> tuple[list[dict[str, Any]], list[RowError]]:
    """Returns the first rows of a file after data.transform, and the errors of rows that cannot be decoded."""
    (chunk, *_) = chunks.plan_chunks(file, "train", kind)
    rows, errors, group_values = list[dict[str, Any]](), list[RowError](), set[str]()
    for number, decoded, _ in itertools.islice(chunks.chunk_rows(chunk), ROWS):
        if chunk.group_by:
            check_group(decoded, number, chunk, group_values)
        if isinstance(decoded, RowError):
            errors.append(replace(decoded, line=number))
        else:
            rows += [row for row in kind.preprocess.transformed(decoded) if isinstance(row, dict)]
    chunks.locate_errors(errors, chunk)
    return rows, errors


def check_group(group: Any, number: int, chunk: chunks.FileChunk, values: set[str]) -> None:
    """Raises InputError if the rows of a group are not consecutive, because an earlier group has the same value of data.group_by.

    Args:
        number: number of the group's first row in the chunk.
        values: the values of the earlier groups. The function adds the value of this group.
    """
    column = str(chunk.group_by)
    first = group[0] if isinstance(group, list) and group else None
    value = first.get(column) if isinstance(first, dict) else None
    if not is_blank(value) and repr(value) in values:
        found = f"{show_json(value)} again, after other values"
        error = RowError("group", column, found, "consecutive rows with the same value", line=number)
        chunks.locate_errors([error], chunk)
        raise InputError(f"{error}; sort the file by this column", key="data.group_by")
    values.add(repr(value))


def fits_kind(row: dict[str, Any], kind: Kind) -> bool:
    """Returns True if a row matches a format of the kind, or if an error prevents the check."""
    return any(not isinstance(item, dict) or format_of(item, kind) is not None for item in kind.rows(row))
