"""Explains one key of a job (`rlhf help trainer.kl_coef`), or all keys of a section (`rlhf help trainer`)."""

import difflib

from pipeline.errors import InputError
from pipeline.job import schema
from pipeline.job.stages import INPUTS, STAGE_SPECS


def run(name: str, more: list[str]) -> None:
    """Prints type, default, range and description of keys. Each argument is a key, or a section, which means all its keys."""
    every = {key for stage in STAGE_SPECS for key in schema.keys_of(stage)} | {*INPUTS, "gate", "extends"}
    for one in (schema.ELSEWHERE.get(word, word) for word in [name, *more]):
        found = [one] if one in every else sorted(key for key in every if key.startswith(f"{one}."))
        short = sorted(key for key in every if key.rpartition(".")[2] == one)
        if not found and not short:
            near = difflib.get_close_matches(one, every, 1)
            hint = f"did you mean {near[0]}?" if near else f"sections are {', '.join(schema.SECTIONS)}"
            raise InputError(f"no key {one!r}; {hint}")
        print("\n".join(text for key in found or short for text in schema.describe_key(key)))
