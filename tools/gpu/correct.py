"""Experiments on correct numbers on this device. By default they use four layers of 8B."""

from __future__ import annotations

import json
import math
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.job import Data, Job, Model
from pipeline.models import probes
from pipeline.models.adapters import SharedBase
from pipeline.models.precision import linear_fp32, mm_fp32
from pipeline.ppo import losses
from pipeline.ppo.episodes import Totals, collate
from pipeline.ppo.selfcheck import rollout as checks
from pipeline.ppo.selfcheck.definitions import precision_in_use
from pipeline.ppo.selfcheck.roles import gradient_of
from pipeline.system.rng import rng_state, set_rng_state
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.rows import Completion, Sampling
from tests.support.settled import work_of
from tools.gpu import models
from tools.gpu.models import DEVICE, SMALL, small
from tools.gpu.record import Record

LAYERS = 4
MEASURED = ("time/", "memory/", "train_", "mfu")  # metrics that differ between runs


def self_checks(record: Record, precision: str) -> None:
    """Checks that PPO's self-checks pass, that two updates have finite metrics, and that a checkpoint repeats an update."""
    shared = models.shared_base(precision=precision, layers=LAYERS)
    trainer = models.trainer(shared, 8, (5, 60), small(32, 12), gradient_checkpointing=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer.folders = {role: _saved(shared, role, folder) for role in ("policy", "reward", "reference")}
        for result in checks.check_first_rollout(trainer, trainer.make_experience().episodes):
            if result.holds is not None:
                record.check(result.check, result.found, result.holds)
        record.check("self-checks that apply", len(record.checks), len(record.checks) >= 12)
        for _ in range(2):
            metrics = trainer.run_update()
        wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
        record.check("all metrics of two updates are finite", wrong or "yes", not wrong)
        trainer.save(f"{folder}/state")
        expected = trainer.run_update()
        trainer.restore(f"{folder}/state")
        again = trainer.run_update()
    # A GPU sums in any order in the backward pass. Values before the first backward must be equal.
    before = [n for n in expected if n.startswith(("objective/", "completions/", "val/num", "val/sampler"))]
    differ = [name for name in before if expected[name] != again[name]]
    what = "an update is repeated from a checkpoint: rollout, scores, KL"
    record.check(what, differ or "to the bit", not differ)
    norms = max(abs(again[n] / expected[n] - 1) for n in expected if n.startswith("grad_norm/"))
    record.check("and its gradient norms to 1e-2", norms, norms < (1e-2 if DEVICE.type == "cuda" else 1e-9))


def _saved(shared: SharedBase, role: str, folder: str) -> str:
    """Saves a role's adapter with its probes, like a stage does. Returns its folder."""
    at = f"{folder}/{role}"
    shared.save(role, at)

    def output(ids: list[int]) -> float:
        return shared.score(role, ids) if role == "reward" else shared.mean_logprob(role, ids)

    probes.write(at, shared.vocab_size, models.PAD, output, precision_in_use(shared))
    return at


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the norm of the difference of two tensors, relative to the norm of the second."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).norm() / b.norm())


def cpu_and_gpu(record: Record) -> None:
    """Compares log-probs, values and gradients of one micro-batch, in fp32 on the CPU and on the device."""
    found = {str(device): _one_minibatch(device) for device in (torch.device("cpu"), DEVICE)}
    if len(found) == 1:  # without a GPU, the CPU is compared with itself
        found["again"] = _one_minibatch(DEVICE)
    exact, ours = found.values()
    for name in exact:
        off = distance(ours[name], exact[name])
        record.check(f"{name}: relative difference below 1e-3", off, off < 1e-3)


def _one_minibatch(device: torch.device) -> dict[str, torch.Tensor]:
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


def ranks(record: Record) -> None:
    """Checks that two workers (gloo, on one device) give the metrics of one worker after two updates."""
    from torch.multiprocessing import start_processes

    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2):
            # fork is quick, but works only if nothing has computed yet
            method = "fork" if SMALL else "spawn"
            start_processes(_rank, (world, folder), nprocs=world, start_method=method)
        one, two = (json.loads(Path(folder, f"{world}.json").read_text()) for world in (1, 2))
    # The terms of a loss cancel each other, so a value below 0.01 is compared relative to 0.01.
    off = {name: abs(two[name] - value) / max(abs(value), 0.01) for name, value in one.items()}
    worst = max(off, key=lambda name: off[name])
    limit = 1e-2 if models.CUDA else 1e-4
    found = f"{worst}: {one[worst]:.6g} and {two[worst]:.6g}"
    record.check(f"all metrics agree to {limit:g}", found, off[worst] < limit)


def _join(rank: int, world: int, folder: str, backend: str) -> None:
    """Joins the process group that meets in a file of `folder`."""
    dist.init_process_group(backend, f"file://{folder}/group-of-{world}", rank=rank, world_size=world)


