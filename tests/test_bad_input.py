"""Tests that wrong input ends a command with exit status 2 and one message, and leaves the registry unchanged.

A message gives the place (file:line or section.key), the value found, the expected value, and the next command. The first table
is about rows (details: tests/data/test_formats.py, test_text_rows.py, test_table_rows.py), the second about job files and their
inputs, and the third about errors that show only during training.
"""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from running import NO_EVAL, ROOT, client

from pipeline.__main__ import main
from pipeline.job import load_job

# With these settings, a run that should have been rejected takes seconds, not minutes.
ONE_STEP = ["trainer.max_steps=1", "trainer.save_strategy=no", *NO_EVAL]
TINY = {
    **{"sft": ONE_STEP, "rm": ONE_STEP, "dpo": [*ONE_STEP, "policy=base"], "kto": [*ONE_STEP, "policy=base"]},
    "ppo": [
        "trainer.total_episodes=4", "trainer.batch_size=4", "trainer.num_mini_batches=1", "trainer.response_length=8",
        "data.eval=null", "policy=base", "reward=python:bad_rewards:length", "judge=null",
    ],
    "evaluate": ["policy=base", "baseline=null", "reward=null", "judge=null", "data.pairs=null"],
}  # fmt: skip


@dataclass
class Case:
    """One wrong input to a command. In overrides, `{name}` stands for a path from the fixture `world`."""

    name: str
    verb: str
    patterns: tuple[str, ...]  # patterns that the message must match
    overrides: list[str] = field(default_factory=list)
    rows: list[Any] | None = None  # rows of `key`
    file: str = "rows.jsonl"
    key: str = "data.train"


def case(name: str, verb: str, *patterns: str, **fields: Any) -> Case:
    return Case(name, verb, patterns, **fields)


