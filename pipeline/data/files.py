"""Finds the data files of a job: paths, globs, folders, URIs, and splits of Hub datasets.

    path/to/folder, path/to/folder/test               written by save_to_disk, with or without splits
    path/to/folder/test, path/to/folder:config/test   a clone or snapshot of a Hub dataset, whose README lists its files
    hf://datasets/NAME[@revision][:config][/split]    the dataset on the Hub

If data.train names no split, the split is `train`. The datasets library reads the README and finds the files. No code of a
dataset is run. Rows are read directly from the Hub, at the current commit of the revision, without downloading the files. With
HF_HUB_OFFLINE=1, a dataset is read from the local cache, which `hf download` fills.
"""

import difflib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pipeline.errors import InputError, in_brief
from pipeline.job.job import HUB, sources_of
from pipeline.system import deadline, storage

NAME = re.compile(
    r"hf://datasets/(?P<repo>[^/@:]+(/[^/@:]+)?)(@(?P<revision>refs/(convert|pr)/[^/:]+|[^/:]+))?"
    r"(:(?P<config>[^/]+))?(/(?P<split>.*))?"
)
FORMATS = ("json", "csv", "parquet", "arrow")  # supported modules of datasets.packaged_modules
SUFFIXES = (
    ".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz",
    ".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet", ".pq", ".arrow",
)  # fmt: skip
# If the name of a file or folder has a word in HELD_OUT, the rows are for evaluation. "set" may follow the word, as in `testset`.
# The datasets library recognizes all words in HELD_OUT except the last three.
HELD_OUT = "test testing validation valid val eval evaluation dev holdout heldout validate".split()
BY_NAME = "excluded by its file name"  # reason why a file of a folder is not read
# pattern for names of files without rows, which cause no warning
ASIDE = re.compile(r"(?i)(readme|license)[^/]*|dataset_infos?\.json|dataset_dict\.json|state\.json")


@dataclass(frozen=True)
class File:
    path: str
    size: int  # size in bytes
    mtime: int  # time of the last change in nanoseconds
    revision: str = ""  # the commit of a dataset on the Hub
    source: int = 0  # index of the source in data.train, data.eval or data.pairs


Paths = tuple[list[str], str]  # (files of a dataset's split, commit of the dataset on the Hub)


def find_files(spec: Any, key: str, unread: dict[str, str] | None = None) -> list[File]:
    """Returns the files of a job's sources. Error messages contain the setting `key`.

    Adds the unread files of folders to `unread`, as {path: reason}. If the key is `data`, adds only files that contain no rows.
    """
    files: list[File] = []
    for index, source in enumerate(sources_of(spec)):
        check_reachable(source.location, key)
        with readable_files(source.location, key):
            matches = matching_files(source.location, key, {} if unread is None else unread)
        files += [replace(file, source=index) for file in matches]
    return files


def check_reachable(location: str, key: str) -> None:
    """Raises InputError if the bucket of a path cannot be reached."""
    if not location.startswith(HUB):
        with readable_files(location, key):
            storage.reach(location)


def matching_files(location: str, key: str, unread: dict[str, str]) -> list[File]:
    """Returns the files of a path, glob, folder or URI. Adds unread files to `unread`. Raises InputError if no file is found."""
    if dataset := files_of(location, key):
        files = []
        for path in dataset[0]:
            fs, inner = storage.filesystem(path)
            files.append(replace(as_file(path, fs.get_file_info(inner)), revision=dataset[1]))
        return files
    fs, inner = storage.filesystem(location)
    info = fs.get_file_info(inner)
    if info.is_file:
        return [as_file(location, info)]
    infos = list[Any]()
    if info.type.name == "Directory":
        infos, skipped = in_folder(fs, inner, key)
        problem = f"the folder {location!r} has no data file; expected files named *{', *'.join(SUFFIXES)}"
        unread |= {as_file(location, info).path: reason for info, reason in skipped.items()}
        if by_name := [as_file(location, info).path for info, reason in skipped.items() if reason == BY_NAME]:
            cause = f"the names of all files in {location!r} mark them as evaluation data"
            problem = f"{cause}; list the training files: {', '.join(by_name)}"
    elif any(char in inner for char in "*?["):
        infos = files_below(fs, inner, pattern=True)
        problem = (
            f"the pattern {location!r} matches no file (looked in {os.getcwd()}); expected a pattern for data files, such as "
            "jobs/demo/data/pref*.jsonl"
        )
    else:
        parent = os.path.dirname(inner)
        siblings = os.listdir(parent) if not storage.is_remote(location) and os.path.isdir(parent) else []
        matches = difflib.get_close_matches(os.path.basename(inner), siblings, 1, 0.7)
        hint = f"; did you mean {os.path.join(os.path.dirname(location), matches[0])!r}?" if matches else ""
        problem = (
            f"there is no file {location!r}{hint}; expected a path, a glob, a folder, or s3:// gs:// hf://"
        )
        if info.type.name == "Unknown":  # rows are read several times, but a pipe can be read only once
            problem = f"{location!r} is a pipe or a device; write the rows to a file, and use this file"
    if not infos:
        raise InputError(problem, key=key)
    return [as_file(location, info) for info in infos]


