"""Jobs for one's own rows: looks at files of rows, and writes a job for each stage that can read them.

    rlhf init my/pairs.parquet [PROFILE]        or   python -m pipeline init ...

PROFILE is `own` unless another is named. Each job is a few lines on top of the profile's (`extends`), with the
data.columns that the files need, guessed from names and values: `validate` shows the rows as the model will see them. What
the jobs train is registered under names of their own. Where a job of jobs/examples reads such rows, it is named.
"""

import contextlib
import json
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.commands import shipped
from pipeline.config.stages import STAGE
from pipeline.data import guess, lookahead, sets
from pipeline.data.files import find
from pipeline.data.reshape import Preprocess
from pipeline.data.shapes import kind_of
from pipeline.data.values import some
from pipeline.errors import InputError
from pipeline.system import storage

JOB = """\
# yaml-language-server: $schema=../schema.json
# `{stage}` on {path}, on top of the profile `{profile}`. Written by `rlhf init`; any key of that profile's job may follow.
extends: ../{profile}/{stage}.yaml
{inputs}data:
  train: {train}
{held_out}"""
BY_PROMPT = "  eval: null\n  eval_fraction: 0.1                # held out by prompt\n"
BY_SPLIT = "  eval: {split}\n  eval_fraction: 0\n"
SPLITS = ("test", "validation", "eval", "dev")  # that a set may have beside `train`, the likeliest first
# Examples with a transform or with thresholds -> columns that identify their rows.
EXAMPLES = {
    "rm/oasst": "message_tree_id prompt tree_state",
    "rm/oasst_flat": "message_tree_id parent_id role text",
    "rm/ultrafeedback_raw": "instruction completions models",
    "rm/nectar": "prompt answers num_responses",
    "rm/helpsteer": "prompt response helpfulness correctness",
    "kto/red_team": "transcript rating task_description",
    "sft/glaive": "system chat",
    "sft/xlam": "query answers tools",
    "sft/imdb": "review sentiment",
}
UNCLEAR = "  label: null                       # set what its values mean:"


def run(path: str, profile: str) -> list[Path]:
    """Writes the jobs and says what to type next; returns their paths.

    Raises:
        InputError: for a file that cannot be read or fits no stage, an unknown profile, and jobs that are there already.
    """
    if profile not in shipped.profiles():
        raise InputError(f"there is no profile {profile!r}; expected one of {', '.join(shipped.profiles())}")
    sources = look(path)
    example = next(
        (name for name, columns in EXAMPLES.items() if {*columns.split()} <= sources.rows[0].keys()), None
    )
    found = {
        stage: guess
        for stage, guess in guesses(sources).items()
        if not (example or "").startswith(f"{stage}/")
    }
    if example:
        bring_example(example, path)
    elif not found:
        raise InputError(guess.misfit(sources.rows, "sft", path))
    return write(sources, profile, found) if found else []


def write(sources: "Sources", profile: str, found: dict[str, dict[str, Any]]) -> list[Path]:
    """Writes the job of each stage that can read the rows, with these data.columns."""
    jobs = {stage: job(stage, sources, profile, found) for stage in found}
    folder = Path("jobs") / name_of(sources.path)
    taken = [str(folder / f"{stage}.yaml") for stage in jobs if (folder / f"{stage}.yaml").exists()]
    if taken:
        raise InputError(f"{', '.join(taken)}: there already; move them away to have them written again")
    shipped.bring(profile)
    folder.mkdir(parents=True, exist_ok=True)
    shipped.write_schema(folder.parent)
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
        print(f"before that, set data.label (what the values of the label mean) in {', '.join(unclear)}")
    return written


