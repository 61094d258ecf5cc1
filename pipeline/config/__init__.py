"""What a job file may say: unknown keys, wrong types and impossible combinations are refused before heavy imports.

    job = load_job("jobs/demo/sft.yaml", ["trainer.learning_rate=1e-4"], stage="sft")

Sections that belong to a library (`lora`, `trainer`, `scaling`) stay plain mappings with the library's keys and are checked
against its dataclass. Relative paths are relative to the working directory of the command.
"""

import difflib
import importlib
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pipeline.config import schema
from pipeline.config.gates import OPERATORS as OPERATORS
from pipeline.config.gates import parse_gate as parse_gate
from pipeline.config.jobfile import Tree, read_tree
from pipeline.config.rules import CHECKS, with_revision, without_evaluation
from pipeline.config.serve import Serve, named
from pipeline.config.sources import sources_of
from pipeline.config.stages import INPUTS, STAGE
from pipeline.errors import InputError, show
from pipeline.system import storage

if TYPE_CHECKING:
    from pipeline.ppo.rollout_config import RolloutConfig

JOBS = tuple(STAGE)  # what a job file may be about
STAGES = tuple(name for name in JOBS if STAGE[name].runs_in == "train")


@dataclass(frozen=True)
class Model:
    name_or_path: str  # a folder, a hub id, or hub id@revision
    revision: str | None = None  # hub only: a commit, tag or branch
    # Of the frozen base; adapters and heads are float32. On a CPU, trainer.bf16 makes it bfloat16.
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    load_in_4bit: bool = False  # nf4 with double quantisation; computes in `dtype`
    fsdp: bool = False  # the base in shards over the workers (FSDP2), whole on none of them; adapters are whole on each
    attn_implementation: str | None = None  # None: what transformers picks (sdpa)
    chat_template: str | None = None  # a Jinja file, "plain", or None: the tokenizer's own, else "plain"
    # Run the Python code that comes with a model on the hub.
    trust_remote_code: bool = False
    allow_pickle: bool = False  # also read *.bin weights, which can run code


@dataclass(frozen=True)
class Data:
    # A path, a glob, a folder, s3:// gs:// hf://, or a list of them; in a list also {path: ..., weight: ..., columns: ...}
    # (sources.Source).
    train: str | list[str | dict[str, Any]] | None = None
    # Where sources have weights: an epoch ends when one of them is used up, or when all are (data/mixture.py).
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    # Held-out rows, as `train`.
    eval: str | list[str | dict[str, Any]] | None = None
    # Of `evaluate`: held-out preferences that the reward model is evaluated on.
    pairs: str | list[str | dict[str, Any]] | None = None
    # A Python function of a row, python:module:function, that returns a row, several, or None; it comes before `columns`.
    transform: str | None = None
    # A column: rows in succession with the same value in it go to `transform` together, as a list.
    group_by: str | None = None
    # {field: column}: the fields that the stage reads, by the names (or paths, as a.0.b) that the columns of the files have.
    columns: dict[str, str | list[str]] | None = None
    # {first: 1, second: 2, tie: 0}: what the values of the column `label` say of the completions `first` and `second`.
    label: dict[str, Any] | None = None
    eval_fraction: Annotated[float, "[0, 1)"] = 0.0  # held out of `train` by prompt, instead of `eval`
    max_length: Annotated[int | None, "[2, 1048576]"] = None  # tokens; None: the model's context
    on_error: Literal["raise", "skip"] = "raise"  # a bad row stops the run, or is counted and left out
    # What becomes of rows with more tokens than `max_length`.
    too_long: Literal["error", "drop", "truncate"] = "error"
    # To text rows; None: unless the template is only the fallback "plain".
    apply_chat_template: bool | None = None
    # What "<|eot_id|>" in the text of a row stands for: its characters, or the token.
    special_tokens: Literal["text", "control"] = "text"
    batch_size: Annotated[int | None, "[1, 1048576]"] = (
        None  # rows per optimizer step over all workers; gradient accumulation follows
    )
    cache_dir: str | None = None  # None: <run.storage_path>/data
    seed: Annotated[int, "[0, 4294967295]"] = (
        0  # of eval_fraction; of `collect`, of the order in which prompts are drawn
    )
    subset: str | None = None  # a column of `pairs`: accuracy is also reported for each of its values


