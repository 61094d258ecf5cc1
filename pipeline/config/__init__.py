"""Reads and checks job files. Unknown keys, wrong types and impossible combinations raise InputError before heavy imports.

    job = load_job("jobs/demo/sft.yaml", ["trainer.learning_rate=1e-4"], stage="sft")

Sections that belong to a library (`lora`, `trainer`, `scaling`) stay plain mappings with the library's keys, and are checked
against its dataclass. Relative paths are relative to the working directory of the command.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pipeline.config import rules, schema
from pipeline.config.gates import OPERATORS, parse_gate
from pipeline.config.job import Collect, Data, Job, MLflow, Model, Run, Serve
from pipeline.config.stages import INPUTS, STAGE
from pipeline.config.yaml_tree import Tree, read_tree
from pipeline.errors import show

JOBS = tuple(STAGE)  # the stages that a job file may have
STAGES = tuple(name for name in JOBS if STAGE[name].runs_in == "train")
# {section: the type of its values}, in the order in which sections are checked
SECTIONS: dict[str, Any] = {
    "model": Model, "lora": dict, "data": Data, "trainer": dict, "scaling": dict, "rollout": dict, "serve": Serve, "run": Run, "mlflow": MLflow,
}  # fmt: skip


def make(stage: str, job_file: str) -> str:
    """Returns the make target of a stage in the profile that a job file is from."""
    folder = Path(job_file).parent
    profile = folder.name if folder.parent.name == "jobs" and folder.name != "demo" else ""
    profile = "own" if profile == "examples" else profile  # the examples extend jobs/own
    return f"make {stage}" + (f" PROFILE={profile}" if profile else "")


def load_job(path: str | Path, overrides: list[str] | None = None, stage: str | None = None) -> Job:
    """Reads and checks a job file. Raises InputError, naming file:line and section.key.

    Args:
        overrides: `section.key=value`, as on the command line.
        stage: the stage that the command line names. None: the stage of the file.
    """
    return job_of(read_tree(path, overrides or []), stage, str(path))


def job_of(tree: Tree, stage: str | None, path: str) -> Job:
    """Returns the checked job of a tree, as `load_job` reads it from a file."""
    found = tree.data.get("stage")
    if found == "iterate":
        raise tree.error("stage", "`iterate` runs several jobs; use one of those that its sections extend")
    if found not in JOBS:
        raise tree.error("stage", f"found {show(found)}, expected one of {', '.join(JOBS)}")
    if stage not in (None, found):
        use = f"use python -m pipeline {found} {path}"
        raise tree.error("stage", f"this is a job for `{found}`, not `{stage}`: {use}")
    _check_top(tree, found)
    job = Job(
        stage=found,
        **{section: kind(**_section(tree, section)) for section, kind in SECTIONS.items()},
        gate={name: rule for name, rule in tree.section("gate").items() if rule is not None},
        source=path,
        overridden=tuple(key for key, place in tree.where.items() if place == "command line"),
        **{name: tree.data[name] for name in STAGE[found].inputs if name in tree.data},
    )
    job = rules.split_revision(tree, rules.drop_eval_schedule(job))
    rules.check(tree, job)
    return job


# ---------------------------------------------------------------- keys and types
def _check_top(tree: Tree, stage: str) -> None:
    known = schema.keys(schema.class_of("job", stage))
    for key, value in tree.data.items():
        if key not in known:
            raise tree.error(key, f"unknown section; {schema.nearest(key, known)}")
        if key in INPUTS:
            if key not in STAGE[stage].inputs:
                raise tree.error(key, f"`{stage}` takes no {key}; remove it")
            if problem := schema.problem(value, known[key]):
                raise tree.error(key, problem)
    for name, needed in STAGE[stage].inputs.items():
        if needed and not tree.data.get(name):
            raise tree.error(name, f"missing; `{stage}` needs it: {name}: models:/NAME@ALIAS, or a folder")


def _section(tree: Tree, section: str) -> dict[str, Any]:
    stage = tree.data["stage"]
    known = schema.keys(schema.class_of(section, stage))

    def hint(key: str) -> str:
        """Returns what an unknown key may mean: the nearest one of this section, or the same key of another section."""
        if f"{section}.{key}" == "trainer.max_steps" and stage == "ppo":
            return "the length of a ppo run is trainer.total_episodes = updates * trainer.batch_size"
        near = get_close_matches(key, [name for name, one in known.items() if "not" not in one], 1, 0.7)
        meant = [f"{section}.{name}" for name in near]
        meant += [full for full, short in schema.keys_of(stage).items() if short == key]
        return f"did you mean {meant[0]}?" if meant else f"`rlhf help {section}` lists the keys"

    return schema.checked(tree, section, known, hint)