def in_folder(fs: Any, inner: str, key: str) -> tuple[list[Any], dict[Any, str]]:
    """Returns the files of a folder to read for the setting `key`, and {unread file: reason}.

    data.train skips files for evaluation. data.eval reads only files for evaluation if the folder has any. `data` reads all
    files.
    """
    infos = [info for info in files_below(fs, inner) if not ASIDE.fullmatch(info.base_name)]
    data_files = [info for info in infos if info.path.lower().endswith(SUFFIXES)]
    held_out = [info for info in data_files if is_held_out(os.path.relpath(info.path, inner))]
    inputs = data_files
    if key == "data.train":
        inputs = [info for info in data_files if info not in held_out]
    elif key != "data":
        inputs = held_out or data_files
    return inputs, {f: BY_NAME if f in data_files else "not a data file" for f in infos if f not in inputs}


def is_held_out(name: str) -> bool:
    """Returns True if a word in a path means that its rows are for evaluation, as in `data/test-00000-of-00001.parquet`."""
    normalized = re.sub(r"(hold|held)[^a-z/]+out", r"\1out", name.lower())
    return any(word.removesuffix("set") in HELD_OUT for word in re.split(r"[^a-z]+", normalized))


def files_below(fs: Any, inner: str, pattern: bool = False) -> list[Any]:
    """Returns the files that match a pattern, or all files below a folder, except hidden ones, in the order of their paths."""
    from fsspec.implementations.arrow import ArrowFSWrapper

    wrapper = ArrowFSWrapper(fs)
    paths = sorted(wrapper.glob(inner) if pattern else wrapper.find(inner), reverse=True)
    start = min(map(inner.find, [char for char in "*?[" if char in inner])) - 1 if pattern else len(inner)
    paths = [path for path in paths if "/." not in path[start:]]
    # Do not follow a link to a parent folder, which would list each file repeatedly.
    unique = {(os.path.realpath(os.path.dirname(path)), os.path.basename(path)): path for path in paths}
    infos = fs.get_file_info([*unique.values()])
    return sorted((info for info in infos if info.is_file), key=lambda info: info.path)


def as_file(location: str, info: Any) -> File:
    scheme = location.split("://")[0] + "://" if storage.is_remote(location) else ""
    path = location if scheme and location.endswith(info.path) else scheme + info.path
    return File(path if scheme else storage.relative(info.path), info.size or 0, info.mtime_ns or 0)


def open_bytes(path: str) -> Any:
    try:
        if not storage.is_remote(path):
            return open(path, "rb")
        fs, inner = storage.filesystem(path)
        return fs.open_input_file(inner)
    except OSError as error:
        raise unreadable_file(path, error) from error


def map_file(path: str) -> Any:
    """Opens a file for random access. A local file is memory-mapped, so it is not copied into memory."""
    import pyarrow as pa

    fs, inner = storage.filesystem(path)
    return fs.open_input_file(inner) if storage.is_remote(path) else pa.memory_map(inner)


def unreadable_file(path: str, error: OSError) -> InputError:
    return InputError(f"data: {path} cannot be read: {error}")


# ---- datasets ------------------------------------------------------------------------------------------------


