"""Writes and reads an adapter's lineage.json, and checks that an adapter was trained on the job's base.

lineage.json has digests of the base, tokenizer, chat template and data that trained the adapter, and the versions of the models
that the training used. A stage rejects an adapter that was trained on another base.
"""

import hashlib
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.models import adapter_files
from pipeline.system import hub
from pipeline.system.hub import json_object

FILE = "lineage.json"
LIBRARIES = ("torch", "transformers", "peft", "trl", "ray", "mlflow")


def describe(
    stage: str,
    base: dict[str, Any],
    tokenizer: Any,
    parents: dict[str, str],
    data: dict[str, str],
    **extra: Any,
) -> dict[str, Any]:
    """Returns the lineage of an adapter. `extra` adds entries, for example mean and std of the reward."""
    from pipeline.models.tokenizer import template_digest, tokenizer_digest

    return {
        "stage": stage,
        "base": base,
        "tokenizer": tokenizer_digest(tokenizer),
        "chat_template": template_digest(tokenizer),
        "parents": parents,
        "data": data,
        "versions": versions(),
        **extra,
    }


def versions() -> dict[str, str]:
    """Returns {library: version} for Python and the libraries that a run's results depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def write(folder: str, lineage: dict[str, Any]) -> None:
    with open(os.path.join(folder, FILE), "w", encoding="utf-8") as file:
        json.dump(lineage, file, indent=2)


def read(folder: str, reference: str) -> dict[str, Any]:
    """Returns the lineage of an adapter folder, or {} if the adapter has no lineage.json because another program trained it."""
    if not os.path.isdir(folder):
        raise InputError(
            f"{reference}: no such folder; use a folder, or models:/NAME@ALIAS of a registered adapter"
        )
    if not is_adapter(folder):
        files = ", ".join(sorted(os.listdir(folder))[:6]) or "nothing"
        raise InputError(f"{reference}: no adapter in {folder} (expected adapter_config.json, found {files})")
    path = os.path.join(folder, FILE)
    return json_object(path, "restore the file, or remove it") if os.path.lexists(path) else {}


def is_adapter(folder: str) -> bool:
    return os.path.lexists(os.path.join(folder, "adapter_config.json"))


def check_same_base(lineage: dict[str, Any], base: dict[str, Any], key: str, reference: str) -> None:
    """Raises InputError if an adapter was trained on another base. The error message names both bases."""
    trained_on = lineage.get("base") or base
    if trained_on["digest"] == base["digest"]:
        return
    name, commit = trained_on["name_or_path"], trained_on["digest"].partition("commit:")[2]
    fix = f"revision={commit}" if commit and name == base["name_or_path"] else f"name_or_path={name}"
    raise InputError(
        f"{reference} was trained on base {name} ({trained_on['digest'][:19]}), but model.name_or_path is "
        f"{base['name_or_path']} ({base['digest'][:19]}). An adapter works on its own base only: set model.{fix}, or train a "
        "new adapter on this base",
        key=key,
    )


def check_base_name(folder: str, base: dict[str, Any], reference: str) -> None:
    """Raises InputError if an adapter's config names another base. This check is for adapters without lineage.json."""
    from pipeline.models.base import base_identity

    trained_on = str(adapter_files.read_settings(folder).get("base_model_name_or_path") or "")
    name = base["name_or_path"]
    differs, fix = False, ""
    if hub.is_reference(trained_on) and base["digest"].startswith("commit:"):
        differs = trained_on.lower() != name.lower()
        fix = f". If {name} has the same weights, download it and set model.name_or_path to the folder"
    elif hub.is_reference(trained_on):
        # A folder called like the model, or the Hub's cache, whose folder is called models--OWNER--NAME
        parts = [part.rpartition("--")[2] for part in Path(name.lower()).parts]
        if Path(trained_on).name.lower() not in parts:
            problem = f"the adapter names the base {trained_on}; {name} may have other weights"
            print(f"warning: {reference}: {problem}", flush=True)
    elif os.path.exists(os.path.join(trained_on, "config.json")) and base["digest"].startswith("sha256:"):
        differs = base_identity(trained_on)["digest"] != base["digest"]
    if differs:
        raise InputError(
            f"{reference} was trained on base {trained_on}, but model.name_or_path is {name}. An adapter works on its own base "
            f"only: use model.name_or_path={trained_on}{fix}"
        )


def folder_digests(folder: str) -> dict[str, dict[str, Any]]:
    """Returns {relative path: {sha256, bytes}} of every file under a local folder."""
    digests = {}
    for path in (path for path in Path(folder).rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        digests[str(path.relative_to(folder))] = {"sha256": digest, "bytes": path.stat().st_size}
    return digests
