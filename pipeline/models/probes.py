"""Scores that travel with a reward adapter, so that whoever loads it can see that it scores as it did when it was trained.

A lost head, a renamed key or another base loads without an error and gives other scores. The rm stage therefore writes
the trained model's own scores of a few sequences into the adapter's folder. The sequences are random numbers: nothing
of the data leaves in them.
"""

import json
import os
import random
from collections.abc import Callable

FILE = "probes.json"
LENGTHS = (4, 9, 17, 30)


def sequences(vocab_size: int, pad: int | None) -> list[list[int]]:
    """Token ids, the same ones for the same vocabulary; never pad, which transformers takes for the end of a row."""
    draw = random.Random(0)
    ids = [i for i in range(vocab_size) if i != pad]
    return [draw.choices(ids, k=length) for length in LENGTHS]


def write(folder: str, rows: list[list[int]], score: Callable[[list[int]], float]) -> None:
    """Writes `rows` with their scores into the adapter's folder."""
    with open(os.path.join(folder, FILE), "w", encoding="utf-8") as file:
        json.dump([{"input_ids": row, "score": score(row)} for row in rows], file)


def read(folder: str) -> list[tuple[list[int], float]]:
    """(token ids, score) of an adapter's probes; none where it was trained elsewhere."""
    path = os.path.join(folder, FILE)
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [(row["input_ids"], row["score"]) for row in json.load(file)]