@dataclass(frozen=True)
class Run:
    name: str | None = None  # None: a fresh one for each run; the same name again continues that run
    # A folder or bucket, with a folder for each run.
    storage_path: str = "runs"
    max_failures: Annotated[int, "-1 or [0, 1000000]"] = 0  # restarts after lost workers; -1: no limit
    placement_timeout_s: Annotated[float, "-1 or (0, 31536000]"] = (
        3600.0  # seconds to wait for workers that no node has room for; -1: no limit
    )
    num_to_keep: Annotated[int, "[1, 1000]"] = 2  # checkpoints
    # The step whose adapter is evaluated, gated and registered: that of the best evaluation so far, or the last one.
    keep: Literal["best", "last"] = "last"
    # A held-out figure, by which evaluations are compared. None: eval_loss; of ppo eval_judge, without a judge eval_reward.
    metric_for_best_model: str | None = None
    # None: false for a loss, a perplexity, a KL and eval_repetition; true for accuracies, margins, rewards and judges.
    greater_is_better: bool | None = None
    # Training stops after this many evaluations in a row none of which was better than the best before. None: never.
    early_stopping_patience: Annotated[int | None, "[1, 1000000]"] = None
    fresh: bool = False  # start over although a run of this name exists
    report: bool = True  # draw report.html at the end, for the run's folder and for MLflow


@dataclass(frozen=True)
class MLflow:
    tracking_uri: str | None = None  # None: $MLFLOW_TRACKING_URI, else sqlite:///<run.storage_path>/mlflow.db
    # The MLflow experiment of the run.
    experiment: str = "rlhf"
    registered_model: str | None = None  # None: nothing is registered
    alias: str = "champion"  # moves to the new version if the gate passes
    # Where else the curves are shown, under the same names and steps; each needs the extra of its name.
    also: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)


@dataclass(frozen=True)
class Forward:
    """The `trainer` section of `score`; its keys, and those of Inference, have PPOConfig's names."""

    local_rollout_forward_batch_size: Annotated[int, "[1, 1048576]"] = 64  # rows per forward
    bf16: bool = False  # matrix products in bfloat16 (autocast); on a CPU the base, too
    # Seconds that a Python reward may take for one row, each called by itself. None: all rows in one call, as long as it takes.
    reward_timeout_s: Annotated[float | None, "(0, 31536000]"] = None
    reward_threads: Annotated[int, "[1, 1024]"] = (
        8  # rows that a Python reward scores at the same time, with reward_timeout_s
    )

    @property
    def rows_per_forward(self) -> int:
        """Rows of data.train that fill a forward."""
        return self.local_rollout_forward_batch_size


@dataclass(frozen=True)
class Inference(Forward):
    """The `trainer` section of `evaluate`, `generate` and `serve`, where a request may say otherwise."""

    response_length: Annotated[int, "[1, 1048576]"] = (
        256  # maximum new tokens of a completion, the end-of-sequence token included
    )
    min_new_tokens: Annotated[int, "[0, inf)"] = 0  # minimum new tokens of a completion
    temperature: Annotated[float, "[0, inf)"] = 1.0  # divides the logits; 0: greedy
    seed: Annotated[int, "[0, 4294967295]"] = 42  # of sampling, together with a row's number


