"""Reads and writes files on a local path or in a bucket (s3://, gs://, hf://), through pyarrow."""

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

LOCK_POLL_S = 0.05  # time between two attempts to lock a file


def is_remote(path: str) -> bool:
    return "://" in path


def absolute(path: str) -> str:
    """Makes a local path absolute, because workers run in other directories. Returns a URI unchanged."""
    return path if is_remote(path) else os.path.abspath(os.path.expanduser(path))


def relative(path: str) -> str:
    """Returns a path relative to the current folder if it is inside this folder, or else the path unchanged."""
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path


def join(base: str, *parts: str) -> str:
    return "/".join([base.rstrip("/"), *parts])


def private(parent: str, name: str, variable: str) -> str:
    """Returns the path of the folder `name` in `parent`, which only this user can enter. Creates the folder if it is missing.

    Raises InputError if another user owns the folder and could therefore replace its files.

    Args:
        variable: environment variable that sets `parent`, for the message.
    """
    folder = os.path.join(parent, name)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.stat(folder)
        if {os.lstat(folder).st_uid, status.st_uid} != {os.getuid()}:  # owners of a link and of its target
            raise OSError(None, "the folder belongs to another user")
        if status.st_mode & 0o077:
            os.chmod(folder, 0o700)
    except OSError as error:
        problem = (
            f"cannot use {folder} ({error.strerror}); export {variable}=FOLDER with a folder that you own"
        )
        raise InputError(problem, variable) from error
    return folder


def scratch(*parts: str) -> str:
    """Returns a path in the temporary folder that this package uses for this user on this machine."""
    return os.path.join(private(tempfile.gettempdir(), f"rlhf-{os.getuid()}", "TMPDIR"), *parts)


def cache(*parts: str) -> str:
    """Returns a path in this package's cache folder for this user. Creates the path's parent folder."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = os.path.join(private(caches, "rlhf-pipeline", "XDG_CACHE_HOME"), *parts)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return path


def filesystem(path: str) -> tuple[Any, str]:
    """Returns (pyarrow filesystem, path in it) of a local path or a URI."""
    import pyarrow.fs as pafs

    if not is_remote(path):
        return pafs.LocalFileSystem(), absolute(path)
    try:
        return pafs.FileSystem.from_uri(path)
    except (ValueError, OSError):  # fsspec may support a scheme that pyarrow lacks, e.g. hf://
        if path.startswith(("s3://", "gs://")):
            raise  # the bucket does not exist, or cannot be reached
        import fsspec

        fs, inner = fsspec.core.url_to_fs(path)
        return pafs.PyFileSystem(pafs.FSSpecHandler(fs)), inner


def reach(path: str) -> None:
    """Sends a request to the path's bucket or to the Hub. Raises TimeoutError after deadline.SECONDS."""
    if is_remote(path):
        deadline.call_with_deadline(exists, path)


def exists(path: str) -> bool:
    fs, inner = filesystem(path)
    return fs.get_file_info(inner).type.name != "NotFound"


def read_json(path: str) -> Any:
    """Returns the parsed content of a JSON file. Raises OSError or ValueError if the file cannot be read or parsed."""
    with _opened(path) as stream:
        return json.loads(stream.read())


def _opened(path: str) -> Any:
    """Opens a file as a stream of bytes. Does not decompress the file, even if its name ends with .gz."""
    fs, inner = filesystem(path)
    return fs.open_input_stream(inner, compression=None)


