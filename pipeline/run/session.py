"""Starts a Ray session: a local Ray, embedded in this process, or the cluster that this driver runs on.

    with ray_session(places, storage_path, uri):      # starts no Ray if the job runs in this process
        ...

By default, Ray listens on every interface, and its agent runs any command that a client posts. The embedded Ray binds every
socket to loopback, so that no other machine can reach it, and requires a token, so that no other user can use it.
"""

import contextlib
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import Failure, InputError, in_brief
from pipeline.job import ALL_STAGES
from pipeline.settle import placement
from pipeline.settle.placement import Places
from pipeline.system import console, process, storage

# Environment variables that are set before Ray starts, so that all of Ray's processes inherit them.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # by default, every line that a worker prints appears twice
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # keeps the same working directory in every process
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # otherwise, `uv run` would upload the working directory at every start
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; silences its warning on CPU workers
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30",  # time that Ray waits for a node that died
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "2",  # a spot node gives 30 s to 120 s of notice
    # Makes Ray Data tokenize on the existing CPUs. By default, Ray Data requests twice as many CPUs. If all node types of a
    # cluster have GPUs (cluster.yaml), the autoscaler would then log again and again that no node type fits.
    "RAY_DATA_DEFAULT_CLUSTER_SCALING_UP_MAX_CPU_RESOURCE_DELTA": "0",
    # Lets a GPU's memory blocks grow, because sequences of new lengths leave holes between blocks of fixed sizes.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # By default, oneDNN caches 1024 matmul kernels, one for each shape. In PPO, where lengths vary, these kernels take 0.4 GiB.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "GIT_PYTHON_REFRESH": "quiet",  # without git, MLflow would print a long warning about the commit
    **console.QUIET,
}
# Environment variables for an embedded Ray.
EMBEDDED = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # the default, 2 s, would delay the end of every run
    "RAY_prestart_worker_first_driver": "0",  # one process per CPU would slow the start, and most would stay idle
    "RAY_worker_niceness": "0",  # with Ray's default, 15, other processes would slow down the training
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # no cloud reclaims this machine
}
RAY_LOGGING: dict[str, Any] = {"log_to_driver": True, "logging_level": "warning"}
MAX_ROOT_CHARACTERS = 40  # Ray's socket names add 66 characters, and a socket path has at most 107


def set_environment() -> None:
    """Sets ENVIRONMENT, except variables that the user has set. Must be called before Ray, torch or MLflow is imported."""
    os.environ.update({k: v for k, v in ENVIRONMENT.items() if k not in os.environ})


@contextlib.contextmanager
def ray_session(places: Places, storage_path: str, uri: str) -> Iterator[None]:
    """Provides Ray for the block, unless the job runs in this process. Uses the Ray that this process has already started, joins
    the cluster, or starts an embedded Ray.

    Args:
        storage_path: folder of the runs, which all nodes must reach.
        uri: address of MLflow, which all nodes must reach.
    """
    placement.check_fits(places)
    set_environment()
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    if places.in_process:
        yield
        return
    storage.scratch()  # raises an error early if another user owns the folder, which workers need
    import ray

    if ray.is_initialized():
        yield
        return
    cluster = placement.on_cluster()
    print("joining the cluster" if cluster else "starting Ray", flush=True)
    with (
        _cluster(storage_path, uri)
        if cluster
        else embedded_ray(num_cpus=placement.EMBEDDED_CPUS, **RAY_LOGGING)
    ):
        process.listen()  # ray.init() has installed its own handlers
        console.attach_ray_printer(ALL_STAGES)
        # By default, Ray Data warns of a hang whenever no CPU is free.
        logging.getLogger("ray.data.dataset").setLevel(logging.ERROR)
        placement.check_fits(places)  # a second check, because Ray's resources are known only after its start
        yield


# ----------------------------------------------------------------------------------------------- a cluster


@contextlib.contextmanager
def _cluster(storage_path: str, uri: str) -> Iterator[None]:
    """Joins the cluster that this driver runs on."""
    import ray

    try:
        ray.init(**RAY_LOGGING)
    except Exception as error:  # for example, no connection, no token, or a different Ray version
        raise InputError(
            f"cannot join the cluster at {os.environ['RAY_ADDRESS']} ({in_brief(error)}); check `ray status` there, "
            "export RAY_AUTH_MODE=token if Ray requires a token, or unset RAY_ADDRESS",
            key="RAY_ADDRESS",
        ) from error
    try:
        check_shared_storage(storage_path, uri)
        yield
    finally:
        with process.signals_ignored():
            ray.shutdown()


