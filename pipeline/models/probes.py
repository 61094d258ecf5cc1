"""Stores a trained model's outputs for a few random sequences (probes) next to its adapter, to detect later changes.

An adapter with a lost head, a changed scaling, a renamed key or a different base can load without an error, but behave
differently. The outputs are the scores of a reward model, or the log-probs of a policy. The sequences are random token ids, so
they reveal nothing about the data.
"""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import InputError, in_brief

FILE = "probes.json"
LENGTHS = (4, 9, 17, 30)  # tokens of each probe


def probe_sequences(vocab_size: int, pad: int | None) -> list[list[int]]:
    """Returns the probes' token ids, without pad tokens, because transformers treats a pad token as the end of a sequence."""
    rng = random.Random(0)
    ids = [i for i in range(vocab_size) if i != pad]
    return [rng.choices(ids, k=length) for length in LENGTHS]


def write_probes(
    folder: str, vocab_size: int, pad: int | None, output: Callable[[list[int]], float], precision: str
) -> None:
    """Writes the probes with their outputs into the adapter's folder.

    Args:
        output: function of token ids that returns a reward model's score, or the mean log-prob in nats of the tokens after the
            first.
        precision: the precision in which `output` computes (precision.precision_of).
    """
    rows = [
        {"input_ids": ids, "output": output(ids), "precision": precision}
        for ids in probe_sequences(vocab_size, pad)
    ]
    with open(os.path.join(folder, FILE), "w", encoding="utf-8") as file:
        json.dump(rows, file)


def read_probes(folder: str) -> list[tuple[list[int], float, str | None]]:
    """Returns (token ids, output, precision) of an adapter's probes, or [] if the adapter has no probes.

    Earlier versions of this pipeline did not store the precision. Raises InputError if the file is damaged.
    """
    path = Path(folder, FILE)
    try:
        rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        return [(row["input_ids"], row["output"], row.get("precision")) for row in rows]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise InputError(
            f"{path}: not a list of probes ({in_brief(error)}); remove it, or save the adapter again"
        ) from error
