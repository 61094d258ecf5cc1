"""Defines a job and its sections as dataclasses. Annotations and docstrings define the type, range and meaning of each key.

schema.json is generated from the annotations, and from the docstrings below the fields.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Container
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from pipeline.input_uri import InputURI
from pipeline.job import schema
from pipeline.job.gates import HELD_OUT_ROWS, Measurable
from pipeline.job.ranges import Count, Fraction, Patience, Rows, Seconds, Seed, Steps
from pipeline.job.rollout import RolloutConfig
from pipeline.job.stages import INPUTS, STAGE_SPECS, StageSpec
from pipeline.system import storage

HUB = "hf://datasets/"


@dataclass(frozen=True)
class Model:
    name_or_path: str
    """A folder, or a model on the Hub: NAME or NAME@REVISION."""
    revision: str | None = None
    """The commit, tag or branch of a model on the Hub."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the frozen base. Adapters and heads are float32. With trainer.bf16 on a CPU, the base is
    bfloat16."""
    load_in_4bit: bool = False
    """Loads the base in 4-bit NF4 with double quantization. Matrix products are still in `dtype`."""
    fsdp: bool = False
    """Shards the base over the workers (FSDP2). Adapters are not sharded."""
    attn_implementation: str | None = None
    """The attention implementation of transformers. By default, transformers chooses (sdpa)."""
    chat_template: str | None = None
    """A Jinja file, or "plain". The default is the template of the tokenizer, or "plain" if the tokenizer has none."""
    trust_remote_code: bool = False
    """Runs the Python code that comes with a model on the Hub."""
    allow_pickle: bool = False
    """Also loads *.bin weights, which can run code."""


SPLITS = ("train", "eval", "pairs", "benchmarks")  # keys of `data` whose values are files of rows
OF_ROWS = ("columns", "label", "transform", "group_by")  # keys of `data` that a source can replace


@dataclass(frozen=True)
class Source:
    """A source of rows: an entry of the list in data.train or another key in SPLITS. An entry is a path, or a mapping with the
    keys of this class."""

    path: str
    """A file, a glob, a folder, or an s3://, gs:// or hf:// address."""
    weight: Annotated[float, Gt(0), Le(10**9)] | None = None
    """Share of this source in an epoch, relative to the weights of the other sources."""
    revision: str | None = None
    """Commit, tag or branch of a dataset on the Hub. The dataset's path may also end with @REVISION."""
    columns: dict[str, str | list[str]] | None = None
    """Replaces data.columns for the rows of this source."""
    label: dict[str, Any] | None = None
    """Replaces data.label for the rows of this source."""
    transform: str | None = None
    """Replaces data.transform for the rows of this source."""
    group_by: str | None = None
    """Replaces data.group_by for the rows of this source."""

    @property
    def location(self) -> str:
        """Returns the path. For a dataset on the Hub, the path includes the revision."""
        if self.revision is None:
            return self.path
        name, colon, split = self.path.removeprefix(HUB).partition(":")
        return f"{HUB}{name}@{self.revision}{colon}{split}"


