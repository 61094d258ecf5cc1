"""Checkpoints with digests: each lists the SHA-256 of its files, and a damaged one is never resumed from.

    seal(folder, digests(folder))      # in a worker, when everything else is in the folder
    damage(folder)                     # None, or what is wrong with it
    repair(run folder)                 # in the driver, before Ray Train looks for the newest

Ray Train copies a checkpoint into the run folder and then notes it in its snapshot. Neither is atomic: a kill leaves a
checkpoint that is not whole, or a snapshot that breaks off. Digests tell what is whole, and the snapshot is written
anew from that.
"""

import hashlib
import json
import os
import re
import shutil
from importlib.metadata import version
from typing import Any

from pipeline.errors import Failure, InputError, causes, in_brief
from pipeline.system import storage

DIGESTS = "digests.json"
# Ray Train's (ray 2.60, private; pinned in pyproject.toml). Remove when Ray Train itself skips a checkpoint that is not whole.
SNAPSHOT = "checkpoint_manager_snapshot.json"
NAME = re.compile(r"checkpoint_(\d{8})(?:-(\d+))?|final(?:-(\d+))?")
SET_ASIDE = "damaged"


def name_of(step: int) -> str:
    return f"checkpoint_{step:08d}"


def unused(run_folder: str, name: str) -> str:
    """`name`, or `name-2`, ...: one that no checkpoint has, not even one that a kill left half written."""
    free, number = name, 1
    while storage.exists(storage.join(run_folder, free)):
        number += 1
        free = f"{name}-{number}"
    return free


# ------------------------------------------------------------------------------------------- one checkpoint


def digests(folder: str) -> dict[str, dict[str, Any]]:
    """{relative path: {sha256, bytes}} of the files in a local folder."""
    digests = {}
    for root, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(root, name)
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            digests[os.path.relpath(path, folder)] = {"sha256": digest, "bytes": os.path.getsize(path)}
    digests.pop(DIGESTS, None)
    return digests


def seal(folder: str, files: dict[str, dict[str, Any]]) -> None:
    """Writes the digests, the last file of a checkpoint: of all its files, those of other nodes included."""
    storage.write_json(os.path.join(folder, DIGESTS), {"files": dict(sorted(files.items()))})


def damage(path: str) -> str | None:
    """What is wrong with a checkpoint (a local folder, or one in a bucket), as text; None if it is whole."""
    fs, folder = storage.filesystem(path)
    if (kind := fs.get_file_info(f"{folder}/{DIGESTS}").type.name) != "File":
        lacks = f"{DIGESTS} is missing, so it was not written to its end"
        return lacks if kind == "NotFound" else f"{DIGESTS} cannot be read (it is no file)"
    try:
        with fs.open_input_stream(f"{folder}/{DIGESTS}") as stream:
            listed = json.loads(stream.read())["files"]
        sizes = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{DIGESTS} cannot be read ({in_brief(error)})"
    for name, (size, sha256) in sizes.items():
        info = fs.get_file_info(f"{folder}/{name}")
        if info.type.name != "File":
            return f"{name} is missing"
        if info.size != size:
            return f"{name} has {info.size} bytes, expected {size}"
        with fs.open_input_stream(f"{folder}/{name}") as stream:
            digest = hashlib.sha256()
            while block := stream.read(1 << 22):
                digest.update(block)
        if digest.hexdigest() != sha256:
            return f"{name} has sha256 {digest.hexdigest()[:12]}, expected {sha256[:12]}"
    return None


# -------------------------------------------------------------------------------------- those of one run


def commit(source: str, run_folder: str, name: str, metrics: dict[str, Any], num_to_keep: int | None) -> None:
    """Moves a sealed local folder into the run's folder, notes it as Ray Train would, and removes the oldest checkpoints.

    Args:
        name: an unused one, of the new checkpoint.
        num_to_keep: how many checkpoints stay. None: all.
    """
    noted = {**(_noted(run_folder) or {}), name: metrics}
    names = list(noted)[-(num_to_keep or len(noted)) :]
    if storage.is_remote(run_folder):
        storage.store_folder(source, storage.join(run_folder, name))
        shutil.rmtree(source)
    else:
        partial = os.path.join(
            run_folder, f"{name}.partial"
        )  # on the disk of the run: a rename cannot be cut short
        shutil.rmtree(partial, ignore_errors=True)
        shutil.move(source, partial)
        os.rename(partial, os.path.join(run_folder, name))
    storage.write_json(storage.join(run_folder, SNAPSHOT), _snapshot(names, noted))
    for old in noted:
        if old not in names:
            storage.remove(storage.join(run_folder, old))


