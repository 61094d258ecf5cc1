"""Experiments that check results. The models are Llama 3 8B with only four layers."""

from __future__ import annotations

import math
import tempfile
import time

import torch
import torch.distributed as dist

from pipeline.job import Model
from pipeline.models import probes
from pipeline.models.adapters import SharedBase
from pipeline.models.precision import linear_fp32, mm_fp32
from pipeline.ppo import losses
from pipeline.ppo.episodes import Totals, collate
from pipeline.ppo.selfcheck import rollout as checks
from pipeline.ppo.selfcheck.definitions import precision_of_base
from pipeline.ppo.selfcheck.roles import gradient_of
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.rows import Completion, Sampling
from tools.gpu import models
from tools.gpu.models import DEVICE, small
from tools.gpu.record import Record

LAYERS = 4


def self_checks(record: Record, precision: str) -> None:
    """Checks that PPO's self-checks pass, that two updates have finite metrics, and that a restored trainer repeats an update."""
    shared = models.shared_base(precision=precision, layers=LAYERS)
    trainer = models.trainer(shared, 8, (5, 60), small(32, 12), gradient_checkpointing=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer.folders = {role: _saved(shared, role, folder) for role in ("policy", "reward", "reference")}
        for result in checks.check_first_rollout(trainer, trainer.make_experience().episodes):
            if result.holds is not None:
                record.check(result.check, result.found, result.holds)
        record.check("at least 12 self-checks apply", len(record.checks), len(record.checks) >= 12)
        for _ in range(2):
            metrics = trainer.run_update()
        wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
        record.check("all metrics of two updates are finite", wrong or "yes", not wrong)
        trainer.save(f"{folder}/state")
        expected = trainer.run_update()
        trainer.restore(f"{folder}/state")
        again = trainer.run_update()
    # In the backward pass, the order of a GPU's sums varies. Values from before the first backward pass must be equal.
    before = [n for n in expected if n.startswith(("objective/", "completions/", "val/num", "val/sampler"))]
    differ = [name for name in before if expected[name] != again[name]]
    record.check(
        "a checkpoint repeats an update's samples, scores and KL", differ or "bit-identical", not differ
    )
    norms = max(abs(again[n] / expected[n] - 1) for n in expected if n.startswith("grad_norm/"))
    record.check("a checkpoint repeats gradient norms: relative difference below 1e-2", norms, norms < 1e-2)


def _saved(shared: SharedBase, role: str, folder: str) -> str:
    """Saves a role's adapter with its probes, as a stage does. Returns the adapter's folder."""
    at = f"{folder}/{role}"
    shared.save(role, at)

    def output(ids: list[int]) -> float:
        return shared.score(role, ids) if role == "reward" else shared.mean_logprob(role, ids)

    probes.write_probes(at, shared.vocab_size, models.PAD, output, precision_of_base(shared))
    return at


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the norm of the difference of two tensors, relative to the norm of the second."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).norm() / b.norm())


def cpu_and_gpu(record: Record) -> None:
    """Compares log-probs, values and gradients of one micro-batch in fp32, computed on the CPU and on the GPU."""
    exact, ours = (_one_micro_batch(device) for device in (torch.device("cpu"), DEVICE))
    for name in exact:
        off = distance(ours[name], exact[name])
        record.check(f"{name}: relative difference below 1e-3", off, off < 1e-3)


def _one_micro_batch(device: torch.device) -> dict[str, torch.Tensor]:
    shared = models.shared_base(precision="fp32", layers=LAYERS, device="cpu", spread=0.02).to(device)
    trainer = models.trainer(shared, 4, (20, 40), 16)
    rows = [row["input_ids"] for row in trainer.prompts.rows[:4]]
    draw = torch.Generator().manual_seed(2)
    texts = [torch.randint(5, models.VOCABULARY // 2, (16,), generator=draw).tolist() for _ in rows]
    completions = [Completion(text, False, [0.0] * 16) for text in texts]
    episodes = collate(rows, completions, range(4), models.PAD, device)
    episodes.scores = torch.ones(4, device=device)
    trainer.logprobs_and_values(episodes)
    logprobs, values = episodes.old_logprobs.clone(), episodes.values.clone()
    episodes.ref_logprobs = logprobs - 0.1
    losses.fill_advantages(trainer.args, trainer.rollout_config, episodes, trainer.kl_coef)
    trainer.accumulate(episodes, [0, 1, 2, 3], Totals.of(episodes.learn))
    gradients = {f"gradient of the {role}": gradient_of(shared, role) for role in trainer.roles}
    return {"log-probs": logprobs, "values": values, **gradients}


def collectives(record: Record) -> None:
    """Runs the pipeline's collectives over NCCL in a group of one rank, because NCCL allows only one rank per GPU."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", f"file://{folder}/group", rank=0, world_size=1)
        x, parts = torch.ones(3, dtype=torch.float64, device=DEVICE), [None]
        dist.all_reduce(x)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        dist.broadcast(x, 0)
        dist.barrier()
        dist.all_gather_object(parts, {"a": 1})
        dist.destroy_process_group()
    right = x.tolist() == [1.0] * 3 and parts == [{"a": 1}]
    record.check("NCCL returns what this rank sent", "yes" if right else (x.tolist(), parts), right)


def fp32_logits(record: Record) -> None:
    """Checks that logits, log-probs and their gradients equal the results of fp32 sums, and that sampler and trainer agree."""
    rows, hidden, vocabulary = small(300, 30), small(4096, 256), small(32000, 500)
    a = torch.randn(rows, hidden, device=DEVICE).bfloat16()
    b = torch.randn(vocabulary, hidden, device=DEVICE).bfloat16().t()
    exact, ours, rounded = a.double() @ b.double(), mm_fp32(a, b), (a @ b).float()
    ours_off, rounded_off = (float((x - exact).square().mean().sqrt()) for x in (ours, rounded))
    found = {"ours": ours_off, "in bf16": rounded_off}
    record.check("rms error of logits: ours < 1e-3 < in bf16", found, ours_off < 1e-3 < rounded_off)

    head = torch.nn.Linear(512, 1000, bias=False, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(7, 512, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y = linear_fp32(x, head, torch.bfloat16)
    (grad,) = torch.autograd.grad(y.logsumexp(-1).sum(), x)
    off = distance(grad, y.double().softmax(-1) @ head.weight.double())
    record.check("gradient of the lm head's input: relative error below 1e-2", off, off < 1e-2)

    shared = models.shared_base(layers=LAYERS, roles=["policy"], spread=0.02)
    prompts = models.prompts(16, 20, 20)
    sampling = Sampling(small(64, 8), (2,), seed=1)
    completions = SlotDecoder(shared).generate("policy", prompts, range(16), sampling)
    rms = sampler_drift(shared, prompts, completions)
    record.check("sampler's and trainer's log-probs: rms difference below 0.02 nats", rms, rms < 0.02)


@torch.no_grad()
def sampler_drift(shared: SharedBase, prompts: list[list[int]], completions: list[Completion]) -> float:
    """Returns the root mean square difference in nats between the sampler's and the training forward's log-probs."""
    episodes = collate(prompts, completions, range(len(prompts)), models.PAD, shared.device)
    again, _ = shared.logprobs("policy", episodes.input_ids, episodes.starts, episodes.mask)
    return float((again - episodes.sampler_logprobs)[episodes.mask].square().mean().sqrt())


def nf4_load(record: Record) -> None:
    """Checks that `load_base` quantizes on the GPU, faster than on the CPU."""
    from pipeline.models.base import load_base

    models.need("bitsandbytes")
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        models.base(layers=LAYERS, device="cpu").save_pretrained(folder)
        for device in (DEVICE, torch.device("cpu")):
            start = time.perf_counter()
            loaded = load_base(Model(folder, dtype="bfloat16", load_in_4bit=True), device=device)
            torch.cuda.synchronize()
            seconds[device.type] = time.perf_counter() - start
            where = {parameter.device.type for parameter in loaded.parameters()}
            record.check(f"all weights are on {device}", ", ".join(where), where == {device.type})
    record.row(**{f"seconds on {device}": taken for device, taken in seconds.items()})
    if not models.PRETEND:
        record.check("faster than on the CPU", seconds, seconds["cuda"] < seconds["cpu"])
