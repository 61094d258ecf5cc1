"""Which files of rows a job names: paths, globs, folders and URIs."""

import difflib
import os
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
PACKED = (".zst", ".bz2", ".xz", ".zip")  # compressed in a format that is not supported


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
        with sets.readable(source.location, key):
            found = matching(source.location, key)
        for file in found:
            if file.path.endswith(PACKED):
                what = f"{file.path} is compressed in an unsupported format"
                raise InputError(f"{what}; unpack it, or compress it with gzip", key=key)
        files += [replace(file, source=index) for file in found]
    return files


def reach(item: str, key: str) -> None:
    """Raises InputError if the bucket or the Hub of a path cannot be reached."""
    if not item.startswith(sets.HUB):
        with sets.readable(item, key):
            storage.reach(item)


def matching(item: str, key: str) -> list[File]:
    """Returns the files of one path, glob, folder or URI. Raises InputError if there are none."""
    if found := sets.files_of(item, key):
        files = []
        for path in found.paths:
            fs, inner = storage.filesystem(path)
            files.append(replace(as_file(path, fs.get_file_info(inner)), revision=found.revision))
        return files
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
    return File(path if scheme else storage.relative(info.path), info.size or 0, info.mtime_ns or 0)


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
