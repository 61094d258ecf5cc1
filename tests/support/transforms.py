"""Functions that tests use as data.transform. Some are faulty."""

import numpy

COUNT = 3


def twice(row):
    return [{"prompt": row["q"], "completion": row["a"] + end} for end in ("!", "?")]


def yields(row):
    yield from twice(row)


def some(row):
    return {"prompt": row["q"], "completion": row["a"]} if row["id"] % 2 else None


def raises(row):
    return {"prompt": row["q"], "completion": row["missing"]}


def raises_sometimes(row):
    return raises(row) if row["id"] == COUNT else twice(row)[0]


def best_against_worst(rows):
    """Returns a pair of the best and the worst completion of a prompt. Each row has one completion."""
    ranked = sorted(rows, key=lambda row: row["rank"])
    return {"prompt": rows[0]["q"], "chosen": ranked[0]["a"], "rejected": ranked[-1]["a"]}


def text(row):
    return row["q"]


def array(row):
    return numpy.zeros(2)


def not_json(row):
    return {"prompt": row["q"], "completion": {"a", "set"}}
