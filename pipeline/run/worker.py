"""Defines `Worker`, a training worker of a stage: its rank and device, its rows, its log and its checkpoints.

The `train(worker)` of a stage runs once in every worker of the group. `train` reads rows and inputs, logs steps, commits
checkpoints, and returns worker.finish(...), which saves the adapter and checks that the adapter reloads.
"""

import contextlib
import json
import logging
import os
import shutil
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline import registry, text
from pipeline.errors import Failure, InputError
from pipeline.metrics import line_of
from pipeline.models import transformers4
from pipeline.registry import lineage
from pipeline.run import checkpoints, memory
from pipeline.run.model_host import ModelHost
from pipeline.run_folder import OUTCOME
from pipeline.settle.placement import Places
from pipeline.settle.work import Work
from pipeline.system import console, hub, storage, terminal
from pipeline.system.lease import hold, remove_abandoned

PRINT_INTERVAL_S = 5.0  # minimum time between printed lines of training steps; evaluations are always printed
LIVE_INTERVAL_S = 0.5  # minimum time between two updates of the progress line
LIVE_METRICS = 3  # number of metrics in the progress line
# time between two queries for a notice; spot nodes give 30 to 120 s of notice
NOTICE_INTERVAL_S = float(os.environ.get("PIPELINE_NOTICE_EVERY_S", "5"))


def run_worker(config: dict[str, Any]) -> dict[str, Any]:
    """Prepares the process of a worker, then trains or resumes. Ray Train calls this function in every worker."""
    import ray.train.collective

    work: Work = config["work"]
    context, folder, model = ray.train.get_context(), work.folder, work.model
    with contextlib.ExitStack() as stack:
        if work.places.in_process:
            console.silence_libraries()
            stack.enter_context(like_a_worker(work.places))
        else:
            name_output(f"{work.identity.stage} {work.identity.name}" if work.sweep else work.identity.stage)
            leave_group_of_one(context.get_world_size(), work.places.on_gpu)
            hold(work.lease)
        # All ranks resume from the same checkpoint.
        newest = None
        if context.get_world_rank() == 0:
            work.lease.require()
            newest = checkpoints.newest_checkpoint(folder)
        newest = ray.train.collective.broadcast_from_rank_zero(newest)
        resume = stack.enter_context(storage.local_copy(storage.join(folder, newest))) if newest else None
        if resume and os.path.exists(outcome := os.path.join(resume, OUTCOME)):
            return storage.read_json(outcome)
        worker = Worker(work, resume, config["companion"])
        if worker.rank == 0:
            if resume:
                terminal.say(f"continuing from {newest}")
            print(hub.loading_message(model.name_or_path, model.revision), flush=True)
        try:
            with memory.memory_errors_explained(work):
                result = config["train"](worker)
        except BaseException as error:
            if isinstance(error, (InputError, Failure)):
                # Ray Train 2.60 would log a traceback, which helps a user less than the error messages.
                logging.getLogger("ray.train.v2._internal.util").disabled = True
            worker.close(timeout=5.0)
            raise
        worker.close()
        return result


@contextlib.contextmanager
def like_a_worker(places: Places) -> Iterator[None]:
    """Gives torch as many threads in this process as in a worker that Ray starts, so that results are bit-identical.

    A GPU job gets only one visible GPU, because transformers wraps a model in nn.DataParallel if several GPUs are visible.
    """
    import torch

    from pipeline.ppo import clock

    if places.on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    threads, precision = torch.get_num_threads(), torch.backends.fp32_precision
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, int(places.workers.each.resources.get("CPU", 1))))
    # The peak memory must not include earlier stages that ran in this process.
    clock.reset_peak(torch.device("cuda" if places.on_gpu else "cpu"))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.fp32_precision = precision  # resets TF32, because trainer.tf32 applies to one job


def leave_group_of_one(world: int, use_gpu: bool) -> None:
    """Ends the torch.distributed group of a single worker on a CPU, because accelerate would wrap models in DDP.

    Keeps the group on a GPU, because without a group, transformers wraps a model in nn.DataParallel if several GPUs are visible.
    Remove this function when TorchTrainer can start a worker without a group, or accelerate does not wrap models in a group of
    one.
    """
    import torch

    if world > 1 or use_gpu:
        return
    torch.distributed.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]