@dataclass(frozen=True)
class Data:
    train: str | list[str | dict[str, Any]] | None = None
    """A file, a glob, a folder, or an s3://, gs:// or hf:// address, or a list of them. An entry of a list
    may also be {path: ..., weight: ..., columns: ...}."""
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    """End of an epoch with weighted sources: when one source is exhausted, or when all sources are exhausted."""
    eval: str | list[str | dict[str, Any]] | None = None
    """Held-out rows for evaluation, in the same notation as `train`."""
    pairs: str | list[str | dict[str, Any]] | None = None
    """Held-out preference pairs on which `evaluate` measures the reward model."""
    benchmarks: str | list[str | dict[str, Any]] | None = None
    """Benchmarks for `evaluate`: RewardBench 2, RM-Bench, or rows with lists of `chosen` and `rejected`."""
    transform: str | None = None
    """A Python function of a row, python:module:function. The function returns a row, several rows, or None to drop the row. The
    function runs before `columns` applies."""
    group_by: str | None = None
    """A column. `transform` receives consecutive rows with the same value in this column as a list."""
    columns: dict[str, str | list[str]] | None = None
    """{field: column}: the column of each field that the stage reads. A path such as a.0.b selects a value inside a column.
    Fields are prompt, completion, label; chosen, rejected; first, second, and label or first_score, second_score; messages,
    conversations; instruction, input, output; system, tools, context."""
    label: dict[str, Any] | None = None
    """{first: 1, second: 2, tie: 0}: the values of the column `label` that prefer the completion `first`, prefer `second`, or
    mean a tie."""
    eval_fraction: Fraction = 0.0
    """Share of the prompts of `train` to hold out. Conversations with the same system prompt and the same first user
    message, apart from greetings, stay together."""
    max_length: Annotated[int, Ge(2), Le(2**20)] | None = None
    """Maximum number of tokens of a row. The default is the context length of the model."""
    on_error: Literal["raise", "skip"] = "raise"
    """Whether a bad row stops the run, or is counted and skipped."""
    deduplicate: bool = False
    """Drops rows that are byte-for-byte equal to an earlier row of the same split (`train` or `eval`)."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """What happens to rows with more than `max_length` tokens."""
    apply_chat_template: bool | None = None
    """Applies the chat template to rows of plain text. The default is true, unless the template is the fallback "plain"."""
    parse_special_tokens: bool = False
    """Encodes special tokens in the text of a row, such as "<|eot_id|>", as special tokens, not as plain text."""
    batch_size: Rows | None = None
    """Rows per optimizer step over all workers."""
    cache_dir: str | None = None
    """Folder of the tokenized rows. The default is <run.storage_path>/data."""
    seed: Seed = 0
    """Seed of the `eval_fraction` split, and of the order of prompts in `collect`."""
    subset: str | None = None
    """A column of `pairs`. The accuracy is also reported for each value in this column."""


@dataclass(frozen=True)
class Run:
    name: str | None = None
    """Name of the run. By default, each run gets a new name. A run with the name of an earlier run resumes the earlier run."""
    storage_path: str = "runs"
    """The folder or bucket that contains the folders of runs."""
    max_failures: Annotated[int, Ge(-1), Le(10**6)] = 0
    """Maximum number of restarts after lost workers. -1 means no limit."""
    placement_timeout_s: Literal[-1] | Annotated[float, Gt(0), Le(365 * 86_400)] = 3600.0
    """Seconds to wait for workers that no node has resources for. -1 means no limit."""
    num_to_keep: Annotated[int, Ge(1), Le(1000)] = 2
    """Number of checkpoints to keep."""
    load_best_model_at_end: bool = False
    """Uses the adapter of the best evaluation, not of the last step, for the final evaluation, the gate and the registry."""
    metric_for_best_model: str | None = None
    """The eval metric that selects the best evaluation. By default, eval_loss; for ppo, eval_judge, or eval_reward if the job has
    no judge."""
    greater_is_better: bool | None = None
    """Whether a larger value of metric_for_best_model is better. The default is false for a loss, a perplexity, a KL and
    eval_repetition, and true for accuracies, margins, rewards and judges."""
    early_stopping_patience: Annotated[int, Ge(1), Le(10**6)] | None = None
    """Training stops after this many consecutive evaluations without improvement. By default, training never stops early."""
    stop_if: dict[str, str] = field(default_factory=dict)
    """Training stops at an evaluation whose metric meets a condition: {eval_kl: "> 20"}. A stopped run counts as finished."""
    overwrite: bool = False
    """Starts from scratch even if a run with this name exists."""
    report: bool = True
    """Writes report.html to the run's folder and to MLflow when the run ends."""


@dataclass(frozen=True)
class MLflow:
    tracking_uri: str | None = None
    """Address of the MLflow server. The default is $MLFLOW_TRACKING_URI, or else the file <run.storage_path>/mlflow.db."""
    experiment: str = "rlhf"
    """The MLflow experiment of the run."""
    registered_model: str | None = None
    """The registered model that gets the new version. By default, nothing is registered."""
    alias: str = "champion"
    """The alias that moves to the new version if the gate passes."""
    report_to: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    """Trackers that receive the metrics in addition to MLflow. Each tracker needs the extra with the same name."""


