"""`iterate`: rounds of real runs at toy size, each on the version before it; killed in the second one it ends with the
same bits."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import ROOT, client
from toy_models import registered

from pipeline.__main__ import main
from pipeline.commands import iterate as command
from pipeline.iteration import plan as plans
from pipeline.registry.lineage import folder_digests

TINY = [
    "policy=models:/toy-policy@champion", "collect.reward=models:/toy-rm@champion", "evaluate.reward=models:/toy-rm@champion",
    "evaluate.judge=null", "collect.trainer.num_generations=3", "collect.trainer.response_length=12",
    "collect.trainer.num_prompts=24", "evaluate.trainer.response_length=12", "evaluate.gate={}", "iterate.rounds=2",
    "dpo.trainer.max_steps=3", "dpo.trainer.save_strategy=steps", "dpo.trainer.save_steps=1", "dpo.data.batch_size=16",
    "dpo.mlflow.registered_model=toy-dpo",
]  # fmt: skip


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [json.dumps({"prompt": f"What is the capital of {place}?"}) for place in ("Peru", "Cuba", "Iran")]
    path.write_text("\n".join(rows))
    return [f"evaluate.data.eval={path}"]


def iterate(storage: Path, name: str, *overrides: str, status: int = 0) -> dict:
    named = [f"run.storage_path={storage}", f"run.name={name}"]
    assert main(["iterate", "jobs/demo/iterate.yaml", *TINY, *named, *overrides]) == status
    path = storage / name / "iterate.json"
    return json.loads(path.read_text()) if path.exists() else {}


def adapters(storage: Path, name: str) -> list[dict[str, str]]:
    """Digests of what each round has trained; the lineage names the versions, which differ."""
    left = []
    for number in (1, 2):
        result = json.loads((storage / name / f"round-{number}-dpo" / "result.json").read_text())
        digests = folder_digests(result["adapter"])
        left.append({file: digest for file, digest in digests.items() if file.endswith(".safetensors")})
    return left


@pytest.mark.slow
def test_rounds_follow_each_other_and_a_kill_changes_nothing(storage, in_root, prompts, tmp_path, capsys):
    registered(storage)
    whole = iterate(storage, "whole", *prompts)
    rounds = whole["rounds"]
    assert whole["ended"] and [one["passed"] for one in rounds] == [True, True]
    assert [one["policy"] for one in rounds] == ["models:/toy-policy/1", rounds[0]["version"]]
    assert whole["version"] == rounds[1]["version"] != rounds[0]["version"]
    used = []
    for number, one in enumerate(rounds, 1):
        folder = storage / "whole" / f"round-{number}-collect"
        lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        assert {line["version"] for line in lines} == {one["policy"]}
        assert {line["seed"] for line in lines} == {1 + 1000 * (number - 1)}
        assert len(lines) == one["rows"] > 0
        used.append({line["prompt"] for line in lines})
    assert not used[0] & used[1], "the rounds share prompts"
    # the lineage and the parent run
    mlflow = client(storage)
    version = mlflow.get_model_version("toy-dpo", rounds[1]["version"].rpartition("/")[2])
    assert json.loads(version.tags["rows_from"]) == {rounds[0]["version"]: rounds[1]["rows"]}
    assert json.loads(version.tags["parents"])["policy"] == rounds[0]["version"]
    assert mlflow.get_run(version.run_id).data.tags["mlflow.parentRunId"] == whole["mlflow_run_id"]
    parent = mlflow.get_run(whole["mlflow_run_id"])
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["score"] == pytest.approx(rounds[1]["score"])
    page = (storage / "whole" / "report.html").read_text()
    assert "<h3>Rounds</h3>" in page
    assert rounds[1]["version"].removeprefix("models:/").replace("/", " v") in page
    (storage / "whole" / "report.html").unlink()
    assert main(["report", str(storage / "whole")]) == 0
    assert (storage / "whole" / "report.html").read_text() == page
    # the same command again
    capsys.readouterr()
    assert iterate(storage, "whole", *prompts) == whole
    assert "has ended" in capsys.readouterr().out
    iterate(storage, "whole", *prompts, "dpo.trainer.beta=0.5", status=2)
    assert "is an iteration of other jobs" in capsys.readouterr().err
    # killed while the second round trains
    typed = [sys.executable, "-m", "pipeline", "iterate", "jobs/demo/iterate.yaml", *TINY, *prompts]
    typed += [f"run.storage_path={storage}", "run.name=cut"]
    folder = storage / "cut" / "round-2-dpo"
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(typed, cwd=ROOT, start_new_session=True, stdout=log, stderr=log) as process,
    ):
        while process.poll() is None and not list(folder.glob("checkpoint_*")):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    log = (tmp_path / "log").read_text()
    assert process.returncode == -signal.SIGKILL and not (folder / "result.json").exists(), log
    first = json.loads((storage / "cut" / "iterate.json").read_text())["rounds"]
    cut = iterate(storage, "cut", *prompts)
    assert cut["rounds"][:1] == first and len(cut["rounds"]) == 2
    assert adapters(storage, "cut") == adapters(storage, "whole")
    # one round more
    more = iterate(storage, "cut", *prompts, "iterate.rounds=3", "run.report=false")
    assert more["rounds"][:2] == cut["rounds"] and more["rounds"][2]["policy"] == cut["version"]


@pytest.mark.slow
@pytest.mark.parametrize("then", ["stop", "discard"])
def test_a_round_that_fails_its_gate(then, storage, in_root, prompts, capsys):
    registered(storage)
    settings = [f"iterate.on_failed_gate={then}", "evaluate.gate.eval_win_rate=>=2", "run.report=false"]
    summary = iterate(storage, then, *prompts, *settings)
    versions = [one["policy"] for one in summary["rounds"]]
    assert versions == ["models:/toy-policy/1"] * (1 if then == "stop" else 2)
    assert summary["version"] == "models:/toy-policy/1" and summary["ended"]
    assert ("ended after round 1, whose gate failed" in capsys.readouterr().out) == (then == "stop")
    assert iterate(storage, then, *prompts, *settings) == summary


def test_versions_are_those_that_the_aliases_meant_when_it_began(storage, in_root):
    registered(storage)
    given = [*TINY, f"run.storage_path={storage}"]
    plan = command._in_one_home(plans.read("jobs/demo/iterate.yaml", given))
    for job in plan.jobs.values():
        assert (job.run.storage_path, job.data.cache_dir) == (str(storage), f"{storage}/data")
        assert job.mlflow.tracking_uri == f"sqlite:///{storage}/mlflow.db"
    fixed, inputs = command.pinned(plan, {})
    policies = {fixed.policy, fixed.jobs["dpo"].policy, fixed.jobs["evaluate"].baseline}
    assert policies == {"models:/toy-policy/1"}
    assert fixed.jobs["collect"].reward == fixed.jobs["evaluate"].reward == "models:/toy-rm/1"
    # the alias has moved since
    known = {
        step: {name: one.replace("/1", "/7") for name, one in named.items()} for step, named in inputs.items()
    }
    again, same = command.pinned(plan, {"pinned": known, "plan": plan.essence()})
    assert same == known and again.policy == again.jobs["collect"].policy == "models:/toy-policy/7"


NO_PROMPT = '{"question": "What is the capital of Peru?"}\n'
# (overrides, whether it is said without Ray, what is said)
LATE = [
    (["evaluate.data.max_length=250"], True, r"evaluate\.data\.max_length: 250 is more than .*evaluate\.trainer\.response_length=12; use evaluate\.data\.max_length=244"),
    (["evaluate.judge=models:/toy-policy@champion"], True, r"evaluate\.judge: "),
    (["dpo.data.eval={rows}"], True, r"dpo\.data\.eval: .*question"),
    (["dpo.data.max_length=24"], False, r"dpo\.data\.max_length: collected rows may have \d+ tokens, more than 24: .* set dpo\.data\.max_length=\d+, or dpo"),
    (["collect.trainer.num_prompts=500", "collect.data.train={prompts}"], False,
     r"collect\.trainer\.num_prompts: found 500, but collect\.data\.train has 3 prompts"),
    (["evaluate.data.eval={long}", "evaluate.data.max_length=20"], False, r"evaluate\.data\.eval: .*long\.jsonl:1"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "without_ray", "says"), LATE, ids=[case[0][0] for case in LATE])
def test_what_the_last_step_would_refuse_is_refused_before_the_first(
    overrides, without_ray, says, storage, in_root, prompts, tmp_path, monkeypatch, capsys
):
    """... and before run.fresh=true deletes what is there."""
    registered(storage)
    for name, text in (("rows", NO_PROMPT), ("long", json.dumps({"prompt": "Where is it? " * 40}))):
        (tmp_path / f"{name}.jsonl").write_text(text)
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("rows", "long", "prompts")}
    given = [re.sub(r"{(\w+)}", lambda found: files[found[1]], one) for one in overrides]
    kept = storage / "refused-late" / "iterate.json"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("{}")
    begun: list[str] = []
    monkeypatch.setattr(command, "through", lambda *_: begun.append("a round"))
    if without_ray:
        monkeypatch.setattr(command, "session", lambda _: begun.append("Ray"))
    iterate(storage, "refused-late", *prompts, "run.fresh=true", *given, status=2)
    error = capsys.readouterr().err
    assert re.search(rf"^error: {says}", error, re.DOTALL), error
    assert not begun and kept.exists()
