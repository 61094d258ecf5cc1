"""Makes sure that only one attempt at a time writes to a run's folder, on a file system or in a bucket.

    with held(folder) as lease:     # waits until the lease of a killed process expires
        ...
    hold(lease)                     # in a worker: shows other processes on this machine that the attempt is alive
    lease.require()                 # before each commit: raises LeaseLost if another attempt owns the folder

Attempt N creates the file `lease/N.json`, and renews it until the attempt ends. Only one process can create `lease/N.json`. The
newest attempt owns the folder. A process that was disconnected for a while may find the file of a later attempt, and then stops.
The lease files remain as a history of the attempts.

The clocks of machines are not compared. A lease has expired if another process has watched it for its full duration, and it was
not renewed. If all processes of a killed attempt ran on this machine, the next attempt waits for a file lock instead of the
expiry.
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
from datetime import UTC, datetime, timedelta
from typing import Any

from pipeline.errors import InputError, LeaseLost
from pipeline.system import storage, terminal

FOLDER = "lease"  # subfolder with the lease's files
# duration of a lease, which its owner renews every SECONDS / 4
SECONDS = float(os.environ.get("PIPELINE_LEASE_S", "60"))
POLL_S = 1.0  # seconds between two reads of a lease that may expire
HELD = ".held"  # file in an attempt's scratch folder, on which all its processes hold a shared lock
ABANDONED_S = 3600  # age at which an unlocked scratch folder is deleted; a new folder may get its lock soon


@dataclass(frozen=True)
class Lease:
    """Represents the right of one attempt to write to a folder. Workers get a copy of the driver's lease."""

    folder: str = ""
    attempt: int = 0
    id: str = ""  # random id of the attempt, unique over all folders

    @property
    def file(self) -> str:
        return _file(self.folder, self.attempt)

    @property
    def scratch(self) -> str:
        """Returns the folder for temporary files of this attempt on this machine."""
        return storage.scratch("runs", self.id)

    def require(self) -> None:
        """Raises LeaseLost if a later attempt owns the folder, or if the folder was deleted."""
        own_record, next_file = _read(self.file), _file(self.folder, self.attempt + 1)
        if own_record.get("id") == self.id and not own_record.get("ended") and not storage.exists(next_file):
            return
        others = [record for record in (_read(next_file), own_record) if record.get("id", self.id) != self.id]
        state = f"belongs to {_who(others[0])}" if others else "was deleted"
        raise LeaseLost(
            f"{self.folder} {state}; this process, attempt {self.attempt}, stops and writes nothing more to this folder"
        )


