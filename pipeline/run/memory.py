"""Adds to out-of-memory errors the phase in which memory ran out, and the settings to change."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.errors import OutOfMemory, in_brief, is_out_of_memory
from pipeline.job import schema
from pipeline.settle.work import Work

# {name of a function in the traceback: phase of the run}. PPO's errors already contain the phase.
PARTS = {"load_base": "loading the base", "training_step": "update", "evaluation_loop": "evaluate"}
ROLLOUT = ("rollout", "score", "values", "evaluate")  # phases without gradients


@contextmanager
def memory_errors_explained(work: Work) -> Iterator[None]:
    """Turns out-of-memory errors of torch or Python in the block into OutOfMemory, which names the settings to change."""
    try:
        yield
    except OutOfMemory as error:  # PPO has raised this error, which contains the phase
        raise OutOfMemory(error.phase, error.detail, memory_advice(work, error.phase)) from error
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        names = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        phase = next((part for name, part in PARTS.items() if name in names), "")
        raise OutOfMemory(phase, in_brief(error), memory_advice(work, phase)) from error


def memory_advice(work: Work, phase: str) -> str:
    """Returns the settings to change, each with its current value. Changes that affect the run least come first."""
    spec, loading, lighter, new_run = work.spec, phase == "loading the base", [], []
    if not loading:
        lighter += _halved(work, _limit(work, phase))
        new_run += _switched(work, "trainer.bf16", True)
    if spec.learns and not loading and phase not in ROLLOUT:
        if work.trainer.get("gradient_checkpointing", False) is None:  # the run has chosen the value
            lighter += ["trainer.gradient_checkpointing=true (now null)"]
        lighter += _switched(work, "trainer.gradient_checkpointing", True)
    new_run += _switched(work, "model.dtype", "bfloat16")
    if not work.model.fsdp:  # a sharded base cannot be quantized
        new_run += _switched(work, "model.load_in_4bit", True)
    advice = [f"set, in this order, {', '.join(lighter)}"] if lighter else []
    advice += [f"if that fails, start a new run with {', '.join(new_run)}"] if new_run else []
    advice += [f"`make plan JOB={work.identity.source}` computes which settings fit"] if spec.learns else []
    return "; ".join(advice)


def _limit(work: Work, phase: str) -> str:
    """Returns the key of `trainer` that limits the rows or tokens of a forward pass in this phase."""
    if work.spec.trl:
        return f"per_device_{'eval' if phase == 'evaluate' else 'train'}_batch_size"
    if not work.spec.learns or phase in ("rollout", "evaluate"):
        return "local_rollout_forward_batch_size"
    if phase in ("score", "values") or work.args.max_tokens_per_micro_batch:
        return "max_tokens_per_micro_batch"
    return "per_device_train_batch_size"


def _halved(work: Work, key: str) -> list[str]:
    now = _value(work, key)
    # if the key is null, the free memory decides
    if now is None and key == "local_rollout_forward_batch_size":
        now = work.args.planned_rows(work.places.workers.fewest)
    if now is None and key == "max_tokens_per_micro_batch":
        from pipeline.scoring.forward import FORWARD_TOKENS

        limit = FORWARD_TOKENS["cuda" if work.places.on_gpu else "cpu"]
        # The key also limits training, so the proposed value is at most the tokens of a training step.
        training = work.args.per_device_train_batch_size * (work.data.max_length or 0) or limit
        return [f"trainer.{key}={min(limit // 2, training)} (now null: {limit} without gradients)"]
    return [f"trainer.{key}={now // 2} (now {now})"] if isinstance(now, int) and now > 1 else []


def _switched(work: Work, key: str, to: Any) -> list[str]:
    section, name = key.split(".")
    now = _value(work, name) if section == "trainer" else getattr(work.model, name)
    if now is None or now == to or (key == "model.dtype" and now != "float32"):
        return []
    return [f"{key}={str(to).lower()} (now {str(now).lower()})"]


def _value(work: Work, name: str) -> Any:
    """Returns a key of the `trainer` section or its default, or None if the stage has no such key."""
    known = schema.keys(work.spec.trainer)
    return work.trainer.get(name, known.get(name, {}).get("default"))
