"""Experiments on decoding at 8B: rows at once, the fused adapter, CUDA graphs, and the memory of the cache."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from peft.tuners.lora.layer import Linear

from pipeline.models import lora
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.rows import Sampling
from tools.gpu import models
from tools.gpu.correct import distance, sampler_drift
from tools.gpu.models import CUDA, DEVICE, MEASURES, small
from tools.gpu.record import Record

ROWS = (2, 4) if models.SMALL else (64, 128, 256, 512)
PROMPT, STEPS = small(512, 8), small(64, 6)


def rows_at_once(record: Record, precision: str) -> None:
    """Measures milliseconds per decoding step and tokens per second by number of rows, for equal and different prompt lengths."""
    shared = models.shared_base(precision=precision, roles=["policy"])
    speed = {}
    for rows in ROWS:
        for shortest in (PROMPT, 7 * PROMPT // 8):
            models.fresh()
            prompts = models.prompts(rows, shortest, PROMPT)
            decoder = SlotDecoder(shared, rows, models.PAD)
            prefill, step = step_seconds(decoder, prompts)
            speed[rows, shortest] = rows / step
            figures = {"prefill_s": prefill, "ms_a_step": 1e3 * step, "tokens_s": rows / step}
            lengths = "one" if shortest == PROMPT else "different"
            record.row(rows=rows, lengths=lengths, **figures, peak_GiB=models.allocated())
    few, many = speed[ROWS[0], PROMPT], speed[ROWS[-1], PROMPT]
    record.check("all batches were decoded", f"{len(speed)}", len(speed) == 2 * len(ROWS))
    if MEASURES:
        record.check(f"{ROWS[-1]} rows: at least 2x the tokens/s of {ROWS[0]}", many / few, many >= 2 * few)


def step_seconds(decoder: SlotDecoder, prompts: list[list[int]]) -> tuple[float, float]:
    """Returns (seconds of the prompts' forward, mean seconds of the decoding steps after it)."""
    seconds = []
    for tokens in (4, 1, STEPS + 1):  # the first is a warmup
        models.synchronize()
        start = time.perf_counter()
        completions = decoder.generate("policy", prompts, range(len(prompts)), Sampling(tokens, ()))
        models.synchronize()
        seconds.append(time.perf_counter() - start)
        assert all(len(one.tokens) == tokens for one in completions)
    _, prefill, whole = seconds
    return prefill, max(whole - prefill, 1e-9) / STEPS


def cuda_graphs(record: Record, precision: str) -> None:
    """Compares decoding with CUDA graphs and kernel by kernel: equally exact, and faster."""
    shared = models.shared_base(precision=precision, roles=["policy"])
    for rows in (ROWS[0], ROWS[-1]):
        prompts, seconds = models.prompts(rows, PROMPT, PROMPT), {}
        for graphs in (False, True):
            models.fresh()
            decoder = SlotDecoder(shared, rows, models.PAD, graphs=graphs and CUDA)
            _, seconds[graphs] = step_seconds(decoder, prompts)
            how = "graphs" if graphs else "kernel by kernel"
            record.row(rows=rows, steps=how, ms_a_step=1e3 * seconds[graphs], peak_GiB=models.allocated())
        if CUDA:
            decoder.generate("policy", prompts, range(rows), Sampling(STEPS, ()))  # new tensors
            works = decoder.graphs is not None and decoder.graphs.works
            record.check(f"{rows} rows: steps can be recorded, twice", "yes" if works else "no", works)
        if MEASURES:
            faster = seconds[False] / seconds[True]
            record.check(f"{rows} rows: not slower than kernel by kernel", f"{faster:.2f}x", faster > 0.95)
    few = models.prompts(ROWS[0], PROMPT // 2, PROMPT)
    completions = decoder.generate("policy", few, range(len(few)), Sampling(STEPS, (), seed=1))
    rms = sampler_drift(shared, few, completions)
    record.check("graphs' and trainer's log-probs: rms below 0.05 nats", rms, rms < 0.05)


def fused_lora(record: Record, backward: bool) -> None:
    """Compares the fused LoRA layer with peft's under autocast: equally exact, with fewer kernels, in less time."""
    shared = models.shared_base(layers=4, roles=["policy"], spread=0.02)
    ids = torch.tensor(models.prompts(4, small(512, 16), small(512, 16)), device=DEVICE)
    parameters, results = shared.parameters_of("policy"), {}
    # The square of the hidden states would be constant after the last norm, and its gradient only rounding errors.
    direction = torch.randn(*ids.shape, shared.hidden_size, device=DEVICE)

    def step() -> tuple[torch.Tensor, ...]:
        with torch.set_grad_enabled(backward):
            hidden = shared.hidden("policy", ids)
        return torch.autograd.grad((hidden.float() * direction).sum(), parameters) if backward else (hidden,)

    for name in ("fused", "peft"):
        if name == "peft":
            for layer in shared.base.modules():
                if type(layer) is lora.FusedLinear:
                    layer.__class__ = Linear
        results[name] = torch.cat([part.float().flatten() for part in step()])
        prompts = models.prompts(small(64, 2), small(256, 8), small(256, 8))
        decoding = {} if backward else {"decoding_ms": 1e3 * step_seconds(SlotDecoder(shared), prompts)[1]}
        record.row(layer=name, kernels=kernels(step), seconds=models.timed(step, 5), **decoding)
    off = distance(results["fused"], results["peft"])
    record.check("relative difference below 3e-2", off, off < 3e-2)
    counts, seconds = ([row[key] for row in record.rows] for key in ("kernels", "seconds"))
    record.check("fewer kernels", f"{counts[0]} and {counts[1]}", counts[0] < counts[1])
    if MEASURES:
        record.check("less time", f"{seconds[0]:.4f} and {seconds[1]:.4f} s", seconds[0] < seconds[1])


def kernels(work: Callable[[], object]) -> int:
    """Returns the number of kernels that a call starts, or without a GPU the number of operations."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if MEASURES else activity.CPU]) as profile:
        work()
        models.synchronize()
    return sum(event.count for event in profile.key_averages())


def cache_memory(record: Record) -> None:
    """Checks that a rollout's cache is one allocation per layer, so that torch reserves little more than it uses."""
    shared = models.shared_base(layers=4, roles=["policy"])
    rows, tokens = small(64, 4), small(300, 12)
    decoder = SlotDecoder(shared, rows)
    ends = tuple(range(2, 2 + small(128, 64)))  # rows leave at any time
    models.fresh()
    ended = 0
    for seed in range(3):
        prompts = models.prompts(rows, small(50, 3), small(500, 9))
        completions = decoder.generate("policy", prompts, range(rows), Sampling(tokens, ends, seed=seed))
        ended += sum(one.ended for one in completions)
    record.check("rows left the batch", ended, ended > 0)
    if CUDA:
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        record.row(peak_GiB=peak / models.GIB, reserved_GiB=reserved / models.GIB, retries=retries)
        record.check("reserved below 1.5 x the peak", reserved / peak, reserved < 1.5 * peak)
        record.check("no allocation was tried twice", retries, retries == 0)
