"""The first rows of a job's files: what can be known before all of them are read.

That their columns are those that the job names, what the values of a label mean, and that the rows are of a shape of the stage.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.data import chunks, columns, guess, sides, thumbs, transform
from pipeline.data.files import File, find
from pipeline.data.kinds import kind_of
from pipeline.data.parse import shape_of
from pipeline.data.preprocess import Preprocess
from pipeline.data.values import RowError
from pipeline.errors import InputError

FILES = 16  # of a set
ROWS = 1000  # of a file


def preprocess_of(stage: str, data: Any) -> Preprocess:
    """What the `data` section asks for, as far as it is known without the rows.

    Raises:
        InputError: for fields that the stage does not read, and columns that become two fields.
    """
    mapped = data.columns or {}
    if stage in ("evaluate", "pairs"):  # two sets of two kinds, and each takes its own fields
        kinds = [kind_of("evaluate"), kind_of("pairs")]
        elsewhere = {field for kind in kinds for field in columns.known_fields(kind)}
        mapped = {
            field: column
            for field, column in mapped.items()
            if field in columns.known_fields(kind_of(stage)) or field not in elsewhere
        }
    if stage == "evaluate" and data.pairs:
        mapped = {field: column for field, column in mapped.items() if field not in ("chosen", "rejected")}
    columns.check(mapped, kind_of(stage))
    return Preprocess(
        mapped,
        sides.Rule.of(data.label) if data.label else None,
        data.transform,
        transform.digest(data.transform) if data.transform else "",
    )


def settled(preprocess: Preprocess, files: Mapping[str, Sequence[File]], stage: str) -> Preprocess:
    """The preprocessing of a stage's files, with the rule that their labels follow where the job says none.

    Raises:
        InputError: for a column that a file does not have, labels that can mean several things, and a file of another
            stage's rows.
    """
    kind, labels = kind_of(stage, preprocess), list[Any]()
    heads = [(key, file, first_rows(file, kind)) for key, some in files.items() for file in some[:FILES]]
    for _, file, rows in heads:
        columns.check_there(preprocess.columns, rows, file.path)
        mapped = [columns.renamed(row, preprocess.columns, ()) for row in rows]
        if stage == "kto":
            thumbs.check_labels([row for row in mapped if "first" not in row], file.path)
        labels += [
            row["label"]
            for row in mapped
            if {"first", "second", "label"} <= row.keys() and "first_score" not in row
        ]
    if kind.has_pairs and labels and preprocess.rule is None:
        column = preprocess.columns.get("label", "label")
        preprocess = replace(preprocess, rule=sides.derived(labels, ", ".join(columns.named(column))))
    for key, file, rows in heads:
        if rows and not any(fits(row, stage, preprocess) for row in rows):
            raise InputError(guess.misfit(rows, stage, file.path), key=f"data.{key}")
    return preprocess


def fitting(spec: str | list[str], key: str, stage: str, data: Any) -> str:
    """The stages that a set's first rows fit, as they are or with which data.columns, in words; empty: none."""
    kind = kind_of(stage, Preprocess(transform=data.transform))
    return guess.fitting(first_rows(find(spec, key)[0], kind))


def first_rows(file: File, kind: Any) -> list[dict[str, Any]]:
    """The first rows of a file that are objects, as data.transform makes them."""
    (chunk, *_) = chunks.plan([file], "train", kind)
    some = itertools.islice(chunks.rows(chunk, hashlib.sha256()), ROWS)
    made = (row for _, decoded, _ in some for row in kind.preprocess.transformed(decoded))
    return [row for row in made if isinstance(row, dict)]


def first_error(file: File) -> RowError | None:
    """Why the first rows of a file cannot be read; None: they can."""
    (chunk, *_) = chunks.plan([file], "train", kind_of("sft"))
    some = itertools.islice(chunks.rows(chunk, hashlib.sha256()), ROWS)
    return next((row for _, row, _ in some if isinstance(row, RowError)), None)


def fits(row: dict[str, Any], stage: str, preprocess: Preprocess) -> bool:
    """Whether a row has a shape of a stage, or a better reason not to be one of its rows."""
    kind = kind_of(stage, replace(preprocess, transform=None))
    return any(not isinstance(made, dict) or shape_of(made, kind) is not None for made in kind.rows(row))
