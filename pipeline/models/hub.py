"""Models and adapters on the Hugging Face hub: `org/name` or `org/name@REVISION`, pinned to a commit (no torch import).

reference = pin("org/name@v1")         # hf://org/name@<commit>
folder = fetch(reference)              # of an adapter: its folder in the hub's cache, downloaded once per machine
"""

from __future__ import annotations

import os
import re

from pipeline.errors import InputError
from pipeline.models.adapter_files import SETTINGS, TENSORS

SCHEME = "hf://"
REFERENCE = re.compile(rf"(?:{SCHEME})?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
# What a job reads of an adapter. Its base is where the tokenizer comes from, and a pickle is never read.
ADAPTER = (SETTINGS, TENSORS, "lineage.json", "chat_template.jinja")


def is_reference(name: str) -> bool:
    """Whether a name is that of a repository on the hub: it has the shape of one, and there is no such folder here."""
    if name.startswith(SCHEME):
        return True
    return bool(REFERENCE.fullmatch(name)) and not name.startswith(".") and not os.path.lexists(name)


def split(name: str) -> tuple[str, str | None]:
    """(repository, revision or None) of a reference; of any other name, the name and None.

    Raises:
        InputError: when it begins like a reference and is none.
    """
    if not is_reference(name):
        return name, None
    found = REFERENCE.fullmatch(name)
    if found is None:
        raise InputError(f"found {name!r}, expected {SCHEME}OWNER/NAME or {SCHEME}OWNER/NAME@REVISION")
    return found["repo"], found["revision"]


def pin(name: str) -> str:
    """`hf://org/name@<commit>`: what a reference means now, so that a run's inputs do not change under it.

    Raises:
        InputError: when there is no such repository or revision, it is gated or out of reach, or holds no model.
    """
    from pipeline.models.base_files import base_file  # with its progress bars, which a notebook would warn of

    repo, revision = split(name)
    if os.path.isdir(repo):
        raise InputError(
            f"{name}: there is a folder {repo!r} here, too; type ./{repo}, or run this elsewhere"
        )
    try:
        found = base_file(repo, SETTINGS, revision) or base_file(repo, "config.json", revision)
    except InputError as error:  # its key is the base's
        raise InputError(error.message) from error
    if found is None:
        raise InputError(
            f"{name} holds neither {SETTINGS} nor config.json; expected a repository with an adapter or a model"
        )
    return f"{SCHEME}{repo}@{found.parent.name}"  # the hub's cache keeps files under snapshots/<commit>/


def fetch(reference: str) -> str:
    """The local folder of a pinned adapter. What is no adapter comes back as it is: whoever loads it downloads it.

    Raises:
        InputError: when the hub does not give its files, or has no weights but pickled ones.
    """
    from huggingface_hub import try_to_load_from_cache

    from pipeline.models.base_files import base_file  # with its progress bars, which a notebook would warn of

    repo, commit = split(reference)
    settings = base_file(repo, SETTINGS, commit)
    if settings is None:
        return reference
    for file in ADAPTER:
        if try_to_load_from_cache(repo, file, revision=commit) is not None:
            continue  # here, or known not to exist
        if base_file(repo, file, commit) is None and file == TENSORS:
            raise InputError(
                f"{reference} has no {TENSORS}. Adapters are read from safetensors only (a pickled adapter_model.bin can run "
                "any code); ask its owner to save it with safe_serialization=True"
            )
    return str(settings.parent)
