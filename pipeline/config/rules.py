"""Which keys and combinations of keys a job may not have, and why: each check raises the InputError that says what to do instead."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import bounds, gates, scaling
from pipeline.config.fields import fields_of, show
from pipeline.config.jobfile import Tree
from pipeline.config.keys import class_of
from pipeline.config.stages import STAGE
from pipeline.intervals import outside

if TYPE_CHECKING:
    from pipeline.config import Job


NAME = r"\w[\w .+()-]*"  # of a registered model: it stands in URIs and in the filters of MLflow
# Of torch.utils.checkpoint and transformers; `selective` is TRL's for sft.
CHECKPOINTING = ("use_reentrant", "preserve_rng_state", "early_stop", "selective")


# ---------------------------------------------------------------- what a stage has no use for
def _check_unused(tree: Tree, job: Job) -> None:
    """A value that would change nothing is refused, wherever it differs from what is there without it."""
    for key, why in STAGE[job.stage].unused.items():
        section, _, name = key.partition(".")
        given, default = tree.data.get(section), None
        if name:
            given = (given or {}).get(name)
            default = fields_of(class_of(section, job.stage))[name].default
        if given not in (None, {}, [], default):
            raise tree.error(key, f"`{job.stage}` has no use for it: {why}; take it out")


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


def _check_lora(tree: Tree, job: Job) -> None:
    """What peft would take and then find no layer for, or fail on in a worker."""
    targets = job.lora.get("target_modules")
    named = [targets] if isinstance(targets, str) else targets or []
    if STAGE[job.stage].trl and any(str(name).rpartition(".")[2] == "lm_head" for name in named):
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
            "data.pairs", "there is no reward model to judge: give reward, e.g. models:/rlhf-rm@champion"
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


def _check_batches(tree: Tree, job: Job) -> None:
    """batch_size = per_device_train_batch_size x workers x accumulation, exactly, for every worker count that can occur."""
    low, high = scaling.worker_range(tree, job)
    size = job.data.batch_size
    if not STAGE[job.stage].trl:
        return
    if low != high and size is None:
        raise tree.error(
            "data.batch_size",
            "missing; with elastic scaling.num_workers it keeps the global batch fixed, for example 64",
        )
    if size is None:
        return
    if "gradient_accumulation_steps" in job.trainer:
        raise tree.error(
            "trainer.gradient_accumulation_steps", "follows from data.batch_size; keep only one of the two"
        )
    device = job.trainer.get(
        "per_device_train_batch_size",
        fields_of(STAGE[job.stage].trainer)["per_device_train_batch_size"].default,
    )
    step = device * low
    for count in range(low + 1, high + 1):
        step = math.lcm(step, device * count)
        if step > bounds.LARGEST_BATCH:  # it doubles and trebles with further workers
            raise tree.error(
                "scaling.num_workers",
                f"found [{low}, {high}]: no data.batch_size comes out even on each of {low} to {count} workers with "
                f"trainer.per_device_train_batch_size={device}; take a narrower range",
            )
    if size % step:
        workers = (
            f"{low} to {high} workers, each count of them"
            if low < high
            else f"{low} worker{'s' if low > 1 else ''}"
        )
        raise tree.error(
            "data.batch_size",
            f"found {size}, expected a multiple of {step}, so that trainer.per_device_train_batch_size={device} on {workers} comes out even; "
            f"try data.batch_size={math.ceil(size / step) * step} or a smaller trainer.per_device_train_batch_size",
        )


def _check_trainer(tree: Tree, job: Job) -> None:
    trainer = job.trainer
    if trainer.get("bf16") and trainer.get("fp16"):
        raise tree.error(
            "trainer.fp16", "given together with trainer.bf16; keep one (bf16 where the GPU has it)"
        )
    if trainer.get("use_cpu") and job.scaling.get("use_gpu"):
        raise tree.error("trainer.use_cpu", "given together with scaling.use_gpu=true; keep one")
    if job.stage == "ppo":  # its arguments are a PPOConfig
        _check_ppo(tree, job)
    elif STAGE[job.stage].trl:
        _check_trl(tree, job)
    elif STAGE[job.stage].writes:
        _check_inference(tree, job.args)


def _check_ppo(tree: Tree, job: Job) -> None:
    from pipeline.ppo.config import SettingError

    try:
        args = job.args
    except SettingError as error:
        raise tree.error(f"trainer.{error.key}", error.message) from None
    prompts, workers = args.batch_size // args.num_generations, job.workers[1]
    if prompts < workers:
        raise tree.error(
            "trainer.batch_size",
            f"found {args.batch_size}, which is {prompts} prompt{'s' * (prompts > 1)} an update for {workers} workers; "
            f"expected at least trainer.batch_size={workers * args.num_generations}",
        )


def _check_trl(tree: Tree, job: Job) -> None:
    """What TRL's trainers refuse when a worker makes them, or never say."""
    trainer = job.trainer
    for what in ("eval", "save", "logging"):
        if f"{what}_steps" in trainer and trainer.get(f"{what}_strategy") == "epoch":
            raise tree.error(
                f"trainer.{what}_steps",
                f"found {show(trainer[f'{what}_steps'])}, which counts with trainer.{what}_strategy=steps only; the job says "
                "epoch",
            )
    if str(trainer.get("optim", "")).startswith(("galore", "apollo", "lomo", "adalomo")):
        raise tree.error(
            "trainer.optim",
            f"found {trainer['optim']}, made for training whole weights; expected one for adapters, for example adamw_torch",
        )
    for key in ("lr_scheduler_kwargs", "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        if isinstance(trainer.get(key), str):
            raise tree.error(f"trainer.{key}", f"found {show(trainer[key])}, expected a mapping or null")
    if trainer.get("dataloader_persistent_workers") and not trainer.get("dataloader_num_workers"):
        raise tree.error(
            "trainer.dataloader_persistent_workers",
            "there are none: give dataloader_num_workers, or take it out",
        )
    if not job.scaling.get("use_gpu"):
        if trainer.get("fp16"):
            raise tree.error("trainer.fp16", "needs a GPU; on CPUs type trainer.fp16=false trainer.bf16=true")
        if trainer.get("activation_offloading"):
            raise tree.error(
                "trainer.activation_offloading", "needs a GPU, from which it offloads; take it out"
            )
    for key in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        for name, value in (trainer.get(key) or {}).items():
            if name not in CHECKPOINTING or not isinstance(value, bool):
                known = f"expected true or false for one of {', '.join(CHECKPOINTING)}"
                raise tree.error(f"trainer.{key}", f"found {show(name)}: {show(value)}, {known}")
    if trainer.get("save_strategy") == "best" or trainer.get("metric_for_best_model") is not None:
        _check_best(tree, job)
    if job.stage == "dpo":
        _check_dpo(tree, trainer, trainer.get("loss_type", ["sigmoid"]))


def _check_dpo(tree: Tree, trainer: dict[str, Any], losses: list[str]) -> None:
    if not losses:
        raise tree.error("trainer.loss_type", "found an empty list, expected a loss, for example [sigmoid]")
    if trainer.get("loss_weights") and not any(trainer["loss_weights"]):
        raise tree.error("trainer.loss_weights", "found weights of 0 alone, which teach nothing")
    if "exo_pair" in losses and not trainer.get("label_smoothing"):
        raise tree.error("trainer.label_smoothing", "exo_pair needs it above 0, for example 0.001")
    diverging = set("sigmoid sigmoid_norm hinge ipo exo_pair robust discopop sft".split())
    if trainer.get("f_divergence_type", "reverse_kl") != "reverse_kl" and (others := set(losses) - diverging):
        raise tree.error(
            "trainer.f_divergence_type",
            f"found {trainer['f_divergence_type']}, which has no meaning for {', '.join(sorted(others))}; expected reverse_kl",
        )
    if trainer.get("use_weighting") and {"aot", "aot_unpaired"} & set(losses):
        raise tree.error(
            "trainer.use_weighting", "weighs pairs, which aot and aot_unpaired take apart; take it out"
        )
    if trainer.get("sync_ref_model"):
        raise tree.error(
            "trainer.sync_ref_model", "the reference is the frozen sft adapter, which stays as it is"
        )


def _check_best(tree: Tree, job: Job) -> None:
    metric, strategy = job.trainer.get("metric_for_best_model"), job.trainer.get("eval_strategy", "no")
    known = [f"eval_{name}" for name in gates.HELD_OUT[job.stage].split()]
    if metric is None or f"eval_{metric.removeprefix('eval_')}" not in known:
        raise tree.error(
            "trainer.metric_for_best_model",
            f"found {show(metric)}, expected one of {', '.join(known)}",
        )
    if strategy == "no":
        raise tree.error(
            "trainer.save_strategy", "found best without trainer.eval_strategy: type =steps or =epoch"
        )


def _check_inference(tree: Tree, args: Any) -> None:
    if 0 < args.temperature < 1e-6:
        raise tree.error("trainer.temperature", f"found {args.temperature}, expected 0 or 0.000001 or more")
    if args.min_new_tokens >= args.response_length:
        raise tree.error(
            "trainer.min_new_tokens", f"found {args.min_new_tokens}, expected less than response_length"
        )


def _check_run(tree: Tree, job: Job) -> None:
    run = job.run
    if run.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run.name):
        raise tree.error(
            "run.name",
            f"found {show(run.name)}, expected letters, digits, `.`, `_` and `-`: it names a folder below run.storage_path",
        )
    if run.name in ("data", "artifacts", "report", "mlflow.db"):
        raise tree.error(
            "run.name",
            f"found {show(run.name)}, where run.storage_path keeps things of all runs; expected another name, "
            f"for example {job.stage}-{run.name}",
        )