def repair(run_folder: str) -> list[str]:
    """Makes the run folder such that Ray Train continues from the newest checkpoint that is whole.

    Damaged ones are named and moved to `damaged/`; what a kill left half written is named and deleted. Returns the names of those
    that are whole, oldest first.

    Raises:
        InputError: when there were checkpoints and none is whole, so that the run would start over unasked.
    """
    noted = _noted(run_folder)
    whole, damaged = [], []
    for name in _names(run_folder):
        path = storage.join(run_folder, name)
        problem = damage(path)
        if problem is None:
            whole.append(name)
        elif noted is not None and name not in noted:
            storage.remove(path)  # Ray Train never heard of it: a kill during its upload
            print(f"{name} was never finished ({problem}): deleted", flush=True)
        else:
            damaged.append(f"{name}: {problem}")
            storage.move(path, storage.join(run_folder, SET_ASIDE, unused_aside(run_folder, name)))
    if damaged:
        newest = f"continuing from {whole[-1]}" if whole else "no other is left"
        print(
            f"warning: in {run_folder} damaged checkpoints were set aside ({newest}):\n  "
            + "\n  ".join(damaged),
            flush=True,
        )
    set_aside = storage.folders(storage.join(run_folder, SET_ASIDE))
    # Not only at the first attempt, which sets the damaged ones aside: a run must not start over unasked.
    if not whole and (damaged or (set_aside and noted != {})):
        raise InputError(
            f"no checkpoint of {run_folder} is whole ({'; '.join(damaged) or 'see damaged/ there'}); run.fresh=true starts "
            "the run over, or bring the files back. run.num_to_keep=2 or more keeps one to fall back to",
            key="run.name",
        )
    aside = {one.partition(":")[0] for one in damaged}
    if gone := [name for name in noted or () if name not in whole and name not in aside]:
        left = f"continuing from {whole[-1]}" if whole else "none is left, the run starts over"
        print(f"warning: {run_folder} has lost {', '.join(gone)} ({left})", flush=True)
    if whole or noted:
        storage.write_json(storage.join(run_folder, SNAPSHOT), _snapshot(whole, noted or {}))
    return whole


def lost(run_folder: str, error: BaseException) -> Failure | None:
    """What to say about a run that ended with `error` because its own files were deleted while it trained; else None."""
    path = run_folder.partition("://")[2] or run_folder
    for one in causes(error):
        named = re.search(rf"{re.escape(path)}[^\s'\",)]*", str(one))
        if isinstance(one, FileNotFoundError) and named:
            return Failure(
                f"{named[0]} is gone: it was deleted while the run trained; the same command with the same run.name continues "
                "from the newest checkpoint that is left, or starts the run again"
            )
    return None


def newest(run_folder: str) -> str | None:
    """The name of the newest checkpoint that is whole; None if there is none. Changes nothing."""
    names = reversed(_names(run_folder))
    return next((name for name in names if damage(storage.join(run_folder, name)) is None), None)


def unused_aside(run_folder: str, name: str) -> str:
    return unused(storage.join(run_folder, SET_ASIDE), name)


def _names(run_folder: str) -> list[str]:
    """Folders of checkpoints, oldest first, the final one last."""

    def age(name: str) -> tuple[float, int]:
        match = NAME.fullmatch(name)
        assert match is not None
        step, again, final_again = match.groups()
        return (float(step) if step else float("inf"), int(again or final_again or 1))

    return sorted((n for n in storage.folders(run_folder) if NAME.fullmatch(n)), key=age)


def _noted(run_folder: str) -> dict[str, dict[str, Any]] | None:
    """{checkpoint: metrics} in Ray Train's snapshot; empty where there is none, None where it breaks off."""
    path = storage.join(run_folder, SNAPSHOT)
    if not storage.exists(path):
        return {}
    try:
        results = storage.read_json(path)["checkpoint_results"]
        return {str(one["checkpoint_dir_name"]): dict(one["metrics"]) for one in results}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({in_brief(error)}); take it out, or bring it back", key="run.name"
        ) from error


def _snapshot(names: list[str], metrics: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ray Train's snapshot of exactly these checkpoints."""
    results = [
        {"version": 0, "checkpoint_dir_name": name, "metrics": metrics.get(name, {})} for name in names
    ]
    return {
        "ray_version": version("ray"),
        "checkpoint_results": results,
        "checkpoint_report_indices": list(range(len(names))),
        "latest_checkpoint_result": results[-1] if results else None,
        "pending_training_results": [],
        "pending_validation_specs": [],
        "current_report_index": len(names),
        "validated_checkpoint_dir_names": [],
        "timed_out_validation_checkpoint_dir_names": [],
        "failed_validation_checkpoint_dir_names": [],
    }
