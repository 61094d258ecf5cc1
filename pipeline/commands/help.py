"""Explains one key of a job (`rlhf help trainer.kl_coef`), or all keys of a section (`rlhf help trainer`)."""

import difflib

from pipeline.errors import InputError
from pipeline.job import schema
from pipeline.job.stages import INPUTS, STAGE_SPECS


def run(name: str, others: list[str]) -> None:
    """Prints type, default, range and description of keys. Each argument is a key, or a section, which means all its keys."""
    keys = {key for stage in STAGE_SPECS for key in schema.keys_of(stage)} | {*INPUTS, "gate", "extends"}
    for query in (schema.ELSEWHERE.get(word, word) for word in [name, *others]):
        matches = [query] if query in keys else sorted(key for key in keys if key.startswith(f"{query}."))
        namesakes = sorted(key for key in keys if key.rpartition(".")[2] == query)
        if not matches and not namesakes:
            similar = difflib.get_close_matches(query, keys, 1)
            hint = f"did you mean {similar[0]}?" if similar else f"sections are {', '.join(schema.SECTIONS)}"
            raise InputError(f"no key {query!r}; {hint}")
        print("\n".join(text for key in matches or namesakes for text in schema.describe_key(key)))
