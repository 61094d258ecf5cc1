"""The lease of a run's folder: one process at a time may write there, on a file system or in a bucket.

    with held(folder) as lease:     # waits until the lease of a killed process expires
        ...
    hold(lease)                     # in a worker: the driver's machine sees that it still lives
    lease.require()                 # before each commit, in any process: raises LeaseLost if it must not write

Attempt N creates the file `lease/N.json`, which can succeed for one process only, and renews it until it ends. The newest
attempt owns the folder: a process that was cut off finds the next attempt, and stops. The files stay as the folder's history.

No two clocks are compared: a lease has expired if nobody renewed it while somebody watched for its duration. A bucket says by
its own clock how long ago that was. On the machine of a killed owner, the system knows that its processes have ended.
"""

import contextlib
import fcntl
import glob
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.errors import InputError, LeaseLost
from pipeline.system import storage, terminal

FOLDER = "lease"  # in the folder that it is the lease of
SECONDS = float(os.environ.get("PIPELINE_LEASE_S", "60"))  # duration; renewed four times in it
POLL_S = 1.0  # time between two looks at a lease that may expire
HELD = ".held"  # the file on which all processes of an attempt on a machine hold a shared lock, in its scratch folder
ABANDONED_S = 3600  # age of a scratch folder that no process holds; a younger one may be about to be held


@dataclass(frozen=True)
class Lease:
    """The right of one attempt to write into a folder. Workers get a copy."""

    folder: str = ""
    attempt: int = 0
    id: str = ""  # of no other attempt, on this or another folder

    @property
    def file(self) -> str:
        return _file(self.folder, self.attempt)

    @property
    def scratch(self) -> str:
        """Returns the folder for temporary files of this attempt on this machine."""
        return storage.scratch("runs", self.id)

    def require(self) -> None:
        """Raises LeaseLost if the folder has a later attempt, or was deleted."""
        mine, later = _read(self.file), _file(self.folder, self.attempt + 1)
        if mine.get("id") == self.id and not mine.get("ended") and not storage.exists(later):
            return
        now = _who(_read(later)) if storage.exists(later) else "nobody: it was deleted"
        raise LeaseLost(
            f"{self.folder} belongs to {now}; this process, attempt {self.attempt}, stops and writes nothing more there"
        )


def hold(lease: Lease) -> int:
    """Lets other processes of this machine see, until this one ends, that the attempt lives. Returns the open file."""
    os.makedirs(lease.scratch, exist_ok=True)
    handle = os.open(os.path.join(lease.scratch, HELD), os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


@contextlib.contextmanager
def held(folder: str) -> Iterator[Lease]:
    """Holds the lease of a folder for the block. Waits until that of a killed process expires.

    Raises InputError if another process holds it, and lives.
    """
    lease, record, handle = _acquire(folder)
    ended = threading.Event()
    renewal = threading.Thread(target=_renew, args=(lease, record, ended), name="lease", daemon=True)
    renewal.start()
    try:
        yield lease
    finally:
        ended.set()
        renewal.join(SECONDS)
        # For example of a full disk: the user has to see the failure itself
        with contextlib.suppress(Exception):
            lease.require()
            storage.write_json(lease.file, record | {"ended": _time()})
        os.close(handle)
        shutil.rmtree(lease.scratch, ignore_errors=True)


def remove_abandoned() -> None:
    """Deletes the scratch folders of attempts of which no process lives on this machine, because they were killed."""
    for path in glob.glob(os.path.join(glob.escape(storage.scratch("runs")), "*", HELD)):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.path.getmtime(path) > ABANDONED_S:
                shutil.rmtree(os.path.dirname(path))


def _acquire(folder: str) -> tuple[Lease, dict[str, Any], int]:
    """Returns the lease of the next attempt, its record, and the file that it holds."""
    owner = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid(), "since": _time()}
    while True:
        last = _newest(folder)
        before = _read(_file(folder, last))
        if last and not before.get("ended"):
            _wait_until_expired(_file(folder, last), before)
        lease = Lease(folder, last + 1, owner["id"])
        record = {"attempt": lease.attempt, **owner, "seconds": SECONDS}
        handle = hold(lease)
        # A client that got no answer asks again, and finds its own file.
        if storage.create(lease.file, record | _expiry()) or _read(lease.file).get("id") == lease.id:
            if last and not before.get("ended"):
                how = {"ended": f"taken over by attempt {lease.attempt}, {_time()}"}
                storage.write_json(_file(folder, last), before | how)
            return lease, record, handle
        os.close(handle)  # another process was faster


