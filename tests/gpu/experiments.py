"""The experiments by name, and how one runs: in a process of its own, to a record of whatever came of it."""

from __future__ import annotations

import os
import platform
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import multiprocessing

from tests.gpu import correct, decoding, models, training
from tests.gpu.record import Record, Skipped

Experiment = Callable[[Record], None]


def experiments() -> dict[str, Experiment]:
    """All experiments by name, in their order: first whether it is right, then what is measured."""
    table: dict[str, Experiment] = {"machine": machine}
    table |= {f"doctor-{name}": partial(correct.doctors, precision=name) for name in models.PRECISIONS}
    table |= {
        "cpu-and-gpu": correct.cpu_and_gpu,
        "two-ranks": correct.ranks,
        "collectives": correct.collectives,
        "random-state": correct.random_state,
        "fp32-logits": correct.fp32_logits,
        "nf4-load": correct.nf4_load,
        "out-of-memory": correct.out_of_memory,
        "cache-memory": decoding.cache_memory,
        "lora-forward": partial(decoding.fused_lora, backward=False),
        "lora-backward": partial(decoding.fused_lora, backward=True),
    }
    for name in ("bf16", "nf4"):
        table |= {
            f"ppo-{name}": partial(training.ppo, precision=name),
            f"rm-{name}": partial(training.reward_model, precision=name),
            f"sft-{name}": partial(training.supervised, precision=name),
            f"decode-{name}": partial(decoding.rows_at_once, precision=name),
            f"graphs-{name}": partial(decoding.cuda_graphs, precision=name),
        }
    return table | {
        "ppo-70b-nf4": training.ppo_70b,
        "with-ray-and-trl": training.installed_pipeline,
        "with-vllm": training.installed_vllm,
    }


def machine(record: Record) -> None:
    """The speed of a large product of bf16 matrices, against the datasheet."""
    from pipeline.models.gpus import peak_flops

    size = models.small(8192, 256)
    weight = torch.randn(size, size, device=models.DEVICE, dtype=torch.bfloat16)
    tflops = 2 * size**3 / models.timed(lambda: weight @ weight, 20, 3) / 1e12
    record.row(bf16_TFLOPs=tflops, tf32=torch.get_float32_matmul_precision())
    record.check("a product of bf16 matrices", f"{tflops:.3g} TFLOP/s", tflops > 0)
    if sheet := peak_flops(models.DEVICE):
        sheet /= 1e12
        record.check(f"half of the datasheet's {sheet:.0f} TFLOP/s", tflops, 2 * tflops >= sheet)


def about() -> dict[str, Any]:
    """The device, its memory, the versions of what is installed, and the date."""
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {"device": f"CPU rehearsal ({platform.machine()}, {os.cpu_count()} cores)"}
    if models.CUDA:
        properties = torch.cuda.get_device_properties(0)
        found = {"device": properties.name, "GiB": round(properties.total_memory / models.GIB, 1)}
        found["cuda"] = torch.version.cuda
    found |= {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    for package in ("torch", "transformers", "peft", "bitsandbytes", "trl", "ray", "vllm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "-"
    return found


def run(name: str) -> Record:
    """The record of one experiment, whatever comes of it."""
    warnings.simplefilter("ignore", FutureWarning)  # transformers'
    warnings.filterwarnings("ignore", module="peft")  # a base with several adapters is what is wanted here
    if models.SMALL:
        torch.set_num_threads(1)  # tiny products: several threads would only wait for each other
    record, start = Record(name), time.perf_counter()
    try:
        torch.manual_seed(0)
        experiments()[name](record)
    except Skipped as reason:
        record.skipped = str(reason)
    except Exception:
        record.error = traceback.format_exc()[-3000:]
    record.seconds = time.perf_counter() - start
    return record


def isolated(seconds: float, work: Callable[..., Any], *args: Any, method: str = "spawn") -> Any:
    """What `work(*args)` returns, in a process of its own: none of its memory, and no fault of CUDA, is left behind.

    Args:
        method: of multiprocessing. `fork` finds libraries loaded already; after a fork CUDA cannot be used.

    Raises:
        RuntimeError: when the process dies, or takes more than some seconds.
    """
    context = multiprocessing.get_context(method)
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(send, work, *args))
    process.start()
    send.close()
    try:
        if receive.poll(seconds):
            return receive.recv()
        raise RuntimeError(f"killed after {seconds:.0f} s")
    except EOFError:
        process.join()
        raise RuntimeError(f"the process died with exit status {process.exitcode}") from None
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def _send(pipe: Any, work: Callable[..., Any], *args: Any) -> None:
    pipe.send(work(*args))
