"""Tests from which checkpoint a run resumes after a kill or disk damage. Checkpoints are in a local folder or a bucket."""

import contextlib
import itertools
import json
import os
import re

import fsspec
import pytest

from pipeline.errors import InputError
from pipeline.registry.lineage import folder_digests
from pipeline.run import checkpoints
from pipeline.system import storage


def make(run, name, content=b"weights", sealed=True):
    folder = run / name
    (folder / "policy").mkdir(parents=True)
    (folder / "policy/adapter_model.safetensors").write_bytes(content)
    (folder / "state.json").write_text(json.dumps({"name": name}))
    if sealed:
        checkpoints.seal_checkpoint(str(run), name, folder_digests(str(folder)))
    return folder


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    return folder


def flip(folder):
    path = folder / "policy/adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "one bit": (flip, r"policy/adapter_model\.safetensors has sha256 [0-9a-f]{12}, expected [0-9a-f]{12}"),
    "truncated": (
        lambda f: os.truncate(f / "policy/adapter_model.safetensors", 3),
        r"policy/adapter_model\.safetensors has 3 bytes, expected 7",
    ),
    "a file gone": (lambda f: (f / "state.json").unlink(), r"state\.json is missing"),
    "a seal without an end": (
        lambda f: (f / "digests.json").write_text("["),
        r"digests\.json cannot be read \(JSONDecodeError: ",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_checkpoint_is_named_and_the_previous_one_is_used(kind, run, capsys):
    spoil, says = DAMAGE[kind]
    for name in ("checkpoint_00000005", "checkpoint_00000010"):
        make(run, name)
    assert checkpoints.find_damage(str(run / "checkpoint_00000010")) is None
    spoil(run / "checkpoint_00000010")
    assert checkpoints.newest_checkpoint(str(run)) == "checkpoint_00000005"
    out = capsys.readouterr().out
    assert re.search(rf"checkpoint_00000010 is damaged \({says}.*\): moved to damaged/", out), out
    assert (run / "damaged/checkpoint_00000010").is_dir(), "it is set aside, not deleted"
    assert checkpoints.newest_checkpoint(str(run)) == "checkpoint_00000005" and capsys.readouterr().out == ""


def test_if_all_checkpoints_are_damaged_the_run_does_not_start_over_silently(run):
    flip(make(run, "checkpoint_00000005"))
    for _ in range(2):  # the first call renames the damaged checkpoint
        with pytest.raises(
            InputError, match=r"run\.name: all checkpoints .*run\.overwrite=true.*num_to_keep"
        ):
            checkpoints.newest_checkpoint(str(run))


def test_incomplete_checkpoints_of_a_killed_run_are_deleted(run, tmp_path, capsys):
    make(run, "checkpoint_00000005")
    make(run, "checkpoint_00000010", sealed=False)
    assert checkpoints.complete_checkpoints(str(run)) == ["checkpoint_00000005"]
    assert checkpoints.newest_checkpoint(str(run)) == "checkpoint_00000005"
    assert not (run / "checkpoint_00000010").exists()
    out = capsys.readouterr().out
    assert out.startswith("checkpoint_00000010 was never finished (digests.json is missing")
    assert checkpoints.newest_checkpoint(str(tmp_path / "nowhere")) is None


def test_order_is_by_step_then_attempt_and_the_final_one_is_last(run):
    names = [f"checkpoint_000000{which}" for which in ("05", "10", "10-1.2", "10-2", "10-2.2", "99")] + [
        "final"
    ]
    for name in reversed(names):
        make(run, name)
    (run / "something_else").mkdir()
    assert checkpoints.complete_checkpoints(str(run)) == names
    # the name of a checkpoint is never reused, even if the checkpoint has no digests
    make(run, "checkpoint_00000010-3", sealed=False)
    found = [checkpoints.unused_name(str(run), "checkpoint_00000010", attempt) for attempt in (1, 2, 3, 4)]
    assert found == [f"checkpoint_00000010-{which}" for which in ("1.3", "2.3", "3.2", "4")]
    assert checkpoints.unused_name(str(run), "checkpoint_00000015") == "checkpoint_00000015"
    assert checkpoints.unused_name(str(run), "checkpoint_00000015", 2) == "checkpoint_00000015-2"


@pytest.fixture(params=["folder", "bucket"])
def anywhere(request, tmp_path):
    """Returns the folder of a run: a local folder, or one in fsspec's memory, which acts as a bucket (no rename, no locks)."""
    if request.param == "folder":
        yield str(tmp_path / "one")
        return
    yield "memory:///runs/one"
    fsspec.filesystem("memory").rm("/runs", recursive=True)


def commit(anywhere, tmp_path, step, keep=2):
    source = make(tmp_path, f"source-{step}", sealed=False)
    name = checkpoints.checkpoint_name(step)
    checkpoints.seal_checkpoint(anywhere, name, checkpoints.store_checkpoint(str(source), anywhere, name))
    checkpoints.prune_checkpoints(anywhere, keep)
    assert not source.exists()


def test_committed_checkpoints_are_intact_and_only_the_newest_are_kept(anywhere, tmp_path):
    for step in (5, 10, 15):
        commit(anywhere, tmp_path, step)
    assert checkpoints.complete_checkpoints(anywhere) == ["checkpoint_00000010", "checkpoint_00000015"]
    assert checkpoints.newest_checkpoint(anywhere) == "checkpoint_00000015"
    newest = f"{anywhere}/checkpoint_00000015"
    with storage.local_copy(newest) as local:
        files = sorted(folder_digests(local))
    assert files == ["digests.json", "policy/adapter_model.safetensors", "state.json"]
    storage.write_json(f"{newest}/state.json", {"name": "another one"})
    assert checkpoints.newest_checkpoint(anywhere) == "checkpoint_00000010"
    assert storage.folders(f"{anywhere}/damaged") == ["checkpoint_00000015"]


class Killed(BaseException):
    pass


def test_a_kill_between_any_two_steps_of_a_commit_leaves_an_intact_checkpoint(
    anywhere, tmp_path, monkeypatch
):
    """A process dies before the n-th change of the storage. After the next commit, the run has two intact checkpoints."""
    for n in itertools.count(1):
        here = f"{anywhere}-{n}"
        for step in (5, 10):
            commit(here, tmp_path, step)
        changes = itertools.count(1)

        def dies(verb, changes=changes, n=n):
            def change(*args):
                if next(changes) == n:
                    raise Killed
                return verb(*args)

            return change

        with monkeypatch.context() as patch:
            for verb in ("store_folder", "write_json", "remove"):
                patch.setattr(checkpoints.storage, verb, dies(getattr(storage, verb)))
            with contextlib.suppress(Killed):
                commit(here, tmp_path / str(n), 15)
        died = next(changes) > n  # whether the commit made at least n changes
        assert checkpoints.newest_checkpoint(here) == (
            "checkpoint_00000010" if n < 3 else "checkpoint_00000015"
        )
        commit(here, tmp_path, 20)
        assert (
            len(checkpoints.complete_checkpoints(here)) == 2
            and checkpoints.newest_checkpoint(here) == "checkpoint_00000020"
        )
        if not died:
            break
    assert n == 4
