"""Ray Train on the driver's side: a session, a TorchTrainer, failures, resume. (`worker.py` is the other side.)

    with driver.session(job):                 # an embedded Ray, or the cluster that this driver runs on
        outcome = driver.fit(work, rows, train)     # `train(worker)` runs once in every worker

The same `run.name` continues from its last checkpoint; without a name every run is a new one.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pipeline import registry
from pipeline.config import JOBS, Job
from pipeline.errors import InputError, in_brief
from pipeline.runtime import checkpoints, embedded, placement
from pipeline.runtime.host import Work
from pipeline.runtime.placement import check_scaling
from pipeline.runtime.worker import Worker, main
from pipeline.system import console, process, storage

# Set before Ray starts, so that every process of it inherits them.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # else every line of a worker appears twice
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths of a job mean the same in every process
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else `uv run` uploads the working directory and slows every start
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; silences its warning on CPU workers
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30",  # after a node died, the first try waits for it in vain
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "2",  # a spot node gives 30 s to 120 s of notice
    # Rows are tokenised on the CPUs that are there. Ray Data asks for twice as many, and where only nodes with GPUs can be
    # started (cluster.yaml) the autoscaler repeats into the job's log that no node type fits.
    "RAY_DATA_DEFAULT_CLUSTER_SCALING_UP_MAX_CPU_RESOURCE_DELTA": "0",
    # A GPU's memory grows in place: sequences of ever new lengths leave holes between blocks of fixed sizes.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # oneDNN keeps 1024 compiled products, one for each shape: in PPO, where lengths vary, 0.4 GiB of them.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "GIT_PYTHON_REFRESH": "quiet",  # MLflow asks for the commit; where git is not installed, a page of advice is printed
    **console.QUIET,
}
# Seconds that a collective of torch.distributed may take; its default is half an hour. Ranks load, score and wait for
# rollout workers on their own, for as long as that may take; Ray Train notices by itself when a rank dies.
COLLECTIVE_TIMEOUT_S = 365 * 24 * 3600
RAY_LOGGING: dict[str, Any] = {"log_to_driver": True, "logging_level": "warning"}


def name_run(job: Job) -> Job:
    """The job with a run name and absolute paths: a name given is kept (and resumed), else stage and time."""
    name = job.run.name or f"{job.stage}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid() % 10000:04d}"
    return replace(job, run=replace(job.run, name=name, storage_path=storage.absolute(job.run.storage_path)))


def set_environment() -> None:
    """The ENVIRONMENT, where the user has set nothing else; before a library that reads it is imported."""
    os.environ.update({k: v for k, v in ENVIRONMENT.items() if k not in os.environ})


@contextlib.contextmanager
def session(job: Job) -> Iterator[None]:
    """Provides Ray for the stages inside: this process's, the cluster's, or an embedded one. None for a job in process."""
    check_scaling(job)
    set_environment()
    if job.in_process:
        logging.getLogger("ray.train").setLevel(logging.WARNING)  # else it explains its local mode
        yield
        return
    import ray

    if ray.is_initialized():
        yield
        return
    with contextlib.ExitStack() as stack:
        cluster = os.environ.get("RAY_ADDRESS")
        print("joining the cluster" if cluster else "starting Ray", flush=True)
        stack.enter_context(_cluster(job) if cluster else _embedded())
        process.listen()  # ray.init() has put handlers of its own there
        console.attach(JOBS)
        logging.getLogger("ray.train").setLevel(logging.WARNING)
        # It expects a hang wherever no CPU happens to be free, for the moment or because the workers have them.
        logging.getLogger("ray.data.dataset").setLevel(logging.ERROR)
        check_scaling(job)  # again: now Ray says what it has
        yield


@contextlib.contextmanager
def _cluster(job: Job) -> Iterator[None]:
    """The cluster that this driver runs on: Ray sets RAY_ADDRESS for the driver of a submitted job."""
    import ray

    try:
        ray.init(**RAY_LOGGING)
    except Exception as error:  # of many types: no connection, no token, another version
        raise InputError(
            f"the cluster at {os.environ['RAY_ADDRESS']} cannot be joined ({in_brief(error)}); look at `ray "
            "status` there, or unset RAY_ADDRESS",
            key="RAY_ADDRESS",
        ) from error
    try:
        check_shared_storage(job)
        yield
    finally:
        with process.signals_ignored():
            ray.shutdown()


def _embedded() -> contextlib.AbstractContextManager[None]:
    return embedded.ray_session(
        num_cpus=placement.embedded_cpus(), labels=placement.local_labels(), **RAY_LOGGING
    )


# ------------------------------------------------------------------------------------------------- preflight


def check_shared_storage(job: Job) -> None:
    """On several nodes, proves with a file that each of them sees the driver's `storage_path`.

    Raises:
        InputError: naming the nodes that do not.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    if storage.is_remote(job.run.storage_path) or len(nodes) < 2:
        return
    if registry.tracking_uri(job).startswith("sqlite:"):
        raise InputError(
            "a SQLite file belongs to one machine, but this cluster has "
            f"{len(nodes)} nodes; name a server, e.g. mlflow.tracking_uri=http://HEAD:5000",
            key="mlflow.tracking_uri",
        )
    probe = storage.probe_in(job.run.storage_path)
    storage.write_json(probe, {"driver": os.uname().nodename})
    sees = ray.remote(num_cpus=0)(os.path.exists)
    asked = {
        node["NodeManagerAddress"]: sees.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(probe)
        for node in nodes
    }

    def is_blind(answer: Any) -> bool:
        try:
            return not ray.get(answer, timeout=60)
        except (ray.exceptions.TaskUnschedulableError, ray.exceptions.WorkerCrashedError):
            return False  # the node has gone meanwhile, as spot nodes do

    blind = [address for address, answer in asked.items() if is_blind(answer)]
    os.remove(probe)
    if blind:
        raise InputError(
            f"{job.run.storage_path} is not shared: {', '.join(blind)} do not see what the driver "
            "writes there; use a bucket or a network mount, e.g. run.storage_path=s3://BUCKET/runs",
            key="run.storage_path",
        )


