"""Stores an adapter's outputs on a few random sequences (probes) with it, to check later that they stay the same.

An adapter with a lost head, another scaling, a renamed key or another base can load without an error and behave differently. So
each stage stores the trained model's outputs: a reward's scores, or a policy's log-probs. The sequences are random token ids,
which reveal nothing about the data.
"""

import json
import os
import random
from collections.abc import Callable

from pipeline.system import hub

FILE = "probes.json"
LENGTHS = (4, 9, 17, 30)  # tokens of each probe


def sequences(vocab_size: int, pad: int | None) -> list[list[int]]:
    """Returns the probes' token ids, which depend on the vocabulary. They exclude pad, which transformers takes for the end."""
    rng = random.Random(0)
    ids = [i for i in range(vocab_size) if i != pad]
    return [rng.choices(ids, k=length) for length in LENGTHS]


def write(
    folder: str, vocab_size: int, pad: int | None, output: Callable[[list[int]], float], precision: str
) -> None:
    """Writes the probes with their outputs into the adapter's folder.

    Args:
        output: returns the output on a row: a reward's score, or a policy's mean log-prob after the first token, in nats.
        precision: precision of the outputs (precision.precision_of).
    """
    rows = [
        {"input_ids": ids, "output": output(ids), "precision": precision}
        for ids in sequences(vocab_size, pad)
    ]
    with open(os.path.join(folder, FILE), "w", encoding="utf-8") as file:
        json.dump(rows, file)


def read(folder: str) -> list[tuple[list[int], float, str | None]]:
    """Returns (token ids, output, precision) of an adapter's probes, or nothing if it has none.

    Earlier versions did not write the precision.
    """
    path = os.path.join(folder, FILE)
    if not os.path.exists(path):
        return []
    rows = hub.json_in(path, list, "remove it, or save the adapter again")
    return [(row["input_ids"], row["output"], row.get("precision")) for row in rows]