@dataclass(frozen=True)
class Serve:
    """The `serve` section: models, model ids, access and limits."""

    policies: dict[str, str] = field(default_factory=dict)
    """{model id in requests: policy}. A policy is a model version, a folder, a Hub id, base, or models:/NAME@ALIAS, which follows
    the alias."""
    rewards: dict[str, str] = field(default_factory=dict)
    """{model id in requests to /score: reward}. A reward may also be python:MODULE:FUNCTION."""
    host: str = "127.0.0.1"
    """The address to listen on. All addresses except 127.0.0.1 need tokens in RLHF_SERVE_TOKENS."""
    port: Annotated[int, Ge(0), Le(65_535)] = 8000
    """The port to listen on. 0 means any free port."""
    max_queue: Annotated[int, Ge(1), Le(10**6)] = 256
    """Maximum number of completions that wait for a slot in a replica's batch. A request beyond this limit gets HTTP status
    429."""
    max_n: Annotated[int, Ge(1), Le(128)] = 16
    """Maximum number of completions per request (`n`)."""
    max_body_bytes: Annotated[int, Ge(2**10), Le(2**30)] = 1048576
    """Maximum bytes of a request. A larger request gets HTTP status 413."""
    timeout_s: Seconds = 300.0
    """Seconds for a complete answer, including the wait for a slot in the batch. A request that takes longer gets HTTP status
    504."""
    cache_tokens: Annotated[int, Ge(16), Le(10**12)] | None = None
    """Number of tokens in the KV cache. By default, the cache uses half of the free memory of a GPU, or a quarter of the free
    memory of a CPU."""
    alias_poll_interval_s: Seconds = 5.0
    """Seconds between two checks for aliases that have moved."""
    log_prompts: bool = False
    """Stores conversations, so that feedback on conversations becomes training rows. By default, only metrics are stored."""
    feedback_path: str | None = None
    """A local folder for conversations and feedback. The default is <run.storage_path>/feedback."""
    max_feedback_bytes: Annotated[int, Ge(4096), Le(10**12)] = 1073741824
    """Maximum bytes of the feedback folder, half for rows and half for conversations. If the half for rows is full, feedback gets
    HTTP status 507."""

    @property
    def inputs(self) -> dict[str, str]:
        """Returns {policies.ID or rewards.ID: URI of the model} for all models."""
        policies = {f"policies.{key}": name for key, name in self.policies.items()}
        return policies | {f"rewards.{key}": name for key, name in self.rewards.items()}

    def without(self, inputs: Container[str]) -> Serve:
        """Returns the section without the given inputs."""
        policies = {key: name for key, name in self.policies.items() if f"policies.{key}" not in inputs}
        rewards = {key: name for key, name in self.rewards.items() if f"rewards.{key}" not in inputs}
        return replace(self, policies=policies, rewards=rewards)


@dataclass(frozen=True)
class Forward:
    """The `trainer` section of `score`. In this class and its subclasses, keys have the same names as in PPOConfig."""

    local_rollout_forward_batch_size: Rows = 64
    """Rows per forward pass."""
    bf16: bool = False
    """Computes matrix products in bfloat16 (autocast). On a CPU, the base is bfloat16, too."""
    reward_timeout_s: Patience = 600.0
    """Seconds to wait for a reward that is an async function, before the run ends. The same command with the same run.name
    resumes the run. -1 means no limit."""

    @property
    def rows_per_forward(self) -> int:
        """Returns how many rows of data.train are processed in one forward pass."""
        return self.local_rollout_forward_batch_size


