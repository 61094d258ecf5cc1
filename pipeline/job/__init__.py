"""Reads and checks job files. Unknown keys, wrong types and invalid combinations raise InputError before slow imports.

    job = load_job("jobs/demo/sft.yaml", ["trainer.learning_rate=1e-4"], stage="sft")

The sections `lora`, `trainer` and `scaling` are dicts, whose keys are checked against the config class of a library. Relative
paths are relative to the working directory.
"""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, blame_key, show_value
from pipeline.job import schema
from pipeline.job.gates import OPERATORS, parse_gate
from pipeline.job.job import Collect, Data, Job, MLflow, Model, Run, Serve
from pipeline.job.rules import find_problems
from pipeline.job.stages import INPUTS, STAGE_SPECS
from pipeline.job.yaml_tree import Tree, read_tree
from pipeline.system import hub

ALL_STAGES = tuple(STAGE_SPECS)  # every value of the key `stage`
TRAIN_STAGES = tuple(name for name in ALL_STAGES if STAGE_SPECS[name].runs_in == "train")
# stages whose runs can be resumed
RESUMABLE = tuple(name for name in ALL_STAGES if STAGE_SPECS[name].runs_in in ("train", "data"))
# {section: type}, in the order of the checks
SECTIONS: dict[str, Any] = {
    "model": Model, "lora": dict, "data": Data, "trainer": dict, "scaling": dict, "rollout": dict, "serve": Serve, "run": Run, "mlflow": MLflow,
}  # fmt: skip


def make_target(stage: str, job_file: str) -> str:
    """Returns the make command that runs a stage with the profile of a job file."""
    folder = Path(job_file).parent
    profile = folder.name if folder.parent.name == "jobs" and folder.name != "demo" else ""
    profile = "own" if profile == "examples" else profile  # the jobs in jobs/examples extend jobs/own
    return f"make {stage}" + (f" PROFILE={profile}" if profile else "")


def command_line(verb: str, path: str, overrides: list[str]) -> str:
    """Returns the command line of a subcommand. Uses make if the job file belongs to a profile."""
    profile = Path(path) if verb == "run" else Path(path).parent
    arguments = shlex.join(overrides)
    if profile.parent != Path("jobs") or (verb != "run" and Path(path).stem != verb):
        return f"python -m pipeline {verb} {path} {arguments}"
    name = "" if profile.name == "demo" else f" PROFILE={profile.name}"
    return f'make {"rlhf" if verb == "run" else verb}{name} ARGS="{arguments}"'


def load_job(path: str | Path, overrides: list[str] | None = None, stage: str | None = None) -> Job:
    """Reads and checks a job file. Raises InputError with the file, the line and the key of the first mistake.

    Args:
        overrides: `section.key=value` texts, as on the command line.
        stage: the stage from the command line, which must be the stage of the file. None accepts any stage.
    """
    _check_file(Path(path), stage or "sft")
    return job_of(read_tree(path, overrides or []), stage, str(path))


def _check_file(path: Path, stage: str) -> None:
    """Raises InputError, which suggests job files, if a path is not a file."""
    if path.exists() and not path.is_dir():
        return
    key, equals, value = str(path).partition("=")
    if equals:
        pair = f"{schema.meant_key(key, stage) or key}={value}"
        raise InputError(f"{path}: no job file; put a job file before the keys: jobs/own/{stage}.yaml {pair}")
    profile = next((p for p in (path, "jobs" / path, path.parent) if any(p.glob("*.yaml"))), None)
    if profile is None:
        profiles = sorted(file.parent.name for file in Path("jobs").glob("*/generate.yaml"))
        raise InputError(f"{path}: no such job file; profiles here are {', '.join(profiles) or 'none'}")
    names = ", ".join(str(file) for file in sorted(profile.glob("*.yaml")))
    raise InputError(f"{path}: no such job file; expected one of {names}")


def job_of(tree: Tree, stage: str | None, path: str) -> Job:
    """Checks a parsed job file and returns its job. Raises InputError for the first mistake."""
    job_stage = tree.data.get("stage")
    if job_stage not in ALL_STAGES:
        raise tree.error("stage", f"found {show_value(job_stage)}, expected one of {', '.join(ALL_STAGES)}")
    if stage not in (None, job_stage):
        sibling = Path(path).with_name(f"{stage}.yaml")
        advice = f"use {sibling}" if sibling.exists() else f"use python -m pipeline {job_stage} {path}"
        raise tree.error("stage", f"this is a job for `{job_stage}`, not `{stage}`; {advice}")
    _check_top(tree, job_stage)
    sections = {section: kind(**_section(tree, section)) for section, kind in SECTIONS.items()}
    sections["model"] = split_revision(tree, sections["model"])
    job = Job(
        stage=job_stage,
        **sections,
        gate={name: rule for name, rule in tree.section("gate").items() if rule is not None},
        source=path,
        overridden=tuple(key for key, place in tree.where.items() if place == "command line"),
        **{name: tree.data[name] for name in STAGE_SPECS[job_stage].inputs if name in tree.data},
    )
    # Without held-out rows, evaluations from the job file are turned off, but evaluations from the command line are errors.
    disabled = {key: off for key, off in job.without_evaluations.items() if key in job.trainer}
    disabled = {key: off for key, off in disabled.items() if f"trainer.{key}" not in job.overridden}
    job = replace(job, trainer=job.trainer | disabled)
    for key, problem in find_problems(job):
        raise tree.error(key, problem)
    return job


def split_revision(tree: Tree, model: Model) -> Model:
    """Splits `name_or_path: org/name@v1` into `name_or_path: org/name` and `revision: v1`."""
    with blame_key("model.name_or_path"):
        name, revision = hub.split_revision(model.name_or_path)
    if revision and model.revision not in (None, revision):
        problem = f"found {show_value(model.revision)}, but model.name_or_path names {show_value(revision)}; keep one"
        raise tree.error("model.revision", problem)
    return replace(model, name_or_path=name, revision=revision or model.revision)


# ---------------------------------------------------------------- keys and types
def _check_top(tree: Tree, stage: str) -> None:
    schemas = schema.keys(schema.class_of("job", stage))
    for key, value in tree.data.items():
        if key not in schemas:
            suggestion = schema.meant_key(key, stage)
            hint = f"did you mean {suggestion}?" if suggestion else schema.suggest_known_key(key, schemas)
            raise tree.error(key, f"unknown section; {hint}")
        if key in INPUTS:
            if key not in STAGE_SPECS[stage].inputs:
                raise tree.error(key, f"`{stage}` takes no {key}; remove it")
            if problem := schema.find_mismatch(value, schemas[key]):
                raise tree.error(key, problem)
    for name, required in STAGE_SPECS[stage].inputs.items():
        if required and not tree.data.get(name):
            function = ", or python:MODULE:FUNCTION" if name == "reward" else ""
            message = f"missing; `{stage}` needs it: {name}: models:/NAME@ALIAS, or a folder{function}"
            raise tree.error(name, message)


def _section(tree: Tree, section: str) -> dict[str, Any]:
    stage = tree.data["stage"]
    schemas = schema.keys(schema.class_of(section, stage))

    def hint(key: str) -> str:
        """Returns advice about an unknown key, such as a similar key or the same key in another section."""
        if f"{section}.{key}" == "trainer.max_steps" and stage == "ppo":
            return "the length of a ppo run is trainer.total_episodes = updates * trainer.batch_size"
        suggestion = schema.meant_key(f"{section}.{key}", stage)
        return f"did you mean {suggestion}?" if suggestion else f"`rlhf help {section}` lists the keys"

    return schema.check_section(tree, section, schemas, hint)