def _wait_until_expired(file: str, left: dict[str, Any]) -> None:
    """Waits until no process of the attempt `left` can renew its lease. Raises InputError if one does."""
    living = InputError(
        f"another process is running {os.path.dirname(os.path.dirname(file))} right now ({_who(left)}); wait for it, end it, "
        "or choose another run.name",
        "run.name",
    )
    path = storage.scratch("runs", str(left.get("id")), HELD)
    if os.path.exists(path):
        _wait_for_processes(path, left, living)
        return
    seconds = left.get("seconds", SECONDS)
    expires = time.monotonic() + seconds - _age(file)
    if (wait := expires - time.monotonic()) > 0:
        terminal.say(f"waiting {wait:.0f} s for a lease to expire: {_who(left)} may still write there")
    while time.monotonic() < expires:
        time.sleep(POLL_S)
        if (now := _read(file)) != left:
            if now.get("ended"):
                return
            raise living


def _wait_for_processes(path: str, left: dict[str, Any], living: InputError, seconds: float = 60.0) -> None:
    """Waits until no process of this machine holds `path`. Raises `living` if the driver is one of them."""
    import psutil

    try:
        with storage.locked(path, "nobody", 0):
            return
    except TimeoutError:
        if psutil.pid_exists(left["pid"]):
            raise living from None
    try:
        with storage.locked(path, "the workers of a killed process to exit", seconds):
            pass
    except TimeoutError as error:
        raise InputError(
            f"workers of an earlier process still run ({_who(left)}); end them (ps lists them as ray::RayTrainWorker), or "
            "choose another run.name",
            "run.name",
        ) from error


def _renew(lease: Lease, record: dict[str, Any], ended: threading.Event) -> None:
    while not ended.wait(SECONDS / 4):
        try:
            lease.require()
            storage.write_json(lease.file, record | _expiry())
        except LeaseLost as lost:  # the next commit fails
            terminal.say(f"warning: {lost}")
            return
        except Exception:  # the storage may answer the next time, and nobody may have waited meanwhile
            continue


def _age(file: str) -> float:
    """Returns the seconds since a file in a bucket was written, at least, by the bucket's clock; 0 if it has none.

    On a shared file system, the time of a file may be that of the machine that wrote it.
    """
    if not storage.is_remote(file):
        return 0.0
    storage.write_json(probe := storage.probe_in(os.path.dirname(file)), {})
    fs, inner = storage.filesystem(file)
    then, now = (one.mtime for one in fs.get_file_info([inner, storage.filesystem(probe)[1]]))
    storage.remove(probe)
    # S3 gives whole seconds
    return max(0.0, (now - then).total_seconds() - 1) if now and then else 0.0


def _newest(folder: str) -> int:
    """Returns the number of the last attempt, or 0."""
    found = (re.fullmatch(r"(\d+)\.json", name) for name in storage.names(storage.join(folder, FOLDER)))
    return max((int(match[1]) for match in found if match), default=0)


def _file(folder: str, attempt: int) -> str:
    return storage.join(folder, FOLDER, f"{attempt:06d}.json")


def _read(file: str) -> dict[str, Any]:
    """Returns what an attempt wrote; {} if its file is missing, or is being created."""
    try:
        return storage.read_json(file)
    except (FileNotFoundError, ValueError):
        return {}


def _who(record: dict[str, Any]) -> str:
    return "attempt {attempt} on {host}, process {pid}, since {since}".format_map(
        {"attempt": "?", "host": "?", "pid": "?", "since": "?"} | record
    )


def _time(seconds: float = 0.0) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


def _expiry() -> dict[str, str]:
    """Returns when a lease was renewed and will expire, by this machine's clock: for people, and to be a change."""
    return {"renewed": f"{_time()} {uuid.uuid4().hex[:8]}", "expires": _time(SECONDS)}
