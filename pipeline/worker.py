"""Ray Train, seen from a worker: who it is, what it reads, and what it says while it trains.

A stage's `train(worker)` runs once in every worker of the group. Its verbs: `rows` and `input` to read, `log` a step,
commit a `checkpoint`, `finish` with an adapter that has been proved to reload.
"""

import contextlib
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipeline import lineage, registry
from pipeline.config import Job

OUTCOME = "outcome.json"  # in the last checkpoint of a run that reached its end


@dataclass(frozen=True)
class Work:
    """What the driver hands to the workers; everything in it is small, pinned and picklable."""

    job: Job
    tokenizer: Any
    base: dict[str, Any]  # models.base.base_identity of the job's base
    digests: dict[str, str]  # of each set of rows, by content
    fingerprints: dict[str, str]  # of each tokenised set
    run_id: str  # of MLflow
    inputs: dict[str, str] = field(default_factory=dict)  # e.g. {"policy": "models:/rlhf-sft/3"}: pinned


def main(config: dict[str, Any]) -> dict[str, Any]:
    """The function that Ray Train calls: prepares the process, resumes or finds the run finished, trains."""
    import ray.train

    work: Work = config["work"]
    quiet(work.job.stage)
    with contextlib.ExitStack() as stack:
        checkpoint = ray.train.get_checkpoint()
        resume = stack.enter_context(checkpoint.as_directory()) if checkpoint else None
        if resume and os.path.exists(os.path.join(resume, OUTCOME)):
            with open(os.path.join(resume, OUTCOME), encoding="utf-8") as file:
                return json.load(file)
        worker = Worker(work, resume)
        outcome = config["train"](worker)
        worker.close()
        return outcome


def quiet(stage: str) -> None:
    """One name for a stage's lines in the driver's log, and none of the libraries' advice to developers."""
    print(f":actor_name:{stage}", flush=True)  # Ray's marker: log lines start with `(sft pid=...)`
    print(f":actor_name:{stage}", file=sys.stderr, flush=True)
    hush()


def hush() -> None:
    """None of the libraries' advice to developers, in a process that holds models."""
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    for noisy in (
        "transformers",
        "trl",
        "peft",
        "accelerate",
        "datasets",
        "torch",
        "bitsandbytes",
        "ray.train",
        "ray.data",
    ):
        logging.getLogger(noisy).setLevel(logging.ERROR)


class Host:
    """A process that holds the models of a job: a worker of a stage, an actor of Ray Data, or the driver itself."""

    def __init__(self, work: Work):
        self.work, self.job, self.tokenizer = work, work.job, work.tokenizer

    @property
    def device(self) -> str:
        """The GPU that this process sees, if the job asks for one, else the CPU."""
        return "cuda" if self.job.scaling.get("use_gpu") else "cpu"

    def input(self, name: str) -> str:
        """The local folder of an input (`policy`, `reward.0`, ...), fetched on this node if it is a registered one."""
        return registry.fetch(self.work.inputs[name], registry.tracking_uri(self.job))


