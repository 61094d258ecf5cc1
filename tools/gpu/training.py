"""Experiments on time and memory of training steps of Llama 3 8B and 70B with full-length rows, compared with `plan`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pipeline.job import Data, Job, Model
from pipeline.planning import plan
from pipeline.settle.places import places_of
from pipeline.settle.settle import sections_of
from tools.gpu import models
from tools.gpu.models import DEVICE, PRETEND, small
from tools.gpu.record import Record, Skipped

TOLERANCE = 0.15  # largest allowed relative difference between measured and planned peak memory
# Completions per second of PPO on an H200, with the 8B base in bf16 and the length limits of jobs/llama3-8b
COMPLETIONS_A_SECOND = 1.0
PHASES = ("rollout", "score", "values", "update")


def planned_peak(stage: str, shape: str, precision: str, length: int, trainer: dict[str, Any]) -> float:
    """Returns the peak memory in GiB that `plan` estimates for a worker of a job with these settings."""
    with tempfile.TemporaryDirectory() as folder:
        models.config(shape).save_pretrained(folder)
        inputs = {"policy": folder, "reward": folder} if stage == "ppo" else {}
        job = Job(
            stage,
            Model(folder, load_in_4bit=precision == "nf4"),
            lora=models.LORA,
            data=Data(max_length=length),
            trainer=trainer,
            scaling={"use_gpu": True},
            **inputs,
        )
        return (
            plan.make_plan(sections_of(job, places_of(job)), {"reward": models.REWARD_LORA}).peak / plan.GIB
        )


def compare(record: Record, planned: float, above_only: bool = False) -> None:
    """Compares the peak memory since the call of `models.fresh` with the planned peak."""
    measured = models.occupied()
    record.row(planned_GiB=planned, measured_GiB=measured)
    if PRETEND:  # for a tiny model, most of the planned memory is CUDA's context and workspaces
        record.check("the peak is below the planned one", measured, measured < planned)
        return
    off = measured / planned - 1
    said = f"{measured:.1f} GiB, planned {planned:.1f}: {off:+.0%}"
    limit = f"at most {TOLERANCE:.0%} above" if above_only else f"within {TOLERANCE:.0%} of"
    record.check(f"the peak is {limit} the planned one", said, (off if above_only else abs(off)) <= TOLERANCE)


def ppo(record: Record, precision: str) -> None:
    """Runs a PPO update of one worker of jobs/llama3-8b: 128 completions of 512 tokens for prompts of 512 tokens."""
    settings = dict(num_ppo_epochs=2, local_rollout_forward_batch_size=small(128, 4))
    speed = _ppo(record, "8b", precision, small(128, 4), small(512, 12), small(512, 8), **settings)
    if precision == "bf16" and "H200" in torch.cuda.get_device_name():
        what = f"at least {COMPLETIONS_A_SECOND} completions/s; 1.4 to 1.7 are expected"
        record.check(what, speed, speed >= COMPLETIONS_A_SECOND)


def ppo_70b(record: Record) -> None:
    """Runs a PPO update with four roles on a 70B base in NF4."""
    if torch.cuda.get_device_properties(0).total_memory < 75 * models.GIB:
        raise Skipped("needs a GPU of 80 GB or more")
    _ppo(record, "70b", "nf4", small(16, 4), small(300, 12), small(96, 8), per_device_train_batch_size=1)


def _ppo(
    record: Record, shape: str, precision: str, episodes: int, prompt: int, completion: int, **settings: Any
) -> float:
    """Runs one update with full-length rows, records the time of each phase, and compares peak memory with the plan.

    Returns the completions per second.
    """
    settings |= {"full_length": True, "gradient_checkpointing": True}
    start = time.perf_counter()
    shared = models.shared_base(shape, precision)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    trainer = models.trainer(shared, episodes, (prompt, prompt), completion, **settings)
    models.fresh()
    metrics = trainer.run_update()
    planned = planned_peak("ppo", shape, precision, prompt, vars(trainer.args))
    speed = metrics["train_samples_per_second"]
    tokens = speed * (prompt + completion)
    record.row(completions_s=speed, tokens_s=tokens, mfu=metrics.get("mfu", ""), build_s=seconds)
    for phase in PHASES:
        record.row(phase=phase, seconds=metrics[f"time/{phase}"], GiB=metrics[f"memory/{phase}"])
    drift = metrics["val/sampler_drift"]
    record.check("sampler's and trainer's log-probs differ by less than 0.1 nats", drift, drift < 0.1)
    compare(record, planned)
    return speed


def reward_model(record: Record, precision: str) -> None:
    """Runs training steps of a reward model on four pairs of 512 tokens, with transformers and peft like TRL's trainer."""
    pairs, length = small(4, 2), small(512, 12)

    def loss(model: Any, ids: Tensor) -> Tensor:
        hidden = model.base_model.model.model(input_ids=ids, use_cache=False).last_hidden_state[:, -1]
        chosen, rejected = head(hidden.float()).squeeze(-1).chunk(2)
        return -logsigmoid(chosen - rejected).mean()

    head = torch.nn.Linear(models.config().hidden_size, 1, bias=False, device=DEVICE)
    _step(record, "rm", precision, loss, pairs, length, 2, list(head.parameters()))