def name_output(stage: str) -> None:
    """Prefixes the lines of this process in the driver's log with the stage, and silences the libraries' warnings."""
    print(f":actor_name:{stage}", flush=True)  # Ray's marker: log lines start with `(sft pid=...)`
    print(f":actor_name:{stage}", file=sys.stderr, flush=True)
    terminal.mark_lines()
    console.silence_libraries()


@dataclass
class Outcome:
    """The results that a stage passes to Worker.finish."""

    metrics: dict[str, float]  # final metrics, which the gate checks
    end: dict[str, Any] = field(default_factory=dict)  # best.describe_end of a stage that trains
    usage: dict[str, int] = field(default_factory=dict)  # numbers of tokens and completions
    samples: list[dict[str, Any]] = field(default_factory=list)  # prompts with completions before and after
    # {file: rows} for the report; the files are saved next to the adapter
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    # Additional entries of lineage.json, for example the mean and standard deviation of a reward
    lineage: dict[str, Any] = field(default_factory=dict)


class PreemptionNotice:
    """Watches for Ray's notice that a node, such as a spot node, will be terminated.

    Every rank calls `poll` after every step. A query is a barrier of a few milliseconds, so all ranks query at the same step.
    At each query, all ranks agree on the step of the next query, about NOTICE_INTERVAL_S later.
    """

    def __init__(self) -> None:
        self.active = False  # whether a notice has arrived, after which the run commits one checkpoint
        self._next, self._step, self._query_time = 0, 0, time.monotonic()

    def poll(self, step: int) -> bool:
        """Returns True at the first step after a notice, and False at all other steps."""
        if self.active or step < self._next:
            return False
        import ray.train.collective

        from pipeline.models.fsdp_sync import catch_up

        now = time.monotonic()
        step_s = (now - self._query_time) / max(1, step - self._step)
        gap = max(1, int(NOTICE_INTERVAL_S / max(step_s, 1e-3))) if self._step else 1
        catch_up()
        gap = ray.train.collective.broadcast_from_rank_zero(gap)
        self._next, self._step, self._query_time = step + gap, step, now
        self.active = ray.train.get_preemption_info() is not None
        return self.active