def hold(lease: Lease) -> int:
    """Locks a file while this process runs, to show that the attempt is alive. Returns the open file."""
    os.makedirs(lease.scratch, exist_ok=True)
    handle = os.open(os.path.join(lease.scratch, HELD), os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


def remove_abandoned() -> None:
    """Deletes the scratch folders of attempts that have no running process on this machine."""
    for path in glob.glob(os.path.join(glob.escape(storage.scratch("runs")), "*", HELD)):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.path.getmtime(path) > ABANDONED_S:
                shutil.rmtree(os.path.dirname(path))


@contextlib.contextmanager
def held(folder: str) -> Iterator[Lease]:
    """Holds the lease of a folder during the `with` block. First waits until the lease of a killed process, if any, expires.

    Raises InputError if a running process holds the lease.
    """
    lease, record, handle = _acquire(folder)
    stopped = threading.Event()
    renewal = threading.Thread(target=_renew, args=(lease, record, stopped), name="lease", daemon=True)
    renewal.start()
    try:
        yield lease
    finally:
        stopped.set()
        renewal.join(SECONDS)
        # An error here, such as a full disk, must not replace an error from the `with` block
        with contextlib.suppress(Exception):
            lease.require()
            storage.write_json(lease.file, record | {"ended": _time()})
        os.close(handle)
        shutil.rmtree(lease.scratch, ignore_errors=True)


def _acquire(folder: str) -> tuple[Lease, dict[str, Any], int]:
    """Creates the lease of the next attempt. Returns the lease, the content of its file, and the open, locked file."""
    while True:
        names = storage.names(storage.join(folder, FOLDER))
        last = max((int(name[:6]) for name in names if re.fullmatch(r"\d{6}\.json", name)), default=0)
        previous = _read(_file(folder, last))
        if last and not previous.get("ended"):
            _wait_until_expired(folder, _file(folder, last), previous)
        lease = Lease(folder, last + 1, uuid.uuid4().hex)
        handle = hold(lease)
        record = {"attempt": lease.attempt, "id": lease.id, "host": socket.gethostname(), "pid": os.getpid()}
        record |= {"since": _time(), "seconds": SECONDS, "cluster": bool(os.environ.get("RAY_ADDRESS"))}
        # If a request gets no response, the bucket's client retries it, and may then find that its first request succeeded.
        if storage.create(lease.file, record | _expiry()) or _read(lease.file).get("id") == lease.id:
            if last and not previous.get("ended"):
                note = f"{_time()}: taken over by attempt {lease.attempt}"
                storage.write_json(_file(folder, last), previous | {"ended": note})
            return lease, record, handle
        os.close(handle)  # another process has created the same lease file


def _wait_until_expired(folder: str, file: str, entry: dict[str, Any]) -> None:
    """Waits until the lease in `file`, which contained `entry`, expires. Raises InputError if a process still holds the lease."""
    import psutil

    path, holder, patience = storage.scratch("runs", str(entry.get("id")), HELD), "another process is", 0.0
    if os.path.exists(path) and not entry.get("cluster"):  # all processes of the attempt ran on this machine
        if not psutil.pid_exists(entry["pid"]):
            holder, patience = "workers of a killed process (ps lists them as ray::RayTrainWorker) are", 60.0
        event = "the workers of a killed process to exit"
        with contextlib.suppress(TimeoutError), storage.locked(path, event, patience):
            return
    elif _expires(file, entry):
        return
    raise InputError(
        f"{holder} running {folder} right now ({_who(entry)}); wait, end the process, or set another run.name",
        "run.name",
    )


def _expires(file: str, last: dict[str, Any]) -> bool:
    """Watches a lease for its duration. Returns True if the lease expires or ends, or False if a process renews it."""
    seconds = last.get("seconds", SECONDS)
    terminal.say(f"waiting {seconds:.0f} s for a lease to expire: {_who(last)} may still write to its folder")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        if (current := _read(file)) != last:
            return bool(current.get("ended"))
    return True


def _renew(lease: Lease, record: dict[str, Any], stopped: threading.Event) -> None:
    while not stopped.wait(SECONDS / 4):
        try:
            lease.require()
            storage.write_json(lease.file, record | _expiry())
        except LeaseLost as lost:  # the next commit will raise LeaseLost
            terminal.say(f"warning: {lost}")
            return
        except Exception:  # retried, because the storage may respond again before the lease expires
            continue


def _file(folder: str, attempt: int) -> str:
    return storage.join(folder, FOLDER, f"{attempt:06d}.json")


def _read(file: str) -> dict[str, Any]:
    """Returns the content of a lease file, or {} if the file is missing or incomplete."""
    try:
        return storage.read_json(file)
    except (FileNotFoundError, ValueError):
        return {}


def _who(record: dict[str, Any]) -> str:
    attempt, host, pid, since = (record.get(key) for key in ("attempt", "host", "pid", "since"))
    return f"attempt {attempt} on {host}, process {pid}, since {since}"


def _expiry() -> dict[str, str]:
    """Returns the times of renewal and expiry by this machine's clock. Other processes only check whether the times change."""
    return {"renewed": _time(), "expires": _time(SECONDS)}


def _time(offset: float = 0.0) -> str:
    return (datetime.now(UTC) + timedelta(seconds=offset)).isoformat(timespec="milliseconds")
