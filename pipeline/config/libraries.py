"""Asks TRL and peft whether they accept a job: builds their config objects, an optimizer and a schedule from it.

    with libraries.asked(job) as check:       # a process of its own begins to import them
        ...                                   # Ray starts meanwhile
        check()                               # InputError, if one of them refuses its section

They take 5 seconds to import, the driver needs neither, and their side effects on a process (devices, environment) are
kept out of it. Where they are loaded already, as in a notebook, they are asked in this process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pipeline.config.stages import STAGE
from pipeline.errors import InputError, printable, show

if TYPE_CHECKING:
    from pipeline.config import Job

STEPS = 1_000_000  # of the schedule that is tried, where the job does not say
LOADED = ("trl.trainer.base_config", "transformers.trainer", "peft")
_answers: dict[str, str | None] = {}  # by request: why a section is refused, or None
_running: dict[str, subprocess.Popen[str]] = {}


@contextlib.contextmanager
def asked(*jobs: Job) -> Iterator[Callable[[], None]]:
    """A function that waits for the answers about these jobs, and raises InputError for the first that is refused.

    All jobs of one call are asked about together, so the first to wait also reports what is wrong with the last.
    """
    requests = [request for job in jobs if (request := _request(job))]
    new = [one for one in dict.fromkeys(requests) if one not in _answers and one not in _running]
    process = None
    if new and all(module in sys.modules for module in LOADED):
        _answers.update({one: problem(json.loads(one)) for one in new})
    elif new:
        process = _start(new)
    try:
        yield lambda: _check(requests)
    finally:
        if process is not None:
            process.kill()  # nothing to be done where it has answered
            process.communicate()
            for one in new:
                _running.pop(one, None)


def load() -> None:
    """Imports them in this process, which `asked` then asks. Python's garbage collector would take a quarter of the time."""
    gc.disable()
    try:
        for module in LOADED:
            importlib.import_module(module)
    finally:
        gc.freeze()  # modules are never garbage
        gc.enable()


def accept(job: Job) -> None:
    """For a process whose parent has asked about this job already."""
    if request := _request(job):
        _answers[request] = None


def _request(job: Job) -> str | None:
    """What to ask about a job, as JSON; None if it has no section for TRL or peft."""
    facts = STAGE[job.stage]
    if not facts.learns:
        return None
    asked: dict[str, Any] = {"stage": job.stage, "source": job.source, "lora": job.lora}
    asked["use_gpu"] = bool(job.scaling.get("use_gpu"))
    if facts.trl:
        asked["trainer"] = job.trainer
    return json.dumps(asked) if asked.get("trainer") or job.lora else None


def _start(requests: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and _check says why
        process.stdin.write(json.dumps(requests))
        process.stdin.close()
    process.stdin = None
    _running.update(dict.fromkeys(requests, process))
    return process


def _check(requests: list[str]) -> None:
    answers: dict[str, str | None] = {}
    for one in requests:
        if one not in _answers:
            process = _running[one]
            printed, errors = process.communicate()
            if process.returncode:
                status = f"exit status {process.returncode}"
                raise RuntimeError(
                    f"the libraries could not be asked about the job: {status}\n{errors[-3000:]}"
                )
            printed_answers = json.loads(printed.splitlines()[-1])
            _answers.update(printed_answers)
            answers |= printed_answers
        answers[one] = _answers[one]
    if refused := next(filter(None, answers.values()), None):
        raise InputError(refused)


# ------------------------------------------------------------------------------------------- where they are loaded


def problem(asked: dict[str, Any]) -> str | None:
    """Why peft or TRL refuses a section of the job, naming the key; None: they take them."""
    prefix = f"{asked['source']}: " if asked.get("source") else ""
    for section, make in (("lora", _lora), ("trainer", _trainer)):
        values = asked.get(section) or {}
        error = _refused(make, asked, values) if section in asked else None
        if error is None:
            continue
        reason = printable(" ".join(str(error).split())[:500])
        # The key without which they take the rest.
        for key in values:
            if _refused(make, asked, {k: v for k, v in values.items() if k != key}) is None:
                return (
                    f"{prefix}{section}.{key}: found {show(values[key])}; {make(asked, None)} says: {reason}"
                )
        return f"{prefix}{section}: {make(asked, None)} says: {reason}"
    return None


def _refused(make: Callable[..., Any], asked: dict[str, Any], values: dict[str, Any]) -> Exception | None:
    try:
        make(asked, values)
    except Exception as error:  # whatever a library raises for values that it cannot take
        return error
    return None


def _lora(asked: dict[str, Any], values: dict[str, Any] | None) -> Any:
    from peft import LoraConfig

    return "peft.LoraConfig" if values is None else LoraConfig(task_type="CAUSAL_LM", **values)


def _trainer(asked: dict[str, Any], values: dict[str, Any] | None) -> Any:
    """The stage's arguments as a worker would make them, its optimizer and its schedule, on one parameter."""
    import torch
    from transformers import Trainer, get_scheduler

    module, _, name = STAGE[asked["stage"]].trainer.rpartition(".")
    if values is None:
        return name
    given = dict(values)
    if asked["use_gpu"]:  # this process may be on a machine without one
        given = {key: value for key, value in given.items() if key not in ("fp16", "fp16_full_eval", "tf32")}
        given["use_cpu"] = True
    config = getattr(importlib.import_module(module), name)
    with tempfile.TemporaryDirectory() as folder:
        args = config(output_dir=folder, report_to="none", disable_tqdm=True, max_length=None, **given)
    if args.use_liger_kernel:
        _require("liger_kernel")
    if args.torch_compile and args.torch_compile_backend not in (known := torch.compiler.list_backends(None)):
        raise ValueError(f"torch_compile_backend is one of {', '.join(known)}")
    made, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
        return args  # a factory, which needs the model
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = made([{"params": [parameter], "weight_decay": args.weight_decay}], **settings)
    steps = args.max_steps if args.max_steps > 0 else STEPS
    warmup = args.get_warmup_steps(steps)
    settings = dict(args.lr_scheduler_kwargs or {})
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, warmup, steps, settings)
    for rate in getattr(schedule, "lr_lambdas", ()):
        for step in sorted({0, 1, warmup, warmup + 1, (warmup + steps) // 2, steps - 1, steps}):
            share = rate(step)
            if isinstance(share, complex) or not math.isfinite(share) or not 0 <= share <= 1e6:
                raise ValueError(
                    f"at step {step} of {steps} the learning rate is {share} times learning_rate"
                )
    return args


def _require(package: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise ImportError(f"the package {package} is not installed here")


if __name__ == "__main__":
    requests = json.load(sys.stdin)
    print(json.dumps({one: problem(json.loads(one)) for one in requests}))