@dataclass(frozen=True)
class Sources:
    """What the jobs are written for."""

    path: str  # as it was typed
    train: list[str]
    held_out: list[str]  # empty: rows of `train` are held out
    heads: dict[str, list[dict[str, Any]]]  # file -> its first rows

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The first rows of the first file."""
        return next(iter(self.heads.values()))


def look(path: str) -> Sources:
    """The files of a path, and their first rows; raises InputError for one without rows."""
    if (Path(path) / "config.json").exists():
        raise InputError(f"{path} is the folder of a model; expected files of rows")
    train, held_out = split(path)
    heads = {}
    for file in find([*train, *held_out], "data.train")[: lookahead.FILES]:
        heads[file.path] = lookahead.first_rows(file, kind_of("sft", Preprocess()))
        if not heads[file.path]:
            raise InputError(f"{file.path}: {lookahead.first_error(file) or 'it has no rows'}")
    return Sources(path, train, held_out, heads)


def guesses(sources: Sources) -> dict[str, dict[str, Any]]:
    """{stage: data.columns} of the stages that can read the rows of all files."""
    rows = sources.rows
    first = {stage: guess.guessed(rows, stage) for stage, facts in STAGE.items() if facts.learns}
    found = {stage: columns for stage, columns in first.items() if columns is not None}
    for path, others in sources.heads.items():
        read = {stage: columns for stage, columns in found.items() if guess.reads(others, columns, stage)}
        if found and not read:
            one = next(iter(sources.heads))
            raise InputError(
                f"{one} has the columns {', '.join(some(rows[0]))}, and {path} has {', '.join(some(others[0]))}: rows of two "
                "shapes; write jobs for each file, or give each its columns: data.train=[{path: ..., columns: ...}, ...]"
            )
        found = read
    return found


def job(stage: str, sources: Sources, profile: str, found: dict[str, dict[str, Any]]) -> str:
    """The text of the job of a stage; `found` holds the data.columns of each stage that gets one."""
    columns, rows, name = found[stage], sources.rows, name_of(sources.path)
    # What it starts from is what the jobs beside it train, where there are such.
    trained = {"policy": "sft", "reward": "rm"}
    inputs = "".join(
        f"{key}: models:/{name}-{other}@champion\n"
        for key, other in trained.items()
        if key in STAGE[stage].inputs and other in found
    )
    train, held_out = (
        json.dumps(paths if len(paths) != 1 else paths[0]) for paths in (sources.train, sources.held_out)
    )
    text = JOB.format(
        stage=stage,
        path=json.dumps(sources.path),
        profile=profile,
        inputs=inputs,
        train=train,
        held_out=BY_SPLIT.format(split=held_out) if sources.held_out else BY_PROMPT,
    )
    if columns:
        text += f"  columns: {guess.mapping(columns)}\n"
    if not guess.is_clear(columns, rows):
        text += f"{UNCLEAR} {guess.meaning(columns)}\n"
    text += f"mlflow:\n  registered_model: {name}-{stage}\n"
    return text


def split(path: str) -> tuple[list[str], list[str]]:
    """(what to train on, what to hold out of it) of a path: a set's own test split, or files called so beside others."""
    on = path.rstrip("/").removesuffix("/train")
    if sets.files_of(path, "data.train"):
        for name in SPLITS:
            with contextlib.suppress(InputError):
                if sets.files_of(f"{on}/{name}", "data.eval"):
                    return [path], [f"{on}/{name}"]
        return [path], []
    below = path if os.path.isdir(path) else os.path.dirname(path)
    names = {file.path: os.path.relpath(file.path, below) for file in find(path, "data.train")}
    held_out = [path for path, name in names.items() if set(re.split(r"[^a-z]+", name.lower())) & {*SPLITS}]
    if storage.is_remote(path) or not 0 < len(held_out) < len(names):
        return [path], []
    return [path for path in names if path not in held_out], held_out


def bring_example(example: str, path: str) -> None:
    """Copies the examples here, and says which of them reads the rows."""
    stage, _, name = example.partition("/")
    shipped.bring("own")
    shipped.bring("examples")
    print(f"jobs/examples/{name}.yaml reads such rows:")
    print(f"  python -m pipeline {stage} jobs/examples/{name}.yaml data.train={shlex.quote(path)}")


def name_of(path: str) -> str:
    """The name of the folder of jobs for a path or URI: none that a profile has."""
    on_hub = sets.NAME.fullmatch(path)
    last = (on_hub["repo"] if on_hub else path.rstrip("/")).rpartition("/")[2]
    name = re.sub(r"[^\w-]+", "_", last.partition(".")[0]).strip("_") or "data"
    return f"{name}_rows" if (shipped.JOBS / name).exists() else name
