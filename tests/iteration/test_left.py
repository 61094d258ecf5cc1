"""What an earlier command left under the name of an iteration: continued, refused, or kept, before Ray or MLflow is asked."""

import json
import re

import pytest

from pipeline.__main__ import main
from pipeline.commands import iterate as command
from pipeline.errors import InputError
from pipeline.iteration import plan as plans

DEMO = "jobs/demo/iterate.yaml"
FIRST = "models:/rlhf-sft/1"
pytestmark = pytest.mark.usefixtures("in_root")


def left_by(storage, *overrides: str, **changes) -> dict:
    """iterate.json of an iteration named `it`, whose only round has ended."""
    plan = plans.read(DEMO, [f"run.storage_path={storage}", "run.name=it", *overrides])
    one = {
        "round": 1, "policy": FIRST, "prompts": 280, "rows": 270, "score": 0.1, "score_best": 2.0, "reward": 2.0, "judge": None,
        "win_rate": 0.75, "judge_win_rate": None, "reward_before": 0.5, "judge_before": None, "version": "models:/rlhf-dpo/1",
        "passed": True, "gate": "passed", "seconds": 4.5, "folders": ["c", "d", "e"],
    }  # fmt: skip
    return {
        "stage": "iterate", "name": "it", "plan": plan.essence(), "pinned": {}, "digests": {}, "rounds": [one], "goes_on": True,
        "ended": True, "version": "models:/rlhf-dpo/1",
    } | changes  # fmt: skip


def write(storage, left) -> None:
    (storage / "it").mkdir(exist_ok=True)
    (storage / "it" / "iterate.json").write_text(left if isinstance(left, str) else json.dumps(left))


def iterate(storage, *overrides: str) -> int:
    return main(
        ["iterate", DEMO, f"run.storage_path={storage}", "run.name=it", "iterate.rounds=1", *overrides]
    )


@pytest.mark.parametrize("fresh", ["true", "false"])
def test_a_name_is_that_of_a_run_or_of_an_iteration_or_of_a_sweep(fresh, tmp_path, capsys):
    for file, owner in (("iterate.json", "an iteration"), ("job.json", "a run"), ("sweep.json", "a sweep")):
        folder = tmp_path / file.partition(".")[0] / "x"
        folder.mkdir(parents=True)
        (folder / file).write_text("{}")
        name = [f"run.storage_path={folder.parent}", "run.name=x", f"run.fresh={fresh}"]
        commands = {
            "a run": ["collect", "jobs/demo/collect.yaml", *name],
            "an iteration": ["iterate", DEMO, *name],
            "a sweep": ["sweep", "jobs/demo/rm.yaml", "lora.r=8,16", *name],
        }
        for kind, typed in commands.items():
            if kind == owner:
                continue
            assert main(typed) == 2
            said = rf"run\.name: 'x' is the name of {owner} \(.*/x\); choose another name, for example run\.name={typed[0]}-x"
            assert re.search(said, error := capsys.readouterr().err), error
            assert [path.name for path in folder.iterdir()] == [file]


def test_what_no_finished_step_has_used_may_be_edited(tmp_path, capsys):
    """evaluate failed in the first round: its job is edited, and collect and dpo are not repeated."""
    left = left_by(tmp_path, ended=False, rounds=[])
    write(tmp_path, left)

    def recorded(*overrides: str) -> dict:
        return command.recorded(plans.read(DEMO, [f"run.storage_path={tmp_path}", "run.name=it", *overrides]))

    edited = ["evaluate.data.max_length=200", "evaluate.judge=null"]
    for step in ("collect", "dpo"):
        (tmp_path / "it" / f"round-1-{step}").mkdir()
        (tmp_path / "it" / f"round-1-{step}" / "result.json").write_text("{}")
    assert recorded(*edited) == left
    for changed in ("dpo.trainer.beta=0.5", "iterate.baseline=first"):
        says = f"'it' is an iteration of other jobs: {changed.partition('=')[0]} changed since it began"
        with pytest.raises(InputError, match=says):
            recorded(*edited, changed)
    (tmp_path / "it" / "round-1-evaluate").mkdir()
    assert recorded(*edited) == left, "it has not ended"
    (tmp_path / "it" / "round-1-evaluate" / "result.json").write_text("{}")
    with pytest.raises(InputError, match=r"jobs: evaluate\.data\.max_length, evaluate\.judge changed"):
        recorded(*edited)
    assert recorded() == left


def test_an_edited_input_is_pinned_again(tmp_path, monkeypatch):
    monkeypatch.setattr(
        command, "pin_inputs", lambda job, known: (job, {"reward.0": "models:/rlhf-rm/3"} | known)
    )
    evaluate = {"policy": FIRST, "baseline": FIRST, "judge": "models:/old/1", "reward.0": "models:/rlhf-rm/3"}
    left = left_by(tmp_path, "evaluate.judge=models:/old@champion", pinned={"evaluate": evaluate})

    def known(judge: str) -> dict:
        given = [f"run.storage_path={tmp_path}", f"evaluate.judge={judge}"]
        return command.pinned(plans.read(DEMO, given), left)[1]["evaluate"]

    assert known("models:/old@champion") == evaluate
    assert known("models:/new@champion") == {k: v for k, v in evaluate.items() if k != "judge"}


def test_an_iteration_that_has_ended_says_so_and_draws_its_report_if_it_was_not_drawn(
    tmp_path, monkeypatch, capsys
):
    drawn = []
    monkeypatch.setattr(
        command.report, "of_several", lambda runs, folder, table: drawn.append((folder, runs))
    )
    write(tmp_path, left_by(tmp_path))
    assert iterate(tmp_path, "run.report=false") == 0 and not drawn
    assert re.search(r"iteration it has ended.*models:/rlhf-dpo/1", capsys.readouterr().out, re.DOTALL)
    assert iterate(tmp_path) == 0
    assert drawn == [(f"{tmp_path}/it", ["d", "e"])]
    (tmp_path / "it" / "report.html").write_text("x")
    assert iterate(tmp_path) == 0 and len(drawn) == 1