def _rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    if world > 1:
        _join(rank, world, folder, "gloo")
    shared = models.shared_base(precision="fp32", layers=LAYERS)
    trainer = models.trainer(shared, 8, (5, 40), 16, num_mini_batches=2, num_ppo_epochs=2)
    for _ in range(2):
        metrics = trainer.run_update()
    if rank == 0:
        figures = {name: value for name, value in metrics.items() if not name.startswith(MEASURED)}
        Path(folder, f"{world}.json").write_text(json.dumps(figures))


def collectives(record: Record) -> None:
    """Runs the pipeline's collectives over NCCL in a group of one, because a GPU takes one rank, or over gloo on a CPU."""
    backend = "nccl" if models.CUDA else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        _join(0, 1, folder, backend)
        x, parts = torch.ones(3, dtype=torch.float64, device=DEVICE), [None]
        dist.all_reduce(x)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        dist.broadcast(x, 0)
        dist.barrier()
        dist.all_gather_object(parts, {"a": 1})
        right = x.tolist() == [1.0] * 3 and parts == [{"a": 1}]
        what = f"{backend}: all_reduce, broadcast, barrier, all_gather_object"
        record.check(what, "as sent" if right else parts, right)
        dist.destroy_process_group()


def random_state(record: Record) -> None:
    """Checks that a checkpoint stores the random state of this GPU, and of no other GPU."""
    torch.rand(5, device=DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(rng_state(), f"{folder}/rng.pt")
        expected = torch.rand(5, device=DEVICE)
        gpus = range(1, torch.cuda.device_count()) if models.CUDA else ()
        others = [torch.cuda.get_rng_state(index) for index in gpus]
        set_rng_state(torch.load(f"{folder}/rng.pt", weights_only=True))
    again = torch.rand(5, device=DEVICE)
    record.check("numbers go on where they were", "yes", torch.equal(again, expected))
    kept = all(torch.equal(torch.cuda.get_rng_state(i), state) for i, state in zip(gpus, others, strict=True))
    record.check(f"those of {len(others)} other GPUs stay", "yes", kept)


def fp32_logits(record: Record) -> None:
    """Checks that logits, log-probs and their gradients equal those of fp32 sums, and that sampler and trainer agree."""
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
    record.check("sampler's and trainer's log-probs: rms below 0.02 nats", rms, rms < 0.02)


@torch.no_grad()
def sampler_drift(shared: SharedBase, prompts: list[list[int]], completions: list[Completion]) -> float:
    """Returns the root mean square difference in nats between the sampler's and the training forward's log-probs."""
    episodes = collate(prompts, completions, range(len(prompts)), models.PAD, shared.device)
    again, _ = shared.logprobs("policy", episodes.input_ids, episodes.starts, episodes.mask)
    return float((again - episodes.sampler_logprobs)[episodes.mask].square().mean().sqrt())


def nf4_load(record: Record) -> None:
    """Checks that `load_base` quantizes on the device within seconds, and that no full base passes through the CPU."""
    from pipeline.models.base import load_base

    models.need("bitsandbytes")
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        models.base(layers=LAYERS, device="cpu").save_pretrained(folder)
        for device in dict.fromkeys((DEVICE, torch.device("cpu"))):
            start = time.perf_counter()
            loaded = load_base(Model(folder, dtype="bfloat16", load_in_4bit=True), device=device)
            models.synchronize()
            seconds[str(device)] = time.perf_counter() - start
            where = {parameter.device.type for parameter in loaded.parameters()}
            record.check(f"all weights are on {device}", ", ".join(where), where == {device.type})
    record.row(**{f"seconds on {device}": taken for device, taken in seconds.items()})
    if models.MEASURES:
        record.check("quicker than on the CPU", seconds, seconds[str(DEVICE)] < seconds["cpu"])


def out_of_memory(record: Record) -> None:
    """Checks that an update that does not fit raises a message with phase and remedy, and that the process can continue."""
    from pipeline.errors import OutOfMemory
    from pipeline.run.memory import explained

    # more bytes than this device has
    limit = 4 * torch.cuda.get_device_properties(DEVICE).total_memory if models.CUDA else 1 << 50
    trainer = models.trainer(models.shared_base(precision="fp32", layers=LAYERS), 4, (20, 40), 16)
    trainer.run_update()
    job = Job("ppo", Model("random"), data=Data(max_length=64), trainer=vars(trainer.args), source="job.yaml")
    said, learn = "", trainer.learn
    trainer.learn = lambda *_, **__: torch.empty(limit, dtype=torch.uint8, device=DEVICE)  # type: ignore[assignment,method-assign]
    try:
        with explained(work_of(job)):
            trainer.run_update()
    except OutOfMemory as error:
        said = str(error)
    trainer.learn = learn  # type: ignore[method-assign]
    record.check("the message names the phase", said[:120] or "no error", "in phase 'update'" in said)
    advice = "trainer.per_device_train_batch_size=2"
    record.check("and the setting to change", advice, advice in said)
    loss = trainer.run_update()["loss/policy_avg"]
    record.check("an update after it is sound", loss, math.isfinite(loss))