def jsonl(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


GOOD = {"prompt": "What is the capital of Peru?", "completion": "Lima."}
ASK = {"prompt": "What is the capital of Peru?", "answer": "Lima"}


ROWS = [
    case("longer than the context", "sft", r"rows\.jsonl:2: found \d{3,} tokens; expected at most 256 .*context", r"data\.overlong=truncate",
         rows=[GOOD, {**GOOD, "completion": "Lima. " * 300}], overrides=["data.max_length=null"]),
    case("prompt that leaves no room", "ppo", r"rows\.jsonl:1: found \d{3} tokens; expected at most 192", rows=[{**ASK, "prompt": "Peru? " * 150}]),
    case("eval row wrong", "sft", r"data\.eval: 1 of 2 rows cannot be used", r"evals\.jsonl:2: `completion`: found null",
         key="data.eval", file="evals.jsonl", rows=[GOOD, {**GOOD, "completion": None}]),
    case("unknown scheme", "sft", r"data\.train: .*'ftps://host/rows\.jsonl'.*expected a path, a glob, a folder, or s3:// gs:// hf://",
         overrides=["data.train=ftps://host/rows.jsonl"]),
]  # fmt: skip

JOB = [
    case("name of a run of another stage", "rm", r"run\.name: 'done' is .*finished sft run in .*run\.name=rm-done", overrides=["run.name=done"]),
    case("critic warmed up for the whole run", "ppo", r"trainer\.critic_warmup_steps: found 9, but the run has 9 updates \(\d+ prompts\): the policy would never learn",
         overrides=["trainer.critic_warmup_steps=9", "trainer.total_episodes=72", "trainer.batch_size=8"]),
    # models
    case("base that is a file", "sft", r"model\.name_or_path: there is no folder 'pyproject\.toml'; expected a folder", overrides=["model.name_or_path=pyproject.toml"]),
    # damaged files of a base, and adapters that do not fit their base (details: tests/models)
    case("no room for a prompt", "ppo", r"trainer\.response_length: 256 tokens leave no room.*context of 256; set trainer\.response_length=128", overrides=["trainer.response_length=256"]),
    case("no room for prompt and completion", "ppo", r"data\.max_length: 192 .*context of 256 tokens less trainer\.response_length=100; use data\.max_length=156", overrides=["trainer.response_length=100"]),
    # inputs
    case("no such policy folder", "dpo", r"policy: /nowhere/adapter: no such folder; use a folder, or models:/NAME@ALIAS", overrides=["policy=/nowhere/adapter"]),
    case("policy folder without adapter", "dpo", r"policy: jobs/demo/model: no adapter in .*expected adapter_config\.json, found ", overrides=["policy=jobs/demo/model"]),
    case("messages for a policy of plain text", "dpo", r"policy: .*/plain was trained by sft on plain text, and the models of this run read messages", overrides=["policy={plain}"]),
    case("policy that is a reward", "ppo", r"policy: .*/judging is a reward adapter.*sft", overrides=["policy={judging}"]),
    case("reward asks for a missing column", "ppo", r"reward: python:bad_rewards:needs_weight asks for `weight`, which the rows of data\.train do not have; expected one of prompts, completions, completion_ids, seeds, groups, answer\.", overrides=["reward=python:bad_rewards:needs_weight"]),
    # the machine
    case("a rollout worker of another kind", "ppo", r"rollout\.resources_per_worker: 1 rollout worker with XPU: 1 each, but this machine has 0", overrides=["rollout.num_workers=1", "rollout.resources_per_worker={{XPU: 1}}"]),
    case("storage below a file", "sft", r"run\.storage_path: '/dev/null/runs' cannot be written.*such as run\.storage_path=\./runs", overrides=["run.storage_path=/dev/null/runs"]),
    case("cache that cannot be written", "sft", r"data\.cache_dir: '/dev/null/cache/.* cannot be written .*such as data\.cache_dir=\./cache", overrides=["data.cache_dir=/dev/null/cache"]),
    case("bucket without a tracking server", "sft", r"mlflow\.tracking_uri: missing; a bucket \(run\.storage_path=memory://runs\)", overrides=["run.storage_path=memory://runs"]),
]  # fmt: skip
# ------------------------------------------------------------------------------------------------- what they find


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> dict[str, str]:
    """Returns folders for the cases, and a storage path whose registry has one model."""
    from transformers import AutoModelForCausalLM

    from pipeline.models.adapters import SharedBase
    from pipeline.models.base import base_identity
    from pipeline.registry import lineage

    home, demo = tmp_path_factory.mktemp("world"), ROOT / "jobs/demo/model"
    for name, head in (("plain", False), ("judging", True)):
        shared = SharedBase(AutoModelForCausalLM.from_pretrained(demo))
        shared.add(name, lora={"r": 2, "target_modules": "all-linear"}, head=head)
        shared.save(name, home / name)
        record = {"stage": "rm" if head else "sft", "base": base_identity(str(demo)), "rows": "text"}
        lineage.write(str(home / name), record)
    (home / "storage/done").mkdir(parents=True)
    (home / "storage/done/result.json").write_text(json.dumps({"stage": "sft", "name": "done"}))
    client(home / "storage").create_registered_model("other")
    return {name: str(home / name) for name in ("storage", "plain", "judging")}


def registry(storage: str) -> dict[str, Any]:
    """Returns what MLflow contains: runs with their status, models, versions and aliases."""
    store = client(Path(storage))
    experiments = [e.experiment_id for e in store.search_experiments()]
    return {
        "runs": {r.info.run_id: r.info.status for r in store.search_runs(experiments)},
        "models": {m.name: dict(m.aliases) for m in store.search_registered_models()},
        "versions": sorted((v.name, v.version) for v in store.search_model_versions()),
    }


def arguments(example: Case, world: dict[str, str], folder: Path) -> list[str]:
    name = re.sub("[^a-z]+", "-", example.name.lower())
    overrides = [f"run.storage_path={world['storage']}", f"run.name=bad-{name}", *TINY.get(example.verb, [])]
    if example.rows is not None:
        path = folder / example.file
        path.write_bytes(jsonl(example.rows))
        overrides += [f"{example.key}={path}"]
    return [
        example.verb,
        f"jobs/demo/{example.verb}.yaml",
        *overrides,
        *(text.format(**world) for text in example.overrides),
    ]


@pytest.mark.parametrize("example", ROWS + JOB, ids=lambda example: example.name.replace(" ", "-"))
def test_wrong_input_gets_one_message(example, world, tmp_path, capsys, in_root):
    before = registry(world["storage"])
    folders = set(os.listdir(world["storage"]))
    status = main(arguments(example, world, tmp_path))
    errors = capsys.readouterr().err
    assert status == 2, errors
    assert sum(line.startswith("error: ") for line in errors.splitlines()) == 1, errors
    assert "Traceback" not in errors
    for pattern in example.patterns:
        assert re.search(pattern, errors), f"{pattern}\nis not in\n{errors}"
    assert registry(world["storage"]) == before
    new_folders = set(os.listdir(world["storage"])) - folders
    assert new_folders <= {"data", "mlflow.db.lock"}, "a run that never began leaves no folder"


def test_rows_longer_than_the_context_are_rejected_before_ray_starts(tmp_path, capsys, monkeypatch, in_root):
    monkeypatch.setattr("pipeline.run.session.ray_session", lambda job: pytest.fail("Ray was started"))
    overrides = ["data.max_length=512", "scaling.num_workers=1", f"run.storage_path={tmp_path}"]
    assert main(["sft", "jobs/demo/sft.yaml", *overrides]) == 2
    assert "data.max_length: 512 is more than the model's context of 256" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------- runs of the same name


def test_a_finished_run_of_other_settings_names_them(tmp_path, capsys, in_root):
    name = ["run.name=done", f"run.storage_path={tmp_path}"]
    job = load_job(
        "jobs/demo/sft.yaml", [*name, "trainer.learning_rate=0.5", "lora.r=3", "run.num_to_keep=7"], "sft"
    )
    (tmp_path / "done").mkdir()
    result = {"stage": "sft", "name": "done", "job": job.to_dict()}
    (tmp_path / "done/result.json").write_text(json.dumps(result))
    (tmp_path / "done/report.html").touch()
    assert main(["sft", "jobs/demo/sft.yaml", *name, "lora.r=5", "data.train=/nowhere.jsonl"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("run done is finished")
    assert lines == [
        "the run used other settings; the settings of this command are ignored:",
        '   data.train: was "jobs/demo/data/demonstrations.jsonl", is "/nowhere.jsonl"',
        "   lora.r: was 3, is 5",
        "   trainer.learning_rate: was 0.5, is 0.002",
    ]
    settings = ["trainer.learning_rate=0.5", "lora.r=3"]
    assert main(["sft", "jobs/demo/sft.yaml", *name, *settings]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


# --------------------------------------------------------------------------------------------------- while training


RAISES = (
    r"raised KeyError: 'What is .+' for prompt '.+', completion '.*', row \{'prompt': '.+ \(sample 0 of \d\):"
    r"(\n  File \".+bad_rewards\.py\", line \d+, in (raises|<listcomp>)\n    .+(\n +[~^]+)?)+"
)
NAN = (
    r"returned nan for prompt '.+', completion '.*', row \{.*\} \(sample 0 of \d\); expected a finite number"
)


@pytest.mark.parametrize(
    ("verb", "function", "pattern"),
    [("ppo", "raises", RAISES), ("evaluate", "raises", RAISES), ("generate", "raises", RAISES), ("score", "nan", NAN)],
)  # fmt: skip
def test_a_reward_that_fails_ends_the_run_with_one_message(
    verb, function, pattern, world, tmp_path, capsys, in_root
):
    before, name = registry(world["storage"]), f"reward-{verb}-{function}"
    (tmp_path / "rows.jsonl").write_bytes(jsonl([ASK, {**ASK, "prompt": "What is Peru?"}]))
    (tmp_path / "completions.jsonl").write_bytes(jsonl([GOOD, {**GOOD, "completion": "Quito."}]))
    key, file = {"score": ("train", "completions"), "evaluate": ("eval", "rows")}.get(verb, ("train", "rows"))
    overrides = [*TINY.get(verb, []), f"data.{key}={tmp_path}/{file}.jsonl", "gate={}"]
    overrides += ["policy=base"] if verb == "generate" else []
    overrides += [
        f"reward=python:bad_rewards:{function}",
        f"run.storage_path={world['storage']}",
        f"run.name={name}",
    ]
    status = main([verb, f"jobs/demo/{verb}.yaml", *overrides])
    errors = capsys.readouterr().err
    assert status == 1, errors
    message = errors[errors.find("failed: ") :].rstrip()
    assert re.fullmatch(rf"failed: reward 'reward' \(bad_rewards:{function}\) {pattern}", message), errors
    assert "Traceback" not in errors and "error: " not in errors
    after = registry(world["storage"])
    statuses = [after["runs"][run] for run in after["runs"].keys() - before["runs"].keys()]
    assert statuses == (["FAILED"] if verb in ("ppo", "evaluate") else [])
    assert (after["models"], after["versions"]) == (before["models"], before["versions"])
    folder = Path(world["storage"], name)
    assert not (folder / "result.json").exists()
    assert json.loads((folder / "failed.json").read_text())["error"].startswith("Failure: ")
