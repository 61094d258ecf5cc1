"""Finds the files of a split of a dataset (of the datasets library) by its name.

    path/to/folder, path/to/folder/test               written by save_to_disk, with or without splits
    path/to/folder/test, path/to/folder:config/test   a clone or snapshot of a set on the hub, whose README says what its
    hf://datasets/NAME[@revision][:config][/split]      files are; and the set itself

Without a split, data.train means `train`. The datasets library reads the README and finds the files; it runs no code of a
dataset, and downloads nothing: the files are read where they are. A dataset on the Hub is pinned to the commit that its
revision means now. With HF_HUB_OFFLINE=1 it is taken from this machine's cache (`hf download`).
"""

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pipeline.config.job import HUB
from pipeline.errors import InputError, in_brief
from pipeline.system import deadline, storage

NAME = re.compile(
    r"hf://datasets/(?P<repo>[^/@:]+(/[^/@:]+)?)(@(?P<revision>refs/(convert|pr)/[^/:]+|[^/:]+))?"
    r"(:(?P<config>[^/]+))?(/(?P<split>.*))?"
)
FORMATS = ("json", "csv", "parquet", "arrow")  # modules of datasets.packaged_modules


@dataclass(frozen=True)
class Files:
    paths: list[str]
    revision: str = ""  # the commit of a dataset on the Hub