def _check_mlflow(tree: Tree, job: Job) -> None:
    mlflow = job.mlflow
    name = mlflow.registered_model
    if name is not None and not re.fullmatch(NAME, name):
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
    for key, name in names:
        if name is None:
            continue
        if name.startswith("models:") and not re.fullmatch(rf"models:/{NAME}(@[\w-]+|/[0-9]{{1,9}})", name):
            raise tree.error(
                key,
                f"found {show(name)}, expected models:/NAME@ALIAS or models:/NAME/VERSION, for example models:/rlhf-sft@champion",
            )
        if name.startswith("python:") and not re.fullmatch(r"python:[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
            raise tree.error(
                key,
                f"found {show(name)}, expected python:MODULE:FUNCTION, for example python:pipeline.demo:gold",
            )
        if key not in ("policy", "baseline") and re.fullmatch(
            r"(?!python:)[A-Za-z_][\w.]*:[A-Za-z_]\w*", name
        ):
            raise tree.error(key, f"found {show(name)}; for a Python function type python:{name}")
        if name.startswith("python:") and key in ("policy", "baseline"):
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
    if job.reward and (not isinstance(job.reward, str) or job.reward.startswith("python:")):
        raise tree.error(
            "reward",
            f"found {show(job.reward)}, expected one reward adapter: models:/rlhf-rm@champion, or its folder",
        )


def warnings(job: Job) -> Iterator[str]:
    """What may be meant, but often is not: a line each, for the run to print before it starts."""
    yield from gates.unmeasured(job)
    if "data.train" in job.overridden and "data.eval" not in job.overridden and job.data.eval:
        yield (
            f"data.train comes from the command line, but data.eval is still the job file's {show(job.data.eval)}: those rows "
            "judge the run. To hold out a tenth of your own, type data.eval=null data.eval_fraction=0.1"
        )


CHECKS = (
    _check_unused,
    bounds.check,
    _check_model,
    _check_lora,
    _check_data,
    _check_trainer,
    _check_batches,
    scaling.check,
    _check_run,
    _check_mlflow,
    gates.check,
    _check_inputs,
)