def write_json(path: str, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    write_lines(path, [json.dumps(value, indent=2, sort_keys=False, default=str)])


def create(path: str, value: Any) -> bool:
    """Writes `value` as JSON into a new file. Returns False if the file exists. Only one of several processes can succeed."""
    content = json.dumps(value, indent=2).encode()
    scheme, _, inner = path.partition("://")
    try:
        if not is_remote(path):
            os.makedirs(os.path.dirname(absolute(path)), exist_ok=True)
            with open(absolute(path), "xb") as file:
                try:
                    file.write(content)
                    file.flush()
                except OSError:  # for example, the disk is full
                    os.remove(absolute(path))
                    raise
            return True
        if scheme in CREATE:
            bucket, _, key = inner.partition("/")
            return CREATE[scheme](bucket, key, content)
        import fsspec

        fs, inner = fsspec.core.url_to_fs(path)
        fs.pipe_file(inner, content, mode="create")  # this call is not atomic for every scheme
        return True
    except FileExistsError:
        return False
    except ImportError as error:
        raise ImportError(f"{scheme}:// needs packages ({error}): pip install -e '.[cloud]'") from error


def _create_in_s3(bucket: str, key: str, content: bytes) -> bool:
    import boto3
    from botocore.exceptions import ClientError

    try:
        boto3.client("s3").put_object(Bucket=bucket, Key=key, Body=content, IfNoneMatch="*")
    except ClientError as error:
        if error.response["Error"]["Code"] in ("PreconditionFailed", "ConditionalRequestConflict"):
            return False
        raise
    return True


def _create_in_gcs(bucket: str, key: str, content: bytes) -> bool:
    from google.api_core.exceptions import PreconditionFailed
    from google.cloud import storage as gcs

    try:
        gcs_bucket = gcs.Client(project=None).bucket(bucket.rpartition("@")[2])  # gs://anonymous@BUCKET
        gcs_bucket.blob(key).upload_from_string(content, if_generation_match=0)
    except PreconditionFailed:
        return False
    return True


# {scheme: function that creates an object only if it does not exist}. pyarrow 25 has no such function.
CREATE = {"s3": _create_in_s3, "gs": _create_in_gcs}


def write_lines(path: str, lines: Iterable[str]) -> None:
    """Writes lines, atomically."""
    fs, inner = filesystem(path)
    fs.create_dir(inner.rsplit("/", 1)[0], recursive=True)
    if is_remote(path):
        # Collects all lines before writing. If `lines` raised an error later, closing the stream would upload incomplete content.
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


@contextlib.contextmanager
def appended(path: str) -> Iterator[Any]:
    """Yields a text file to which the caller can append lines. In a bucket, the lines are uploaded when the `with` block ends."""
    if not is_remote(path):
        with open(filesystem(path)[1], "a", buffering=1, encoding="utf-8") as file:
            yield file
        return
    lines, buffer = list(read_lines(path)) if exists(path) else [], io.StringIO()
    try:
        yield buffer
    finally:
        write_lines(path, [*lines, *buffer.getvalue().splitlines()])


def read_lines(path: str) -> Iterator[str]:
    """Yields the lines of a text file without line breaks."""
    with _opened(path) as stream:
        for line in io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8", newline="\n"):
            yield line.removesuffix("\n")


@contextlib.contextmanager
def local_copy(folder: str) -> Iterator[str]:
    """Yields the absolute path of `folder` if it is local, or of a temporary local copy if it is in a bucket."""
    if not is_remote(folder):
        yield absolute(folder)
        return
    with tempfile.TemporaryDirectory() as parent:
        local = os.path.join(parent, folder.rstrip("/").rpartition("/")[2])
        store_folder(folder, local)
        yield local


def store_folder(folder: str, path: str) -> None:
    """Copies the files of `folder` into the folder `path`. Both folders may be local or in a bucket."""
    import pyarrow.fs as pafs

    (source, inner), (sink, target) = filesystem(folder), filesystem(path)
    sink.create_dir(target, recursive=True)
    pafs.copy_files(inner, target, source_filesystem=source, destination_filesystem=sink)


def remove(path: str) -> None:
    """Deletes a file or a folder, if it exists."""
    fs, inner = filesystem(path)
    kind = fs.get_file_info(inner).type.name
    if kind == "Directory":
        fs.delete_dir(inner)
    elif kind != "NotFound":
        fs.delete_file(inner)


def folders(path: str) -> list[str]:
    """Returns the names of the folders directly in `path`, or [] if `path` does not exist."""
    return [name for name, info in names(path).items() if info.type.name == "Directory"]


def names(path: str) -> dict[str, Any]:
    """Returns {name: pyarrow's FileInfo} for the entries directly in `path`, or {} if `path` does not exist."""
    import pyarrow.fs as pafs

    fs, inner = filesystem(path)
    entries = fs.get_file_info(pafs.FileSelector(inner, allow_not_found=True))
    return {entry.base_name: entry for entry in entries}


def move(path: str, target: str) -> None:
    """Moves a folder. In a bucket, copies the folder's files and then deletes the originals."""
    if is_remote(path):
        store_folder(path, target)
        remove(path)
    else:
        os.renames(absolute(path), absolute(target))


@contextlib.contextmanager
def locked(path: str, event: str, seconds: float = 120.0) -> Iterator[None]:
    """Locks a file during the `with` block. Raises TimeoutError if another process on this machine holds the lock for `seconds`.

    Args:
        event: text for messages that says what this process waits for.
    """
    with open(path, "ab") as file:
        for attempt in range(int(seconds / LOCK_POLL_S) + 1):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if attempt == int(1 / LOCK_POLL_S):
                print(f"waiting for {event}", flush=True)
            time.sleep(LOCK_POLL_S)
        else:
            raise TimeoutError(f"waited {seconds:.0f} s for {event}: {path} is locked")
        yield


def require_writable(path: str, key: str = "run.storage_path", example: str = "./runs") -> None:
    """Raises InputError, with the reason that the file system gives, if no file can be written to the folder `path`.

    Args:
        key: the job's key that sets the path, for the message.
        example: a valid value of the key, for the message.
    """
    try:
        reach(path)
        if not create(probe := probe_in(path), {}) or create(probe, {}):
            raise OSError("the storage lets a process overwrite a file that must be new")
        remove(probe)
    except Exception as error:  # pyarrow and each cloud's client raise their own types of exceptions
        advice = f"set a folder or bucket that this user may write to, such as {key}={example}"
        problem = without_credentials(f"{path!r} cannot be written ({error})")
        raise InputError(f"{key}: {problem}; {advice}") from error


def probe_in(folder: str) -> str:
    """Returns a unique path in a folder for a file that tests whether the folder can be written."""
    return join(folder, f".probe-{uuid.uuid4().hex[:12]}")


def read_bytes(path: str, start: int = 0) -> bytes:
    """Returns the content of a file from byte `start` to the end."""
    fs, inner = filesystem(path)
    with fs.open_input_file(inner) as file:
        file.seek(start)
        return bytes(file.read())
