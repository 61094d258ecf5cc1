"""Experiments on decoding with Llama 3 8B: the number of rows, CUDA graphs, and the fused LoRA layer."""

from __future__ import annotations

import time

import torch
from peft.tuners.lora.layer import Linear

from pipeline.models import lora
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.rows import Sampling
from tools.gpu import models
from tools.gpu.correct import distance, sampler_drift
from tools.gpu.models import DEVICE, PRETEND, small
from tools.gpu.record import Record

ROWS = (2, 4) if PRETEND else (64, 128, 256, 512)  # completions that are decoded together
PROMPT, STEPS = small(512, 8), small(64, 6)


def rows_at_once(record: Record, precision: str) -> None:
    """Measures the speed of decoding for several numbers of rows, with equal and with different prompt lengths."""
    shared = models.shared_base(precision=precision, roles=["policy"])
    speed = {}
    for rows in ROWS:
        for shortest in (PROMPT, 7 * PROMPT // 8):
            models.fresh()
            prompts = models.prompts(rows, shortest, PROMPT)
            prefill, step = step_seconds(SlotDecoder(shared, rows, models.PAD), prompts)
            speed[rows, shortest] = rows / step
            lengths = "equal" if shortest == PROMPT else "different"
            times = {"prefill_s": prefill, "ms_per_step": 1e3 * step, "tokens_s": rows / step}
            peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            memory = {"peak_GiB": peak / models.GIB, "reserved_GiB": reserved / models.GIB}
            record.row(rows=rows, lengths=lengths, **times, **memory)
    few, many = speed[ROWS[0], PROMPT], speed[ROWS[-1], PROMPT]
    ratio = many / few
    wanted = 0 if PRETEND else 2
    record.check(f"{ROWS[-1]} rows have at least {wanted}x the tokens/s of {ROWS[0]}", ratio, ratio >= wanted)


def step_seconds(decoder: SlotDecoder, prompts: list[list[int]]) -> tuple[float, float]:
    """Returns (seconds of the prompts' forward pass, mean seconds of the decoding steps after it)."""
    seconds = []
    for tokens in (4, 1, STEPS + 1):  # the first call is a warmup
        torch.cuda.synchronize()
        start = time.perf_counter()
        completions = decoder.generate("policy", prompts, range(len(prompts)), Sampling(tokens, ()))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        assert all(len(one.tokens) == tokens for one in completions)
    _, prefill, whole = seconds
    return prefill, max(whole - prefill, 1e-9) / STEPS


def cuda_graphs(record: Record, precision: str) -> None:
    """Checks that decoding with CUDA graphs gives the log-probs of decoding without CUDA graphs, and is not slower."""
    shared = models.shared_base(precision=precision, roles=["policy"])
    for rows in (ROWS[0], ROWS[-1]):
        prompts, seconds = models.prompts(rows, PROMPT, PROMPT), {}
        for graphs in (False, True):
            models.fresh()
            decoder = SlotDecoder(shared, rows, models.PAD, graphs=graphs)
            _, seconds[graphs] = step_seconds(decoder, prompts)
            peak = torch.cuda.max_memory_allocated() / models.GIB
            record.row(rows=rows, graphs=graphs, ms_per_step=1e3 * seconds[graphs], peak_GiB=peak)
        # A second call of `generate` must capture its CUDA graphs again.
        decoder.generate("policy", prompts, range(rows), Sampling(STEPS, ()))
        works = decoder.graphs is not None and decoder.graphs.works
        record.check(f"{rows} rows: steps are captured, twice", "yes" if works else "no", works)
        if not PRETEND:
            faster = seconds[False] / seconds[True]
            record.check(f"{rows} rows: not slower than without graphs", f"{faster:.2f}x", faster > 0.95)
    few = models.prompts(ROWS[0], PROMPT // 2, PROMPT)
    completions = decoder.generate("policy", few, range(len(few)), Sampling(STEPS, (), seed=1))
    rms = sampler_drift(shared, few, completions)
    record.check("sampler's and trainer's log-probs: rms difference below 0.05 nats", rms, rms < 0.05)


def fused_lora(record: Record, backward: bool) -> None:
    """Checks that under autocast, our fused LoRA layer has the results of peft's LoRA layer and takes less time."""
    shared = models.shared_base(layers=4, roles=["policy"], spread=0.02)
    ids = torch.tensor(models.prompts(4, small(512, 16), small(512, 16)), device=DEVICE)
    parameters, results, seconds = shared.parameters_of("policy"), {}, {}
    # After the last norm, the square of the hidden states is constant, and its gradient would be only rounding errors.
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
        seconds[name] = models.timed(step, 5)
        prompts = models.prompts(small(64, 2), small(256, 8), small(256, 8))
        decoding = {} if backward else {"decoding_ms": 1e3 * step_seconds(SlotDecoder(shared), prompts)[1]}
        record.row(layer=name, seconds=seconds[name], **decoding)
    off = distance(results["fused"], results["peft"])
    record.check("relative difference below 3e-2", off, off < 3e-2)
    if not PRETEND:
        record.check("less time than peft's layer", seconds, seconds["fused"] < seconds["peft"])
