"""Wrong and hostile input to a run that is continued: each its error, before anything is trained, and an untouched folder."""

import os
import re
import shutil

import pytest
from running import ROOT

from pipeline.__main__ import main
from pipeline.config import load_job
from pipeline.errors import InputError
from pipeline.runtime import checkpoints, driver, earlier, inputs
from pipeline.system import functions

BATCH = ["data.batch_size=16", "trainer.per_device_train_batch_size=8"]


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """A storage path with a run of sft and one of ppo that were stopped after their first checkpoint."""
    folder = tmp_path_factory.mktemp("halfway")
    before = os.getcwd()
    os.chdir(ROOT)
    for verb, more in (
        ("sft", BATCH),
        ("ppo", ["policy=base", "reward=python:bad_rewards:length", "judge=null"]),
    ):
        job = load_job(
            f"jobs/demo/{verb}.yaml", [f"run.storage_path={folder}", f"run.name={verb}", *more], verb
        )
        earlier.record(driver.name_run(job), {}, "sha256:base", {"train": "sha256:rows"})
        checkpoint = folder / verb / "checkpoint_00000010"
        checkpoint.mkdir()
        (checkpoint / "state.json").write_text("{}")
        checkpoints.seal(str(checkpoint), checkpoints.digests(str(checkpoint)))
    os.chdir(before)
    return folder


def tree(folder):
    return {
        str(p.relative_to(folder)): p.stat().st_size
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.suffix not in (".db", ".lock")
    }


# (name, verb, overrides or a change to the folder, what the message says)
CHANGED = [
    ("learning rate", "sft", ["trainer.learning_rate=0.5"], r"was begun with trainer\.learning_rate=0\.002 \(now 0\.5\).*run\.fresh=true.*may change: run, mlflow, gate, scaling, data\.cache_dir and \d+ more$"),
    ("seed", "sft", ["trainer.seed=2"], r"begun with trainer\.seed=1 \(now 2\)"),
    ("seed of ppo", "ppo", ["trainer.seed=2"], r"begun with trainer\.seed=1 \(now 2\)"),
    ("rank of the adapter", "sft", ["lora.r=8"], r"begun with lora\.r=16 \(now 8\)"),
    ("a key added", "sft", ["trainer.adam_beta2=0.9"], r"begun with trainer\.adam_beta2=not given \(now 0\.9\)"),
    ("data", "sft", ["data.train=jobs/demo/data/demonstrations_eval.jsonl"], r"begun with data\.train=.*demonstrations\.jsonl"),
    ("length of rows", "sft", ["data.max_length=128"], r"begun with data\.max_length=256"),
    ("global batch", "sft", ["data.batch_size=32"], r"begun with data\.batch_size=16 \(now 32\)"),
    ("episodes of an update", "ppo", ["trainer.batch_size=32"], r"begun with trainer\.batch_size=64 \(now 32\)"),
    ("schedule", "sft", ["trainer.lr_scheduler_type=linear"], r'begun with trainer\.lr_scheduler_type="cosine"'),
    ("length of the run", "sft", ["trainer.num_train_epochs=9"], r"begun with trainer\.num_train_epochs=3"),
    ("dtype", "sft", ["model.dtype=bfloat16"], r'begun with model\.dtype="float32"'),
    ("base", "sft", ["model.name_or_path=jobs/demo"], r'begun with model\.name_or_path="jobs/demo/model"'),
    ("policy", "ppo", ["policy=elsewhere"], r'begun with policy="base"'),
    ("reward", "ppo", ["reward=python:bad_rewards:nan"], r'begun with reward="python:bad_rewards:length"'),
    ("many keys", "sft", ["trainer.seed=2", "lora.r=8"], r"begun with lora\.r=16 \(now 8\), trainer\.seed=1 \(now 2\);"),
    ("more keys than are named", "sft",
     ["trainer.seed=2", "lora.r=8", "lora.lora_alpha=8", "data.max_length=128", "data.batch_size=32", "trainer.weight_decay=0.1"],
     r"data\.max_length=256 \(now 128\), lora\.lora_alpha=.*, trainer\.seed=1 \(now 2\) and 1 more;"),
]  # fmt: skip


