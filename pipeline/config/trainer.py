"""The `trainer` section: combinations that PPOConfig or TRL's trainers would refuse in a worker, ignore, or fail on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pipeline.config import library_keys, scaling, schema
from pipeline.config.jobfile import Tree
from pipeline.config.stages import STAGE
from pipeline.errors import show

if TYPE_CHECKING:
    from pipeline.config import Job

# Of torch.utils.checkpoint and transformers; `selective` is TRL's for sft.
CHECKPOINTING = ("use_reentrant", "preserve_rng_state", "early_stop", "selective")


def check(tree: Tree, job: Job) -> None:
    """Refuses values that exclude each other, fail in a worker, or do not fit the number of workers."""
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
        _check_rollout(tree, job)
        _check_inference(tree, job.args)
    if job.stage == "collect":
        _check_collect(tree, job.args)
    _check_batches(tree, job)


def _check_ppo(tree: Tree, job: Job) -> None:
    from pipeline.ppo.settings import SettingError

    try:
        args = job.args
    except SettingError as error:
        raise tree.error(f"trainer.{error.key}", error.message) from None
    _check_rollout(tree, job)
    prompts, workers = args.batch_size // args.num_generations, job.workers[1]
    if prompts < workers:
        raise tree.error(
            "trainer.batch_size",
            f"found {args.batch_size}, which is {prompts} prompt{'s' * (prompts > 1)} an update for {workers} workers; "
            f"expected at least trainer.batch_size={workers * args.num_generations}",
        )


def _check_rollout(tree: Tree, job: Job) -> None:
    from pipeline.ppo.settings import SettingError

    try:
        job.rollout_config  # noqa: B018 - it raises
    except SettingError as error:
        raise tree.error(f"rollout.{error.key}", error.message) from None


def _check_trl(tree: Tree, job: Job) -> None:
    """Refuses what TRL's trainers would refuse in a worker, or silently ignore."""
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
    if trainer.get("save_strategy") == "best":
        raise tree.error(
            "trainer.save_strategy",
            "found best, which leaves a stopped run little to continue from; expected steps or epoch. run.keep=best registers "
            "the best step, whenever checkpoints are written",
        )
    if trainer.get("sync_ref_model"):
        raise tree.error(
            "trainer.sync_ref_model", "the reference is the frozen sft adapter, which stays as it is"
        )
    if job.stage == "dpo":
        _check_dpo(tree, trainer, trainer.get("loss_type", ["sigmoid"]))
    if job.stage == "kto":
        _check_kto(tree, trainer)


def _check_dpo(tree: Tree, trainer: dict[str, Any], losses: list[str]) -> None:
    if not losses:
        raise tree.error("trainer.loss_type", "found an empty list, expected a loss, for example [sigmoid]")
    if trainer.get("loss_weights") and not any(trainer["loss_weights"]):
        raise tree.error("trainer.loss_weights", "found weights of 0 alone, which teach nothing")
    if "exo_pair" in losses and not trainer.get("label_smoothing"):
        raise tree.error("trainer.label_smoothing", "exo_pair needs it above 0, for example 0.001")
    for key, users in (("label_smoothing", "robust exo_pair aot aot_unpaired"), ("discopop_tau", "discopop")):
        if (
            key in trainer
            and trainer[key] != schema.keys(STAGE["dpo"].trainer)[key].get("default")
            and not set(users.split()) & set(losses)
        ):
            raise tree.error(
                f"trainer.{key}",
                f"found {trainer[key]}, which {', '.join(losses)} has no use for; it belongs to {', '.join(users.split())}",
            )
    diverging = set("sigmoid sigmoid_norm hinge ipo exo_pair robust discopop sft".split())
    if trainer.get("f_divergence_type", "reverse_kl") != "reverse_kl" and (others := set(losses) - diverging):
        raise tree.error(
            "trainer.f_divergence_type",
            f"found {trainer['f_divergence_type']}, which has no meaning for {', '.join(sorted(others))}; expected reverse_kl",
        )
    if trainer.get("use_weighting") and {"aot", "aot_unpaired"} & set(losses):
        raise tree.error(
            "trainer.use_weighting", "needs paired losses, and aot and aot_unpaired are not; take it out"
        )


def _check_kto(tree: Tree, trainer: dict[str, Any]) -> None:
    if not trainer.get("desirable_weight", 1.0) and not trainer.get("undesirable_weight", 1.0):
        raise tree.error("trainer.desirable_weight", "found weights of 0 alone, which teach nothing")
    if trainer.get("loss_type", "kto") != "kto":
        return
    if trainer.get("per_device_train_batch_size", 8) < STAGE["kto"].fewest_rows:
        raise tree.error(
            "trainer.per_device_train_batch_size",
            "found 1: the kto loss needs the completions of other rows for its KL term; expected 2 or more, or "
            "trainer.loss_type=apo_zero_unpaired, which has none",
        )
    if trainer.get("precompute_ref_log_probs"):
        raise tree.error(
            "trainer.precompute_ref_log_probs",
            "each epoch pairs other rows for the KL term, whose log-probs cannot be known before; take it out",
        )


def _check_inference(tree: Tree, args: Any) -> None:
    if 0 < args.temperature < 1e-6:
        raise tree.error("trainer.temperature", f"found {args.temperature}, expected 0 or 0.000001 or more")
    if args.min_new_tokens >= args.response_length:
        raise tree.error(
            "trainer.min_new_tokens", f"found {args.min_new_tokens}, expected less than response_length"
        )


def _check_collect(tree: Tree, args: Any) -> None:
    if args.select != "best" and args.num_generations < 2:
        raise tree.error(
            "trainer.num_generations",
            f"found {args.num_generations}: a pair needs two completions; expected 2 or more, for example 4, or "
            "trainer.select=best",
        )
    if args.temperature == 0 and args.num_generations > 1:
        raise tree.error(
            "trainer.temperature",
            f"found 0, with which the {args.num_generations} completions of a prompt are all the same; expected a temperature "
            "above 0, for example 1.0",
        )
    if args.select == "best" and args.min_margin:
        raise tree.error("trainer.min_margin", "trainer.select=best makes no pairs; take it out")
    if args.skip_prompts and args.num_prompts is None:
        raise tree.error(
            "trainer.skip_prompts",
            "goes with trainer.num_prompts, of the order in which prompts are drawn; without it all are used",
        )


def _check_batches(tree: Tree, job: Job) -> None:
    """data.batch_size = per_device_train_batch_size * workers * accumulation must hold for every possible worker count."""
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
        schema.keys(STAGE[job.stage].trainer)["per_device_train_batch_size"]["default"],
    )
    step = device * low
    for count in range(low + 1, high + 1):
        step = math.lcm(step, device * count)
        if step > library_keys.LARGEST_BATCH:  # it doubles and trebles with further workers
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
