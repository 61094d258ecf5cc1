"""Checkpoints: folders in a run's folder. A checkpoint is complete once it lists the SHA-256 digests of all files.

    files = store(source, run_folder, name)    # one worker of each node copies what its node has written
    seal(run_folder, name, files)              # rank 0 writes the digests, the last file of a checkpoint
    prune(run_folder, num_to_keep)             # and only then removes the oldest ones
    newest(run_folder)                         # the one to resume from

A kill at any moment leaves the checkpoints before, and perhaps a folder without digests, which no run resumes from.
"""

import hashlib
import re
import shutil
from typing import Any

from pipeline.errors import InputError, in_brief
from pipeline.registry import lineage
from pipeline.run_folder import DAMAGED, DIGESTS
from pipeline.system import storage, terminal

NAME = re.compile(r"(?:checkpoint_(\d{8})|final)(?:-(\d+)(?:\.(\d+))?)?")


def name_of(step: int) -> str:
    return f"checkpoint_{step:08d}"


def unused(folder: str, name: str, attempt: int = 1) -> str:
    """Returns `name`, or in a later attempt at the run `name-ATTEMPT`; with `.2`, `.3`, ... if there is such a folder.

    So an attempt that has lost the run, and does not know it yet, writes into no folder of its successor.
    """
    mine = name if attempt == 1 else f"{name}-{attempt}"
    free, number = mine, 1
    while storage.exists(storage.join(folder, free)):
        number += 1
        free = f"{name}-{attempt}.{number}"
    return free


def store(source: str, run_folder: str, name: str) -> dict[str, dict[str, Any]]:
    """Copies the files of a local folder into the checkpoint `name`, deletes the folder and returns the files' digests."""
    files = lineage.folder_digests(source)
    storage.store_folder(source, storage.join(run_folder, name))
    shutil.rmtree(source)
    return files


def seal(run_folder: str, name: str, files: dict[str, dict[str, Any]]) -> None:
    """Completes a checkpoint: writes the digests of all its files, from every node."""
    storage.write_json(storage.join(run_folder, name, DIGESTS), {"files": dict(sorted(files.items()))})


def prune(run_folder: str, num_to_keep: int | None) -> None:
    """Removes all checkpoints except the newest `num_to_keep` complete ones. None keeps all complete checkpoints."""
    kept = complete(run_folder)[-(num_to_keep or 0) :]
    for name in _names(run_folder):
        if name not in kept:
            storage.remove(storage.join(run_folder, name))


def complete(run_folder: str) -> list[str]:
    """Returns the names of the completely written checkpoints, oldest first. Does not read their content."""
    return [name for name in _names(run_folder) if storage.exists(storage.join(run_folder, name, DIGESTS))]


def newest(run_folder: str) -> str | None:
    """Returns the name of the newest checkpoint whose files match their digests, or None if there is no checkpoint.

    Reports newer checkpoints: deletes an unfinished one, and moves a damaged one to `damaged/`. Raises InputError if all
    checkpoints are damaged, because the run must not start over unless the user sets this.
    """
    aside = storage.join(run_folder, DAMAGED)
    for name in reversed(_names(run_folder)):
        path = storage.join(run_folder, name)
        problem = damage(path)
        if problem is None:
            return name
        if not storage.exists(storage.join(path, DIGESTS)):
            storage.remove(path)
            terminal.say(f"{name} was never finished ({problem}): deleted")
        else:
            storage.move(path, storage.join(aside, unused(aside, name)))
            print(f"warning: {run_folder}: {name} is damaged ({problem}): moved to {DAMAGED}/", flush=True)
    if storage.folders(aside):  # including checkpoints that an earlier attempt moved
        raise InputError(
            f"all checkpoints of {run_folder} are damaged, see {DAMAGED}/; restore their files, or set run.overwrite=true to start "
            "over. run.num_to_keep=2 or more keeps one to fall back to",
            key="run.name",
        )
    return None


def damage(path: str) -> str | None:
    """Returns the damage of a checkpoint (in a folder or bucket), or None if its files match their digests."""
    if not storage.exists(f"{path}/{DIGESTS}"):
        return f"{DIGESTS} is missing, so the checkpoint is incomplete"
    fs, folder = storage.filesystem(path)
    try:
        listed = storage.read_json(f"{path}/{DIGESTS}")["files"]
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return f"{DIGESTS} cannot be read ({in_brief(error)})"
    if not expected:
        return f"{DIGESTS} lists no file"
    for name, (size, sha256) in expected.items():
        info = fs.get_file_info(f"{folder}/{name}")
        if info.type.name != "File":
            return f"{name} is missing"
        if info.size != size:
            return f"{name} has {info.size} bytes, expected {size}"
        # Each read of a bucket's stream is a request, and file_digest reads 256 KiB
        with fs.open_input_stream(f"{folder}/{name}", buffer_size=1 << 22) as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != sha256:
            return f"{name} has sha256 {digest[:12]}, expected {sha256[:12]}"
    return None


def _names(run_folder: str) -> list[str]:
    """Returns the folders of checkpoints, complete or not: oldest first, the final one last."""
    found = filter(None, map(NAME.fullmatch, storage.folders(run_folder)))
    ordered = sorted(found, key=lambda name: (float(name[1] or "inf"), int(name[2] or 1), int(name[3] or 1)))
    return [name[0] for name in ordered]
