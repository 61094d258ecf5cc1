"""Checks that TRL and peft accept the sections of a job, by building config objects before a worker starts.

Importing TRL and peft takes about 5 seconds.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

from pipeline.errors import InputError, escape_controls, show_value
from pipeline.job.job import Job
from pipeline.system import console

_checked_elsewhere = False


def skip_library_checks() -> None:
    """Disables `check_with_libraries` in this process, because the parent process has already checked all jobs."""
    global _checked_elsewhere
    _checked_elsewhere = True


def check_with_libraries(job: Job) -> None:
    """Raises InputError, with the key, if peft or TRL rejects a section of the job."""
    spec = job.spec
    if _checked_elsewhere or not (spec.trl or (spec.learns and job.lora)):
        return
    console.silence_libraries()
    import_libraries(spec.trl)
    if problem := find_rejection("lora", "peft.LoraConfig", _make_lora, job.lora):
        raise InputError(f"{job.source}: {problem}")
    if spec.trl:
        make = partial(_make_trainer_arguments, spec.trainer, bool(job.scaling.get("use_gpu")))
        if problem := find_rejection("trainer", spec.trainer.rpartition(".")[2], make, job.trainer):
            raise InputError(f"{job.source}: {problem}")


def import_libraries(trl: bool = True) -> None:
    """Imports peft, and TRL if `trl` is true. Garbage collection is off during the imports, because it would take a quarter of
    the time."""
    gc.disable()
    try:
        for module in ("peft", *(("trl.trainer.base_config", "transformers.trainer") if trl else ())):
            importlib.import_module(module)
    finally:
        gc.freeze()  # makes the garbage collector skip the imported modules from now on
        gc.enable()


def find_rejection(
    section: str, owner: str, make: Callable[[dict[str, Any]], object], values: dict[str, Any]
) -> str | None:
    """Returns why a library rejects a section, or None if it accepts the section. The reason starts with a key if the library
    accepts the section without this key."""
    if (error := _error_of(make, values)) is None:
        return None
    reason = f"{owner} says: {escape_controls(' '.join(str(error).split())[:500])}"
    for key in values:
        if _error_of(make, {k: v for k, v in values.items() if k != key}) is None:
            return f"{section}.{key}: found {show_value(values[key])}; {reason}"
    return f"{section}: {reason}"


def _error_of(make: Callable[[dict[str, Any]], object], values: dict[str, Any]) -> Exception | None:
    environment = dict(os.environ)
    try:
        make(values)
    except Exception as error:  # libraries raise many types of errors
        return error
    finally:
        # trainer.torch_compile sets variables that would compile the models of all later jobs.
        for key in os.environ.keys() - environment.keys():
            del os.environ[key]
        os.environ.update(environment)
    return None


def _make_lora(values: dict[str, Any]) -> None:
    from peft import LoraConfig

    LoraConfig(task_type="CAUSAL_LM", **values)


def _make_trainer_arguments(dotted: str, use_gpu: bool, values: dict[str, Any]) -> None:
    """Builds a TRL stage's training arguments, an optimizer with one parameter, and a schedule, to find invalid values."""
    import torch
    from transformers import Trainer, get_scheduler

    module, _, name = dotted.rpartition(".")
    if use_gpu:  # the workers have GPUs, but this machine may have none
        values = {k: v for k, v in values.items() if k not in ("fp16", "fp16_full_eval", "tf32")}
    config = getattr(importlib.import_module(module), name)
    with tempfile.TemporaryDirectory() as folder:
        args = config(
            output_dir=folder, report_to="none", disable_tqdm=True, max_length=None, use_cpu=True, **values
        )
    if args.use_liger_kernel and importlib.util.find_spec("liger_kernel") is None:
        raise ImportError("the package liger_kernel is not installed here")
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        return  # the optimizer is made by a factory, which needs the model
    optimizer = kind([torch.nn.Parameter(torch.zeros(2, 2))], **settings)
    steps = args.max_steps if args.max_steps > 0 else 1_000_000
    warmup = args.get_warmup_steps(steps)
    get_scheduler(args.lr_scheduler_type, optimizer, warmup, steps, dict(args.lr_scheduler_kwargs or {}))
