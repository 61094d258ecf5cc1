"""data.columns: the fields that a stage reads, by the names that the columns have in the job's files.

    columns: {prompt: question.text, chosen: output_1, rejected: output_2}

A column is a name, or the path to a nested value: names of fields and, from 0, numbers of list elements. Where a file has a
column with the name of a mapped field, the mapping counts. The column of `label` may be a list of columns, one a vote.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.data.tools import decoded
from pipeline.data.values import RowError, fields_of, nearest, some
from pipeline.errors import InputError, visible

if TYPE_CHECKING:
    from pipeline.data.shapes import Kind

Columns = Mapping[str, str | list[str]]
# Of two completions that are not in order of preference (sides.py).
UNORDERED = ("first", "second", "label", "first_score", "second_score")


def known_fields(kind: "Kind") -> list[str]:
    """The fields that the rows of a kind may have, those of its shapes first."""
    needs = [name for shape in kind.shapes.values() for name in shape]
    unordered = UNORDERED if kind.has_pairs else ()
    input_of = ("input",) if "instruction" in needs else ()
    return [*dict.fromkeys([*needs, *unordered, *sorted(kind.further), *input_of, "system", "tools"])]


def check(columns: Columns, kind: "Kind", key: str = "data.columns") -> None:
    """Raises InputError for fields that the stage does not read, and for a column that is given to two of them."""
    known, taken = known_fields(kind), dict[str, str]()
    for field, column in columns.items():
        near = difflib.get_close_matches(field, known, 1)
        if field not in known and (near or not kind.keeps_columns):
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
            raise InputError(f"`{kind.stage}` reads no field of this name; {hint}", key=f"{key}.{field}")
        if isinstance(column, list) and field != "label":
            raise InputError(f"found {len(column)} columns, expected one", key=f"{key}.{field}")
        for one in named(column):
            if one in taken:
                raise InputError(
                    f"found {one!r}, which is {key}.{taken[one]} already; a column becomes one field",
                    key=f"{key}.{field}",
                )
            taken[one] = field
    if not shapes_with(columns, kind.shapes):
        one_of = " | ".join(kind.shapes)
        raise InputError(
            f"no row of `{kind.stage}` has {' and '.join(columns)}; expected fields of one of {one_of}",
            key=key,
        )


def named(column: str | Sequence[str]) -> list[str]:
    return [column] if isinstance(column, str) else [*column]


def shapes_with(columns: Columns, shapes: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The shapes that have all mapped fields: a row's other columns must not make it one that leaves them out."""
    sides = {"first": "chosen", "second": "rejected"}
    fields = [field for field in columns if field != "label" or "first" not in columns]
    mapped = {sides.get(field, field) for field in fields} & {
        name for needs in shapes.values() for name in needs
    }
    return {name: needs for name, needs in shapes.items() if mapped <= {*needs}}


def renamed(row: dict[str, Any], columns: Columns, needed: Iterable[str]) -> dict[str, Any]:
    """The row with the fields of `columns` in place of the columns that they are made of.

    Raises:
        RowError: when it lacks the column of a field that is `needed`, or that it has under the field's own name: the job
            says that this is another column.
    """
    fields: dict[str, Any] = {}
    taken = {one for column in columns.values() for one in named(column)}
    for field, column in columns.items():
        try:
            values = [value_at(row, one) for one in named(column)]
        except KeyError as error:
            if field in needed or (field in row and field not in taken):
                raise absent(row, field, str(error.args[0])) from None
            continue
        fields[field] = values if isinstance(column, list) else values[0]
    used = {
        one if one in row else one.partition(".")[0] for column in columns.values() for one in named(column)
    }
    return {**{name: value for name, value in row.items() if name not in used}, **fields}


def value_at(row: dict[str, Any], path: str) -> Any:
    """The value of a column, or at a path into it; raises KeyError with the path."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        value = decoded(value)  # a CSV file holds lists and objects as their JSON text
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise KeyError(path)
    return value


def absent(row: dict[str, Any], field: str, column: str) -> RowError:
    found = fields_of(some(row)) + nearest(column, row)
    return RowError("missing_field", column, found, f"the column that data.columns.{field} names")


def check_there(
    columns: Columns, rows: Sequence[dict[str, Any]], file: str, key: str = "data.columns"
) -> None:
    """Raises InputError for a column that none of a file's first rows has."""
    names = [*dict.fromkeys(name for row in rows for name in some(row))]
    for field, column in columns.items():
        for one in named(column):
            if rows and not any(_has(row, one) for row in rows):
                shown = visible(", ".join(names[:30]), lines=False)
                near = difflib.get_close_matches(one, names, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise InputError(
                    f"{file}: rows 1-{len(rows):,} have no column {one!r}; their columns are {shown}{hint}",
                    key=f"{key}.{field}",
                )


def _has(row: dict[str, Any], path: str) -> bool:
    try:
        value_at(row, path)
    except KeyError:
        return False
    return True