def supervised(record: Record, precision: str) -> None:
    """Runs SFT steps on two rows of 1024 tokens, with transformers and peft.

    TRL's SFT loss needs more memory than transformers' loss.
    """

    def loss(model: Any, ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    _step(record, "sft", precision, loss, 2, small(1024, 16))


def _step(
    record: Record,
    stage: str,
    precision: str,
    loss: Callable[[Any, Tensor], Tensor],
    rows: int,
    length: int,
    sequences: int = 1,
    head: Sequence[Any] = (),
) -> None:
    """Runs AdamW steps on one batch. Checks that the loss falls, and compares the peak with the plan.

    Args:
        sequences: number of sequences per row.
        head: parameters that are not part of the model.
    """
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(models.base(precision=precision), LoraConfig(task_type="CAUSAL_LM", **models.LORA))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    learning = [p for p in model.parameters() if p.requires_grad]
    for parameter in learning:
        parameter.data = parameter.data.float()  # the adapter is in fp32, as in the pipeline's stages
    optimizer = torch.optim.AdamW([*learning, *head], lr=1e-3)
    ids = torch.tensor(models.prompts(sequences * rows, length, length), device=DEVICE)
    losses: list[float] = []

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            value = loss(model, ids)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())

    models.fresh()
    seconds = models.timed(step, rounds=3)
    record.row(seconds=seconds, tokens_s=sequences * rows * length / seconds, rows=rows, length=length)
    found = f"{losses[0]:.3f} to {losses[-1]:.3f}"
    record.check("the loss falls in four steps on one batch", found, losses[-1] < losses[0])
    trainer = dict(per_device_train_batch_size=rows, gradient_checkpointing=True, bf16=True)
    # `plan` expects TRL's SFT loss, which keeps more copies of the logits in memory than the loss of this experiment.
    compare(record, planned_peak(stage, "8b", precision, length, trainer), above_only=stage == "sft")


def installed_pipeline(record: Record) -> None:
    """Runs the demo's sft by command line on this GPU, if Ray, TRL and MLflow are installed."""
    if PRETEND:
        raise Skipped("tests/gpu/test_runs.py runs the commands on a pretended GPU")
    models.need("ray", "trl", "mlflow")
    with tempfile.TemporaryDirectory() as folder:
        settings = "scaling.use_gpu=true gate={} trainer.max_steps=2 trainer.eval_on_start=false trainer.eval_strategy=no"
        run = [f"run.storage_path={folder}", "run.name=gpu", "run.report=false"]
        _check_succeeds(record, "pipeline", "sft", "jobs/demo/sft.yaml", *settings.split(), *run)
        result = json.loads(Path(folder, "gpu/result.json").read_text())
        numbers = {key: value for key, value in result["metrics"].items() if isinstance(value, int | float)}
        record.row(**numbers)


def installed_vllm(record: Record) -> None:
    """Runs the tests of the vLLM engine on this GPU, if vLLM and pytest are installed."""
    models.need("vllm", "pytest")
    _check_succeeds(record, "pytest", "-rs", "tests/writing/test_vllm.py")


def _check_succeeds(record: Record, *module: str) -> None:
    done = subprocess.run([sys.executable, "-m", *module], capture_output=True, text=True, timeout=600)
    found = (done.stderr or done.stdout)[-300:] if done.returncode else 0
    record.check(f"python -m {module[0]} ends with status 0", found, done.returncode == 0)
