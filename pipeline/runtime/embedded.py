"""An embedded Ray: it listens on loopback only, requires a token of its own, and leaves nothing behind.

    with embedded.ray_session(logging_level="warning"):
        ...

Ray listens on every interface and, without a token, runs whatever command is posted to its agent. Here every socket is
bound to loopback, so that no other machine can knock, and every request needs the token, so that no other user of this
machine gets in.
"""

import contextlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import Failure, InputError, in_brief
from pipeline.system import process

# Set before Ray starts, so that every process of it inherits them; what the user has set stays.
DEFAULTS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # also what a checkpoint report waits for (2 s by default)
    "RAY_prestart_worker_first_driver": "0",  # a process per CPU would slow the start, and few are used
    "RAY_worker_niceness": "0",  # Ray's default is 15: its own idle processes would push the training aside
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one process less: no cloud reclaims this machine
}


LONGEST_ROOT = 40  # characters: Ray adds 66 for the names of its sockets, and the system allows 107


def secured() -> dict[str, str]:
    """The environment of a Ray that only this session can speak to. It overrides what the user has set."""
    return {
        # Named after the systems on which it is the default: there Ray binds to loopback, to spare its users the
        # firewall's questions (https://github.com/ray-project/ray/issues/18730). It does the same on Linux.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _token(),
        # torch.distributed would listen on the address that this machine's name resolves to.
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _loopback_interface()),
    }


@cache  # two sessions of one process may share it
def _token() -> str:
    return secrets.token_hex(32)


def _loopback_interface() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """The environment of a session for the block; afterwards as it was, for a cluster with a token of its own, say."""
    before = dict(os.environ)
    os.environ.update({key: value for key, value in DEFAULTS.items() if key not in os.environ})
    os.environ.update(secured())
    _read_by_ray()
    try:
        yield
    finally:
        for key in (*DEFAULTS, *secured()):
            os.environ.pop(key, None)
            os.environ.update({key: before[key]} if key in before else {})
        _read_by_ray()


_folders: list[str] = []  # of the session that this process has, if it has one


def session_folder() -> str | None:
    """Where the files of this process's embedded Ray lie, until it ends; None where the Ray here is another one."""
    return _folders[-1] if _folders else None


def belong_to(folder: str | None) -> None:
    """For another process of an embedded Ray, which is to start workers as the driver does; `folder` is the driver's."""
    _folders[:] = [folder] if folder else []


def _read_by_ray() -> None:
    """Ray reads these settings when it is imported, which a notebook, say, did long before: it reads them again.

    All of it private (ray 2.60); tests/runtime/test_embedded.py lists the sockets of a session that starts in such a process.
    Remove when ray.init reads them, or takes address and token as arguments.
    """
    from ray._private import ray_constants as ray_settings
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    default = not ray_settings.IS_WINDOWS_OR_OSX
    ray_settings.ENABLE_RAY_CLUSTER = ray_settings.env_bool(ray_settings.ENABLE_RAY_CLUSTERS_ENV_VAR, default)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def ray_session(**options: Any) -> Iterator[None]:
    """Starts Ray for the block, and ends it. `options` are ray.init's.

    Raises:
        InputError: when the folder for Ray's files belongs to another user.
        Failure: when Ray does not start.
    """
    root = _session_root()
    _sweep(root)
    with _environment():
        import ray

        try:
            _folders.append(_start(root, options))
            yield
            ray.shutdown()
            shutil.rmtree(_folders[-1], ignore_errors=True)
        finally:  # of a session that failed, Ray's logs stay until the next but one starts
            with process.signals_ignored():
                ray.shutdown()
            _folders.clear()


def _start(root: Path, options: dict[str, Any]) -> str:
    """The folder of the session that was started."""
    import ray

    began = time.monotonic()
    try:
        # address="local": else it would join whatever cluster this machine last started, somebody else's included.
        context = ray.init(address="local", include_dashboard=False, _temp_dir=str(root), **options)
    except Exception as error:  # of many types: a process that died, or did not answer in time, a full disk
        raise Failure(
            f"Ray did not start; gave up after {time.monotonic() - began:.0f} s ({in_brief(error, 400)}). "
            f"Its logs are in {root}/session_latest/logs. Check free memory, CPU load and disk space in {root}, "
            "then run the same command again"
        ) from error
    return context.address_info["session_dir"]


# --------------------------------------------------------------------------------------------- what stays behind


def _session_root() -> Path:
    """Returns the folder of this user's Ray sessions: logs and unix sockets.

    Ray opens its folder and everything in it to all users, so that folder lies in one that only this user can enter.
    """
    private = Path(os.environ.get("RAY_TMPDIR", "/tmp"), f"rlhf-{os.getuid()}")
    root = private / "ray"
    try:
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{private} cannot be created ({error.strerror}); export RAY_TMPDIR=FOLDER, one of your own with a short path",
            key="RAY_TMPDIR",
        ) from error
    if len(str(root)) > LONGEST_ROOT:
        raise InputError(
            f"found {os.environ['RAY_TMPDIR']!r}, too long for the unix sockets in it; name a shorter one",
            key="RAY_TMPDIR",
        )
    if private.lstat().st_uid != os.getuid():
        raise InputError(
            f"{private} belongs to another user; export RAY_TMPDIR=FOLDER, one of your own with a short path"
        )
    private.chmod(0o700)
    root.mkdir(exist_ok=True)
    return root


def _sweep(root: Path) -> None:
    """Deletes the folders of sessions whose driver is gone, except the newest: its logs may be wanted."""
    import psutil

    sessions = sorted(path for path in root.glob("session_*_*") if path.is_dir() and not path.is_symlink())
    ended = [path for path in sessions if not psutil.pid_exists(int(path.name.rpartition("_")[2]))]
    for path in ended[:-1]:
        shutil.rmtree(path, ignore_errors=True)
