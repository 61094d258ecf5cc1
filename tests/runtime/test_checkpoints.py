"""Which checkpoint a run continues from, whatever a kill or a disk did to the newest. Ray's own manager reads, without Ray."""

import asyncio
import json
import os
import re

import pytest

from pipeline.errors import InputError
from pipeline.registry.lineage import folder_digests
from pipeline.runtime import checkpoints
from pipeline.system import storage


def make(run, name, content=b"weights", sealed=True):
    folder = run / name
    (folder / "policy").mkdir(parents=True)
    (folder / "policy/adapter_model.safetensors").write_bytes(content)
    (folder / "state.json").write_text(json.dumps({"name": name}))
    if sealed:
        checkpoints.seal(str(folder), checkpoints.digests(str(folder)))
    return folder


def note(run, *names):
    """Ray Train's snapshot, as if it had these checkpoints."""
    metrics = {name: {"loss": 1.0, "step": 5} for name in names}
    (run / checkpoints.SNAPSHOT).write_text(json.dumps(checkpoints._snapshot(list(names), metrics)))


def as_ray_reads_it(run, num_to_keep=2):
    """(latest checkpoint, all of them) in the eyes of the installed Ray Train."""
    from ray.train import CheckpointConfig
    from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
    from ray.train.v2._internal.execution.storage import StorageContext

    async def read():
        context = StorageContext(storage_path=str(run.parent), experiment_dir_name=run.name)
        manager = CheckpointManager(CheckpointConfig(num_to_keep=num_to_keep), context)
        latest = manager.latest_checkpoint_result
        every = [os.path.basename(one.checkpoint.path) for one in manager._checkpoint_results]
        return os.path.basename(latest.checkpoint.path) if latest else None, every

    return asyncio.run(read())


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    return folder