# ---------------------------------------------------------------------------------------------- what a run is


@dataclass(frozen=True)
class Outcome:
    """What a run left: final metrics, samples, the adapter's folder, the last checkpoint, and what it cost."""

    metrics: dict[str, float]
    samples: list[dict[str, Any]]
    adapter: str | None  # in the checkpoint; None where nothing was trained
    checkpoint: str
    seconds: float
    peak_memory: int  # bytes, the largest worker: of the GPU where there is one, else resident
    # Which step was kept and why training ended (best.outcome), and of ppo a typical update; empty where nothing was trained.
    end: dict[str, Any]


def fit(
    work: Work, rows: dict[str, Any], train: Callable[[Worker], dict[str, Any]], beside: Any = None
) -> Outcome:
    """Runs `train(worker)` on every worker of a TorchTrainer; restarts and resumes as the job says.

    Args:
        beside: an actor that is handed to each worker, and told when they wait for their places. None: there is none.

    Raises:
        ray.train.WorkerGroupError: with each worker's exception; the command line looks into it for
            an InputError.
        Failure: when no place for the workers was found within run.placement_timeout_s.
    """
    job = work.job
    trainer = _torch_trainer(work, rows, train, beside)
    # Ray Train's handler of Ctrl-C would end this process with status 1, without a word (ray 2.60, private): here it is a
    # KeyboardInterrupt like anywhere else. Remove when https://docs.ray.io has a public way to keep one's own.
    controllers: list[Any] = []
    trainer._register_sigint_handler = controllers.append
    if job.run.num_to_keep == 1:
        print("warning: run.num_to_keep=1 leaves no checkpoint to fall back to, should the newest be damaged")
    low, high = job.workers
    count = f"{low}" if low == high else f"{low} to {high}"
    if not job.in_process:
        print(f"starting {count} worker{'s' * (high > 1)}: importing torch and transformers", flush=True)
    started = time.monotonic()
    try:
        result = trainer.fit()
    except Exception:
        _print_what_is_left(job)
        raise
    except BaseException:
        with process.signals_ignored():
            _end_workers(controllers)
        raise
    return _outcome(job, result, time.monotonic() - started)


