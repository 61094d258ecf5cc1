"""Asks TRL and peft whether they accept a job: builds their config objects, an optimizer and a schedule from it.

    with libraries.asked(job) as check:       # a child process begins to import them
        ...                                   # Ray starts meanwhile
        check()                               # InputError if one of them rejects its section

They take 5 seconds to import, the driver needs neither, and they have side effects on a process (devices, environment).
If this process has loaded them already, as a notebook has, it asks them itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.errors import InputError, show, visible
from pipeline.job.job import Job
from pipeline.job.stages import STAGE
from pipeline.system import console

LOADED = ("trl.trainer.base_config", "transformers.trainer", "peft")
_asked: set[str] = set()  # requests about which this process has asked already
_parent_asked = False


@contextlib.contextmanager
def asked(*jobs: Job) -> Iterator[Callable[[], None]]:
    """Yields a function that waits for the answer about these jobs, and raises InputError for the first rejected one.

    If a job runs on Ray, another process imports the libraries meanwhile. If all jobs run in this process, the function
    imports them. Jobs that an outer block has asked about are not asked about again.
    """
    requests = [one for job in jobs if (one := _request(job)) and one not in _asked and not _parent_asked]
    process = None
    on_ray = not all(job.in_process for job in jobs)
    if requests and on_ray and not all(module in sys.modules for module in LOADED):
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *requests],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def check() -> None:
        if process:
            printed, errors = process.communicate()
            if process.returncode:
                raise RuntimeError(
                    f"cannot ask TRL and peft: exit status {process.returncode}\n{errors[-3000:]}"
                )
            reasons = json.loads(printed.splitlines()[-1])
        else:
            if requests and not on_ray:  # the run is in this process, which needs the libraries anyway
                load()
            reasons = [problem(json.loads(one)) for one in requests]
        if reason := next(filter(None, reasons), None):
            raise InputError(reason)

    _asked.update(requests)
    try:
        yield check
    except BaseException:
        _asked.difference_update(requests)
        raise
    finally:
        if process is not None:
            process.kill()
            process.communicate()


def load() -> None:
    """Imports the libraries in this process. Without garbage collection, which takes a quarter of the time."""
    console.silence_libraries()
    gc.disable()
    try:
        for module in LOADED:
            importlib.import_module(module)
    finally:
        gc.freeze()  # the collector then skips all modules
        gc.enable()


def trust_the_parent() -> None:
    """Records that the parent process has asked about all jobs of this process."""
    global _parent_asked
    _parent_asked = True


def _request(job: Job) -> str | None:
    """Returns the request about a job as JSON, or None if TRL and peft have no part in it."""
    facts = job.facts
    trainer = job.trainer if facts.trl else {}
    if not facts.trl and not (facts.learns and job.lora):
        return None
    given = {"stage": job.stage, "source": job.source, "lora": job.lora, "trainer": trainer}
    return json.dumps(given | {"use_gpu": bool(job.scaling.get("use_gpu"))})


# ---------------------------------------------------------------- in the process that has loaded them


def problem(asked: dict[str, Any]) -> str | None:
    """Returns why peft or TRL rejects a section of the job, naming the key, or None."""
    for section, make in (("lora", _lora), ("trainer", _trainer)):
        values = asked[section]
        by_default = section == "trainer" and STAGE[asked["stage"]].trl  # TRL's default bf16 needs a GPU
        if not (values or by_default) or (error := _rejected(make, asked, values)) is None:
            continue
        owner = "peft.LoraConfig" if section == "lora" else STAGE[asked["stage"]].trainer.rpartition(".")[2]
        reason = f"{owner} says: {visible(' '.join(str(error).split())[:500])}"
        where = f"{asked['source']}: {section}"
        # The error names the key without which the libraries accept the rest.
        for key in values:
            if _rejected(make, asked, {k: v for k, v in values.items() if k != key}) is None:
                return f"{where}.{key}: found {show(values[key])}; {reason}"
        return f"{where}: {reason}"
    return None


def _rejected(make: Callable[..., object], asked: dict[str, Any], values: dict[str, Any]) -> Exception | None:
    try:
        make(asked, values)
    except Exception as error:  # libraries raise errors of any type
        return error
    return None


def _lora(_: dict[str, Any], values: dict[str, Any]) -> None:
    from peft import LoraConfig

    LoraConfig(task_type="CAUSAL_LM", **values)


def _trainer(asked: dict[str, Any], values: dict[str, Any]) -> None:
    """Builds the stage's arguments, optimizer and schedule as a worker does, for one parameter."""
    import torch
    from transformers import Trainer, get_scheduler

    module, _, name = STAGE[asked["stage"]].trainer.rpartition(".")
    if asked["use_gpu"]:  # this machine may have no GPU
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


if __name__ == "__main__":
    print(json.dumps([problem(json.loads(one)) for one in sys.argv[1:]]))
