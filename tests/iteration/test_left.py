"""What an earlier command left under the name of an iteration: continued, refused, or kept, before Ray or MLflow is asked."""

import json
import re

import pytest

from pipeline.__main__ import main
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
        for kind, command in commands.items():
            if kind == owner:
                continue
            assert main(command) == 2
            said = rf"run\.name: 'x' is the name of {owner} \(.*/x\); choose another, for example run\.name={command[0]}-x"
            assert re.search(said, error := capsys.readouterr().err), error
            assert [path.name for path in folder.iterdir()] == [file]


def test_an_iteration_that_has_ended_says_so(tmp_path, capsys):
    write(tmp_path, left_by(tmp_path))
    assert iterate(tmp_path, "run.report=false") == 0
    assert re.search(r"iteration it has ended.*models:/rlhf-dpo/1", capsys.readouterr().out, re.DOTALL)


@pytest.mark.parametrize(
    "damage", ["goes_on", "version", "plan", "[{}]", "[3]", "[[]]", "{", "[]", "a figure"]
)
def test_a_damaged_iterate_json_is_named(damage, tmp_path, capsys):
    left = left_by(tmp_path)
    if damage in left:
        del left[damage]
    elif damage.startswith("[") and damage != "[]":
        left["rounds"] = json.loads(damage)
    elif damage == "a figure":
        left["rounds"][0]["reward"] = "high"
    else:
        left = damage
    write(tmp_path, left)
    assert iterate(tmp_path) == 2
    error = capsys.readouterr().err
    assert re.search(r"^error: run\.name: .*it/iterate\.json cannot be read \(.*run\.fresh=true", error), (
        error
    )
