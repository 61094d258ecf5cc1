"""Stores checkpoints as folders in the folder of a run. A checkpoint is complete once digests.json lists all its files.

    files = store_checkpoint(source, run_folder, name)    # one worker of each node copies the files of its node
    seal_checkpoint(run_folder, name, files)              # rank 0 writes digests.json
    prune_checkpoints(run_folder, num_to_keep)            # only then, rank 0 removes the oldest checkpoints
    newest_checkpoint(run_folder)                         # the checkpoint to resume from

A process that is killed during these steps leaves the earlier checkpoints intact.
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


def checkpoint_name(step: int) -> str:
    return f"checkpoint_{step:08d}"


def unused_name(folder: str, name: str, attempt: int = 1) -> str:
    """Returns an unused folder name: `name`, or `name-ATTEMPT` after the first attempt, with `.2`, `.3`, ... if needed.

    An attempt that has lost its lease without noticing therefore cannot write into the folders of the next attempt.
    """
    base_name = name if attempt == 1 else f"{name}-{attempt}"
    candidate, number = base_name, 1
    while storage.exists(storage.join(folder, candidate)):
        number += 1
        candidate = f"{name}-{attempt}.{number}"
    return candidate


def store_checkpoint(source: str, run_folder: str, name: str) -> dict[str, dict[str, Any]]:
    """Copies the files of a local folder into the checkpoint `name`, deletes the folder and returns the files' digests."""
    files = lineage.folder_digests(source)
    storage.store_folder(source, storage.join(run_folder, name))
    shutil.rmtree(source)
    return files


def seal_checkpoint(run_folder: str, name: str, files: dict[str, dict[str, Any]]) -> None:
    """Completes a checkpoint by writing the digests of its files."""
    storage.write_json(storage.join(run_folder, name, DIGESTS), {"files": dict(sorted(files.items()))})


def prune_checkpoints(run_folder: str, num_to_keep: int | None) -> None:
    """Removes all checkpoints except the newest `num_to_keep` complete ones, or except all complete ones if it is None."""
    newest = complete_checkpoints(run_folder)[-(num_to_keep or 0) :]
    for name in _names(run_folder):
        if name not in newest:
            storage.remove(storage.join(run_folder, name))


def complete_checkpoints(run_folder: str) -> list[str]:
    """Returns the names of the complete checkpoints, oldest first. Does not compare files with their digests."""
    return [name for name in _names(run_folder) if storage.exists(storage.join(run_folder, name, DIGESTS))]


def newest_checkpoint(run_folder: str) -> str | None:
    """Returns the name of the newest checkpoint whose files match their digests, or None if there is no checkpoint.

    Deletes newer checkpoints that are unfinished, and moves damaged ones to `damaged/`. Raises InputError if all checkpoints
    are damaged, because only the user may decide to start over.
    """
    damaged = storage.join(run_folder, DAMAGED)
    for name in reversed(_names(run_folder)):
        path = storage.join(run_folder, name)
        problem = find_damage(path)
        if problem is None:
            return name
        if not storage.exists(storage.join(path, DIGESTS)):
            storage.remove(path)
            terminal.say(f"{name} was never finished ({problem}): deleted")
        else:
            storage.move(path, storage.join(damaged, unused_name(damaged, name)))
            print(f"warning: {run_folder}: {name} is damaged ({problem}): moved to {DAMAGED}/", flush=True)
    if storage.folders(damaged):  # an earlier attempt may have moved some checkpoints
        raise InputError(
            f"all checkpoints of {run_folder} are damaged, see {DAMAGED}/; restore their files, or set run.overwrite=true to start "
            "over. With run.num_to_keep=2 or more, an earlier checkpoint is kept as a reserve",
            key="run.name",
        )
    return None


def find_damage(path: str) -> str | None:
    """Returns what is wrong with a checkpoint, or None if its files match their digests."""
    if not storage.exists(f"{path}/{DIGESTS}"):
        return f"{DIGESTS} is missing, so the checkpoint is incomplete"
    fs, folder = storage.filesystem(path)
    try:
        entries = storage.read_json(f"{path}/{DIGESTS}")["files"]
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}
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
        # Uses a large buffer, because file_digest reads 256 KiB at a time, and each read from a bucket is a request.
        with fs.open_input_stream(f"{folder}/{name}", buffer_size=1 << 22) as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != sha256:
            return f"{name} has sha256 {digest[:12]}, expected {sha256[:12]}"
    return None


def _names(run_folder: str) -> list[str]:
    """Returns the names of all checkpoints, complete or not, oldest first and the final one last."""
    matches = filter(None, map(NAME.fullmatch, storage.folders(run_folder)))
    ordered = sorted(matches, key=lambda m: (float(m[1] or "inf"), int(m[2] or 1), int(m[3] or 1)))
    return [match[0] for match in ordered]