@contextmanager
def readable_files(location: str, key: str) -> Iterator[None]:
    """Turns errors of pyarrow, the datasets library and clients of cloud storage into InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # each library raises its own types of exceptions
        raise InputError(
            f"{location!r} cannot be read ({in_brief(error, 300)}); expected a path, a glob, a folder, or s3:// gs:// hf:// with "
            "credentials in the environment",
            key=key,
        ) from error


def files_of(location: str, key: str) -> Paths | None:
    """Returns the files of a dataset, or None if `location` is not a dataset. `location` is a value of the setting `key`.

    Raises InputError if the dataset lacks the config or split, if its file format is unsupported, or if the Hub cannot be
    reached.
    """
    with readable_files(location, key):
        if location.startswith(HUB):
            return _on_hub(location, key)
        name = location.rstrip("/").rpartition("/")[2]
        if storage.is_remote(location):
            return None if re.search(r"[.*?\[]", name) else _saved(location, "", location, key)
        folder = storage.absolute(location)
        if os.path.isdir(folder):
            return _in_folder(folder, "", "", location, key)
        if os.path.exists(folder) or re.search(r"[.*?\[]", name):
            return None
        parent, colon, config = folder.rpartition(":")
        if colon and os.path.isdir(parent):
            config, _, split = config.partition("/")
            return _in_folder(parent, config, split, location, key, explicit=True)
        parent, _, split = folder.rpartition("/")
        return _in_folder(parent, "", split, location, key) if os.path.isdir(parent) else None


def _in_folder(
    folder: str, config: str, split: str, location: str, key: str, explicit: bool = False
) -> Paths | None:
    """Returns the files of a dataset in a local folder, or None if the folder is not a dataset.

    `explicit` is True if `location` has the syntax of a dataset. If `explicit` is False, a folder is a dataset only if its README
    assigns files to splits.
    """
    if (saved := None if config else _saved(folder, split, location, key)) or not (
        explicit or _has_card(folder)
    ):
        return saved
    return _declared(folder, config, split, location, key), ""


def _has_card(folder: str) -> bool:
    """Returns True if a README assigns files to splits."""
    try:
        with open(os.path.join(folder, "README.md"), encoding="utf-8") as file:
            head = file.read(1 << 20)
    except (OSError, UnicodeDecodeError):
        return False
    return (
        head.startswith("---")
        and re.search(r"^(configs|dataset_info):", head.split("\n---", 1)[0], re.M) is not None
    )


def _saved(folder: str, split: str, location: str, key: str) -> Paths | None:
    """Returns the Arrow files that save_to_disk wrote into a folder for a Dataset or DatasetDict, or None."""
    if storage.exists(index := storage.join(folder, "dataset_dict.json")):
        splits = storage.read_json(index)["splits"]
        folder = storage.join(folder, _split(splits, split, location, key))
    elif split:
        return None
    if not storage.exists(index := storage.join(folder, "state.json")):
        return None
    files = storage.read_json(index)["_data_files"]
    return [storage.join(folder, str(file["filename"])) for file in files], ""


def _split(splits: Sequence[str], split: str, location: str, key: str) -> str:
    """Returns the split to read: the requested split, the only split, or `train` for data.train."""
    if not split and (len(splits) == 1 or (key == "data.train" and "train" in splits)):
        return splits[0] if len(splits) == 1 else "train"
    if split in splits:
        return split
    path = location.removesuffix("/").removesuffix(f"/{split}") if split else location.removesuffix("/")
    cause = f"no split {split!r}" if split else "several splits"
    raise InputError(
        f"{location!r} has {cause}; expected one of {', '.join(f'{path}/{name}' for name in splits)}", key=key
    )


# ---- datasets with a README ---------------------------------------------------------------------------------------


def _declared(
    path: str, config: str, split: str, location: str, key: str, revision: str | None = None
) -> list[str]:
    """Returns the files of a split, which the datasets library finds from the README or by file name."""
    import datasets

    with tempfile.TemporaryDirectory() as scratch:
        builder = datasets.load_dataset_builder(path, config or None, revision=revision, cache_dir=scratch)
    format = type(builder).__module__.split(".")[-1]
    if format not in FORMATS:
        problem = f"{location!r} has files in the format {format!r}"
        raise InputError(f"{problem}; expected {', '.join(FORMATS)}", key=key)
    # These settings in a README select rows inside a file or rename columns, which is not supported.
    if fields := [name for name in ("field", "column_names", "names") if getattr(builder.config, name, None)]:
        raise InputError(
            f"the README of {location!r} sets `{fields[0]}`; use the paths of the files instead", key=key
        )
    files = {str(name): list(paths) for name, paths in builder.config.data_files.items()}
    return files[_split(list(files), split, location, key)]


def _on_hub(location: str, key: str) -> Paths | None:
    """Returns the files of a dataset on the Hub or in the local cache, or None if `location` is only a path on the Hub."""
    match = NAME.fullmatch(location)
    if match is None or any(char in location for char in "*?["):
        return None
    repo, revision, config, subpath = (match[name] or "" for name in ("repo", "revision", "config", "split"))
    subpath = subpath.strip("/")
    root, commit = _snapshot(location, key, repo, revision)
    if subpath and not config:
        fs, inner = storage.filesystem(path := f"{root}/{subpath}")
        if (info := fs.get_file_info(inner)).type.name != "NotFound":
            if info.is_file:
                return [path], commit
            if storage.is_remote(root):
                return None
    if "/" in subpath:
        raise InputError(
            f"there is no file {location!r}; expected hf://datasets/NAME:config/split, or a path in the dataset",
            key=key,
        )
    dataset = repo if storage.is_remote(root) else root
    return _declared(dataset, config, subpath, location, key, commit), commit


def _snapshot(location: str, key: str, repo: str, revision: str) -> tuple[str, str]:
    """Returns (location, commit) of a dataset. The location is a URI with the commit, or a folder in the local cache."""
    from huggingface_hub import HfApi, is_offline_mode, snapshot_download

    version, download = revision or None, f"run `hf download --repo-type dataset {repo}`"
    try:
        if is_offline_mode():
            folder = snapshot_download(repo, repo_type="dataset", revision=version, local_files_only=True)
            return folder, os.path.basename(folder)
        commit = deadline.call_with_deadline(lambda: HfApi().dataset_info(repo, revision=version).sha)
        return f"{HUB}{repo}@{commit}", str(commit)
    except Exception as error:  # the HTTP client raises its own types of exceptions
        problem = (
            f"{location!r} cannot be read from the Hub ({in_brief(error)}); expected hf://datasets/NAME:config/split, and HF_TOKEN in "
            f"the environment for a private or gated dataset. Without network access, {download} on another machine, then set "
            "HF_HUB_OFFLINE=1"
        )
        if is_offline_mode():
            problem = (
                f"{location!r} is not in the local cache, and HF_HUB_OFFLINE is set; {download} with network access, or unset "
                "HF_HUB_OFFLINE"
            )
        raise InputError(problem, key=key) from error
