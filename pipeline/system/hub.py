"""Finds the files of models and adapters in a local folder, or on the Hub (`org/name` or `org/name@REVISION`), without torch.

config = base_config("org/base")       # from a folder or a Hub repository; fetched once per machine
reference = pin_hub("org/name@v1")     # hf://org/name@<commit>
folder = fetch_adapter(reference)      # an adapter's folder in the Hub's cache
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, blame_key, in_brief

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"  # peft's file names in an adapter
HEAD_NAMES = ("score", "classifier", "classification_head")  # transformers' layer names of a scalar head

SCHEME = "hf://"
REFERENCE = re.compile(rf"(?:{SCHEME})?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
# The files of an adapter that a job reads. The tokenizer comes from the base. Pickle files are never read.
ADAPTER = (SETTINGS, TENSORS, "lineage.json", "chat_template.jinja")
KEY = "model.name_or_path"

# ---------------------------------------------------------------------------------------------- files of a base


def local(name_or_path: str) -> Path:
    """Returns a base's name as a path with `~` expanded. Path.is_dir raises for some names, so callers use os.path.isdir."""
    return Path(os.path.expanduser(name_or_path))


def source(name_or_path: str) -> str:
    """Returns a base's name in the form that libraries expect: an existing folder, or a Hub id."""
    folder = local(name_or_path)
    return str(folder) if os.path.isdir(folder) else name_or_path


def require_local(name_or_path: str) -> None:
    """Raises InputError if the name is the path of a file, or looks like a path of a folder that does not exist."""
    folder = local(name_or_path)
    path_like = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    if not os.path.isdir(folder) and (path_like or os.path.lexists(folder)):
        raise InputError(
            f"there is no folder {name_or_path!r}; expected a folder with config.json and *.safetensors in it, or a hub id",
            KEY,
        )


def base_file(name_or_path: str, filename: str, revision: str | None = None) -> Path | None:
    """Returns the local path of one file of a base, or None if the base has no such file. Downloads the file if necessary.

    Raises InputError if the base is neither a folder nor on the Hub, or if the Hub denies access.
    """
    folder = local(name_or_path)
    if os.path.isdir(folder):
        return folder / filename if os.path.lexists(folder / filename) else None
    require_local(name_or_path)
    from huggingface_hub import errors, hf_hub_download, try_to_load_from_cache

    from pipeline.system.progress import Bar

    options: dict[str, Any] = {"local_files_only": not _hub_answers(), "tqdm_class": Bar}
    try:
        return Path(hf_hub_download(name_or_path, filename, revision=revision, **options))
    except (errors.HTTPError, errors.HFValidationError, errors.EntryNotFoundError) as error:
        if isinstance(error, errors.EntryNotFoundError):
            offline = isinstance(error, errors.LocalEntryNotFoundError)
            cached = offline and try_to_load_from_cache(name_or_path, "config.json", revision=revision)
            # Offline, the error is the same for a model that is not cached and for a cached model without this file.
            if not offline or (filename != "config.json" and isinstance(cached, str)):
                return None
        name = f"{name_or_path!r}" + (f" (revision {revision!r})" if revision else "")
        raise InputError(
            f"{name} is not a folder here, and cannot be read from the hub ({in_brief(error, 400)}); check the name, set "
            f"HF_TOKEN if it is private or gated, or run `hf download {name_or_path}` on a machine with a network",
            KEY,
        ) from error


@cache
def _hub_answers() -> bool:
    """Returns True if the Hub can be reached. Without this check, hf_hub_download would retry for 23 s per file while offline."""
    from huggingface_hub import constants, errors, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except (errors.HTTPError, errors.OfflineModeIsEnabled):
        return False
    return True


def base_json(name_or_path: str, filename: str, revision: str | None = None) -> dict[str, Any] | None:
    """Returns the content of a base's JSON file, or None if the file does not exist. Raises InputError if the JSON is invalid."""
    path = base_file(name_or_path, filename, revision)
    if path is None:
        return None
    with blame_key(KEY):
        return json_object(path)


