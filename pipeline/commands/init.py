"""Jobs for one's own rows: looks at a file, and writes a job for each stage that can read it.

    rlhf init my/pairs.parquet [PROFILE]        or   python -m pipeline init ...

PROFILE is `own` unless another is named. Each job is a few lines on top of the profile's (`extends`), with the
data.columns that the file needs, guessed from names and values: `validate` shows the rows as the model will see them.
"""

import json
import re
from pathlib import Path
from typing import Any

from pipeline.commands import shipped
from pipeline.config.stages import STAGE
from pipeline.data import guess, lookahead, sets
from pipeline.data.files import find
from pipeline.data.kinds import kind_of
from pipeline.data.preprocess import Preprocess
from pipeline.errors import InputError

JOB = """\
# `{stage}` on {path}, on top of the profile `{profile}`. Written by `rlhf init`; any key of that profile's job may follow.
extends: ../{profile}/{stage}.yaml
data:
  train: {path}
  eval: null
  eval_fraction: 0.1                # held out by prompt
"""
UNCLEAR = "  label: null                       # say what its values mean:"


def run(path: str, profile: str) -> list[Path]:
    """Writes the jobs and says what to type next; returns their paths.

    Raises:
        InputError: for a file that cannot be read or fits no stage, an unknown profile, and jobs that are there already.
    """
    if profile not in shipped.profiles():
        raise InputError(f"there is no profile {profile!r}; expected one of {', '.join(shipped.profiles())}")
    [file, *_] = find(path, "data.train")
    rows = lookahead.first_rows(file, kind_of("sft", Preprocess()))
    if not rows:
        raise InputError(f"{file.path}: {lookahead.first_error(file) or 'it has no rows'}")
    jobs = {
        stage: job(stage, path, profile, found, rows)
        for stage, facts in STAGE.items()
        if facts.learns and (found := guess.guessed(rows, stage)) is not None
    }
    if not jobs:
        raise InputError(guess.misfit(rows, "sft", file.path))
    folder = Path("jobs") / name_of(path)
    taken = [str(folder / f"{stage}.yaml") for stage in jobs if (folder / f"{stage}.yaml").exists()]
    if taken:
        raise InputError(f"{', '.join(taken)}: there already; move them away to have them written again")
    shipped.bring(profile)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for stage, text in jobs.items():
        written.append(folder / f"{stage}.yaml")
        written[-1].write_text(text, encoding="utf-8")
    print(f"wrote {', '.join(map(str, written))}; look at the rows, and train:")
    for file_of_job in written:
        print(
            f"  python -m pipeline validate {file_of_job}    python -m pipeline {file_of_job.stem} {file_of_job}"
        )
    if unclear := [str(one) for one in written if UNCLEAR in one.read_text(encoding="utf-8")]:
        print(f"what the values of the label mean is to be said first, as data.label in {', '.join(unclear)}")
    return written


def job(stage: str, path: str, profile: str, columns: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The text of a job whose rows need these `data.columns`."""
    text = JOB.format(stage=stage, path=json.dumps(path), profile=profile)
    if columns:
        text += f"  columns: {guess.mapping(columns)}\n"
    if not guess.is_clear(columns, rows):
        text += f"{UNCLEAR} {{first: VALUE, second: VALUE, tie: VALUE}}\n"
    return text


def name_of(path: str) -> str:
    """The name of the folder of jobs for a path or URI: none that a profile has."""
    on_hub = sets.NAME.fullmatch(path)
    last = (on_hub["repo"] if on_hub else path.rstrip("/")).rpartition("/")[2]
    name = re.sub(r"[^\w-]+", "_", last.partition(".")[0]).strip("_") or "data"
    return f"{name}_rows" if (shipped.JOBS / name).exists() else name