@dataclass(frozen=True)
class Collect(Inference):
    """The `trainer` section of `collect`."""

    num_generations: Annotated[int, "[1, 1024]"] = 4  # completions of each prompt
    # Rows that come out: the best completion (for sft), the best against the worst, or every pair (for dpo, rm and kto).
    select: Literal["best", "best_worst", "pairs"] = "best_worst"
    min_margin: Annotated[float, "[0, inf)"] = (
        0.0  # least difference of the scores of a pair; equal scores never make one
    )
    # Prompts that are used, drawn from data.train without replacement in an order that data.seed gives. None: all, in the
    # order of the file.
    num_prompts: Annotated[int | None, "[1, 1000000000]"] = None
    skip_prompts: Annotated[int, "[0, 1000000000]"] = (
        0  # of that order, those in front of the first one used; after the last prompt it is drawn anew
    )

    @property
    def rows_per_forward(self) -> int:
        return max(1, self.local_rollout_forward_batch_size // self.num_generations)


@dataclass(frozen=True)
class Export:
    """The `trainer` section of `export`; what goes to the hub has the names of transformers.TrainingArguments."""

    merge: bool = True  # false: the adapter as it is, with its tokenizer and card
    response_length: Annotated[int, "[1, 1048576]"] = (
        256  # maximum new tokens of the greedy completions that are compared
    )
    # Matrix products of the adapter, which the merged model is compared with, in bfloat16 (autocast).
    bf16: bool = False
    hub_model_id: str | None = None  # OWNER/NAME on the hub; None: nothing is pushed
    push_to_hub: bool = False  # false: only say what would be pushed
    hub_private_repo: bool = True  # of a repository that is made for it
    hub_revision: str | None = None  # the branch, made if there is none; None: main


@dataclass(frozen=True)
class Job:
    stage: str
    model: Model
    lora: dict[str, Any] = field(default_factory=dict)
    data: Data = field(default_factory=Data)
    trainer: dict[str, Any] = field(default_factory=dict)
    scaling: dict[str, Any] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)
    serve: Serve = field(default_factory=Serve)
    run: Run = field(default_factory=Run)
    mlflow: MLflow = field(default_factory=MLflow)
    gate: dict[str, str] = field(default_factory=dict)  # metric -> ">= 0.95"
    # models:/name@alias, a folder, an adapter on the hub (org/name or org/name@revision), or `base`: no adapter
    policy: str | None = None
    reference: str | None = (
        None  # of dpo: the frozen adapter that it is held to; None: the policy that it starts from
    )
    reward: str | list[Any] | None = None  # one, or a list of names and {reward: name, weight: number}
    baseline: str | None = None
    judge: str | None = None  # a Python function or a second reward model: reported, never trained on
    source: str = ""  # the job file
    overridden: tuple[str, ...] = ()  # keys that the command line set; no part of the resolved job

    @property
    def folder(self) -> str:
        """Where everything of the run lies: checkpoints, result.json, its report."""
        return storage.join(self.run.storage_path, str(self.run.name))

    @property
    def paths(self) -> list[tuple[str, str]]:
        """(key, path) of all rows that the job names."""
        return [
            (f"data.{name}", source.location)
            for name in ("train", "eval", "pairs")
            for source in sources_of(getattr(self.data, name))
        ]

    @property
    def workers(self) -> tuple[int, int]:
        """(fewest, most) workers; equal unless the job is elastic."""
        count = self.scaling.get("num_workers", 1)
        count = 1 if count == 0 else count
        return (count[0], count[1]) if isinstance(count, list) else (count, count)

    @property
    def in_process(self) -> bool:
        """Returns whether the job runs in the process of its command: `scaling.num_workers: 0`.

        On a cluster, and next to rollout workers, which need Ray, 0 means one worker.
        """
        asked = self.scaling.get("num_workers", 1) == 0
        return asked and "RAY_ADDRESS" not in os.environ and not self.rollout_config.workers[1]

    @property
    def rewards(self) -> list[tuple[str, float]]:
        """(name, weight) of each reward."""
        items = self.reward if isinstance(self.reward, list) else [self.reward] if self.reward else []
        return [
            (i["reward"], float(i.get("weight", 1.0))) if isinstance(i, dict) else (i, 1.0) for i in items
        ]

    @property
    def inputs(self) -> dict[str, str]:
        """{key: name} of every model or Python function that the job names: policy, baseline, judge, reward.0, ..."""
        given = {key: getattr(self, key) for key in INPUTS if key != "reward"}
        given |= {f"reward.{index}": name for index, (name, _) in enumerate(self.rewards)}
        return {key: name for key, name in given.items() if name} | named(self.serve)

    @property
    def bf16(self) -> bool:
        """Whether matrix products are in bfloat16; where the job does not say, they are in TRL's stages (trl.SFTConfig.bf16)."""
        asked = self.trainer.get("bf16")
        return bool(STAGE[self.stage].trl and not self.trainer.get("fp16") if asked is None else asked)

    @property
    def base_dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """The dtype in which workers hold the frozen base: on a CPU that of its products, else `model.dtype`.

        A CPU casts a float32 weight for each of its products in bfloat16, which takes as long as the product of few rows.
        """
        on_cpu = STAGE[self.stage].runs_in != "here" and not self.scaling.get("use_gpu")
        return "bfloat16" if on_cpu and self.bf16 else self.model.dtype

    @property
    def args(self) -> Any:
        """The `trainer` section as its config class, if that is ours; TRL's are instantiated in a worker."""
        module, _, name = STAGE[self.stage].trainer.rpartition(".")
        assert module.startswith("pipeline."), f"{name} is made in a worker"
        return getattr(importlib.import_module(module), name)(**self.trainer)

    @property
    def rollout_config(self) -> "RolloutConfig":
        """The `rollout` section as its config class."""
        from pipeline.ppo.rollout_config import RolloutConfig

        return RolloutConfig(**self.rollout)

    def to_dict(self) -> dict[str, Any]:
        """The resolved job as plain JSON-able data."""
        return {key: value for key, value in asdict(self).items() if key != "overridden"}


