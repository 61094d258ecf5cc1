"""Which files of rows a job names: paths, globs, folders and URIs."""

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config.job import sources_of
from pipeline.data import sets
from pipeline.errors import InputError
from pipeline.system import storage

SUFFIXES = (
    ".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz",
    ".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet", ".pq", ".arrow",
)  # fmt: skip
# How to unpack files that cannot be read directly.
PACKED = {
    ".zst": "zstd -d {path}",
    ".bz2": "bunzip2 -k {path}",
    ".xz": "unxz -k {path}",
    ".zip": "unzip {path}",
}


@dataclass(frozen=True)
class File:
    path: str
    size: int  # bytes
    mtime: int  # ns
    revision: str = ""  # the commit of a dataset on the Hub
    source: int = 0  # the number of the source in data.train, data.eval or data.pairs


def find(spec: Any, key: str) -> list[File]:
    """Returns the files of the sources that a job names (config.job.sources_of). `key` names the setting in errors."""
    files: list[File] = []
    for index, source in enumerate(sources_of(spec)):
        reach(source.location, key)
        found = _readable(lambda item: matching(item, key), source.location, key)
        files += [replace(file, source=index) for file in found]
    for file in files:
        if unpack := PACKED.get(os.path.splitext(file.path)[1]):
            raise InputError(
                f"{file.path} is compressed in an unsupported format; expected one of {', '.join(SUFFIXES)}; run "
                f"{unpack.format(path=file.path)}",
                key=key,
            )
    return files


def reach(item: str, key: str) -> None:
    """Raises InputError if the bucket or the Hub of a path cannot be reached."""
    if not item.startswith(sets.HUB):
        _readable(storage.reach, item, key)


def _readable(read: Callable[[str], Any], item: str, key: str) -> Any:
    try:
        return read(item)
    except InputError:
        raise
    except Exception as error:  # pyarrow and each cloud's client raise their own types
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise InputError(
            f"{item!r} cannot be read ({reason}); expected a path, a glob, a folder, or s3:// gs:// hf:// with "
            "the credentials for it in the environment",
            key=key,
        ) from error


def matching(item: str, key: str) -> list[File]:
    """Returns the files of one path, glob, folder or URI. Raises InputError if there are none."""
    if found := sets.files_of(item, key):
        return [replace(one_file(path, key), revision=found.revision) for path in found.paths]
    fs, inner = storage.filesystem(item)
    info = fs.get_file_info(inner)
    if info.is_file:
        return [as_file(item, info)]
    infos = []
    if info.type.name == "Directory":
        infos = [one for one in below(fs, inner) if one.path.endswith(SUFFIXES)]
        problem = f"the folder {item!r} holds no data file; expected files named *{', *'.join(SUFFIXES)}"
    elif any(char in inner for char in "*?["):
        infos = below(fs, inner, pattern=True)
        problem = (
            f"the pattern {item!r} matches no file (looked in {os.getcwd()}); expected one that finds files of rows, such as "
            "jobs/demo/data/pref*.jsonl"
        )
    else:
        parent = os.path.dirname(inner)
        names = os.listdir(parent) if not storage.is_remote(item) and os.path.isdir(parent) else []
        close = difflib.get_close_matches(os.path.basename(inner), names, 1)
        hint = f"; did you mean {os.path.join(os.path.dirname(item), close[0])!r}?" if close else ""
        problem = f"there is no file {item!r}{hint}; expected a path, a glob, a folder, or s3:// gs:// hf://"
    if not infos:
        raise InputError(problem, key=key)
    return [as_file(item, one) for one in infos]


def one_file(path: str, key: str) -> File:
    fs, inner = storage.filesystem(path)
    info = fs.get_file_info(inner)
    if not info.is_file:
        raise InputError(f"there is no file {path!r}, a part of the dataset", key=key)
    return as_file(path, info)


def below(fs: Any, inner: str, pattern: bool = False) -> list[Any]:
    """Returns the files that match a pattern, or all files below a folder, except hidden ones, in the order of their paths."""
    from fsspec.implementations.arrow import ArrowFSWrapper

    wrapped = ArrowFSWrapper(fs)
    paths = sorted(wrapped.glob(inner) if pattern else wrapped.find(inner), reverse=True)
    start = min(map(inner.find, [char for char in "*?[" if char in inner])) - 1 if pattern else len(inner)
    paths = [path for path in paths if "/." not in path[start:]]
    # A link to a parent folder shows each file again, until the operating system stops it
    once = {(os.path.realpath(os.path.dirname(path)), os.path.basename(path)): path for path in paths}
    infos = fs.get_file_info([*once.values()])
    return sorted((info for info in infos if info.is_file), key=lambda info: info.path)


def as_file(item: str, info: Any) -> File:
    scheme = item.split("://")[0] + "://" if storage.is_remote(item) else ""
    path = item if scheme and item.endswith(info.path) else scheme + info.path
    return File(path if scheme else shown(info.path), info.size or 0, info.mtime_ns or 0)


def shown(path: str) -> str:
    """Returns a path as a person would write it: relative if it is below the current folder."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def open_bytes(path: str) -> Any:
    try:
        if not storage.is_remote(path):
            return open(path, "rb")
        fs, inner = storage.filesystem(path)
        return fs.open_input_file(inner)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str, error: OSError) -> InputError:
    return InputError(f"data: {path} cannot be read: {error}")
