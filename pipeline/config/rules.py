"""Keys and combinations of keys that a job may not have: each check raises an InputError that says what to do instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import references
from pipeline.config import best, gates, scaling, schema, serve, sources, trainer
from pipeline.config.jobfile import Tree
from pipeline.config.stages import STAGE
from pipeline.errors import about, show
from pipeline.intervals import outside
from pipeline.references import Ref

if TYPE_CHECKING:
    from pipeline.config import Job


# What run.storage_path keeps beside the folders of runs.
RESERVED = ("artifacts", "data", "feedback", "mlflow.db", "report")


# ---------------------------------------------------------------- what a stage has no use for
def _check_unused(tree: Tree, job: Job) -> None:
    """Refuses a value that would change nothing, unless it is the default."""
    for key, why in STAGE[job.stage].unused.items():
        section, _, name = key.partition(".")
        given, default = tree.data.get(section), None
        if name:
            given = (given or {}).get(name)
            default = schema.keys(schema.class_of(section, job.stage))[name].get("default")
        if given not in (None, {}, [], default):
            raise tree.error(key, f"`{job.stage}` has no use for it: {why}; take it out")


# ---------------------------------------------------------------- nothing held out
def without_evaluation(tree: Tree, job: Job) -> Job:
    """A job without held-out rows evaluates nothing, whatever its file says of when to; what the command line says stays."""
    if job.data.eval or job.data.eval_fraction or not STAGE[job.stage].learns:
        return job
    off = {"eval_strategy": "no", "eval_on_start": False} if STAGE[job.stage].trl else {"eval_steps": 0}
    stays = {key for key, place in tree.where.items() if place == "command line"}
    quiet = {key: value for key, value in off.items() if key in job.trainer and f"trainer.{key}" not in stays}
    return replace(job, trainer={**job.trainer, **quiet})


# ---------------------------------------------------------------- a base on the hub
def with_revision(tree: Tree, job: Job) -> Job:
    """`model.name_or_path: org/name@v1` is `model.revision: v1` of org/name."""
    from pipeline.models import hub

    with about("model.name_or_path"):
        name, revision = hub.split(job.model.name_or_path)
    if revision and job.model.revision not in (None, revision):
        raise tree.error(
            "model.revision",
            f"found {show(job.model.revision)}, but model.name_or_path says {show(revision)}; keep one",
        )
    return replace(job, model=replace(job.model, name_or_path=name, revision=revision or job.model.revision))


# ---------------------------------------------------------------- texts
# Names become folders, tags and columns: bytes.
NAMES = {
    "run.name": 128, "run.storage_path": 1024, "data.cache_dir": 1024, "mlflow.experiment": 200, "mlflow.registered_model": 200,
    "mlflow.alias": 200, "serve.host": 255,
}  # fmt: skip
PATHS = """model.name_or_path model.chat_template data.train data.eval data.pairs data.train.path data.eval.path
    data.pairs.path data.cache_dir run.storage_path serve.feedback_path policy reward baseline judge""".split()


def _check_texts(tree: Tree, job: Job) -> None:
    for section, value in job.to_dict().items():
        if section not in ("stage", "source", "gate", "trainer", "scaling"):
            for key, text in _texts(section, value):
                check_text(tree, key, text)


def _texts(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Yields (dotted key, text); an item of a list has the key of the list."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(f"{key}.{name}", item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(key, item)
    elif isinstance(value, str):
        yield key, value


def check_text(tree: Tree, key: str, value: str) -> None:
    """Refuses blank text, and names that are too long for a file system or for MLflow."""
    if not value.strip():
        raise tree.error(key, "found empty text, expected a value; leave the key out, or use null")
    if len(value.encode()) > NAMES.get(key, 1 << 20):
        raise tree.error(key, f"found {len(value.encode())} bytes, expected at most {NAMES[key]}")
    longest = max(re.split(r"[/:]", value), key=lambda part: len(part.encode()))
    if key in PATHS and len(longest.encode()) > 240:  # a file system's 255, less what is appended
        size = len(longest.encode())
        raise tree.error(key, f"found {show(longest)} of {size} bytes in a path, expected at most 240")


# ---------------------------------------------------------------- combinations
def _check_model(tree: Tree, job: Job) -> None:
    template = job.model.chat_template
    if template not in (None, "plain") and not Path(str(template)).expanduser().is_file():
        raise tree.error(
            "model.chat_template",
            f"found {show(template)}, expected an existing Jinja file, `plain`, or null",
        )
    if job.lora.get("bias", "none") != "none":
        raise tree.error(
            "lora.bias",
            "found a bias of the base to be trained, expected none: the base stays frozen and shared",
        )
    init = job.lora.get("init_lora_weights", True)
    if isinstance(init, str) and init not in ("gaussian", "orthogonal"):
        raise tree.error(
            "lora.init_lora_weights",
            f"found {init}, which rewrites base weights that all adapters share; expected true or gaussian",
        )


def _check_shards(tree: Tree, job: Job) -> None:
    if not job.model.fsdp:
        return
    if job.model.load_in_4bit:
        raise tree.error(
            "model.fsdp",
            "given together with model.load_in_4bit, whose 4-bit weights FSDP cannot gather; keep one: an nf4 base is held "
            "whole, in a quarter of the memory of bfloat16",
        )
    if job.lora.get("use_dora"):
        raise tree.error(
            "model.fsdp",
            "given together with lora.use_dora, which takes norms of whole weights; keep one",
        )
    if job.rollout.get("engine") == "vllm":
        raise tree.error(
            "rollout.engine",
            "found vllm together with model.fsdp: each process with vLLM also loads the full base on one device, for "
            "reference and rewards; set rollout.engine=transformers, or model.fsdp=false if the base fits on one device",
        )


def _check_lora(tree: Tree, job: Job) -> None:
    """Refuses what peft accepts and then matches with no layer, or fails on in a worker."""
    from pipeline.models.adapter_files import adapts_lm_head

    targets = job.lora.get("target_modules")
    if STAGE[job.stage].trl and adapts_lm_head(targets):
        raise tree.error(
            "lora.target_modules", "found lm_head, to which TRL's trainers apply no adapter; take it out"
        )
    for key in ("target_modules", "exclude_modules", "layers_pattern"):
        value = job.lora.get(key)
        if value == [] and key == "target_modules":
            raise tree.error(
                f"lora.{key}", "found an empty list, expected layers to adapt, for example all-linear"
            )
        if isinstance(value, str) and key != "layers_pattern":  # a pattern that whole names have to match
            try:
                re.compile(value)
            except re.error as error:
                raise tree.error(
                    f"lora.{key}", f"found {show(value)}, which is no pattern ({error})"
                ) from None
    for key, allowed in (("rank_pattern", "whole [1, 8192]"), ("alpha_pattern", "(0, 1000000]")):
        if key in job.lora and job.lora[key] is None:
            raise tree.error(
                f"lora.{key}", "found null, expected a mapping of layers to numbers; take it out"
            )
        for layers, value in (job.lora.get(key) or {}).items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if problem := outside(value, allowed) if number else "a number":
                raise tree.error(f"lora.{key}", f"found {show(value)} for {show(layers)}, expected {problem}")


def _check_data(tree: Tree, job: Job) -> None:
    data = job.data
    facts = STAGE[job.stage]
    if facts.reads_train and not data.train:
        what = "to learn from" if facts.learns else "to work on"
        raise tree.error(
            "data.train",
            f"missing; `{job.stage}` needs rows {what}, for example data.train=jobs/demo/data/*.jsonl",
        )
    if job.stage == "evaluate":
        _check_evaluate(tree, job)
    if data.subset and not data.pairs:
        raise tree.error("data.subset", "names a column of data.pairs, and there are none")
    if data.pairs and not job.reward:
        raise tree.error(
            "data.pairs", "there is no reward model to evaluate: give reward, e.g. models:/rlhf-rm@champion"
        )
    if data.eval and data.eval_fraction:
        raise tree.error(
            "data.eval_fraction",
            "given together with data.eval; keep one: a file of its own, or a share of data.train",
        )
    # PPOConfig has no strategy: its steps say whether it evaluates.
    key, off = ("eval_strategy", "no") if facts.trl else ("eval_steps", 0)
    if job.trainer.get(key, off) != off and not (data.eval or data.eval_fraction):
        raise tree.error(
            f"trainer.{key}",
            f"there is nothing to evaluate on: give data.eval or data.eval_fraction, or {key}={off}",
        )
    if job.trainer.get("eval_on_start") and not (data.eval or data.eval_fraction):
        raise tree.error(
            "trainer.eval_on_start",
            "there is nothing to evaluate on: give data.eval or data.eval_fraction, or eval_on_start=false",
        )


def _check_evaluate(tree: Tree, job: Job) -> None:
    data = job.data
    if not data.eval and not (data.pairs and not job.policy):
        raise tree.error(
            "data.eval",
            "missing; `evaluate` needs prompts, for example data.eval=jobs/demo/data/prompts_eval.jsonl (or, for a reward "
            "model alone, data.pairs and policy=null)",
        )
    if data.eval and not job.policy:
        raise tree.error(
            "policy",
            "missing; `evaluate` needs it to answer data.eval: models:/rlhf-ppo@champion (or `base`: no adapter); for a "
            "reward model alone type data.eval=null",
        )
    if job.baseline and not data.eval:
        raise tree.error(
            "baseline", "there are no prompts to compare it on: give data.eval, or type baseline=null"
        )


def _check_run(tree: Tree, job: Job) -> None:
    check_name(tree, job.run.name, job.stage)


def check_name(tree: Tree, name: str | None, verb: str) -> None:
    """Refuses the name of a run, or of an iteration, that names no folder or one that is not its own."""
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise tree.error(
            "run.name",
            f"found {show(name)}, expected letters, digits, `.`, `_` and `-`: it names a folder below run.storage_path",
        )
    if name in RESERVED:
        raise tree.error(
            "run.name",
            f"found {show(name)}, where run.storage_path keeps things of all runs; expected another name, "
            f"for example {verb}-{name}",
        )


def _check_mlflow(tree: Tree, job: Job) -> None:
    mlflow = job.mlflow
    name = mlflow.registered_model
    if name is not None and not re.fullmatch(references.NAME, name):
        raise tree.error(
            "mlflow.registered_model",
            f"found {show(name)}, expected letters, digits, spaces and `. _ - + ( )`, for example rlhf-{job.stage}",
        )
    if mlflow.alias == "latest" or re.fullmatch(r"v\d+", mlflow.alias, re.IGNORECASE):
        raise tree.error(
            "mlflow.alias", f"`{mlflow.alias}` is reserved by MLflow; take another word, for example champion"
        )
    if not re.fullmatch(r"[\w-]{1,255}", mlflow.alias):
        raise tree.error(
            "mlflow.alias",
            f"found {show(mlflow.alias)}, expected letters, digits, `_` and `-`, for example champion",
        )
    if (mlflow.tracking_uri or "").startswith("file:"):
        raise tree.error(
            "mlflow.tracking_uri",
            "MLflow no longer writes to file: stores; use sqlite:///runs/mlflow.db or http://host:5000",
        )


def _check_inputs(tree: Tree, job: Job) -> None:
    names = [("policy", job.policy), ("baseline", job.baseline), ("judge", job.judge)]
    for index, item in enumerate(
        job.reward if isinstance(job.reward, list) else [job.reward] if job.reward else []
    ):
        place = f"reward.{index}" if isinstance(job.reward, list) else "reward"
        if isinstance(item, dict):
            weight = item.get("weight", 1.0)
            if (
                set(item) - {"reward", "weight"}
                or isinstance(weight, bool)
                or not isinstance(weight, (int, float))
                or abs(weight) > 1e6
            ):
                raise tree.error(place, f"found {show(item)}, expected {{reward: NAME, weight: NUMBER}}")
            item = item.get("reward")
        if not isinstance(item, str) or not item:
            raise tree.error(
                place,
                f"found {show(item)}, expected a name such as models:/rlhf-rm@champion, or {{reward: NAME, weight: NUMBER}}",
            )
        names.append((place, item))
    if job.rewards and not any(weight for _, weight in job.rewards):
        raise tree.error("reward", "found weights of 0 alone, which reward nothing")
    names += [(f"serve.{key}", name) for key, name in serve.named(job.serve).items()]
    for key, name in names:
        if name is None:
            continue
        if name.startswith("models:") and not Ref.parse(name).is_registered:
            raise tree.error(
                key,
                f"found {show(name)}, expected models:/NAME@ALIAS or models:/NAME/VERSION, for example models:/rlhf-sft@champion",
            )
        if name.startswith("python:") and not Ref.parse(name).is_function:
            raise tree.error(
                key,
                f"found {show(name)}, expected python:MODULE:FUNCTION, for example python:pipeline.demo:gold",
            )
        adapter = key in ("policy", "baseline") or key.startswith("serve.policies.")
        if not adapter and Ref.parse(f"python:{name}").is_function:
            raise tree.error(key, f"found {show(name)}; for a Python function type python:{name}")
        if name.startswith("python:") and adapter:
            raise tree.error(
                key, f"found {show(name)}, expected an adapter: models:/NAME@ALIAS, a folder, or base"
            )
    if job.stage == "export":
        _check_export(tree, job)


def _check_export(tree: Tree, job: Job) -> None:
    if not job.policy and not job.reward:
        raise tree.error(
            "policy", "missing; `export` needs it, or a reward: policy=models:/rlhf-ppo@champion"
        )
    if job.policy == "base":
        raise tree.error(
            "policy", "found 'base', expected an adapter to merge: models:/rlhf-ppo@champion, or its folder"
        )
    if job.reward and (not isinstance(job.reward, str) or Ref.parse(job.reward).is_function):
        raise tree.error(
            "reward",
            f"found {show(job.reward)}, expected one reward adapter: models:/rlhf-rm@champion, or its folder",
        )
    repository = job.args.hub_model_id
    if repository is None:
        for key in ("push_to_hub", "hub_private_repo", "hub_revision"):
            if job.trainer.get(key) not in (None, schema.keys(STAGE["export"].trainer)[key].get("default")):
                raise tree.error(
                    f"trainer.{key}", "goes with trainer.hub_model_id=OWNER/NAME; give that, too"
                )
    elif not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]{0,95}", repository) or ".." in repository:
        raise tree.error(
            "trainer.hub_model_id",
            f"found {show(repository)}, expected OWNER/NAME: a user or an organisation, and a name of letters, digits, "
            "`.`, `_` and `-`",
        )
    elif job.policy and job.reward:
        raise tree.error(
            "trainer.hub_model_id",
            f"{repository} is one repository, for one model; type reward=null or policy=null",
        )


def warnings(job: Job) -> Iterator[str]:
    """Lines to print before a run starts, on settings that are valid but often unintended."""
    if STAGE[job.stage].learns and not (job.data.eval or job.data.eval_fraction):
        yield (
            "nothing is held out, so nothing tells how well the run learns; data.eval names rows, data.eval_fraction=0.1 holds "
            "out a tenth"
        )
    yield from gates.unmeasured(job)
    if job.gate and STAGE[job.stage].learns and not job.mlflow.registered_model:
        yield "gate: the job registers nothing (mlflow.registered_model is null): the gate moves no alias, and is only reported"
    if job.model.fsdp and job.workers[0] == 1:
        left = "" if job.workers[1] == 1 else ", and so does the last one of scaling.num_workers"
        yield f"model.fsdp: one worker holds the base whole{left}; with 2 or more each has its part"
    if job.in_process and job.run.max_failures:
        yield "run.max_failures: there is no worker to restart with scaling.num_workers=0; set scaling.num_workers=1"
    if job.stage == "ppo":
        yield from _idle_rollout_workers(job)
        yield from _crowded_rollout_workers(job)
    if "data.train" in job.overridden and "data.eval" not in job.overridden and job.data.eval:
        yield (
            f"data.train comes from the command line, but data.eval is still the job file's {show(job.data.eval)}: the run "
            "is evaluated on those rows. To hold out a tenth of your own, type data.eval=null data.eval_fraction=0.1"
        )


def _crowded_rollout_workers(job: Job) -> Iterator[str]:
    """Rollout workers with fewer CPUs than threads: they compute with as many threads as a trainer, for the same bits."""
    rollout = job.rollout_config
    cpus = (job.scaling.get("resources_per_worker") or {}).get("CPU", 1)
    asked = (rollout.resources_per_worker or {}).get("CPU", 1)
    on_gpus = job.scaling.get("use_gpu") if rollout.use_gpu is None else rollout.use_gpu
    if rollout.workers[1] and not on_gpus and asked < cpus:
        yield (
            f"rollout: each rollout worker computes with {cpus:g} threads, as a trainer does, and asks Ray for {asked:g} CPUs; give "
            f"rollout.resources_per_worker CPU: {cpus:g}"
        )


def _idle_rollout_workers(job: Job) -> Iterator[str]:
    """More rollout workers than there are chunks to be sampled at a time."""
    args, rollout = job.args, job.rollout_config
    most, trainers = rollout.workers[1], job.workers[1]
    share = -(-args.batch_size // args.num_generations // trainers)  # prompts
    chunks = trainers * -(-share // max(1, args.decoded(trainers) // args.num_generations))
    busy = chunks * max(1, rollout.staleness)
    if most > busy:
        rows = max(args.num_generations, args.batch_size * max(1, rollout.staleness) // most)
        yield (
            f"rollout.num_workers: {most - busy} of {most} workers will have nothing to do: an update is {chunks} "
            f"chunk{'s' * (chunks > 1)} of {args.decoded(trainers)} completions. trainer.local_rollout_forward_batch_size={rows} "
            "cuts it into smaller ones"
        )


CHECKS = (
    _check_unused,
    _check_texts,
    _check_model,
    _check_shards,
    _check_lora,
    _check_data,
    sources.check,
    trainer.check,
    scaling.check,
    _check_run,
    best.check,
    _check_mlflow,
    gates.check,
    serve.check,
    _check_inputs,
)
