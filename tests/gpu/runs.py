"""Helpers that run commands of the pipeline on pretended GPUs, in separate processes or on Ray."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from unittest import mock

# isort: off
from tools.gpu.pretend import branches  # imported before pipeline/, to instrument its modules
# isort: on

import pytest
import resumed
import served
import torch

from pipeline.job import load_job
from pipeline.run import roles
from pipeline.run.model_host import load_model_host
from pipeline.run.session import embedded_ray
from pipeline.serving import models
from pipeline.writing.memory import GIB
from tools.gpu.pretend import worker
from tools.gpu.pretend.command import machine, run


def run_cut(arguments: list[str], step: int) -> dict[str, Any]:
    """Makes a command fail after it has saved this step's checkpoint, and then runs the command again."""
    with pytest.MonkeyPatch.context() as patch:
        resumed.interrupted(patch, arguments[0], step)
        assert run(arguments)["status"] == 1
    return run(arguments)


def with_output(
    statements: str, gpus: int, work: Callable[..., dict[str, Any]], *args: Any
) -> dict[str, Any]:
    """Returns the result of `work(*args)` on a machine with GPUs, plus the printed text as `output`.

    Args:
        statements: file to which executed statements are added (branches.FILE).
    """
    os.environ[branches.FILE] = statements
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output), machine(gpus):
        found = work(*args)
    return {**found, "output": output.getvalue()}


def run_on_ray(arguments: list[str]) -> dict[str, Any]:
    """Runs a command whose workers are separate Ray processes."""
    with ray():
        return run(arguments)


def served_answer(storage: Path, *keys: str) -> dict[str, Any]:
    """Starts `serve`, sends one request, and returns the answer."""
    with ray(), served.served(storage, *keys) as server:
        status, answer = served.chat(server.url, max_tokens=8)
        return {"status": status, "answer": answer}


def options_of_vllm(verb: str, keys: list[str], free: int) -> dict[str, Any]:
    """Returns the options that ppo or serve passes to a fake vLLM if `free` GiB of the GPU's 80 GiB are free."""
    passed: dict[str, Any] = {}

    def started(*_: Any, **options: Any) -> Any:
        passed.update(options, gpus=os.environ["CUDA_VISIBLE_DEVICES"])
        return mock.MagicMock()

    stands = {name: ModuleType(name) for name in ("vllm", "vllm.config", "vllm.config.lora")}
    for name, module in stands.items():
        module.__spec__ = ModuleSpec(name, None)
    stands["vllm"].LLM = started  # type: ignore[attr-defined]
    stands["vllm.config.lora"].MaxLoRARanks = Literal[8, 16]  # type: ignore[attr-defined]
    with (
        mock.patch.dict(sys.modules, stands),
        mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="3,1"),
        mock.patch.object(torch.cuda, "mem_get_info", lambda *_: (free * GIB, 80 * GIB)),
        mock.patch.object(roles, "VllmDecoder"),
        mock.patch.object(models, "VllmDecoder"),
    ):
        host = load_model_host(load_job(f"jobs/demo/{verb}.yaml", keys, verb))
        if verb == "serve":
            models._vllm(host)
        else:
            with roles.vllm_decoder(host, roles.shared_base(host), [None], longest=24, rows=16):
                pass
    return {key: passed[key] for key in ("gpu_memory_utilization", "gpus")}


@contextmanager
def ray() -> Iterator[None]:
    """Starts an embedded Ray, whose workers also pretend to have GPUs."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # an empty value would hide the GPU from Ray
    for wait in ("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"):
        os.environ[wait] = "300"  # timeout in seconds; each process needs time to import torch
    hook = {"worker_process_setup_hook": f"{worker.__name__}.begin"}
    with embedded_ray(num_cpus=4, num_gpus=worker.GPUS, runtime_env=hook):
        yield
