"""Where an adapter comes from: `lineage.json` in its folder, and the checks that read it back.

An adapter is useless without its base. Its folder therefore names the base by digest, the tokenizer and
chat template that it was trained with, its parents and its data; a stage that takes an adapter as input refuses
one whose base is not the job's base.
"""

import hashlib
import json
import os
import platform
from importlib.metadata import version
from typing import Any

from pipeline.errors import InputError
from pipeline.models import adapter_files, hub
from pipeline.models.files import json_object

FILE = "lineage.json"
MEND = "bring the file back, take it out (the base is then checked by shape alone), or name another adapter"
MOST = 1e30  # of a reward's mean and std: far above any score
LIBRARIES = ("torch", "transformers", "peft", "trl", "ray", "mlflow")


def describe(
    stage: str,
    base: dict[str, Any],
    tokenizer: Any,
    parents: dict[str, str],
    data: dict[str, str],
    **more: Any,
) -> dict[str, Any]:
    """The lineage of an adapter that a stage is about to save; `more` holds e.g. the reward's mean and std, or rows_from."""
    from pipeline.models.tokenizer import template_digest, tokenizer_digest

    return {
        "stage": stage,
        "base": base,
        "tokenizer": tokenizer_digest(tokenizer),
        "chat_template": template_digest(tokenizer),
        "parents": parents,
        "data": data,
        "versions": versions(),
        **more,
    }


def versions() -> dict[str, str]:
    """{library: version} of what decides the numbers of a run, and of Python."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def write(folder: str, lineage: dict[str, Any]) -> None:
    with open(os.path.join(folder, FILE), "w", encoding="utf-8") as file:
        json.dump(lineage, file, indent=2)


def read(folder: str, reference: str) -> dict[str, Any]:
    """The lineage of an adapter folder.

    Raises:
        InputError: when the folder is missing, is no adapter, or was not saved by this pipeline.
    """
    if not os.path.isdir(folder):
        raise InputError(
            f"{reference}: no such folder; give a folder, or models:/NAME@ALIAS of a registered adapter"
        )
    if not is_adapter(folder):
        files = ", ".join(sorted(os.listdir(folder))[:6]) or "nothing"
        raise InputError(f"{reference}: no adapter in {folder} (expected adapter_config.json, found {files})")
    path = os.path.join(folder, FILE)
    if not os.path.lexists(path):
        return {}  # a plain peft adapter: usable, its base is checked by shape
    lineage = json_object(path, MEND)
    if problem := _problem(lineage):
        raise InputError(f"{path}: {problem}; {MEND}")
    return lineage


def _problem(lineage: dict[str, Any]) -> str | None:
    """The first entry that is not as `describe` writes it, in words; entries may be missing."""
    for key in ("base", "parents", "data", "rows_from", "versions", "reward"):
        if not isinstance(lineage.get(key, {}), dict):
            return f"{key}: found {lineage[key]!r:.80}, expected an object"
    if not all(type(rows) is int for rows in lineage.get("rows_from", {}).values()):
        return f"rows_from: found {lineage['rows_from']!r:.80}, expected numbers of rows"
    for key in ("name_or_path", "digest") if "base" in lineage else ():
        if not isinstance(lineage["base"].get(key), str):
            return f"base.{key}: found {lineage['base'].get(key)!r:.80}, expected a text"
    if "reward" not in lineage:
        return None
    reward = lineage["reward"]
    numbers = [reward.get(key) for key in ("mean", "std")]
    finite = all(type(number) in (int, float) and abs(number) <= MOST for number in numbers)
    if reward.keys() != {"mean", "std"} or not finite or numbers[1] <= 0:
        return f"reward: found {reward!r:.80}, expected mean and std, finite numbers of which std is above 0"
    return None


def is_adapter(folder: str) -> bool:
    return os.path.lexists(os.path.join(folder, "adapter_config.json"))


def adapter_config(folder: str) -> dict[str, Any]:
    """peft's settings of an adapter folder, as its adapter_config.json has them."""
    return adapter_files.settings(folder)


def check_base(lineage: dict[str, Any], base: dict[str, Any], key: str, reference: str) -> None:
    """Refuses an adapter that was trained on another base than the job's.

    Raises:
        InputError: with both names and digests.
    """
    trained_on = lineage.get("base")
    if trained_on and trained_on["digest"] != base["digest"]:
        commit = trained_on["digest"].partition("commit:")[2]
        if commit and trained_on["name_or_path"] == base["name_or_path"]:
            raise InputError(
                f"{reference} was trained on {base['name_or_path']} at commit {commit}, and the job's base is at another one "
                f"({base['digest'].partition(':')[2]}); type model.revision={commit}",
                key=key,
            )
        raise InputError(
            f"{reference} was trained on base {trained_on['name_or_path']} ({trained_on['digest'][:19]}), but "
            f"model.name_or_path is {base['name_or_path']} ({base['digest'][:19]}). An adapter works on its own base "
            f"only: set model.name_or_path={trained_on['name_or_path']}, or train a new adapter on this base",
            key=key,
        )


def check_base_name(folder: str, base: dict[str, Any], reference: str) -> None:
    """Refuses an adapter without lineage.json whose settings name another base on the hub than the job's.

    A folder, of the adapter's base or of the job's, says nothing: its name differs from machine to machine.

    Raises:
        InputError: with both names.
    """
    trained_on = str(adapter_config(folder).get("base_model_name_or_path") or "")
    name = base["name_or_path"]
    if not hub.is_reference(trained_on) or not base["digest"].startswith("commit:"):
        return
    if trained_on.lower() != name.lower():
        raise InputError(
            f"{reference} was trained on base {trained_on}, but model.name_or_path is {name}. An adapter works on its own base "
            f"only: type model.name_or_path={trained_on}. If {name} holds the same weights, download it and name the folder"
        )


def check_head(folder: str, scores: bool, reference: str) -> None:
    """Refuses a policy with a scalar head and a reward without one: its score would be random numbers.

    Raises:
        InputError: with the stage that trains what is needed.
    """
    head = adapter_config(folder).get("task_type") == "SEQ_CLS"
    if scores and not head:
        raise InputError(
            f"{reference} is an adapter without a scalar head, so it cannot score a completion; expected one that `rm` "
            "trained, e.g. models:/rlhf-rm@champion"
        )
    if head and not scores:
        raise InputError(
            f"{reference} is a reward adapter (it has a scalar head), so it cannot write completions; expected one that "
            "`sft`, `dpo`, `kto` or `ppo` trained, e.g. models:/rlhf-sft@champion"
        )


def folder_digests(folder: str) -> dict[str, str]:
    """{relative path: sha256} of every file under `folder`."""
    digests = {}
    for root, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(root, name)
            with open(path, "rb") as file:
                digests[os.path.relpath(path, folder)] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