def _torch_trainer(
    work: Work, rows: dict[str, Any], train: Callable[[Worker], dict[str, Any]], beside: Any
) -> Any:
    from ray.train import (
        DataConfig,
        FailureConfig,
        LoggingConfig,
        RunConfig,
        ScalingConfig,
    )
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

    from pipeline.runtime.rendezvous import FileRendezvous

    folder = embedded.session_folder()

    class Trainer(TorchTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            """Without the cleaner of placement groups in an embedded Ray, whose processes all end with the driver.

            It asks a dashboard once a second, of whatever Ray this machine was the last to start, and the end of the run waits
            12 s for an answer (ray 2.60, private). Remove when it asks the GCS of its own session.
            """
            callbacks: list[Any] = super()._create_default_callbacks()
            return [c for c in callbacks if not (folder and isinstance(c, PlacementGroupCleanerCallback))]

    run, scaling = work.job.run, dict(work.job.scaling)
    if isinstance(scaling.get("num_workers"), list):
        scaling["num_workers"] = tuple(scaling["num_workers"])
    if work.job.in_process:  # Ray Train's local mode: it calls `main` here, without starting Ray
        config = {"train": train, "work": work, "beside": None}
        local = ScalingConfig(num_workers=0)
        return TorchTrainer(main, train_loop_config=config, datasets=rows, scaling_config=local)
    scaling["num_workers"] = scaling.get("num_workers", 1) or 1
    return Trainer(
        main,
        train_loop_config={"train": train, "work": work, "beside": beside},
        torch_config=FileRendezvous(folder=folder, timeout_s=COLLECTIVE_TIMEOUT_S)
        if folder
        else TorchConfig(timeout_s=COLLECTIVE_TIMEOUT_S),
        datasets=rows,
        # Every worker sees the whole set: a split shard would be split a second time by accelerate.
        dataset_config=DataConfig(datasets_to_split=[]),
        scaling_config=ScalingConfig(**scaling),
        run_config=RunConfig(
            name=run.name,
            storage_path=run.storage_path,
            failure_config=FailureConfig(max_failures=run.max_failures),
            logging_config=LoggingConfig(log_level="WARNING"),
            callbacks=[placement.callback(work.job, beside)],
        ),
    )


def _outcome(job: Job, result: Any, seconds: float) -> Outcome:
    """Returns what a run left, from what its workers returned and its last checkpoint."""
    checkpoint = storage.join(job.folder, checkpoints.complete(job.folder)[-1])
    adapter = storage.join(checkpoint, "adapter")
    left = result.return_value
    return Outcome(
        metrics=left["metrics"],
        samples=left["samples"],
        adapter=adapter if storage.exists(adapter) else None,
        checkpoint=checkpoint,
        seconds=seconds,
        peak_memory=left["peak_memory"],
        end={key: left[key] for key in ("kept", "ended", "timeline") if key in left},
    )


def _end_workers(controllers: list[Any]) -> None:
    """After Ctrl-C or SIGTERM: the workers first, so that nobody writes into the run's folder any more."""
    import ray

    for controller in controllers:
        # Its process ends with the call, which is an error to Ray.
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(controller.abort.remote(), timeout=5)


def _print_what_is_left(job: Job) -> None:
    """After a failure: where the same command will continue. What failed may be the disk itself: then only that is said."""
    try:
        complete = checkpoints.complete(job.folder)
    except Exception as error:
        print(f"run {job.run.name} failed, and {job.folder} cannot be read ({error})", flush=True)
        return
    left = (
        f"continues from {complete[-1]}" if complete else "starts it over: it has no complete checkpoint yet"
    )
    print(f"run {job.run.name} failed; the same command with run.name={job.run.name} {left}", flush=True)
