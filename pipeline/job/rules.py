"""Checks jobs for problems that the schema's types and ranges cannot express. Each problem has a key and a message with the fix.

Settings that are valid but often unintended cause warnings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline import input_uri
from pipeline.errors import InputError, shorten, show_value
from pipeline.input_uri import InputURI
from pipeline.job import schema
from pipeline.job.gates import HELD_OUT_ROWS, Measurable, parse_gate
from pipeline.job.job import (
    HUB,
    SPLITS,
    Collect,
    Data,
    Inference,
    Job,
    MLflow,
    Run,
    Serve,
    sources_of,
    sources_with_defaults,
    transforms_of,
)
from pipeline.job.lora import adapts_lm_head, ignored_by_vllm
from pipeline.job.rollout import RolloutConfig
from pipeline.job.stages import StageSpec

Problems = Iterator[tuple[str, str]]  # (key of the job, description of the problem)

# Names of files and folders in run.storage_path that are not runs. No run can have one of these names.
RESERVED = ("artifacts", "data", "feedback", "judges", "mlflow.db", "report")
MODEL_ID = r"[A-Za-z0-9][\w.-]{0,63}"  # pattern for model ids in requests to `serve`
LABELS = ({"good", "bad"}, {"first", "second"}, {"first", "second", "tie"})  # allowed keys of data.label

# {key: other keys that must be set for this key to have an effect}
NEEDS = {
    "baseline": ["data.eval"],
    "trainer.teacher_system": ["teacher"],
    "data.subset": ["data.pairs"],
    "trainer.probes": ["data.pairs"],
    "data.pairs": ["reward"],
    "data.benchmarks": ["reward"],
    "trainer.best_of_n": ["data.eval", "reward"],
    "trainer.skip_prompts": ["trainer.num_prompts"],
    "trainer.push_to_hub": ["trainer.hub_model_id"],
    "trainer.hub_private_repo": ["trainer.hub_model_id"],
    "trainer.fp16": ["scaling.use_gpu"],
    "trainer.activation_offloading": ["scaling.use_gpu"],
}
# (key, key that cannot be set together with it, reason)
EXCLUDES = [
    ("model.fsdp", "model.load_in_4bit", "FSDP cannot gather 4-bit weights"),
    ("model.fsdp", "lora.use_dora", "DoRA takes norms of unsharded weights"),
    ("data.eval_fraction", "data.eval", "held-out rows are a separate file, or a share of data.train"),
    ("trainer.gradient_accumulation_steps", "data.batch_size", "each determines the other"),
    ("trainer.fp16", "trainer.bf16", "matrix products have one dtype"),
]


def find_problems(job: Job) -> Problems:
    """Yields the problems of a job. Callers use only the first problem, because each rule assumes that earlier rules passed."""
    spec, data = job.spec, job.data
    for key, reason in spec.unused.items():
        if job.changes(key):
            yield key, f"`{job.stage}` does not use this key ({reason}); remove it"
    for section in ("trainer", "rollout"):
        try:
            _ = job.args if section == "trainer" else job.rollout_config
        except InputError as error:  # raised by our own config classes
            yield f"{section}.{error.key}", error.message
    args, uses_vllm = job.args, job.rollout.get("engine") == "vllm"
    if uses_vllm:
        makes_adapter = job.stage == "ppo" and "base" in (job.policies or ["base"])
        yield from _vllm_problems(job.model.fsdp, job.lora if makes_adapter else {})
    if spec.reads_train and not data.train:
        advice = f"`{job.stage}` needs rows, for example data.train=jobs/demo/data/*.jsonl"
        yield "data.train", f"missing; {advice}"
    if job.workers[0] > job.workers[1]:
        yield "scaling.num_workers", f"found {[*job.workers]}, expected [min, max]"
    if spec.trl:
        yield from _trl_problems(job.trainer, job.lora, data.batch_size, job.workers)
    if job.stage == "ppo":
        yield from _ppo_problems(args, job.reward, job.teacher, job.workers[1])
    if job.stage == "evaluate":
        yield from _evaluate_problems(data, job.policy)
    if isinstance(args, Inference) and args.min_new_tokens >= args.response_length:
        yield "trainer.min_new_tokens", f"found {args.min_new_tokens}, expected less than response_length"
    if isinstance(args, Collect):
        yield from _collect_problems(args, "good_above" in job.trainer)
    yield from _name_problems(job.run, job.mlflow)
    if job.stage == "serve":
        yield from _serve_problems(job.serve, job.run.storage_path, uses_vllm)
    if job.stage == "export":
        yield from _export_problems(job.policies, job.reward, args.hub_model_id)
    for key, required in NEEDS.items():
        missing = [name for name in required if not job.value(name)]
        if missing and job.changes(key):
            yield key, f"needs {' and '.join(missing)}; set the missing keys, or remove this key"
    for key, other_key, reason in EXCLUDES:
        if job.value(key) and job.value(other_key):
            yield key, f"set together with {other_key}, but {reason}; keep only one of the keys"
    for key, off in job.without_evaluations.items():
        if job.trainer.get(key, off) != off:
            problem = "no rows to evaluate on; set data.eval or data.eval_fraction"
            yield f"trainer.{key}", f"{problem}, or {key}={str(off).lower()}"
    yield from _source_problems(data, bool(spec.learns))
    yield from batch_problems(data.batch_size, job.trainer, spec, job.workers)
    for section in ("scaling", "rollout"):
        for label, value in (job.value(f"{section}.label_selector") or {}).items():
            if " " in value:  # Ray 2.60 does not strip spaces from labels
                fixed = value.replace(" ", "")
                yield f"{section}.label_selector.{label}", f"found {show_value(value)}, expected {fixed}"
    yield from _mapping_problems(job.reward, job.judge)
    references = transforms_of(data) | {job.key_of(name): source for name, source in job.inputs.items()}
    references |= {f"policy.{index}": name for index, name in enumerate(job.policies)}
    yield from _reference_problems(references)
    if any((job.run.load_best_model_at_end, job.run.early_stopping_patience, job.run.stop_if)):
        yield from _best_problems(job.run, job.measurable, job.evaluates, spec.trl)
    # If the command line removes the held-out rows that the job file's gate needs, the run is allowed, but moves no alias.
    removed = {"data.eval", "data.eval_fraction"} & {*job.overridden}
    needs_rows = {metric for metric in job.gate if not removed or f"gate.{shorten(metric)}" in job.overridden}
    yield from _gate_problems(job.gate, job.measurable, needs_rows if spec.learns else set())
    model = job.inputs.get("policy") or job.reward
    if job.gate and not spec.learns and not InputURI.parse(str(model)).is_registered:
        yield "gate", f"found a gate, but {show_value(model)} is not a registered version; remove the gate"


# ---------------------------------------------------------------- rules of stages and sections
def _vllm_problems(fsdp: bool, lora: dict[str, Any]) -> Problems:
    """Yields settings that vLLM would ignore. `lora` is the section `lora`, or {} if the job creates no adapter."""
    if fsdp:
        problem = "found vllm together with model.fsdp, but with vLLM each process loads the full base"
        yield "rollout.engine", f"{problem}; set rollout.engine=transformers"
    if key := ignored_by_vllm(lora):
        advice = f"set rollout.engine=transformers, or remove lora.{key}"
        yield "rollout.engine", f"found vllm, which ignores lora.{key}; {advice}"


def _trl_problems(
    trainer: dict[str, Any], lora: dict[str, Any], batch_size: int | None, workers: tuple[int, int]
) -> Problems:
    """Yields keys that TRL would ignore, and a missing data.batch_size if the number of workers may change."""
    if adapts_lm_head(lora.get("target_modules")):
        yield "lora.target_modules", "found lm_head, to which TRL's trainers apply no adapter; remove it"
    for prefix in ("eval", "save", "logging"):
        if f"{prefix}_steps" in trainer and trainer.get(f"{prefix}_strategy") == "epoch":
            condition = f"which has an effect only with trainer.{prefix}_strategy=steps; the job sets epoch"
            yield f"trainer.{prefix}_steps", f"found {show_value(trainer[f'{prefix}_steps'])}, {condition}"
    if batch_size is None and workers[0] < workers[1]:
        reason = "with elastic scaling.num_workers, this key keeps the global batch size fixed"
        yield "data.batch_size", f"missing; {reason}, for example 64"


def _ppo_problems(args: Any, reward: Any, teacher: str | None, workers: int) -> Problems:
    """Yields problems of a ppo job, such as a reward or teacher that is missing or has no effect."""
    only_teacher = args.advantage_estimator == "none"
    if not reward and not only_teacher:
        expected = "`ppo` needs it: reward: models:/NAME@ALIAS, or a folder, or python:MODULE:FUNCTION"
        advice = "To learn only from a teacher, set trainer.advantage_estimator=none"
        yield "reward", f"missing; {expected}. {advice}"
    if reward and only_teacher:
        advice = "set reward=null, or another estimator"
        yield "trainer.advantage_estimator", f"found none, so the reward has no effect; {advice}"
    if not teacher and (args.teacher_coef or only_teacher):
        yield "teacher", "missing; the job learns from a teacher: models:/NAME@ALIAS, a folder, or base"
    if teacher and not args.teacher_coef:
        problem = f"found {show_value(args.teacher_coef)}, with which the teacher has no effect"
        advice = "set the weight of its advantage, e.g. trainer.teacher_coef=1.0"
        yield "trainer.teacher_coef", f"{problem}; {advice}"
    if args.batch_size // args.num_generations < workers:
        minimum = f"trainer.batch_size={workers * args.num_generations}"
        yield "trainer.batch_size", f"fewer prompts for an update than workers; expected at least {minimum}"


def _evaluate_problems(data: Data, policy: Any) -> Problems:
    """Yields a problem if an evaluate job has prompts without a policy, or a policy without prompts."""
    if not data.eval and (policy or not (data.pairs or data.benchmarks)):
        advice = "to evaluate only a reward model, set data.pairs and policy=null"
        yield "data.eval", f"missing; `evaluate` needs prompts ({advice})"
    if data.eval and not policy:
        expected = "`evaluate` needs a policy to answer data.eval: models:/NAME@ALIAS or `base`"
        yield "policy", f"missing; {expected}; to evaluate only a reward model, set data.eval=null"


def _collect_problems(args: Collect, sets_good_above: bool) -> Problems:
    """Yields settings with which `collect` cannot make useful rows, and settings that have no effect."""
    if args.select in ("best_worst", "pairs") and args.num_generations < 2:
        expected = "2 or more, for example 4, or trainer.select=best"
        yield "trainer.num_generations", f"found 1, but a pair needs two completions; expected {expected}"
    if args.temperature == 0 and args.num_generations > 1:
        problem = "found 0, so all completions of a prompt are the same"
        yield "trainer.temperature", f"{problem}; expected a temperature above 0, for example 1.0"
    if args.min_margin and args.select in ("best", "labels"):
        yield "trainer.min_margin", f"trainer.select={args.select} makes no pairs; remove it"
    if args.select != "labels" and sets_good_above:
        yield "trainer.good_above", "only trainer.select=labels makes labels; remove it"


def _name_problems(run: Run, mlflow: MLflow) -> Problems:
    """Yields problems with the names of the run, the registered model and the alias."""
    if run.name in RESERVED or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", run.name or "new"):
        expected = "at most 200 letters, digits, `.`, `_` and `-` for a new folder in run.storage_path"
        yield (
            "run.name",
            f"found {show_value(run.name)}, expected {expected}, which has {', '.join(RESERVED)} already",
        )
    if not re.fullmatch(input_uri.NAME, mlflow.registered_model or "none"):
        expected = "letters, digits, spaces and `. _ - + ( )`, for example rlhf-sft"
        yield "mlflow.registered_model", f"found {show_value(mlflow.registered_model)}, expected {expected}"
    if not re.fullmatch(r"(?!(?i:latest|v\d+)$)[\w-]{1,255}", mlflow.alias):
        expected = "letters, digits, `_` and `-`, for example champion"
        reserved = "`latest` and `v1` are reserved by MLflow"
        yield "mlflow.alias", f"found {show_value(mlflow.alias)}, expected {expected}; {reserved}"


def _serve_problems(serve: Serve, storage_path: str, uses_vllm: bool) -> Problems:
    """Yields problems of a serve job, such as invalid model ids and settings that a replica cannot use."""
    if not serve.inputs:
        example = "'serve.policies={my-policy: models:/rlhf-ppo@champion}'"
        yield "serve.policies", f"missing; `serve` needs it, or serve.rewards: {example}"
    if invalid := [name for name in (*serve.policies, *serve.rewards) if not re.fullmatch(MODEL_ID, name)]:
        yield "serve.policies", f"found {invalid}, expected ids of letters, digits, `.`, `_` and `-`"
    if duplicates := ", ".join(sorted(serve.policies.keys() & serve.rewards.keys())):
        yield "serve.rewards", f"found {duplicates}, which is also in serve.policies; expected another id"
    if "://" in (serve.feedback_path or storage_path):
        reason = "feedback is written to a local folder of one node, not to a bucket"
        yield "serve.feedback_path", f"{reason}; set serve.feedback_path=FOLDER"
    if serve.cache_tokens is not None and uses_vllm:
        reason = "rollout.gpu_memory_utilization sets the size of the KV cache"
        yield "serve.cache_tokens", f"found {serve.cache_tokens}; remove it, because with vllm {reason}"


def _export_problems(policies: list[str], reward: Any, repository: str | None) -> Problems:
    """Yields inputs of an export job that are not adapters, and a Hub repository that is invalid or would get two models."""
    if "base" in policies or not (policies or reward):
        expected = "`export` needs an adapter: policy=models:/rlhf-ppo@champion, its folder, or a reward"
        yield "policy", f"found {show_value(policies[0] if policies else None)}; {expected}"
    if isinstance(reward, (dict, list)) or InputURI.parse(reward).is_function:
        expected = "one reward adapter: models:/rlhf-rm@champion, or its folder"
        yield "reward", f"found {show_value(reward)}, expected {expected}"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository or "owner/name"):
        expected = "OWNER/NAME: a user or an organization, and a name"
        yield "trainer.hub_model_id", f"found {show_value(repository)}, expected {expected}"
    if policies and reward and repository:
        advice = "set reward=null or policy=null"
        yield "trainer.hub_model_id", f"{repository} can contain only one model; {advice}"


# ---------------------------------------------------------------- rows, batches, inputs
def _source_problems(data: Data, learns: bool) -> Problems:
    """Yields problems of the sources of rows: unknown keys, keys that do not apply to a source, and missing weights.

    data/reshape.py later checks the fields that each stage needs.
    """
    fields = schema.keys(schema.class_of("source", ""))
    for name in SPLITS:
        spec = getattr(data, name)
        for index, item in enumerate(spec if isinstance(spec, list) else []):
            for key, problem in schema.wrong_keys(item, fields) if isinstance(item, dict) else ():
                yield f"data.{name}.{index}.{key}", problem
    for name in SPLITS:
        sources = zip(sources_of(getattr(data, name)), sources_with_defaults(data, name), strict=True)
        for index, (source, full) in enumerate(sources):
            own_keys = {key for key, value in vars(source).items() if value is not None}
            keys = {key: f"data.{name}.{index}.{key}" if key in own_keys else f"data.{key}" for key in fields}
            if full.label is not None and full.label.keys() not in LABELS:
                forms = "{first: VALUE, second: VALUE} and perhaps tie: VALUE, or {good: VALUE, bad: VALUE} for ratings"
                yield keys["label"], f"found {show_value(full.label)}, expected {forms}"
            if full.group_by and not full.transform:
                problem = f"found {show_value(full.group_by)}; only a transform can read several rows at once"
                yield keys["group_by"], f"{problem}; also set transform: python:MODULE:FUNCTION"
            if source.revision and (not source.path.startswith(HUB) or "@" in source.path):
                problem = f"found {show_value(source.revision)} for {show_value(source.path)}"
                expected = f"only a dataset on the Hub ({HUB}NAME) has a revision; set the revision once"
                yield keys["revision"], f"{problem}; {expected}"
            if source.weight is not None and (name != "train" or not learns):
                yield keys["weight"], "weights apply only to training rows; remove it"
    weights = [source.weight for source in sources_of(data.train)]
    if not any(weights) and data.stopping_strategy != "first_exhausted":
        reason = "no source of data.train has a weight; set weights, or remove this key"
        yield "data.stopping_strategy", reason
    if any(weights) and None in weights:
        reason = f"{weights.count(None)} of {len(weights)} sources have no weight"
        yield "data.train", f"{reason}; expected a weight for each source, or for none"


def batch_problems(
    size: int | None, trainer: dict[str, Any], spec: StageSpec, workers: tuple[int, int]
) -> Problems:
    """Yields data.batch_size if it is not a multiple of the number of rows that all workers process at once.

    Args:
        size: data.batch_size.
        workers: the minimum and maximum number of workers.
    """
    if size is None or not spec.trl:
        return
    key = "per_device_train_batch_size"
    device = trainer.get(key, schema.keys(spec.trainer)[key]["default"])
    low, high = workers
    step = device * math.lcm(*range(low, high + 1))
    if size % step:
        worker_counts = f"any of {low} to {high} workers" if low < high else f"workers ({low})"
        expected = f"a multiple of {step}, for trainer.{key}={device} on {worker_counts}"
        multiple = math.ceil(size / step) * step
        yield "data.batch_size", f"found {size}, expected {expected}; set data.batch_size={multiple}"


def _mapping_problems(reward: Any, judge: Any) -> Problems:
    """Yields mappings under `reward` or `judge` that have the wrong keys or values."""
    rewards = reward if isinstance(reward, list) else []
    for item in rewards:
        if isinstance(item, dict) and not _names_input(item, ({"reward"}, {"judge"}), weighted=True):
            expected = "{reward: NAME, weight: NUMBER} or {judge: FILE, weight: NUMBER}"
            yield f"reward.{rewards.index(item)}", f"found {show_value(item)}, expected {expected}"
    for key, item in {"reward": reward, "judge": judge}.items():
        if isinstance(item, dict) and not _names_input(item, ({"judge"},), weighted=False):
            yield key, f"found {show_value(item)}, expected {{judge: FILE}}"


def _names_input(item: dict[str, Any], kinds: tuple[Any, ...], weighted: bool) -> bool:
    """Returns True if a mapping has text values, the keys in one of `kinds`, and a weight only if `weighted` is true."""
    names = {key: value for key, value in item.items() if key != "weight"}
    has_weight = type(item.get("weight", 1)) in (int, float) if weighted else "weight" not in item
    return names.keys() in kinds and all(isinstance(name, str) for name in names.values()) and has_weight


def _reference_problems(names: Mapping[str, str]) -> Problems:
    """Yields invalid references to models and functions. `names` is {key of the job: reference}."""
    for key, name in names.items():
        adapter = key.startswith(("policy", "baseline", "reference", "teacher", "serve.policies."))
        is_function = InputURI.parse(name).is_function
        if name.startswith("models:") and not InputURI.parse(name).is_registered:
            expected = "models:/NAME@ALIAS or models:/NAME/VERSION, for example models:/rlhf-sft@champion"
        elif adapter and name.startswith(("python:", "judge:")):
            expected = "an adapter: models:/NAME@ALIAS, a folder, or base"
        elif not is_function and (name.startswith("python:") or key.endswith("transform")):
            expected = "python:MODULE:FUNCTION, for example python:pipeline.demo:gold"
        elif not adapter and name.endswith(".py"):
            module = name.removesuffix(".py").replace("/", ".")
            expected = f"python:{module}:FUNCTION for a function in this file"
        elif not adapter and InputURI.parse(f"python:{name}").is_function:
            expected = f"python:{name} for a Python function"
        else:
            continue
        yield key, f"found {show_value(name)}, expected {expected}"


# ---------------------------------------------------------------- evaluations and gates
def _best_problems(run: Run, measurable: Measurable, evaluates: bool, trl: bool) -> Problems:
    """Yields problems if a job keeps its best step or may stop early, but has no evaluations or no suitable metric."""
    if not evaluates:
        key = next(
            key
            for key in ("load_best_model_at_end", "early_stopping_patience", "stop_if")
            if getattr(run, key)
        )
        reason = f"found {show_value(getattr(run, key))}, but there are no evaluations to compare"
        schedule = "trainer.eval_strategy=epoch" if trl else "trainer.eval_steps=10"
        advice = f"set data.eval or data.eval_fraction, and {schedule}, or remove this key"
        yield f"run.{key}", f"{reason}; {advice}"
    if problem := measurable.why_not_compared(run.metric_for_best_model, run.greater_is_better):
        yield "run.metric_for_best_model", problem
    for metric, rule in run.stop_if.items():
        key = f"run.stop_if.{shorten(metric)}"
        yield from _condition_problems(key, metric, rule, measurable, measurable.compared)
        if lacking := measurable.compared.get(metric):
            yield key, f"{metric} needs {lacking}, which the job does not have"


def _gate_problems(gate: dict[str, str], measurable: Measurable, needs_rows: set[str]) -> Problems:
    """Yields invalid conditions of a gate. `needs_rows` lists the metrics that require held-out rows."""
    for metric, rule in gate.items():
        key = f"gate.{shorten(metric)}"
        yield from _condition_problems(key, metric, rule, measurable, measurable.lacks)
        if metric in needs_rows and measurable.lacks.get(metric) == HELD_OUT_ROWS:
            yield key, f"needs {HELD_OUT_ROWS}; set data.eval_fraction=0.1, or gate={{}}"


def _condition_problems(
    key: str, metric: str, rule: Any, measurable: Measurable, metrics: Mapping[str, str]
) -> Problems:
    try:
        relative = parse_gate(rule)[1] is None
    except ValueError as error:
        yield key, str(error)
        return
    if relative and not (key.startswith("gate.") and metric.startswith("eval_")):
        advice = "only gates on eval_... metrics can use the champion; set a number"
        yield key, f"found {show_value(rule)}; {advice}"
    if metric not in metrics and not measurable.is_open(metric):
        yield key, measurable.unknown(metric, metrics)


def find_warnings(job: Job) -> Iterator[str]:
    """Yields warnings about settings that are valid but often unintended, to print before a run starts."""
    learns, trainer = job.spec.learns, job.trainer
    if learns and not job.held_out:
        yield (
            "no rows are held out, so no metric measures generalization; set data.eval to held-out rows, or "
            "data.eval_fraction=0.1 to hold out 10 % of the rows"
        )
    for metric in job.gate:
        if lacking := job.measurable.lacks.get(metric):
            problem = f"needs {lacking}, which this job does not have"
            yield f"gate.{metric}: {problem}; the version will be registered without the alias"
    if job.gate and learns and not job.mlflow.registered_model:
        yield "gate: mlflow.registered_model is null, so the gate moves no alias, and its result is only reported"
    if job.in_process and job.run.max_failures:
        yield "run.max_failures: there is no worker to restart with scaling.num_workers=0; set scaling.num_workers=1"
    if job.stage == "ppo" and job.rollout_config.num_workers:
        yield from _idle_workers(job.args, job.rollout_config, job.workers[1])
    dropout = schema.keys(job.spec.trainer).get("disable_dropout", {"default": job.stage == "ppo"})
    if learns and job.lora.get("lora_dropout") and trainer.get("disable_dropout", dropout["default"]):
        alternative = ", or trainer.disable_dropout=false" if job.spec.trl else ""
        reason = f"`{job.stage}` trains without dropout"
        yield f"lora.lora_dropout changes nothing: {reason}; set lora.lora_dropout=0{alternative}"
    if "data.train" in job.overridden and "data.eval" not in job.overridden and job.data.eval:
        yield (
            f"data.train comes from the command line, but data.eval is still {show_value(job.data.eval)} from the job file, so the run "
            "is evaluated on these rows. To hold out 10 % of data.train instead, set data.eval=null data.eval_fraction=0.1"
        )


def _idle_workers(args: Any, rollout: RolloutConfig, trainers: int) -> Iterator[str]:
    """Yields a warning if there are more rollout workers than chunks of work, so that some workers are idle."""
    workers, updates = rollout.num_workers, max(1, rollout.staleness)
    prompts = math.ceil(args.prompts_per_update / trainers)  # prompts of an update on one trainer
    chunks = trainers * updates * math.ceil(prompts / max(1, args.decoded(trainers) // args.num_generations))
    if workers > chunks:
        rows = max(args.num_generations, args.batch_size * updates // workers)
        yield (
            f"rollout.num_workers: {workers - chunks} of {workers} workers will be idle, because completions are sampled in "
            f"chunks of {args.decoded(trainers)}; for smaller chunks, set trainer.local_rollout_forward_batch_size={rows}"
        )