class Worker(Host):
    """One worker of a stage: who it is, what it reads, and the four things that it says while it trains."""

    def __init__(self, work: Work, resume: str | None):
        import ray.train

        super().__init__(work)
        context = ray.train.get_context()
        self.rank, self.world = context.get_world_rank(), context.get_world_size()
        self.local_rank = context.get_local_rank()
        self.resume = resume  # the folder of the checkpoint to continue from, or None
        # The same folder for all workers of a node: transformers lets each rank add its random state to it.
        self.scratch = os.path.join(tempfile.gettempdir(), f"pipeline-{os.getuid()}", work.run_id)
        self.started: tuple[float, int] | None = None  # (time, step) of the first line: for the time left
        self.step = 0
        self.metrics = (
            registry.MetricLog(registry.tracking_uri(self.job), work.run_id) if self.rank == 0 else None
        )
        if self.local_rank == 0 and self.resume is None:
            shutil.rmtree(self.scratch, ignore_errors=True)
        os.makedirs(self.scratch, exist_ok=True)

    @property
    def device(self) -> str:
        """The GPU that Ray gave this worker, else the CPU."""
        import ray.train.torch

        return str(ray.train.torch.get_device())

    def rows(self, name: str) -> Any:
        """The whole tokenised set `train`, `eval` or `pairs` as a datasets.Dataset over Ray's shared blocks; None if unset."""
        import ray.train

        from pipeline.data.feed import to_hf

        fingerprint = self.work.fingerprints.get(name)
        return to_hf(ray.train.get_dataset_shard(name), fingerprint) if fingerprint else None

    def gather(self, mine: Any) -> list[Any]:
        """[what each rank has], on every rank."""
        import torch

        if self.world == 1:
            return [mine]
        parts: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(parts, mine)
        return parts

    def log(self, metrics: dict[str, float], step: int, total: int) -> None:
        """One readable line with the time left, and the numbers to MLflow; rank 0 speaks for all."""
        self.step = step
        if self.metrics is None:
            return
        now = time.monotonic()
        if self.started is None:
            self.started = (now, step)
        done = step - self.started[1]
        left = (now - self.started[0]) / done * (total - step) if done else None
        clock = f"  left {int(left // 60)}:{int(left % 60):02d}" if left is not None else ""
        shown = "  ".join(f"{word} {metrics[k]:<8.4g}" for k, word in SHOWN.items() if k in metrics)
        print(f"step {step:>{len(str(total))}}/{total}  {shown}{clock}", flush=True)
        self.metrics.log(metrics, step)

    def checkpoint(self, source: str, metrics: dict[str, float], step: int) -> None:
        """Commits the files of `source` as the checkpoint of `step`. A barrier: every rank calls it."""
        # One worker a node hands in the folder; Ray merges those of several nodes into one checkpoint.
        mine = source if self.local_rank == 0 else None
        self._commit(mine, f"checkpoint_{step:08d}", {**metrics, "step": step})

    def _commit(self, folder: str | None, name: str, metrics: dict[str, Any]) -> None:
        import ray.train

        checkpoint = ray.train.Checkpoint.from_directory(folder) if folder else None
        ray.train.report(metrics, checkpoint=checkpoint, checkpoint_dir_name=name)

    def finish(
        self,
        metrics: dict[str, float],
        save: Callable[[str], None] | None = None,
        verify: Callable[[str], None] | None = None,
        facts: dict[str, Any] | None = None,
        samples: list[dict[str, Any]] | None = None,
        tables: dict[str, list[dict[str, Any]]] | None = None,
    ) -> dict[str, Any]:
        """Saves the adapter, proves that it reloads as it was, and commits it as the run's last checkpoint.

        Args:
            metrics: the final ones; they decide the gate.
            save: writes adapter and head into a folder (on rank 0). None: nothing was trained.
            verify: raises if the adapter in that folder does not behave like the one in memory (on rank 0).
            facts: further entries of lineage.json, e.g. the reward's mean and standard deviation.
            samples: prompts with replies before and after, for result.json.
            tables: further rows for the report, each kept as NAME.json beside the adapter.
        """
        # PPO resets the system's own peak figure at each of its phases and keeps the highest itself (GiB).
        peak = max(peak_memory(), int(metrics.get("memory/peak", 0.0) * 2**30))
        outcome = {"metrics": metrics, "samples": samples or [], "peak_memory": peak}
        final = os.path.join(self.scratch, "final")
        if self.rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            os.makedirs(final)
            if save and verify:
                adapter = os.path.join(final, "adapter")
                os.makedirs(adapter)
                save(adapter)
                self.tokenizer.save_pretrained(adapter)
                lineage.write(adapter, self._lineage(facts or {}))
                verify(adapter)
            if self.metrics:
                held_out = {k: v for k, v in metrics.items() if k.startswith(("eval_", "before_"))}
                self.metrics.log(held_out, self.step)
            for name, content in {"outcome": outcome, **(tables or {})}.items():
                with open(os.path.join(final, f"{name}.json"), "w", encoding="utf-8") as file:
                    json.dump(content, file)
        self._commit(final if self.rank == 0 else None, "final", metrics)
        return outcome

    def _lineage(self, facts: dict[str, Any]) -> dict[str, Any]:
        work = self.work
        parents = {
            name: source for name, source in work.inputs.items() if name != "judge"
        }  # it taught nothing
        return lineage.describe(self.job.stage, work.base, self.tokenizer, parents, work.digests, **facts)

    def close(self) -> None:
        if self.metrics:
            self.metrics.close()
        if self.local_rank == 0:
            shutil.rmtree(self.scratch, ignore_errors=True)


# The few numbers that a line shows, what matters most first, and their words; everything else is in MLflow.
SHOWN = {
    "loss": "loss",
    "eval_loss": "held-out loss",
    "accuracy": "accuracy",
    "rewards/accuracies": "accuracy",
    "eval_accuracy": "accuracy",
    "eval_rewards/accuracies": "accuracy",
    "mean_token_accuracy": "tokens right",
    "eval_mean_token_accuracy": "tokens right",
    "margin": "margin",
    "rewards/margins": "margin",
    "eval_margin": "margin",
    "eval_rewards/margins": "margin",
    "objective/scores": "score",
    "objective/kl": "kl",
    "objective/entropy": "entropy",
    "completions/mean_length": "length",
    "val/explained_variance": "explained",
    "policy/clipfrac_avg": "clipped",
    "grad_norm": "grad",
}


def peak_memory() -> int:
    """Bytes: the most that this worker held at once, on the GPU where there is one, else in resident memory."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