def json_object(path: str | Path, advice: str = "fetch or save it again") -> dict[str, Any]:
    """Returns the content of a JSON file. Raises InputError if the content is not a JSON object.

    Args:
        advice: text at the end of the error message.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {advice}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({in_brief(error)}); {advice}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: found {type(content).__name__}, expected a JSON object; {advice}")
    return content


def base_config(name_or_path: str, revision: str | None = None) -> dict[str, Any]:
    """Returns the base's config.json. Raises InputError if the base has no config.json, for example because it is an adapter."""
    config = base_json(name_or_path, "config.json", revision)
    if config is not None:
        return config
    if base_file(name_or_path, SETTINGS, revision) is not None:
        raise InputError(
            f"{name_or_path!r} is an adapter, not a base: name its base here, and the adapter as "
            "`policy` or `reward`",
            KEY,
        )
    raise InputError(f"{name_or_path!r} has no config.json; expected a model folder or a hub id", KEY)


def loading_message(name_or_path: str, revision: str | None = None) -> str:
    """Returns a message that the base is being loaded (or downloaded and loaded), with the size of its weights if known."""
    from tqdm import tqdm

    config = base_file(name_or_path, "config.json", revision)
    total = sum(file.stat().st_size for file in weight_files(config.parent)) if config else 0
    size = f" ({tqdm.format_sizeof(total, 'B')})" if total else ""
    return f"{'' if total else 'downloading and '}loading {name_or_path}{size}"


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a model folder, or its pickle files if it has no safetensors."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    return [file for file in files if file.is_file()]


# ----------------------------------------------------------------------------------------------- pinned references


def is_reference(name: str) -> bool:
    """Returns True if a name has the form of a Hub repository's name, and no local file or folder has this name."""
    if name.startswith(SCHEME):
        return True
    return bool(REFERENCE.fullmatch(name)) and not name.startswith(".") and not os.path.lexists(name)


def split_revision(name: str) -> tuple[str, str | None]:
    """Splits `org/name@REVISION` into repository and revision, which is None if there is no `@`.

    Raises InputError if a name with hf:// is malformed.
    """
    if not is_reference(name):
        return name, None
    match = REFERENCE.fullmatch(name)
    if match is None:
        raise InputError(f"found {name!r}, expected {SCHEME}OWNER/NAME or {SCHEME}OWNER/NAME@REVISION")
    return match["repo"], match["revision"]


def pin_hub(name: str) -> str:
    """Returns `hf://org/name@<commit>` with the commit that a reference names now, so that a run's inputs cannot change.

    Raises InputError if the repository or revision cannot be read, or if the repository has neither a model nor an adapter.
    """
    repo, revision = split_revision(name)
    if os.path.isdir(repo):
        raise InputError(
            f"{name}: ambiguous: a folder {repo!r} exists here. Use ./{repo} for the folder; for the hub's model, run this in "
            "another directory"
        )
    config_file = base_file(repo, SETTINGS, revision) or base_file(repo, "config.json", revision)
    if config_file is None:
        raise InputError(
            f"{name} contains neither {SETTINGS} nor config.json; expected a repository with an adapter or a model"
        )
    return f"{SCHEME}{repo}@{config_file.parent.name}"  # the Hub's cache stores files in snapshots/<commit>/


def fetch_adapter(reference: str) -> str:
    """Returns the local folder of a pinned adapter, or the reference itself if it is a full model.

    Raises InputError if a file cannot be read from the Hub.
    """
    from huggingface_hub import try_to_load_from_cache

    repo, commit = split_revision(reference)
    settings = base_file(repo, SETTINGS, commit)
    if settings is None:
        return reference
    for file in ADAPTER:
        # The result is None if the cache does not record whether the file exists.
        if try_to_load_from_cache(repo, file, revision=commit) is None:
            base_file(repo, file, commit)
    return str(settings.parent)