class Worker(ModelHost):
    """One worker of a stage: its rank and device, its rows, its log, its checkpoints and its outcome."""

    def __init__(self, work: Work, resume: str | None, companion: Any = None):
        import ray.train.collective

        super().__init__(work)
        context = ray.train.get_context()
        self.rank, self.world = context.get_world_rank(), context.get_world_size()
        self.local_rank = context.get_local_rank()
        self.resume = resume  # the folder of the checkpoint to resume from, or None
        self.companion = companion  # what Recipe.companion yields, for example the pool of rollout workers
        # All workers of a node share this folder, because transformers lets each rank add its random state to a checkpoint.
        self.scratch = os.path.join(work.lease.scratch, "files")
        # (time, step) of the first line, to estimate the time left
        self.started: tuple[float, int] | None = None
        self.printed = self.shown = 0.0  # times of the last printed line and of the last live line
        self.step = self.total = 0  # the last logged step, and the total number of steps of the run
        self.report = self._report if work.sweep else None
        self.metrics = (
            registry.open_curves(work.tracking, work.run_id) if self.rank == 0 and work.run_id else None
        )
        self.notice = PreemptionNotice()
        self._rows: dict[str, Any] = {}  # results of `rows`
        if self.local_rank == 0:  # killed workers may have left files
            shutil.rmtree(self.scratch, ignore_errors=True)
            remove_abandoned()
        ray.train.collective.barrier()

    @property
    def device(self) -> str:
        """Returns the GPU that Ray gave this worker, or the CPU."""
        import ray.train.torch

        return super().device if self.work.places.in_process else str(ray.train.torch.get_device())

    def rows(self, name: str) -> Any:
        """Returns all tokenized rows of `train`, `eval` or `pairs` as a datasets.Dataset, or None if the job has none."""
        import ray.train

        from pipeline.data.read import to_hf

        if name not in self._rows and (fingerprint := self.work.fingerprints.get(name)):
            self._rows[name] = to_hf(ray.train.get_dataset_shard(name), fingerprint)
        return self._rows.get(name)

    def frozen_base(self, scorer_tokenizer: Any = None) -> Any:
        """Loads the job's frozen base on this worker's device. With `model.fsdp`, the workers hold shards of the base."""
        if not (self.work.model.fsdp and self.world > 1):
            return super().frozen_base(scorer_tokenizer)
        from pipeline.models.shards import load_shards

        return load_shards(self.work.frozen, scorer_tokenizer, self.device)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in the order of the ranks, on every rank."""
        from pipeline.models.fsdp_sync import gather

        return gather(value)

    def log(self, metrics: dict[str, float], step: int, total: int) -> None:
        """On rank 0, sends metrics to MLflow, and prints a line at most every PRINT_INTERVAL_S."""
        self.step, self.total = step, total
        if self.metrics is None:
            return
        now = time.monotonic()
        if self.started is None:
            self.started = (now, step)
        start_time, first_step = self.started
        remaining = (now - start_time) / (step - first_step) * (total - step) if step > first_step else 0.0
        cells = [f"{label} {value:<9.4g}" for label, value in line_of(self.work.identity.stage, metrics)]
        is_milestone = step in (first_step, total) or any(key.startswith("eval_") for key in metrics)
        if is_milestone or now - self.printed >= PRINT_INTERVAL_S:  # MLflow gets every step
            self.printed = now
            eta = f"  left {terminal.duration(remaining)}" if step > first_step else ""
            print(f"step {step:>{len(str(total))}}/{total}  {'  '.join(cells)}{eta}".rstrip(), flush=True)
        if is_milestone or now - self.shown >= LIVE_INTERVAL_S:
            self.shown = now
            numbers = "  ".join(cell.rstrip() for cell in cells[:LIVE_METRICS])
            terminal.show_progress(text.row("train", f"{step}/{total}"), remaining, numbers)
        self.metrics.log(metrics, step)

    def _report(self, value: float, step: int) -> str | None:
        """Reports an evaluation to the sweep. Returns the reason to stop the trial, or None. All ranks get the same result."""
        import ray

        assert self.work.sweep
        return ray.get(self.work.sweep.rungs.report.remote(self.work.identity.name, step, self.total, value))

    def replay(self, history: list[tuple[int, dict[str, float]]]) -> None:
        """Sends the metrics in a checkpoint to MLflow again, because MLflow may lack the last steps before the checkpoint."""
        if self.metrics:
            for step, metrics in history:
                self.metrics.log(metrics, step)

    def checkpoint(self, source: str, step: int) -> None:
        """Commits the folder `source` as the checkpoint of `step`, and deletes `source`. Every rank must call this method."""
        self._commit(source, checkpoints.checkpoint_name(step))
        if self.notice.active and self.rank == 0:
            terminal.say(f"node is being reclaimed: checkpoint of step {step} committed")

    def _commit(self, source: str | None, name: str, checked: dict[str, Any] | None = None) -> None:
        """Copies the folder `source` of every node into the run's folder, seals the checkpoint, and removes the oldest
        checkpoints.

        Args:
            source: folder with the files of this node, or None if this node has no files.
            checked: {file: digest computed in memory}. Raises Failure if a stored file has a different digest.
        """
        import ray.train.collective

        from pipeline.models.fsdp_sync import catch_up

        run_folder = self.work.folder
        catch_up()
        if self.rank == 0:
            self.work.lease.require()
            name = checkpoints.unused_name(run_folder, name, self.work.lease.attempt)
        # The broadcast also waits until every rank has written its files.
        name = ray.train.collective.broadcast_from_rank_zero(name)
        files = (
            checkpoints.store_checkpoint(source, run_folder, name) if source and self.local_rank == 0 else {}
        )
        parts = self.gather(files)
        if self.rank == 0:
            self.work.lease.require()
            checkpoints.seal_checkpoint(run_folder, name, dict(ChainMap(checked or {}, *parts)))
            if checked and (damage := checkpoints.find_damage(path := storage.join(run_folder, name))):
                storage.remove(path)
                raise Failure(
                    f"the last checkpoint differs from the trained weights ({damage}): another program writes to {self.scratch} or "
                    f"{run_folder}; stop that program, then run the same command again"
                )
            self.work.lease.require()
            checkpoints.prune_checkpoints(run_folder, self.work.run.num_to_keep)

    def finish(
        self,
        outcome: Outcome,
        save: Callable[[str], dict[str, Any]] | None = None,
        outputs: Callable[[str | None], list[Any]] | None = None,
    ) -> dict[str, Any]:
        """Saves the adapter, checks that it reloads unchanged, and commits it as the last checkpoint of the run.

        Returns the entries of result.json about the training. The driver computes the cost from the entry `usage`.

        Args:
            save: function that writes adapter and head into a folder and returns their digest (see adapter_files.write_adapter),
                or None if nothing was trained. Called on rank 0.
            outputs: function of a folder that returns outputs of the folder's adapter on a few rows. If the folder is None, the
                function uses the adapter in memory. Called on rank 0.
        """
        import torch

        # PPO resets the system's peak at each phase. PPO's metric memory/peak has the highest peak, in GiB.
        metrics = outcome.metrics
        peak = max(peak_memory(self.device), int(metrics.get("memory/peak", 0.0) * 2**30))
        gpu = torch.cuda.get_device_name(self.device) if self.device.startswith("cuda") else None
        usage = {"gpu": gpu, "workers": self.world, **outcome.usage}
        entries = {"metrics": metrics, "samples": outcome.samples, "peak_memory_bytes": peak, "usage": usage}
        entries |= outcome.end
        final, checked = os.path.join(self.scratch, "final"), dict[str, Any]()
        if self.rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            os.makedirs(final)
            if save:
                assert outputs, "an adapter is accepted only after a check that it reloads"
                adapter = os.path.join(final, "adapter")
                os.makedirs(adapter)
                checked[f"adapter/{hub.TENSORS}"] = save(adapter)
                transformers4.save_tokenizer(self.tokenizer, adapter)
                lineage.write(adapter, self._lineage(outcome))
                print("checking that the adapter reloads as it was saved", flush=True)
                require_reload(outputs(None), outputs(adapter), adapter)
            if self.metrics:
                held_out = {k: v for k, v in metrics.items() if k.startswith(("eval_", "initial_"))}
                step = outcome.end["kept"]["step"] if outcome.end else self.step
                self.metrics.log(held_out, step, final=True)
                self.metrics.close()  # sends the last metrics before the run is marked as finished
            for name, content in {**outcome.tables, OUTCOME: entries}.items():
                with open(os.path.join(final, name), "w", encoding="utf-8") as file:
                    json.dump(content, file)
        self._commit(final if self.rank == 0 else None, "final", checked)
        return entries

    def _lineage(self, outcome: Outcome) -> dict[str, Any]:
        from pipeline.models.template import text_as_chat

        work, facts = self.work, outcome.lineage | {"step": outcome.end["kept"]["step"]}
        if work.rows_from:
            facts["rows_from"] = work.rows_from
        if work.judged_by:
            facts["judged_by"] = work.judged_by
        facts["rows"] = work.row_format
        # If all rows are messages, the policy was trained only on messages.
        chat = work.row_format == "chat"
        facts["text_as_chat"] = chat or text_as_chat(self.tokenizer, self.work.data.apply_chat_template)
        # The judge is not a parent, because nothing was trained on the judge's scores.
        parents = {name: version for name, version in work.versions.items() if name != "judge"}
        return lineage.describe(
            work.identity.stage, work.base, self.tokenizer, parents, work.digests, **facts
        )

    def close(self, timeout: float = registry.Curves.CLOSE_TIMEOUT_S) -> None:
        if self.metrics:
            self.metrics.close(timeout)
        if self.local_rank == 0:
            shutil.rmtree(self.scratch, ignore_errors=True)


def require_reload(trained: list[Any], reloaded: list[Any], folder: str) -> None:
    """Raises RuntimeError unless the outputs of the saved adapter and of the trained adapter are bit-identical.

    Lost heads and renamed keys are the most frequent faults of LoRA checkpoints, and peft only warns about them.
    """
    for row, (a, b) in enumerate(zip(trained, reloaded, strict=True)):
        if not a.equal(b):
            raise RuntimeError(
                f"the saved adapter does not reload as it was: row {row} differs by {(a - b).abs().max().item():.3g}; "
                f"nothing was registered. Compare {folder} with the parameters listed in adapter_config.json"
            )


def peak_memory(device: Any) -> int:
    """Returns this worker's peak memory in bytes: GPU memory if the worker has a GPU, or else resident memory."""
    import torch

    from pipeline.ppo import clock

    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return clock.peak_bytes(torch.device("cpu"))
