"""The files of a base: a folder or a Hugging Face hub id, and its JSON files (no torch import)."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, about
from pipeline.models.config_types import check_types
from pipeline.models.files import json_object
from pipeline.system.progress import Bar, size


def local(name_or_path: str) -> Path:
    """A base's name as a path, `~` expanded. Test it with os.path.isdir: Path.is_dir can raise on arbitrary names."""
    return Path(os.path.expanduser(name_or_path))


def source(name_or_path: str) -> str:
    """A base's name as libraries expect it: an existing folder, or a hub id."""
    folder = local(name_or_path)
    return str(folder) if os.path.isdir(folder) else name_or_path


def require_local(name_or_path: str) -> None:
    """Raises InputError if the name is that of a file, or can only be that of a folder and there is none."""
    folder = local(name_or_path)
    if os.path.isdir(folder):
        return
    if os.path.lexists(folder):
        raise InputError(
            f"{name_or_path!r} is a file; expected the folder with config.json and "
            f"*.safetensors in it, perhaps {str(folder.parent)!r}",
            key="model.name_or_path",
        )
    if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1:
        raise InputError(
            f"there is no folder {name_or_path!r}; expected a model folder or a hub id",
            key="model.name_or_path",
        )


def base_file(name_or_path: str, filename: str, revision: str | None = None) -> Path | None:
    """The path of one file of a base, fetched from the hub unless the base is a folder; None if it has no such file.

    Raises InputError if the base itself is missing: neither a folder nor on the hub, unreachable, gated, or of an
    unknown revision.
    """
    folder = local(name_or_path)
    if os.path.isdir(folder):
        return folder / filename if os.path.lexists(folder / filename) else None
    require_local(name_or_path)
    return _hub_file(name_or_path, filename, revision)


def _hub_file(repo: str, filename: str, revision: str | None) -> Path | None:
    from huggingface_hub import errors, hf_hub_download

    key, where = "model.name_or_path", f"{repo!r}" + (f" (revision {revision!r})" if revision else "")
    try:
        return Path(
            hf_hub_download(
                repo, filename, revision=revision, local_files_only=not _hub_answers(), tqdm_class=Bar
            )
        )
    except errors.GatedRepoError as error:
        raise InputError(f"{where} {_gated(repo, error.response.status_code)}", key) from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"{where} is neither a folder here nor a model on the hub (HTTP {error.response.status_code}); "
            "check the spelling, and set HF_TOKEN if the repository is private",
            key,
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(
            f"{repo!r} has no revision {revision!r}; leave it out for the newest", key="model.revision"
        ) from error
    except errors.HFValidationError as error:
        raise InputError(
            f"{where} is neither a folder here nor a possible hub id ('owner/name')", key
        ) from error
    except errors.LocalEntryNotFoundError as error:
        # Offline, a cached model that lacks an optional file looks like this, too.
        if filename != "config.json" and _in_cache(repo, revision):
            return None
        raise InputError(
            f"{where} is not a folder here, and the hub cannot be reached nor is it in the hub cache; give a folder, "
            f"or run `hf download {repo}` where there is a network (HF_HUB_OFFLINE must be unset)",
            key,
        ) from error
    except errors.EntryNotFoundError:
        return None
    except errors.HTTPError as error:
        raise InputError(
            f"{where}: the hub answered with an error: {str(error).splitlines()[0]}", key
        ) from error


@cache
def _hub_answers() -> bool:
    """Whether the hub can be reached; tested once, since hf_hub_download retries for 23 s if it cannot."""
    from huggingface_hub import constants, errors, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except (errors.HTTPError, errors.OfflineModeIsEnabled):
        return False
    return True


def _gated(repo: str, status: int) -> str:
    page = f"https://huggingface.co/{repo}"
    if status == 401:
        return f"is gated and no valid HF_TOKEN is set (HTTP 401): accept its licence at {page}, then `export HF_TOKEN=...`"
    return f"is gated and the account of this HF_TOKEN has not been granted access (HTTP {status}): accept its licence at {page}"


def _in_cache(repo: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repo, "config.json", revision=revision), str)


def base_json(name_or_path: str, filename: str, revision: str | None = None) -> dict[str, Any] | None:
    """The content of one JSON file of a base, or None if it has no such file. Raises InputError if it is damaged."""
    path = base_file(name_or_path, filename, revision)
    if path is None:
        return None
    with about("model.name_or_path"):
        return json_object(path)


def base_config(name_or_path: str, revision: str | None = None) -> dict[str, Any]:
    """The base's config.json. Raises InputError if there is none (an adapter folder, for example)."""
    config = base_json(name_or_path, "config.json", revision)
    if config is not None:
        check_types(str(base_file(name_or_path, "config.json", revision)), config)
        return config
    if base_file(name_or_path, "adapter_config.json", revision) is not None:
        raise InputError(
            f"{name_or_path!r} is an adapter, not a base: name its base here, and the adapter as "
            "`policy` or `reward`",
            key="model.name_or_path",
        )
    raise InputError(
        f"{name_or_path!r} has no config.json; expected a model folder or a hub id", key="model.name_or_path"
    )


def announcement(name_or_path: str, revision: str | None = None) -> str:
    """What a process says before it loads a base: with its bytes, or that it is to be fetched first."""
    from huggingface_hub import try_to_load_from_cache

    folder = local(name_or_path)
    if not os.path.isdir(folder):
        cached = try_to_load_from_cache(name_or_path, "config.json", revision=revision)
        folder = Path(cached).parent if isinstance(cached, str) else folder
    total = sum(file.stat().st_size for file in weight_files(folder))
    return f"loading {name_or_path} ({size(total)})" if total else f"downloading and loading {name_or_path}"


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model folder: safetensors, or pickles if there are none."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    return [file for file in files if file.is_file()]  # reading a pipe would not end