def make(stage: str, job_file: str) -> str:
    """The make target of a stage in the profile that a job file is from."""
    folder = Path(job_file).parent
    profile = folder.name if folder.parent.name == "jobs" and folder.name != "demo" else ""
    profile = "own" if profile == "examples" else profile  # whose jobs they extend
    return f"make {stage}" + (f" PROFILE={profile}" if profile else "")


def load_job(path: str | Path, overrides: list[str] | None = None, stage: str | None = None) -> Job:
    """Reads and checks a job file.

    Args:
        overrides: `section.key=value`, as on the command line.
        stage: the stage that the command line asks for; None: that of the file.

    Raises:
        InputError: naming file:line and section.key.
    """
    return job_of(read_tree(path, overrides or []), stage, str(path))


def job_of(tree: Tree, stage: str | None, path: str) -> Job:
    """The job of a tree, as `load_job` reads it from a file.

    Raises:
        InputError: naming file:line and section.key.
    """
    file_stage = tree.data.get("stage")
    if file_stage == "iterate":
        parts = [one for one in tree.data.values() if isinstance(one, dict) and "extends" in one]
        files = ", ".join(str(Path(path).parent / str(one["extends"])) for one in parts)
        raise tree.error("stage", f"`iterate` runs several jobs; use one of them: {files or 'its sections'}")
    if file_stage not in JOBS:
        what = "missing" if file_stage is None else f"found {show(file_stage)}"
        raise tree.error(
            "stage", f"{what}, expected one of {', '.join(JOBS)}; for example `stage: {stage or 'sft'}`"
        )
    if stage is not None and file_stage != stage:
        raise tree.error(
            "stage",
            f"this is a job for `{file_stage}`, not `{stage}`: type python -m pipeline {file_stage} {path}",
        )
    _check_top(tree, file_stage)
    job = Job(
        stage=file_stage,
        model=Model(**_section(tree, "model")),
        lora=_section(tree, "lora"),
        data=Data(**_section(tree, "data")),
        trainer=_section(tree, "trainer"),
        scaling=_section(tree, "scaling"),
        rollout=_section(tree, "rollout"),
        serve=Serve(**_section(tree, "serve")),
        run=Run(**_section(tree, "run")),
        mlflow=MLflow(**_section(tree, "mlflow")),
        gate={name: rule for name, rule in tree.section("gate").items() if rule is not None},
        source=path,
        overridden=tuple(key for key, place in tree.where.items() if place == "command line"),
        **{name: tree.data[name] for name in STAGE[file_stage].inputs if name in tree.data},
    )
    job = with_revision(tree, without_evaluation(tree, job))
    for check in CHECKS:
        check(tree, job)
    return job