@pytest.mark.parametrize(("verb", "overrides", "says"), [c[1:] for c in CHANGED], ids=[c[0] for c in CHANGED])
def test_a_changed_job_does_not_continue_a_checkpoint(verb, overrides, says, halfway, in_root, capsys):
    before = tree(halfway)
    more = BATCH if verb == "sft" else ["policy=base", "reward=python:bad_rewards:length", "judge=null"]
    given = [
        verb,
        f"jobs/demo/{verb}.yaml",
        f"run.storage_path={halfway}",
        f"run.name={verb}",
        *more,
        *overrides,
    ]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert re.search(rf"^error: run\.name: .*{says}", error, re.DOTALL), error
    assert tree(halfway) == before


@pytest.mark.parametrize(
    "overrides",
    [
        ["run.max_failures=3", "run.num_to_keep=5"], ["trainer.logging_steps=1", "trainer.save_strategy=steps", "trainer.save_steps=7"],
        ["trainer.per_device_train_batch_size=4"], ["gate.eval_loss=<= 3"], ["scaling.num_workers=2"],
        ["trainer.gradient_checkpointing=true"], ["mlflow.alias=challenger"],
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_change_the_numbers_may_change(overrides, halfway, in_root):
    assert earlier.unfinished(job_of(halfway, *BATCH, *overrides)) is not None


def test_how_evaluations_are_compared_decides_what_is_registered(halfway, tmp_path, in_root):
    """run.* and the evaluations may change, but not in a run that keeps its best step or may stop early."""
    folder = shutil.copytree(halfway, tmp_path / "copy")
    begun = [*BATCH, "run.keep=best", "trainer.eval_strategy=steps", "trainer.eval_steps=5"]
    for left, now, says in [
        (BATCH, [*BATCH, "run.keep=best"], r'run\.keep="last" \(now "best"\)'),
        (
            BATCH,
            [*BATCH, "run.early_stopping_patience=3"],
            r"run\.early_stopping_patience=not given \(now 3\)",
        ),
        (
            begun,
            [*begun, "run.metric_for_best_model=eval_mean_token_accuracy"],
            r"run\.metric_for_best_model=not given",
        ),
        (begun, [*begun, "trainer.eval_steps=7"], r"trainer\.eval_steps=5 \(now 7\)"),
    ]:
        earlier.record(job_of(folder, *left), {}, "b", {})
        with pytest.raises(InputError, match=says):
            earlier.unfinished(job_of(folder, *now))
        assert earlier.unfinished(job_of(folder, *left, "run.num_to_keep=5")) is not None


def job_of(folder, *overrides):
    given = [f"run.storage_path={folder}", "run.name=sft", *overrides]
    return driver.name_run(load_job("jobs/demo/sft.yaml", given, "sft"))


def test_rows_in_memory_decide_the_batch_where_no_batch_size_is_given(halfway, tmp_path, in_root):
    folder = shutil.copytree(halfway, tmp_path / "copy")
    earlier.record(job_of(folder, "data.batch_size=null"), {}, "b", {})
    with pytest.raises(InputError, match=r"begun with trainer\.per_device_train_batch_size=16 \(now 8\)"):
        earlier.unfinished(job_of(folder, "data.batch_size=null", "trainer.per_device_train_batch_size=8"))


def test_without_a_checkpoint_the_job_may_still_be_mended(halfway, tmp_path, in_root):
    folder = shutil.copytree(halfway, tmp_path / "copy")
    shutil.rmtree(folder / "sft/checkpoint_00000010")
    assert earlier.unfinished(job_of(folder, *BATCH, "trainer.learning_rate=0.5")) is None
    job = job_of(folder, *BATCH)
    found = earlier.unfinished(job)
    assert found is not None, "the same job goes on with its MLflow run"
    assert earlier.same_content(found, job, "sha256:base", {"train": "sha256:rows"})
    assert not earlier.same_content(found, job, "sha256:base", {"train": "sha256:edited"})


@pytest.mark.parametrize(
    ("base", "rows", "says"),
    [
        ("sha256:other", {"train": "sha256:rows"}, r"content of model\.name_or_path \(jobs/demo/model\) has changed since 'sft' began"),
        ("sha256:base", {"train": "sha256:edited"}, r"content of data\.train has changed since 'sft' began.*run\.fresh=true"),
    ],
    ids=["base", "rows"],
)  # fmt: skip
def test_content_that_changed_under_the_same_path_is_found_out(base, rows, says, halfway, in_root):
    job = job_of(halfway, *BATCH)
    found = earlier.unfinished(job)
    assert earlier.same_content(found, job, "sha256:base", {"train": "sha256:rows"})
    with pytest.raises(InputError, match=says):
        earlier.same_content(found, job, base, rows)


def test_a_python_reward_that_was_edited_is_content_that_changed(halfway, tmp_path, in_root, monkeypatch):
    """Of collect, rows of both rewards would lie side by side under one reward_version."""
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "edited_reward.py"
    module.write_text("def score(completions, **_):\n    return [0.0 for _ in completions]\n")
    given = ["reward=[python:edited_reward:score]", f"run.storage_path={tmp_path}", "run.name=one"]
    job = load_job("jobs/demo/collect.yaml", given, "collect")
    rows = {"train": "sha256:rows"} | inputs.digests_of_functions(job)
    assert rows.keys() == {"train", "reward"}
    earlier.record(job, {}, "sha256:base", rows)
    (tmp_path / "one" / earlier.PARTS).mkdir()
    found = earlier.unfinished(job)
    assert earlier.same_content(
        found, job, "sha256:base", {"train": "sha256:rows"} | inputs.digests_of_functions(job)
    )
    module.write_text("def score(completions, **_):\n    return [1.0 for _ in completions]\n")
    changed = {"train": "sha256:rows"} | inputs.digests_of_functions(job)
    with pytest.raises(
        InputError, match=r"content of reward has changed since 'one' began; .*Restore the files"
    ):
        earlier.same_content(found, job, "sha256:base", changed)


def test_functions_that_decide_numbers_have_digests(in_root):
    gold, length = "python:pipeline.demo:gold", "python:bad_rewards:length"
    several = [f"reward=[{gold},{{reward: {length}, weight: 2}}]", f"judge={gold}", "policy=base"]
    ppo = load_job("jobs/demo/ppo.yaml", several, "ppo")
    assert inputs.digests_of_functions(ppo).keys() == {"reward"}, "nothing is trained on its judge"
    evaluate = load_job("jobs/demo/evaluate.yaml", [f"judge={gold}"], "evaluate")
    assert inputs.digests_of_functions(evaluate) == {"judge": functions.digest([gold])}


BROKEN = {
    "empty": b"",
    "breaks off": b'{"stage": "sf',
    "a list": b"[1, 2]",
    "no stage": b'{"model": {}}',
    "not text": b"\xff\xfe\x00",
    "a number": b"5",
    "deep": b'{"stage":' * 100_000,
    "deeper than a walk": b'{"stage": "sft", "lora": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
    "metrics of a number": b'{"stage": "sft", "metrics": 5, "begun_with": 5}',
    "inputs of numbers": b'{"stage": "sft", "inputs": {"policy": 5}, "begun_with": {"inputs": {"policy": 5}}}',
    "rows of a list": b'{"stage": "sft", "seconds": "long", "begun_with": {"rows": [1]}}',
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("file", ["job.json", "result.json"])
def test_what_a_run_left_cannot_be_read(file, kind, halfway, tmp_path, in_root, capsys):
    folder = shutil.copytree(halfway, tmp_path / "copy")
    (folder / "sft" / file).write_bytes(BROKEN[kind])
    assert main(["sft", "jobs/demo/sft.yaml", f"run.storage_path={folder}", "run.name=sft"]) == 2
    error = capsys.readouterr().err
    assert re.search(rf"^error: run\.name: .*/sft/{file} cannot be read .*run\.fresh=true", error), error


EVALUATIONS = [None, b"", b"[]", b'{"pairs": 5}', b'{"metrics": {}}', b'{"pairs":' * 100_000]


@pytest.mark.parametrize("content", EVALUATIONS, ids=["none", "empty", "list", "number", "no pairs", "deep"])
def test_an_evaluation_that_cannot_be_read(content, tmp_path, in_root, capsys):
    folder = tmp_path / "eval"
    folder.mkdir()
    (folder / "result.json").write_text('{"stage": "evaluate", "inputs": {}, "metrics": {}}')
    if content is not None:
        (folder / "evaluation.json").write_bytes(content)
    assert main(["evaluate", "jobs/demo/evaluate.yaml", f"run.storage_path={tmp_path}", "run.name=eval"]) == 2
    error = capsys.readouterr().err
    assert re.search(
        r"^error: run\.name: .*/eval/evaluation\.json cannot be read .*run\.fresh=true", error
    ), error


# ------------------------------------------------------------------------------------------------ paths


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.name=../outside", r"run\.name: found .*it names a folder below run\.storage_path"),
        ("run.name=/etc/outside", r"run\.name: found "),
        ("run.name=..", r"run\.name: found "),
        ("run.name=.hidden", r"run\.name: found "),
        ("run.name=a/b", r"run\.name: found "),
        ("run.name=bell\x07", r"not valid YAML: unacceptable character #x0007"),
        ("mlflow.registered_model=../../outside", r"mlflow\.registered_model: found .*expected letters"),
        ("mlflow.registered_model=..", r"mlflow\.registered_model: found "),
        ("mlflow.alias=../x", r"mlflow\.alias: found "),
    ],
)  # fmt: skip
def test_names_cannot_lead_out_of_the_storage_path(override, says, tmp_path, in_root, capsys):
    store = tmp_path / "deep/runs"
    assert main(["sft", "jobs/demo/sft.yaml", f"run.storage_path={store}", override]) == 2
    assert re.search(rf"^error: .*{says}", capsys.readouterr().err)
    assert not store.exists() and list(tmp_path.iterdir()) == []


def test_a_storage_path_that_is_a_file(tmp_path, in_root, capsys):
    (tmp_path / "runs").write_text("")
    assert main(["sft", "jobs/demo/sft.yaml", f"run.storage_path={tmp_path / 'runs'}"]) == 2
    assert re.search(r"^error: run\.storage_path: .* cannot be written", capsys.readouterr().err)


def test_a_job_file_is_data_and_runs_nothing(tmp_path, capsys):
    hostile = (
        ROOT / "jobs/demo/sft.yaml"
    ).read_text() + f"\npolicy: !!python/object/apply:os.system ['touch {tmp_path}/ran']\n"
    (tmp_path / "hostile.yaml").write_text(hostile)
    assert main(["sft", str(tmp_path / "hostile.yaml")]) == 2
    assert "hostile.yaml" in capsys.readouterr().err and not (tmp_path / "ran").exists()


def test_a_base_named_by_a_version_may_be_named_so_again(halfway, in_root):
    """A run records the base that models:/name@alias stood for; whether that is still the same one, its content tells."""
    assert (
        earlier.unfinished(job_of(halfway, *BATCH, "model.name_or_path=models:/rlhf-sft@champion"))
        is not None
    )


def test_a_base_on_the_hub_goes_on_at_its_commit(halfway, in_root):
    """A run records the commit that its revision meant; when that moves on, the message says what to type."""
    job = job_of(halfway, *BATCH)
    left = earlier.unfinished(job)
    begun = {**left, "model": {**left["model"], "revision": "a" * 40}}
    assert not earlier.differences(begun, job, ("begun_with", *earlier._resolved(job)))
    begun["begun_with"] = {**left["begun_with"], "base": f"commit:{'a' * 40}"}
    with pytest.raises(InputError, match=f"Type model.revision={'a' * 40}, or type another run.name"):
        earlier.same_content(begun, job, f"commit:{'b' * 40}", left["begun_with"]["rows"])


def test_versions_hold_for_the_inputs_that_the_job_names_as_it_did(tmp_path, in_root):
    def ppo(*overrides):
        named = [
            "policy=models:/a@champion",
            "judge=models:/b@champion",
            f"run.storage_path={tmp_path}",
            "run.name=one",
        ]
        return load_job("jobs/demo/ppo.yaml", [*named, *overrides], "ppo")

    pinned = {"policy": "models:/a/1", "judge": "models:/b/2", "reward.0": "models:/rlhf-rm/3"}
    earlier.record(ppo(), pinned, "b", {})
    found = earlier.unfinished(ppo())
    assert found is not None and earlier.pinned_inputs(found, ppo()) == pinned
    del pinned["judge"]  # another one: it is looked up and checked anew
    assert earlier.pinned_inputs(found, ppo("judge=models:/c@champion")) == pinned
