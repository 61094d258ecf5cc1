"""Checks results on one GPU, and measures speed and memory.

    make gpu                                all experiments, in at most 25 minutes
    make gpu ARGS="checks-nf4 decode-bf16"  some of them
    make gpu PRETEND=1                      all of them with tiny models on a pretended GPU: the code for CUDA runs on a CPU
    python -m tools.gpu [NAME ...] [--out FOLDER]      from the root of the repository

The experiments need torch, transformers and peft. Some experiments also need bitsandbytes, Ray with TRL and MLflow, or vLLM.
Weights are random, and nothing is downloaded. Each experiment runs in its own process, so the others continue if one fails. After
each experiment, gpu.md and gpu.json in FOLDER (runs/gpu) have the results. The exit status is 1 if an experiment failed, and 2
for an unknown name. docs/gpu.md describes the experiments.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

if os.environ.get("PRETEND"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import multiprocessing

from pipeline.ppo.trainer import PPOTrainer
from tools.gpu import correct, decoding, models, pretend, training
from tools.gpu.record import Record, Skipped, markdown

TOTAL_MINUTES = 25
LIMIT_S = 480  # time limit of one experiment


def machine(record: Record) -> None:
    """Compares the speed of a large product of bf16 matrices with the datasheet."""
    from pipeline.models.gpus import peak_flops

    size = models.small(8192, 256)
    weight = torch.randn(size, size, device=models.DEVICE, dtype=torch.bfloat16)
    tflops = 2 * size**3 / models.timed(lambda: weight @ weight, 20, 3) / 1e12
    record.row(bf16_TFLOPs=tflops, tf32=torch.get_float32_matmul_precision())
    sheet = 0 if models.PRETEND else (peak_flops(models.DEVICE) or 0) / 1e12
    limit = (
        f"at least half of the datasheet's {sheet:.0f} TFLOP/s"
        if sheet
        else "any speed: no datasheet is known"
    )
    record.check(limit, tflops, 2 * tflops >= sheet)


# the experiments that check results run before the measurements
EXPERIMENTS: dict[str, Callable[[Record], None]] = {
    "machine": machine,
    **{f"checks-{name}": partial(correct.self_checks, precision=name) for name in models.PRECISIONS},
    "cpu-and-gpu": correct.cpu_and_gpu,
    "collectives": correct.collectives,
    "fp32-logits": correct.fp32_logits,
    "nf4-load": correct.nf4_load,
    "lora-forward": partial(decoding.fused_lora, backward=False),
    "lora-backward": partial(decoding.fused_lora, backward=True),
    **{
        f"{what}-{name}": partial(experiment, precision=name)
        for name in ("bf16", "nf4")
        for what, experiment in {
            "ppo": training.ppo,
            "rm": training.reward_model,
            "sft": training.supervised,
            "decode": decoding.rows_at_once,
            "graphs": decoding.cuda_graphs,
        }.items()
    },
    "ppo-70b-nf4": training.ppo_70b,
    "with-ray-and-trl": training.installed_pipeline,
    "with-vllm": training.installed_vllm,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of gpu.md and gpu.json")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in EXPERIMENTS]:
        parser.error(f"no experiment {', '.join(unknown)}; there are {', '.join(EXPERIMENTS)}")
    if not (models.PRETEND or torch.cuda.is_available()):
        parser.error("there is no GPU that torch can use; to rehearse on a CPU, set PRETEND=1")
    options.out.mkdir(parents=True, exist_ok=True)
    here, records = isolated(LIMIT_S, describe_machine), list[Record]()
    end = time.monotonic() + 60 * TOTAL_MINUTES
    for name in options.names or EXPERIMENTS:
        left = end - time.monotonic()
        try:
            record = Record(name, skipped=f"{TOTAL_MINUTES} minutes are over")
            if left >= 30:
                record = isolated(min(left, LIMIT_S), run, name)
        except RuntimeError as error:
            record = Record(name, error=str(error))
        records.append(record)
        print(f"{record.outcome:<8} {name:<16} {record.seconds:6.1f} s  {record.reason}", flush=True)
        (options.out / "gpu.md").write_text(markdown(here, records), encoding="utf-8")
        experiments = [{"outcome": one.outcome, **asdict(one)} for one in records]
        results = json.dumps({"machine": here, "experiments": experiments}, indent=1, default=str)
        (options.out / "gpu.json").write_text(results, encoding="utf-8")
    counts = Counter(record.outcome for record in records)
    numbers = f"{counts['passed']} passed, {counts['skipped']} skipped, {counts['FAILED']} failed"
    print(f"\n{numbers}; {options.out}/gpu.md", flush=True)
    return 1 if counts["FAILED"] else 0


def describe_machine() -> dict[str, Any]:
    """Returns the device, its memory, the installed versions, and the date."""
    properties = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {
        "device": f"{'pretended ' * models.PRETEND}{properties.name}",
        "GiB": round(properties.total_memory / models.GIB, 1),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    for package in ("torch", "transformers", "peft", "bitsandbytes", "trl", "ray", "vllm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "-"
    return found


def run(name: str) -> Record:
    """Runs one experiment and returns its record, even if it fails."""
    warnings.simplefilter("ignore", FutureWarning)  # warnings of transformers
    warnings.filterwarnings("ignore", module="peft")  # peft warns of several adapters on one base
    if models.PRETEND:
        torch.set_num_threads(1)  # for tiny matrix products, several threads are slower than one
    record, start = Record(name), time.perf_counter()
    try:
        torch.manual_seed(0)
        with counted_host_reads(record) if models.PRETEND else nullcontext():
            EXPERIMENTS[name](record)
    except Skipped as reason:
        record.skipped = str(reason)
    except Exception:
        record.error = traceback.format_exc()[-3000:]
    record.seconds = time.perf_counter() - start
    return record


def isolated(seconds: float, work: Callable[..., Any], *args: Any, method: str | None = None) -> Any:
    """Runs `work(*args)` in a separate process and returns its result.

    The end of the process frees its GPU memory and clears CUDA errors.

    Args:
        method: start method of multiprocessing. By default, a pretended GPU uses `fork`, because libraries are then loaded
            already. A real GPU uses `spawn`, because CUDA does not work in a fork.

    Raises:
        RuntimeError: if the process dies or exceeds `seconds`.
    """
    context = multiprocessing.get_context(method or ("fork" if models.PRETEND else "spawn"))
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
        process.kill()
        process.join()


def _send(pipe: Any, work: Callable[..., Any], *args: Any) -> None:
    with pretend.cuda() if models.PRETEND else nullcontext():
        pipe.send(work(*args))


@contextmanager
def counted_host_reads(record: Record) -> Iterator[None]:
    """Records how often the host waited for the pretended GPU, in each PPO update and in the full experiment."""
    run_update = PPOTrainer.run_update

    def add_row(during: str, reads: Counter[str], **more: Any) -> None:
        record.row(host_reads=reads.total(), during=during, by=dict(reads.most_common()), **more)

    def counted(trainer: PPOTrainer, *args: Any) -> Any:
        before = Counter(pretend.host_reads)
        metrics = run_update(trainer, *args)
        add_row(f"update {trainer.update}", pretend.host_reads - before)
        return metrics

    with mock.patch.object(PPOTrainer, "run_update", counted):
        yield
    add_row("the experiment", pretend.host_reads, replays=pretend.machine.replays)
