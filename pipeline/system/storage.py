"""Files of a run, on a local path or in a bucket (s3://, gs://, hf://): the same few verbs for both, through pyarrow.

A write is atomic where it matters: `write_json` writes beside the target and moves it into place, so that a
reader never sees half a `result.json`.
"""

import contextlib
import fcntl
import io
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from pipeline.errors import InputError
from pipeline.system import deadline
from pipeline.system.credentials import without_credentials


def is_remote(path: str) -> bool:
    return "://" in path


def absolute(path: str) -> str:
    """A bucket URI as it is; a local path made absolute, because workers do not share the driver's directory."""
    return path if is_remote(path) else os.path.abspath(os.path.expanduser(path))


def join(base: str, *parts: str) -> str:
    return "/".join([base.rstrip("/"), *parts])


def cache(*parts: str) -> str:
    """Returns a path in this user's cache of the pipeline, whose folder exists."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = os.path.join(caches, "rlhf-pipeline", *parts)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return path


def filesystem(path: str) -> tuple[Any, str]:
    """(pyarrow filesystem, path inside it) of a local path or a URI."""
    import pyarrow.fs as pafs

    if not is_remote(path):
        return pafs.LocalFileSystem(), absolute(path)
    try:
        return pafs.FileSystem.from_uri(path)
    except (ValueError, OSError):  # a scheme that only fsspec knows, such as hf://
        if path.startswith(("s3://", "gs://")):
            raise  # pyarrow's own: it is the bucket that is not there, or not to be reached
        import fsspec

        fs, inner = fsspec.core.url_to_fs(path)
        return pafs.PyFileSystem(pafs.FSSpecHandler(fs)), inner


def reach(path: str) -> None:
    """The first contact with a bucket or a hub, whose clients would try for up to minutes where nobody answers.

    Raises:
        TimeoutError, and whatever pyarrow and each cloud's client raise.
    """
    if is_remote(path):
        deadline.answer(exists, path)


def exists(path: str) -> bool:
    fs, inner = filesystem(path)
    return fs.get_file_info(inner).type.name != "NotFound"


def read_json(path: str) -> Any:
    """The value of a JSON file. Raises OSError and ValueError where there is none to be read."""
    with _opened(path) as stream:
        return json.loads(stream.read())


def _opened(path: str) -> Any:
    """A file as a stream of its bytes, whatever its name ends with. Raises OSError for a pipe, which might never end."""
    fs, inner = filesystem(path)
    if fs.get_file_info(inner).type.name in ("Unknown", "Directory"):
        raise OSError(f"{path} is not a regular file")
    return fs.open_input_stream(inner, compression=None)


def write_json(path: str, value: Any) -> None:
    """Writes `value` as indented JSON; the file appears whole or not at all."""
    write_lines(path, [json.dumps(value, indent=2, sort_keys=False, default=str)])


def write_lines(path: str, lines: Iterable[str]) -> None:
    """Writes the lines as they come; the file appears whole or not at all."""
    fs, inner = filesystem(path)
    fs.create_dir(inner.rsplit("/", 1)[0], recursive=True)
    if is_remote(path):
        # An object store shows an upload when its stream is closed, even by what `lines` raises: so not yet.
        with tempfile.TemporaryFile() as file:
            file.writelines(f"{line}\n".encode() for line in lines)
            file.seek(0)
            with fs.open_output_stream(inner) as stream:
                shutil.copyfileobj(file, stream)
        return
    partial = f"{inner}.{uuid.uuid4().hex[:12]}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, inner)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)
        raise


def read_lines(path: str) -> Iterator[str]:
    """The lines of a text file, one at a time, without their ends."""
    with _opened(path) as stream:
        for line in io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8", newline="\n"):
            yield line.removesuffix("\n")


@contextlib.contextmanager
def local_copy(folder: str) -> Iterator[str]:
    """A local folder with the files of `folder`: itself if it is local, else a copy that ends with the block."""
    if not is_remote(folder):
        yield absolute(folder)
        return
    import pyarrow.fs as pafs

    fs, inner = filesystem(folder)
    with tempfile.TemporaryDirectory() as local:
        pafs.copy_files(inner, local, source_filesystem=fs)
        yield local


def store_folder(local: str, path: str) -> None:
    """Copies the files of a local folder into `path`."""
    if not is_remote(path):
        shutil.copytree(local, absolute(path), dirs_exist_ok=True)
        return
    import pyarrow.fs as pafs

    fs, inner = filesystem(path)
    fs.create_dir(inner, recursive=True)
    pafs.copy_files(local, inner, destination_filesystem=fs)


def remove(path: str) -> None:
    """Deletes a folder; nothing happens when it is not there."""
    if not exists(path):
        return
    if not is_remote(path):
        shutil.rmtree(path)
        return
    fs, inner = filesystem(path)
    fs.delete_dir(inner)


def remove_file(path: str) -> None:
    """Deletes one file; nothing happens when it is not there."""
    if exists(path):
        fs, inner = filesystem(path)
        fs.delete_file(inner)


def folders(path: str) -> list[str]:
    """Names of the folders directly in `path`; none where it does not exist."""
    import pyarrow.fs as pafs

    fs, inner = filesystem(path)
    entries = fs.get_file_info(pafs.FileSelector(inner, allow_not_found=True))
    return [entry.base_name for entry in entries if entry.type.name == "Directory"]


def move(path: str, target: str) -> None:
    """Moves a folder within a storage path; object stores have no such verb, so there it is copied and deleted."""
    import pyarrow.fs as pafs

    fs, inner = filesystem(path)
    _, moved = filesystem(target)
    fs.create_dir(moved.rsplit("/", 1)[0], recursive=True)
    if is_remote(path):
        pafs.copy_files(inner, moved, source_filesystem=fs, destination_filesystem=fs)
        fs.delete_dir(inner)
    else:
        os.replace(inner, moved)


@contextlib.contextmanager
def locked(path: str, what: str, seconds: float = 120.0) -> Iterator[None]:
    """A block that one process of this machine at a time is in; `what` says what the others wait for.

    Raises:
        TimeoutError: when another process stays in it for `seconds`.
    """
    started, told = time.monotonic(), False
    with open(path, "r+b", buffering=0, opener=lockable) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - started
            if waited > seconds:
                raise TimeoutError(f"waited {seconds:.0f} s for {what}: {path} is locked")
            if waited > 1 and not told:
                print(f"waiting for {what}", flush=True)
                told = True
            time.sleep(0.05)
        yield


def lockable(path: str, _: int) -> int:
    """Opens a file to be locked; of a pipe too this does not wait for somebody at its other end."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)


def require_writable(path: str, key: str = "run.storage_path", example: str = "./runs") -> None:
    """Refuses a path that cannot be written, before any work is done; `key` is what the job calls it.

    Raises:
        InputError: with the reason that the file system gives.
    """
    try:
        reach(path)
        _write_and_delete(probe_in(path))
    except Exception as error:  # pyarrow and each cloud's client raise types of their own
        raise InputError(
            without_credentials(
                f"{key}: {path!r} cannot be written ({error}); choose a folder or bucket that this user may write to, e.g. "
                f"{key}={example}"
            )
        ) from error


def probe_in(folder: str) -> str:
    """The path of a file to try a folder with: no two processes use the same."""
    return join(folder, f".probe-{uuid.uuid4().hex[:12]}")


def _write_and_delete(path: str) -> None:
    write_json(path, {})
    fs, inner = filesystem(path)
    fs.delete_file(inner)