def test_a_checkpoint_as_it_was_sealed_is_whole(run):
    assert checkpoints.damage(str(make(run, "checkpoint_00000005"))) is None


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
    "not sealed": (lambda f: (f / "digests.json").unlink(), r"digests\.json is missing.*not written to its end"),
    "half a seal": (lambda f: os.truncate(f / "digests.json", 20), r"digests\.json cannot be read"),
    "another seal": (lambda f: (f / "digests.json").write_text("[]"), r"digests\.json cannot be read"),
    "a seal of a number": (lambda f: (f / "digests.json").write_text('{"files": 5}'), r"digests\.json cannot be read"),
    "a seal of numbers": (lambda f: (f / "digests.json").write_text('{"files": {"state.json": 5}}'), r"digests\.json cannot be read"),
    "a seal without digests": (lambda f: (f / "digests.json").write_text('{"files": {"state.json": {"bytes": 3}}}'), r"digests\.json cannot be read .*sha256"),
    "a deep seal": (lambda f: (f / "digests.json").write_text('{"files":' * 100_000), r"digests\.json cannot be read .*RecursionError"),
    "not text": (lambda f: (f / "digests.json").write_bytes(b"\xff\xfe"), r"digests\.json cannot be read"),
    "a folder for a seal": (lambda f: ((f / "digests.json").unlink(), (f / "digests.json").mkdir()), r"digests\.json cannot be read \(it is no file"),
    "a folder for a file": (lambda f: ((f / "state.json").unlink(), (f / "state.json").mkdir()), r"state\.json is missing"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_to_the_newest_is_named_and_the_one_before_is_used(kind, run, capsys):
    spoil, says = DAMAGE[kind]
    for name in ("checkpoint_00000005", "checkpoint_00000010"):
        make(run, name)
    note(run, "checkpoint_00000005", "checkpoint_00000010")
    spoil(run / "checkpoint_00000010")
    assert checkpoints.repair(str(run)) == ["checkpoint_00000005"]
    out = capsys.readouterr().out
    assert re.search(rf"continuing from checkpoint_00000005.*checkpoint_00000010: {says}", out, re.DOTALL), (
        out
    )
    assert as_ray_reads_it(run) == ("checkpoint_00000005", ["checkpoint_00000005"])
    assert (run / "damaged/checkpoint_00000010").is_dir(), "it is set aside, not deleted"
    assert checkpoints.repair(str(run)) == ["checkpoint_00000005"] and capsys.readouterr().out == ""


@pytest.mark.parametrize("snapshot", ["whole", "cut off"])
def test_no_whole_checkpoint_is_an_error_not_a_silent_start_from_nothing(snapshot, run):
    flip(make(run, "checkpoint_00000005"))
    note(run, "checkpoint_00000005")
    if snapshot == "cut off":
        os.truncate(run / checkpoints.SNAPSHOT, 1)
    for _ in range(2):  # the damaged one has been set aside by the first
        with pytest.raises(
            InputError, match=r"run\.name: no checkpoint .* is whole.*run\.fresh=true.*num_to_keep"
        ):
            checkpoints.repair(str(run))


def test_what_a_kill_left_half_uploaded_is_deleted(run, capsys):
    make(run, "checkpoint_00000005")
    note(run, "checkpoint_00000005")
    make(run, "checkpoint_00000010", sealed=False)
    assert checkpoints.repair(str(run)) == ["checkpoint_00000005"]
    assert not (run / "checkpoint_00000010").exists()
    out = capsys.readouterr().out
    assert (
        out.startswith("checkpoint_00000010 was never finished (digests.json is missing")
        and "warning" not in out
    )


def test_a_checkpoint_that_is_whole_counts_although_ray_was_killed_before_it_noted_it(run):
    make(run, "checkpoint_00000005")
    note(run, "checkpoint_00000005")
    make(run, "checkpoint_00000010")
    checkpoints.repair(str(run))
    assert as_ray_reads_it(run)[0] == "checkpoint_00000010"


@pytest.mark.parametrize("length", [0, 1, 200])
def test_a_snapshot_that_breaks_off_is_written_anew(length, run):
    make(run, "checkpoint_00000005")
    make(run, "checkpoint_00000010")
    note(run, "checkpoint_00000005", "checkpoint_00000010")
    os.truncate(run / checkpoints.SNAPSHOT, length)
    assert checkpoints.repair(str(run)) == ["checkpoint_00000005", "checkpoint_00000010"]
    assert as_ray_reads_it(run)[0] == "checkpoint_00000010"


def test_a_checkpoint_that_somebody_deleted_does_not_stop_the_others(run, capsys):
    make(run, "checkpoint_00000005")
    note(run, "checkpoint_00000005", "checkpoint_00000010")
    assert checkpoints.repair(str(run)) == ["checkpoint_00000005"]
    assert "has lost checkpoint_00000010 (continuing from checkpoint_00000005)" in capsys.readouterr().out
    assert as_ray_reads_it(run)[0] == "checkpoint_00000005"


def test_that_all_checkpoints_were_deleted_is_said(run, capsys):
    note(run, "checkpoint_00000005", "checkpoint_00000010")
    assert checkpoints.repair(str(run)) == []
    assert (
        "has lost checkpoint_00000005, checkpoint_00000010 (none is left, the run starts over)"
        in capsys.readouterr().out
    )
    assert as_ray_reads_it(run) == (None, [])


SNAPSHOTS = {
    "a number": "5", "deep": '{"checkpoint_results":' * 100_000, "not text": "\udcff", "another kind": '{"checkpoint_results": 5}',
    "of numbers": '{"checkpoint_results": [5]}', "without metrics": '{"checkpoint_results": [{"checkpoint_dir_name": "checkpoint_00000005"}]}',
    "other metrics": '{"checkpoint_results": [{"checkpoint_dir_name": "checkpoint_00000005", "metrics": 5}]}',
}  # fmt: skip


@pytest.mark.parametrize("kind", SNAPSHOTS)
def test_a_snapshot_that_is_none_is_written_anew(kind, run):
    make(run, "checkpoint_00000005")
    (run / checkpoints.SNAPSHOT).write_text(SNAPSHOTS[kind], errors="surrogateescape")
    assert checkpoints.repair(str(run)) == ["checkpoint_00000005"]
    assert as_ray_reads_it(run) == ("checkpoint_00000005", ["checkpoint_00000005"])


def test_a_snapshot_that_is_a_folder(run):
    make(run, "checkpoint_00000005")
    (run / checkpoints.SNAPSHOT).mkdir()
    with pytest.raises(InputError, match=r"run\.name: .*snapshot\.json cannot be read"):
        checkpoints.repair(str(run))


def test_files_that_vanish_under_a_run_are_named():
    from ray.train import ControllerError

    gone = ControllerError(FileNotFoundError("Path not found: (<fs>, /runs/one/checkpoint_00000004)"))
    says = "/runs/one/checkpoint_00000004 is gone: it was deleted while"
    assert str(checkpoints.lost("/runs/one", gone)).startswith(says)
    remote = FileNotFoundError("'bucket/one/x'")
    assert str(checkpoints.lost("s3://bucket/one", remote)).startswith("bucket/one/x is gone")
    assert checkpoints.lost("/runs/one", FileNotFoundError("/elsewhere/rows.jsonl")) is None
    assert checkpoints.lost("/runs/one", RuntimeError("/runs/one/x")) is None


def test_an_empty_folder_and_a_missing_one_are_fresh_starts(run, tmp_path):
    for folder in (run, tmp_path / "nowhere"):
        assert checkpoints.repair(str(folder)) == []
    assert not (run / checkpoints.SNAPSHOT).exists()


def test_order_is_by_step_then_attempt_and_the_final_one_is_last(run):
    names = ["checkpoint_00000005", "checkpoint_00000010", "checkpoint_00000010-2", "checkpoint_00000100", "final"]  # fmt: skip
    for name in reversed(names):
        make(run, name)
    (run / "something_else").mkdir()
    assert checkpoints.repair(str(run)) == names


def test_a_name_is_never_used_twice(run):
    assert checkpoints.unused(str(run), "checkpoint_00000010") == "checkpoint_00000010"
    make(run, "checkpoint_00000010", sealed=False)
    assert checkpoints.unused(str(run), "checkpoint_00000010") == "checkpoint_00000010-2"
    make(run, "checkpoint_00000010-2")
    assert checkpoints.unused(str(run), "checkpoint_00000010") == "checkpoint_00000010-3"


def test_the_same_in_a_bucket(tmp_path, monkeypatch):
    """fsspec's memory file system stands for one: no rename, no lock, folders that are only prefixes."""
    import fsspec

    folder = make(tmp_path, "checkpoint_00000005")
    bad = make(tmp_path, "checkpoint_00000010")
    flip(bad)
    note(tmp_path, "checkpoint_00000005", "checkpoint_00000010")
    bucket = fsspec.filesystem("memory")
    bucket.put(str(folder), "/runs/one/checkpoint_00000005", recursive=True)
    bucket.put(str(bad), "/runs/one/checkpoint_00000010", recursive=True)
    bucket.put(str(tmp_path / checkpoints.SNAPSHOT), f"/runs/one/{checkpoints.SNAPSHOT}")
    uri = "memory:///runs/one"
    assert checkpoints.damage(f"{uri}/checkpoint_00000005") is None
    assert "sha256" in (checkpoints.damage(f"{uri}/checkpoint_00000010") or "")
    assert checkpoints.repair(uri) == ["checkpoint_00000005"]
    assert storage.read_json(f"{uri}/{checkpoints.SNAPSHOT}")["current_report_index"] == 1
    assert storage.folders(f"{uri}/damaged") == ["checkpoint_00000010"]
    with storage.local_copy(f"{uri}/checkpoint_00000005") as local:
        assert folder_digests(local) == folder_digests(str(folder))
    assert not os.path.exists(local)
    with storage.local_copy(str(folder)) as local:
        assert local == str(folder)
    bucket.rm("/runs", recursive=True)