@dataclass(frozen=True)
class Inference(Forward):
    """The `trainer` section of `generate` and `serve`. Requests to `serve` may override these keys."""

    response_length: Rows = 256
    """Maximum new tokens of a completion, including the end-of-sequence token."""
    min_new_tokens: Annotated[int, Ge(0)] = 0
    """Minimum new tokens of a completion."""
    temperature: Literal[0] | Annotated[float, Ge(0.01)] = 1.0
    """Divides the logits. 0 means greedy decoding."""
    seed: Seed = 42
    """Seed of sampling, which is combined with the number of the row."""


@dataclass(frozen=True)
class Evaluate(Inference):
    """The `trainer` section of `evaluate`."""

    probes: bool = False
    """Edits the completions of data.pairs, and measures how much the edits change the reward."""
    best_of_n: Literal[0] | Annotated[int, Ge(2), Le(1024)] = 0
    """Number of completions per prompt of data.eval for the best-of-n curve. The reward chooses the best completion. 0 means no
    curve."""


@dataclass(frozen=True)
class Collect(Inference):
    """The `trainer` section of `collect`."""

    num_generations: Annotated[int, Ge(1), Le(1024)] = 4
    """Number of completions per prompt."""
    select: Literal["best", "best_worst", "pairs", "labels"] = "best_worst"
    """Rows to write. best: the best completion (for sft). best_worst: a pair of the best and the worst completion (for dpo, rm
    and kto). pairs: every pair. labels: every completion with a label (for kto)."""
    good_above: float = 0.5
    """With select=labels, completions with a score above this value are good. A judge's scores are from 0 to 1."""
    min_margin: Annotated[float, Ge(0)] = 0.0
    """Smallest difference between the scores of a pair. Equal scores never make a pair."""
    num_prompts: Count | None = None
    """Number of prompts to draw from data.train without replacement, in the random order of data.seed. By default, all prompts
    are used in the order of the file."""
    skip_prompts: Steps = 0
    """Number of prompts to skip in the random order of data.seed. After the last prompt, a new order is drawn."""

    @property
    def rows_per_forward(self) -> int:
        return max(1, self.local_rollout_forward_batch_size // self.num_generations)


@dataclass(frozen=True)
class Export:
    """The `trainer` section of `export`. Keys about the Hub have the same names as in transformers.TrainingArguments."""

    merge: bool = True
    """Merges the adapter into the base. false exports the adapter unmerged, with tokenizer and model card."""
    response_length: Rows = 256
    """Maximum new tokens of the completions that compare the merged model with the adapter."""
    bf16: bool = False
    """Computes in bfloat16 (autocast) when the adapter is compared with the merged model."""
    hub_model_id: str | None = None
    """OWNER/NAME on the Hub, for the model card and the upload."""
    push_to_hub: bool = False
    """Uploads the exported files to hub_model_id."""
    hub_private_repo: bool = True
    """Whether a repository that the upload creates is private."""


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
    gate: dict[str, str] = field(default_factory=dict)
    """{metric: condition}, for example {eval_accuracy: ">= 0.95"}."""
    policy: str | list[str] | None = None
    """models:/NAME@ALIAS, a folder, an adapter on the Hub (NAME or NAME@REVISION), or `base` for no adapter. From a list, the job
    uses the first policy that exists."""
    reference: str | None = None
    """For dpo: the frozen adapter that training stays close to. The default is the policy that training starts from."""
    reward: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    """A reward model, a Python function, or {judge: FILE}. An entry of a list of rewards may also be {reward: NAME, weight:
    NUMBER} or {judge: FILE, weight: NUMBER}."""
    baseline: str | None = None
    """For evaluate: the policy that `policy` is compared with, in the same notation as `policy`."""
    teacher: str | None = None
    """For ppo: the adapter, or `base`, that rates every token that the policy samples (trainer.teacher_coef)."""
    judge: str | dict[str, Any] | None = None
    """A Python function, a second reward model, or {judge: FILE}. The judge's scores are reported, but never used for
    training."""
    source: str = ""
    """The job file."""
    overridden: tuple[str, ...] = ()
    """Keys that the command line sets. This field is not part of the resolved job."""

    @property
    def spec(self) -> StageSpec:
        """Returns the entry of the job's stage in STAGE_SPECS."""
        return STAGE_SPECS[self.stage]

    @property
    def folder(self) -> str:
        """Returns the run's folder, which contains checkpoints, result.json and the report."""
        return storage.join(self.run.storage_path, str(self.run.name))

    @property
    def paths(self) -> list[tuple[str, str]]:
        """Returns (key, path) for all files of rows in the job."""
        return [
            (f"data.{key}", source.location)
            for key in SPLITS
            for source in sources_of(getattr(self.data, key))
        ]

    @property
    def held_out(self) -> bool:
        """Returns True if the job has held-out rows, from data.eval or data.eval_fraction."""
        return bool(self.data.eval or self.data.eval_fraction)

    @property
    def evaluates(self) -> bool:
        """Returns True if the job evaluates during training. Evaluations need held-out rows and a schedule."""
        scheduled = self.trainer.get("eval_steps")
        if self.spec.trl:
            scheduled = self.trainer.get("eval_strategy", "no") != "no"
        return bool(self.held_out and scheduled)

    @property
    def without_evaluations(self) -> dict[str, Any]:
        """Returns the keys of `trainer` that turn evaluations off if a training job has no held-out rows, or else {}."""
        if self.held_out or not self.spec.learns:
            return {}
        return {"eval_strategy": "no", "eval_on_start": False} if self.spec.trl else {"eval_steps": 0}

    @property
    def measurable(self) -> Measurable:
        """Returns the metrics that the job can measure."""
        data, trainer, rollout = self.data, self.trainer, self.rollout_config
        needs = {
            "rows": (self.held_out, HELD_OUT_ROWS if self.spec.learns else "prompts to answer (data.eval)"),
            "start": (trainer.get("eval_on_start"), "trainer.eval_on_start=true"),
            "teacher": (self.teacher, "a teacher"),
            "workers": (rollout.num_workers, "rollout workers (rollout.num_workers)"),
            "off_policy": (rollout.corrects or rollout.staleness, "rollout.staleness or rollout.correction"),
            "reward": (self.reward, "a reward"),
            "judge": (self.judge, "a judge"),
            "pairs": (data.pairs, "pairs to evaluate the reward on (data.pairs)"),
            "subset": (data.subset, "a column of the pairs (data.subset)"),
            "benchmarks": (data.benchmarks, "rows of a benchmark (data.benchmarks)"),
            "probes": (trainer.get("probes"), "probes of the reward (trainer.probes=true)"),
            "best_of_n": (trainer.get("best_of_n"), "a search (trainer.best_of_n=16)"),
        }
        absent = {need: description for need, (condition, description) in needs.items() if not condition}
        return Measurable(self.stage, absent, len(self.rewards))

    def value(self, key: str) -> Any:
        """Returns the value of a section or of `section.key`. Returns None for a key of a library that the job does not set."""
        section, _, name = key.partition(".")
        values = getattr(self, section)
        if not name:
            return values
        return values.get(name) if isinstance(values, dict) else getattr(values, name)

    def changes(self, key: str) -> bool:
        """Returns True if the job sets a section or `section.key` to a value other than the default."""
        section, _, name = key.partition(".")
        value = self.value(key)
        schemas = schema.keys(schema.class_of(section, self.stage)) if name else {}
        default = schemas[name].get("default") if name in schemas else type(value)()
        return value not in (None, {}, [], default)

    @property
    def workers(self) -> tuple[int, int]:
        """Returns the minimum and maximum number of workers. Both are equal unless scaling.num_workers is elastic."""
        count = self.scaling.get("num_workers", 1) or 1
        return (count[0], count[1]) if isinstance(count, list) else (count, count)

    @property
    def in_process(self) -> bool:
        """Returns True if the job runs in the command's process, as exports and jobs with scaling.num_workers: 0 do.

        On a cluster, or with rollout workers, scaling.num_workers=0 means one worker.
        """
        if self.spec.runs_in == "here":
            return True
        no_workers = self.scaling.get("num_workers", 1) == 0
        return no_workers and not os.environ.get("RAY_ADDRESS") and not self.rollout_config.num_workers

    @property
    def rewards(self) -> list[tuple[str, float]]:
        """Returns (reference, weight) for each reward."""
        items = self.reward if isinstance(self.reward, list) else [self.reward] if self.reward else []
        return [
            (reference_of(item), float(item.get("weight", 1.0)) if isinstance(item, dict) else 1.0)
            for item in items
        ]

    @property
    def policies(self) -> list[str]:
        """Returns the policies of the job as references. The job uses the first policy that exists."""
        return self.policy if isinstance(self.policy, list) else [self.policy] if self.policy else []

    @property
    def inputs(self) -> dict[str, str]:
        """Returns {policy, baseline, judge, reward.0, ...: reference} for all models, judges and Python rewards in the job."""
        inputs = {"policy": next(iter(self.policies), None)}
        inputs |= {key: reference_of(getattr(self, key)) for key in INPUTS if key not in ("policy", "reward")}
        inputs |= {f"reward.{index}": name for index, (name, _) in enumerate(self.rewards)}
        return {key: name for key, name in inputs.items() if name} | self.serve.inputs

    def key_of(self, name: str) -> str:
        """Returns the key of an input in the job file. If `reward` is not a list, the key of reward.0 is `reward`."""
        if name in self.serve.inputs:
            return f"serve.{name}"
        return "reward" if name == "reward.0" and not isinstance(self.reward, list) else name

    @property
    def functions(self) -> dict[str, str]:
        """Returns {key: python:module:function} for rewards and judges that are Python functions."""
        inputs = self.inputs.items()
        return {self.key_of(name): source for name, source in inputs if InputURI.parse(source).is_function}

    @property
    def bf16(self) -> bool:
        """Returns True if matrix products are in bfloat16. TRL's trainers use bfloat16 by default (trl.SFTConfig.bf16)."""
        setting = self.trainer.get("bf16")
        return bool(self.spec.trl and not self.trainer.get("fp16") if setting is None else setting)

    @property
    def args(self) -> Any:
        """Returns the section `trainer` as a config object, or None for a TRL stage, because only workers import TRL."""
        if self.spec.trl:
            return None
        module, _, name = self.spec.trainer.rpartition(".")
        return getattr(importlib.import_module(module), name)(**self.trainer)

    @property
    def rollout_config(self) -> RolloutConfig:
        """Returns the section `rollout` as a RolloutConfig."""
        return RolloutConfig(**self.rollout)

    def to_dict(self) -> dict[str, Any]:
        """Returns the job as a dict, including keys with default values."""
        return {key: value for key, value in asdict(self).items() if key != "overridden"}


def reference_of(item: Any) -> Any:
    """Returns the name or URI of a reward or judge as text. `{judge: FILE}` becomes judge:FILE (pipeline/input_uri.py)."""
    if not isinstance(item, dict):
        return item
    return f"judge:{item['judge']}" if "judge" in item else item.get("reward")


def sources_of(spec: str | list[str | dict[str, Any]] | None) -> list[Source]:
    """Returns the sources in the value of a key in SPLITS."""
    items = [spec] if isinstance(spec, str) else spec or []
    return [Source(item) if isinstance(item, str) else Source(**item) for item in items]


def sources_with_defaults(data: Data, name: str) -> list[Source]:
    """Returns the sources of a split. The section `data` provides the keys in OF_ROWS that a source does not set."""
    defaults = {key: getattr(data, key) for key in OF_ROWS}
    return [
        replace(source, **{key: value for key, value in defaults.items() if getattr(source, key) is None})
        for source in sources_of(getattr(data, name))
    ]


def transforms_of(data: Data) -> dict[str, str]:
    """Returns {key of the job: python:module:function} for all functions that transform rows. Each function is listed once."""
    functions = {"data.transform": data.transform}
    for name in SPLITS:
        for index, source in enumerate(sources_of(getattr(data, name))):
            functions[f"data.{name}.{index}.transform"] = source.transform
    keys = {function: key for key, function in reversed(functions.items()) if function is not None}
    return {key: function for function, key in keys.items()}