@contextmanager
def readable(item: str, key: str) -> Iterator[None]:
    """Raises InputError for an error of pyarrow, the datasets library or the client of a cloud in the block."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # each library raises its own types
        raise InputError(
            f"{item!r} cannot be read ({in_brief(error, 300)}); expected a path, a glob, a folder, or s3:// gs:// hf:// with "
            "the credentials for it in the environment",
            key=key,
        ) from error


def files_of(item: str, key: str) -> Files | None:
    """Returns the files of the dataset that `item` names, for the setting `key`, or None if it names no dataset.

    Raises:
        InputError: if the dataset lacks the config or split, has other formats, or if the Hub cannot be reached.
    """
    with readable(item, key):
        if item.startswith(HUB):
            return _on_hub(item, key)
        last = item.rstrip("/").rpartition("/")[2]
        if storage.is_remote(item):
            return None if re.search(r"[.*?\[]", last) else _saved(item, "", item, key)
        folder = storage.absolute(item)
        if os.path.isdir(folder):
            return _in_folder(folder, "", "", item, key)
        if os.path.exists(folder) or re.search(r"[.*?\[]", last):
            return None
        above, colon, config = folder.rpartition(":")
        if colon and os.path.isdir(above):
            config, _, split = config.partition("/")
            return _in_folder(above, config, split, item, key, named=True)
        above, _, split = folder.rpartition("/")
        return _in_folder(above, "", split, item, key) if os.path.isdir(above) else None


def _in_folder(
    folder: str, config: str, split: str, item: str, key: str, named: bool = False
) -> Files | None:
    """Returns the files of a local folder. `named` is True if `item` has the form of a dataset, so it needs no README."""
    if (saved := None if config else _saved(folder, split, item, key)) or not (named or _has_card(folder)):
        return saved
    return Files(_declared(folder, config, split, item, key))


def _has_card(folder: str) -> bool:
    """Returns True if a README says which files make which split."""
    try:
        with open(os.path.join(folder, "README.md"), encoding="utf-8") as file:
            head = file.read(1 << 20)
    except (OSError, UnicodeDecodeError):
        return False
    return (
        head.startswith("---")
        and re.search(r"^(configs|dataset_info):", head.split("\n---", 1)[0], re.M) is not None
    )


def _saved(folder: str, split: str, item: str, key: str) -> Files | None:
    """Returns the Arrow files of a Dataset or DatasetDict that save_to_disk wrote here, or None."""
    if storage.exists(index := storage.join(folder, "dataset_dict.json")):
        splits = storage.read_json(index)["splits"]
        folder = storage.join(folder, _split(splits, split, item, key))
    elif split:
        return None
    if not storage.exists(index := storage.join(folder, "state.json")):
        return None
    return Files(
        [storage.join(folder, str(file["filename"])) for file in storage.read_json(index)["_data_files"]]
    )


def _split(splits: Sequence[str], split: str, item: str, key: str) -> str:
    """Returns the requested split: by name, or the only one, or `train` for data.train."""
    if not split and (len(splits) == 1 or (key == "data.train" and "train" in splits)):
        return splits[0] if len(splits) == 1 else "train"
    if split in splits:
        return split
    whole = item.removesuffix("/").removesuffix(f"/{split}") if split else item.removesuffix("/")
    found = f"no split {split!r}" if split else "several splits"
    raise InputError(
        f"{item!r} has {found}; expected one of {', '.join(f'{whole}/{name}' for name in splits)}", key=key
    )


# ---- sets with a README ----------------------------------------------------------------------------------------


def _declared(
    path: str, config: str, split: str, item: str, key: str, revision: str | None = None
) -> list[str]:
    """Returns the files of a split, which the datasets library finds by the README of a folder or Hub id, or by name."""
    import datasets

    with tempfile.TemporaryDirectory() as scratch:
        builder = datasets.load_dataset_builder(path, config or None, revision=revision, cache_dir=scratch)
    format = type(builder).__module__.split(".")[-1]
    if format not in FORMATS:
        found = f"{item!r} holds files of the kind {format!r}"
        raise InputError(f"{found}; expected {', '.join(FORMATS)}", key=key)
    files = {str(name): list(paths) for name, paths in builder.config.data_files.items()}
    return files[_split(list(files), split, item, key)]


def _on_hub(item: str, key: str) -> Files | None:
    """Returns the files of a dataset on the Hub or in the local cache, or None if `item` names a path in a repository."""
    from huggingface_hub import is_offline_mode

    match = NAME.fullmatch(item)
    if match is None or any(sign in item for sign in "*?["):
        return None
    repo, revision, config, rest = (match[name] or "" for name in ("repo", "revision", "config", "split"))
    rest = rest.strip("/")
    if is_offline_mode():
        return _cached(item, key, repo, revision, config, rest)
    commit = _commit(item, key, repo, revision)
    if rest and not config:
        fs, inner = storage.filesystem(path := f"{HUB}{repo}@{commit}/{rest}")
        if (info := fs.get_file_info(inner)).type.name != "NotFound":
            return Files([path], commit) if info.is_file else None
    if "/" in rest:
        raise InputError(
            f"there is no file {item!r}; expected hf://datasets/NAME:config/split, or a path in it", key=key
        )
    return Files(_declared(repo, config, rest, item, key, commit), commit)


def _commit(item: str, key: str, repo: str, revision: str) -> str:
    """Returns the current commit of a revision of a dataset."""
    from huggingface_hub import HfApi

    try:
        return str(deadline.answer(lambda: HfApi().dataset_info(repo, revision=revision or None).sha))
    except Exception as error:  # the HTTP client raises its own types
        raise InputError(
            f"{item!r} cannot be read from the Hub ({in_brief(error)}); expected hf://datasets/NAME:config/split, and HF_TOKEN in "
            f"the environment for a private or gated dataset. Without a network here, run `hf download --repo-type dataset {repo}` "
            "elsewhere, then set HF_HUB_OFFLINE=1",
            key=key,
        ) from error


def _cached(item: str, key: str, repo: str, revision: str, config: str, rest: str) -> Files:
    """Returns the files of a snapshot in the Hub's cache: a split, or one file."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repo, repo_type="dataset", revision=revision or None, local_files_only=True
        )
    except Exception as error:
        raise InputError(
            f"{item!r} is not in the cache of this machine, and HF_HUB_OFFLINE is set; run `hf download --repo-type dataset "
            f"{repo}` with network, or leave HF_HUB_OFFLINE out",
            key=key,
        ) from error
    commit, path = os.path.basename(folder), os.path.join(folder, rest)
    if rest and not config and os.path.isfile(path):
        return Files([path], commit)
    return Files(_declared(folder, config, rest, item, key), commit)