# ---------------------------------------------------------------- keys and types
def _check_top(tree: Tree, stage: str) -> None:
    known = schema.keys("pipeline.config.Job")
    for key, value in tree.data.items():
        if key not in known:
            raise _unknown(tree, stage, "", key, list(known))
        if key in INPUTS:
            if key not in STAGE[stage].inputs:
                takers = ", ".join(name for name, facts in STAGE.items() if key in facts.inputs)
                raise tree.error(key, f"`{stage}` takes no {key}; take the line out (it belongs to {takers})")
            if problem := schema.problem(value, known[key]):
                raise tree.error(key, problem)
    for name, needed in STAGE[stage].inputs.items():
        if needed and not tree.data.get(name):
            example = {"policy": "policy: models:/rlhf-sft@champion (or `base`: no sft adapter)"}
            raise tree.error(
                name, f"missing; `{stage}` needs it: {example.get(name, 'reward: models:/rlhf-rm@champion')}"
            )


def _section(tree: Tree, section: str) -> dict[str, Any]:
    """Returns the checked values of a section."""
    stage = tree.data["stage"]
    refused = schema.refused(section, stage)
    for key in tree.section(section):
        if key in refused:
            raise tree.error(f"{section}.{key}", f"not to be set here: {refused[key]}")
    known = {
        key: one for key, one in schema.keys(schema.class_of(section, stage)).items() if key not in refused
    }
    return schema.checked(
        tree, section, known, lambda key: _unknown(tree, stage, section, key, list(known)).message
    )


def _unknown(tree: Tree, stage: str, section: str, key: str, valid: list[str]) -> InputError:
    """The error for an unknown key: suggests the nearest key of its section, else of another, else lists what there is."""
    name = f"{section}.{key}" if section else key
    message = f"unknown {'key' if section else 'section'}"
    if name == "trainer.max_steps" and "total_episodes" in valid:
        return tree.error(name, f"{message}; {_in_episodes(tree)}")
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.7)
    if near:
        return tree.error(name, f"{message}; did you mean {f'{section}.' if section else ''}{near[0]}?")
    keys = schema.keys_of(stage)
    for cutoff in (1.0, 0.7):
        elsewhere = difflib.get_close_matches(key, keys.values(), n=1, cutoff=cutoff)
        if elsewhere:
            meant = next(full for full, short in keys.items() if short == elsewhere[0])
            return tree.error(name, f"{message}; did you mean {meant}?")
    if len(valid) <= 16:
        return tree.error(name, f"{message}; expected one of {', '.join(valid)}")
    return tree.error(name, f"{message}; the keys of `{section}` are those of {_owner(stage, section)}")


def _in_episodes(tree: Tree) -> str:
    """What to type for a number of updates, with the arithmetic."""
    trainer = tree.data["trainer"]
    size = trainer.get("batch_size") or schema.keys("pipeline.ppo.config.PPOConfig")["batch_size"].get(
        "default"
    )
    updates = trainer["max_steps"] if type(trainer["max_steps"]) is int and trainer["max_steps"] > 0 else 100
    rule = "the length of a ppo run is trainer.total_episodes = updates * trainer.batch_size"
    if type(size) is not int:
        return rule
    return f"{rule}: {updates} updates of {size} episodes are trainer.total_episodes={updates * size}"


def _owner(stage: str, section: str) -> str:
    libraries = {"lora": "peft.LoraConfig", "scaling": "ray.train.ScalingConfig"}
    return libraries.get(section) or schema.class_of(section, stage).rpartition(".")[2]
