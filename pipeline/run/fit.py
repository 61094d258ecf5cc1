"""Runs a function in the workers of a TorchTrainer, and restarts workers that died."""

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.train import DataConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig

# TorchConfig's own backend runs these private functions in the workers. Remove this import when Ray's `init_method` takes a URL.
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _set_torch_distributed_env_vars, _setup_torch_process_group, _TorchBackend
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

from pipeline.job import Run
from pipeline.run.session import session_folder
from pipeline.settle import placement
from pipeline.settle.placement import Places
from pipeline.system import process

# Timeout of collectives in torch.distributed. torch's default is half an hour, but a rank may wait longer for other ranks that
# load models, score completions or wait for rollout workers. Ray Train detects the death of a rank without this timeout, but a
# rank that hangs must not hold a rented cluster forever.
COLLECTIVE_TIMEOUT_S = 24 * 3600


def fit(
    places: Places,
    run: Run,
    loop: Callable[[dict[str, Any]], Any],
    config: dict[str, Any],
    rows: dict[str, Any],
) -> Any:
    """Runs `loop(config)` on every worker of a TorchTrainer. Returns the result of `loop` on rank 0.

    Restarts workers that died, at most run.max_failures times. Raises ray.train.WorkerGroupError with the exception of each
    worker, or Failure if the workers could not be placed in time.

    Args:
        run: the section `run` of the job.
        rows: {name: dataset} that each worker gets.
    """
    trainer = _trainer(places, run, loop, config, rows)
    # Ray Train's handler of Ctrl-C would end this process with status 1 and without a message (ray 2.60, private). Without that
    # handler, Ctrl-C raises KeyboardInterrupt. Remove this code when Ray has a public switch for its handler.
    controllers: list[Any] = []
    trainer._register_sigint_handler = controllers.append
    try:
        return trainer.fit().return_value
    except (KeyboardInterrupt, SystemExit):
        # Waits until the workers have ended, so that no worker writes into the run's folder later.
        with process.signals_ignored():
            for controller in controllers:
                # Ray raises an error in this call when the controller's process ends.
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(controller.abort.remote(), timeout=5)
        raise


def _trainer(places: Places, run: Run, loop: Any, config: dict[str, Any], rows: dict[str, Any]) -> Any:
    if places.in_process:  # in local mode, Ray Train calls the loop in this process, without Ray
        local_scaling = ScalingConfig(num_workers=0)
        return TorchTrainer(loop, train_loop_config=config, datasets=rows, scaling_config=local_scaling)
    scaling, folder = dict(places.scaling), session_folder()
    workers = scaling.pop("num_workers", 1) or 1
    torch_config = TorchConfig(timeout_s=COLLECTIVE_TIMEOUT_S)
    if folder:
        torch_config = FileRendezvous(folder=folder, timeout_s=COLLECTIVE_TIMEOUT_S)
    trainer = TorchTrainer(
        loop,
        train_loop_config=config,
        torch_config=torch_config,
        datasets=rows,
        # Every worker gets all rows, because accelerate splits them.
        dataset_config=DataConfig(datasets_to_split=[]),
        scaling_config=ScalingConfig(
            num_workers=tuple(workers) if isinstance(workers, list) else workers, **scaling
        ),
        run_config=RunConfig(
            name=run.name,
            storage_path=run.storage_path,
            failure_config=FailureConfig(max_failures=run.max_failures),
            logging_config=LoggingConfig(log_level="WARNING"),
            callbacks=[placement.placement_callback(places)],
        ),
    )
    if folder:
        # Ray Train's cleaner of placement groups delays the end of a run by 12 s (ray 2.60, private). The cleaner polls the
        # dashboard of the Ray that this machine started last, which may belong to another user. An embedded Ray needs no cleaner,
        # because its processes end with the driver. Remove this code when the cleaner queries the GCS of its own session.
        defaults, cleaner = trainer._create_default_callbacks, PlacementGroupCleanerCallback
        trainer._create_default_callbacks = lambda: [c for c in defaults() if not isinstance(c, cleaner)]
    return trainer


@dataclass
class FileRendezvous(TorchConfig):
    """TorchConfig for workers on one machine, which initialize their process group through a file that only this user can read.

    torch's TCPStore, which a cluster needs, listens on every interface without a password (torch 2.13;
    https://github.com/pytorch/pytorch/issues/173909).

    Args:
        folder: a folder that only this user can read, and that is deleted when the session ends.
    """

    folder: str = ""

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return _Backend


class _Backend(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: FileRendezvous) -> None:
        """Initializes the process group of all workers. Runs in Ray Train's controller."""
        store = os.path.join(tempfile.mkdtemp(prefix="rendezvous-", dir=backend_config.folder), "store")
        group = {
            "backend": "nccl" if worker_group.get_resources_per_worker().get("GPU") else "gloo",
            "world_size": len(worker_group),
            "init_method": f"file://{store}",
            "timeout_s": backend_config.timeout_s,
        }
        worker_group.execute(_set_torch_distributed_env_vars)
        ray.get(
            [
                worker_group.execute_single_async(rank, _setup_torch_process_group, world_rank=rank, **group)
                for rank in range(len(worker_group))
            ]
        )