def check_shared_storage(storage_path: str, uri: str) -> None:
    """Raises InputError if a node cannot see a file that the driver writes, or if MLflow's store is a SQLite file."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    if storage.is_remote(storage_path) or len(nodes) < 2:
        return
    if uri.startswith("sqlite:"):
        raise InputError(
            f"a SQLite file belongs to one machine, but this cluster has {len(nodes)} nodes; name a server, e.g. "
            "mlflow.tracking_uri=http://HEAD:5000",
            key="mlflow.tracking_uri",
        )
    probe = storage.probe_in(storage_path)
    storage.write_json(probe, {})
    path_exists = ray.remote(num_cpus=0)(os.path.exists)
    answers, addresses = {}, []
    for node in nodes:
        affinity = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        answers[node["NodeManagerAddress"]] = path_exists.options(scheduling_strategy=affinity).remote(probe)
    for address, answer in answers.items():
        # A spot node may have been terminated since the nodes were listed.
        with contextlib.suppress(ray.exceptions.TaskUnschedulableError, ray.exceptions.WorkerCrashedError):
            if not ray.get(answer, timeout=60):
                addresses.append(address)
    os.remove(probe)
    if addresses:
        raise InputError(
            f"{storage_path} is not shared: {', '.join(addresses)} do not see the files of the driver; use a bucket or a "
            "network mount, e.g. run.storage_path=s3://BUCKET/runs",
            key="run.storage_path",
        )


# ------------------------------------------------------------------------------------------ an embedded Ray

TOKEN = secrets.token_hex(32)  # all sessions of this process share the token


def secured_environment() -> dict[str, str]:
    """Returns environment variables that restrict the embedded Ray to this session, and override the user's settings."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return {
        # Makes Ray bind to loopback. The variable's name refers to Windows and macOS, where Ray binds to loopback by default
        # (https://github.com/ray-project/ray/issues/18730).
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        # By default, torch.distributed would listen on the address that this machine's name resolves to.
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback),
    }


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Sets the environment variables of an embedded session only within the block, because a cluster has another token."""
    environment = dict(os.environ)
    os.environ.update({key: value for key, value in EMBEDDED.items() if key not in os.environ})
    os.environ.update(secured_environment())
    _read_by_ray()
    try:
        yield
    finally:
        for key in (*EMBEDDED, *secured_environment()):
            os.environ.pop(key, None)
            os.environ.update({key: environment[key]} if key in environment else {})
        _read_by_ray()


_folders: list[str] = []  # the folder of this process's session, if one is open


def session_folder() -> str | None:
    """Returns the folder of this process's embedded Ray, or None if there is none."""
    return _folders[-1] if _folders else None


def belong_to(folder: str | None) -> None:
    """Sets the session_folder() of this process to the driver's, so that this process can start workers in the driver's Ray."""
    _folders[:] = [folder] if folder else []


def _read_by_ray() -> None:
    """Makes Ray read the environment again. By default, Ray reads its environment variables only at import.

    A notebook may have imported Ray before the variables were set. The imported names are private (ray 2.60). Remove this
    function when ray.init reads the environment, or takes address and token as arguments.
    """
    from ray._private import ray_constants as ray_settings
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    default = not ray_settings.IS_WINDOWS_OR_OSX
    ray_settings.ENABLE_RAY_CLUSTER = ray_settings.env_bool(ray_settings.ENABLE_RAY_CLUSTERS_ENV_VAR, default)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def embedded_ray(**options: Any) -> Iterator[None]:
    """Starts Ray for the block, with `options` as arguments of ray.init. Raises Failure if Ray does not start."""
    import psutil

    root = _session_root()
    # Keeps the newest session whose driver has ended, because its logs may be needed. Deletes older sessions.
    sessions = sorted(path for path in root.glob("session_*_*") if path.is_dir() and not path.is_symlink())
    ended = [path for path in sessions if not psutil.pid_exists(int(path.name.rpartition("_")[2]))]
    for path in ended[:-1]:
        shutil.rmtree(path, ignore_errors=True)
    with _environment():
        import ray

        try:
            try:
                # Without "local", Ray would join the cluster that this machine started last, even another user's.
                context = ray.init(address="local", include_dashboard=False, _temp_dir=str(root), **options)
            # Ray raises errors of many types, for example if a process died or the disk is full.
            except Exception as error:
                raise Failure(
                    f"Ray did not start ({in_brief(error, 400)}). Its logs are in {root}/session_latest/logs. Check free "
                    f"memory, CPU load and disk space in {root}, then run the same command again"
                ) from error
            _folders.append(context.address_info["session_dir"])
            yield
            ray.shutdown()
            shutil.rmtree(_folders[-1], ignore_errors=True)
        finally:  # keeps the logs of a failed session; the next session deletes them
            with process.signals_ignored():
                ray.shutdown()
            _folders.clear()


def _session_root() -> Path:
    """Returns the folder of this user's Ray sessions, for logs and unix sockets.

    Ray makes its folder accessible to all users, so the parent of that folder is private.
    """
    parent = storage.private(os.environ.get("RAY_TMPDIR", "/tmp"), f"rlhf-{os.getuid()}", "RAY_TMPDIR")
    root = Path(parent, "ray")
    if len(str(root)) > MAX_ROOT_CHARACTERS:
        problem = f"cannot use {parent} (its path is too long for unix sockets); export RAY_TMPDIR=FOLDER, with a short path"
        raise InputError(problem, "RAY_TMPDIR")
    root.mkdir(exist_ok=True)
    return root
