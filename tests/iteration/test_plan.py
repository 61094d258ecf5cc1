"""The jobs of an iteration: read from one file, checked before anything starts, made into rounds, and continued."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.commands import iterate
from pipeline.config import load_job
from pipeline.errors import InputError
from pipeline.iteration import plan as plans
from pipeline.iteration import table

DEMO = "jobs/demo/iterate.yaml"
FIRST, SECOND = "models:/rlhf-sft/1", "models:/rlhf-dpo/2"
pytestmark = pytest.mark.usefixtures("in_root")


def read(*overrides: str, job: str = DEMO) -> plans.Plan:
    return replace(plans.read(job, list(overrides)), policy=FIRST)


@pytest.mark.parametrize("profile", ["demo", "own", "llama3-8b", "llama3-8b-qlora", "llama3-70b-qlora"])
def test_the_shipped_jobs_are_those_of_their_stages(profile):
    path = f"jobs/{profile}/iterate.yaml"
    header = Path(path).read_text()
    assert f"python -m pipeline iterate {path}" in header
    plan = plans.read(path, [])
    assert list(plan.jobs) == ["collect", "dpo", "evaluate"]
    alone = {step: load_job(f"jobs/{profile}/{step}.yaml", [], step) for step in plan.jobs}
    for step, job in plan.jobs.items():
        assert (job.model, job.scaling) == (alone[step].model, alone[step].scaling)
    assert plan.policy == alone["dpo"].policy == alone["collect"].policy
    assert plan.jobs["dpo"].mlflow.alias != plan.jobs["evaluate"].mlflow.alias  # only what was tried moves it


def test_the_same_command_is_the_same_iteration():
    def name(*overrides):
        return read(*overrides).run.name

    assert name() == name("iterate.rounds=9") == name("collect.scaling.num_workers=2")
    assert re.fullmatch(r"iterate-dpo-[0-9a-f]{8}", name())
    for other in ("dpo.trainer.beta=0.3", "iterate.start=first", "policy=models:/rlhf-sft/2"):
        assert name(other) != name(), other
    assert name("run.name=mine") == "mine"


def test_a_round_goes_on_from_the_newest_policy(tmp_path):
    plan = read(f"run.storage_path={tmp_path}", "run.name=it", "collect.trainer.num_prompts=50")
    collect = plans.job_of_round(plan, 2, "collect", SECOND)
    train = plans.job_of_round(plan, 2, "dpo", SECOND)
    evaluate = plans.job_of_round(plan, 2, "evaluate", SECOND, "models:/rlhf-dpo/3")
    assert [job.folder for job in (collect, train, evaluate)] == [
        f"{tmp_path}/it/round-2-{step}" for step in ("collect", "dpo", "evaluate")
    ]
    assert (collect.policy, train.policy) == (SECOND, SECOND)
    assert (evaluate.policy, evaluate.baseline) == ("models:/rlhf-dpo/3", SECOND)
    assert train.data.train == f"{tmp_path}/it/round-2-collect/rows.jsonl"
    assert train.data.eval == "jobs/demo/data/preferences_eval.jsonl"
    assert collect.args.skip_prompts == 50
    assert plans.job_of_round(plan, 1, "collect", FIRST).args.skip_prompts == 0
    for step in ("collect", "dpo"):
        jobs = [plans.job_of_round(plan, number, step, FIRST) for number in (1, 2, 3)]
        assert [job.trainer["seed"] for job in jobs] == [1, 1001, 2001]
    assert evaluate.trainer["seed"] == plans.job_of_round(plan, 1, "evaluate", FIRST, SECOND).trainer["seed"]


def test_or_from_the_first_one():
    plan = read("iterate.start=first", "iterate.baseline=first")
    collect, train = (plans.job_of_round(plan, 2, step, SECOND) for step in ("collect", "dpo"))
    assert (collect.policy, collect.args.skip_prompts) == (SECOND, 0)  # all prompts in all rounds
    assert (train.policy, train.reference) == (FIRST, None)
    assert plans.job_of_round(plan, 2, "evaluate", SECOND, "models:/rlhf-dpo/3").baseline == FIRST
    held = plans.job_of_round(read("iterate.reference=first"), 2, "dpo", SECOND)
    assert (held.policy, held.reference) == (SECOND, FIRST)


@pytest.mark.parametrize("stage", ["kto", "ppo", "sft"])
def test_other_stages_learn_too(stage):
    select = ["collect.trainer.select=best", "iterate.start=null"] if stage == "sft" else []
    plan = read("dpo=null", f"{stage}={{extends: {stage}.yaml}}", *select)
    job = plans.job_of_round(plan, 2, stage, SECOND)
    assert job.data.train.endswith("/round-2-collect/rows.jsonl")
    assert job.policy == (None if stage == "sft" else SECOND)


def row(number: int, passed: bool = True) -> dict:
    common = {"folder": f"f{number}", "seconds": 1.5, "inputs": {"policy": FIRST}, "gate": "none set"}
    collected = {"rows": 280, "counts": {"rows": 270}, "metrics": {"score": 0.1, "score_best": 2.0}}
    trained = {"registered_model": "rlhf-dpo", "version": str(number)}
    metrics = {"eval_reward": 1.0 + number, "before_reward": 0.5, "eval_win_rate": 0.75}
    evaluated = {"metrics": metrics, "gate": "passed" if passed else "failed: eval_reward = 1, required >= 2"}
    return table.row(number, common | collected, common | trained, common | evaluated)


def test_the_table_has_a_line_for_each_round_and_one_for_the_start():
    _, *lines = table.cells([row(1), row(2, passed=False)])
    assert lines[0] == ["0", "", "", "", "", "0.500", "", "", "rlhf-sft v1", "", ""]
    assert "|".join(lines[1]) == "1|280|270|0.100|2.000|2.000||0.750|rlhf-dpo v1|passed|4"
    assert lines[2][-2] == "failed"


def test_a_round_that_fails_its_gate_ends_the_iteration_or_is_left_out():
    rounds = [row(1), row(2, passed=False)]
    assert iterate.newest(read(), []) == FIRST
    assert iterate.newest(read(), rounds) == "models:/rlhf-dpo/1"
    assert iterate.goes_on(read(), rounds[0]) and not iterate.goes_on(read(), rounds[1])
    assert iterate.goes_on(read("iterate.on_failed_gate=discard"), rounds[1])


KTO, SFT = (["dpo=null", f"{stage}={{extends: {stage}.yaml}}"] for stage in ("kto", "sft"))
TAKEN = "but an iteration takes it from"
WRONG = [
    (["stage=dpo"], r"stage: found 'dpo', expected `stage: iterate`, as in jobs/demo/iterate\.yaml"),
    (["dpo.trainer.bta=1"], r"command line: dpo\.trainer\.bta: unknown key; did you mean dpo\.trainer\.beta"),
    (["evaluate.gate.eval_x=>=1"], r"evaluate\.gate\.eval_x: `evaluate` has no such metric"),
    (["iterate.round=3"], r"iterate\.round: unknown key; did you mean rounds\?"),
    (["iterate.reference=first", "dpo.trainer.precompute_ref_log_probs=true"], r"dpo\.trainer\.precompute_ref_log_probs: given together with"),
    ([*KTO, "iterate.reference=first"], r"iterate\.reference: found first, but `kto` stays close to"),
    (["dpo=null"], r"stage: found none; expected one section of sft, dpo, kto, ppo"),
    (["kto={extends: kto.yaml}"], r"found dpo and kto; expected one section of sft, dpo, kto, ppo"),
    (["collect=null"], r"collect: missing, expected a job: collect: {extends: collect\.yaml}"),
    (["policy=null"], r"policy: missing; the first round collects from it"),
    (["data.train=x"], r"data: unknown section, expected one of stage, .*; keys of a step are dpo\.data\.max_length"),
    (["collect.data.train=/nowhere/x.jsonl"], r"^error: collect\.data\.train: .*/nowhere/x\.jsonl"),
    (["evaluate.scaling.num_workers=999"], r"^error: evaluate\.scaling\.num_workers: "),
    (["run.max_failures=3"], r"run\.max_failures: unknown key; expected one of name, fresh, report, storage_path; each job has the others"),
    (["run.name=artifacts", "run.fresh=true"], r"run\.name: found 'artifacts', .*: it names a folder in run\.storage_path, which has artifacts"),
    (["dpo.run.name=x"], rf"command line: dpo\.run\.name: found 'x', {TAKEN} run\.name; remove the key"),
    (["dpo.reference=models:/a/1"], rf"dpo\.reference: found 'models:/a/1', {TAKEN} iterate\.reference"),
    (["collect.policy=base"], rf"collect\.policy: found 'base', {TAKEN} policy and the rounds"),
    (["dpo.data.train=x.jsonl"], rf"dpo\.data\.train: found 'x\.jsonl', {TAKEN} the rows that it collects"),
    (["collect.trainer.select=best"], r"collect\.trainer\.select: found best; set best_worst or pairs, which `dpo` learns from"),
    (SFT, r"iterate\.start: `sft` starts from the base in every round"),
    ([*SFT, "iterate.start=null"], r"collect\.trainer\.select: found best_worst; set best, which `sft` learns from"),
    (["dpo.mlflow.registered_model=null"], r"dpo\.mlflow\.registered_model: missing; a round continues the version"),
    (["dpo.data.columns={prompt: question}"], r"dpo\.data\.columns: collected rows have the columns that training reads"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "says"), WRONG, ids=[" ".join(case[0]) for case in WRONG])
def test_wrong_input_is_answered_before_anything_starts(overrides, says, tmp_path, capsys):
    assert main(["iterate", DEMO, f"run.storage_path={tmp_path}", *overrides]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and re.search(says, errors), errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "message", "says"),
    [
        ("data.max_length", "set data.max_length=244, or trainer.response_length",
         "evaluate.data.max_length: set evaluate.data.max_length=244, or evaluate.trainer.response_length"),
        ("data.eval.0.columns", "data.jsonl has none of /x/data.eval", "evaluate.data.eval.0.columns: data.jsonl has none of /x/data.eval"),
        ("reward", "set reward=null or judge=null", "evaluate.reward: set evaluate.reward=null or evaluate.judge=null"),
        ("run.name", "set policy=base or mlflow.tracking_uri", "run.name: set policy=base or mlflow.tracking_uri"),
        ("evaluate.data.eval", "set evaluate.data.eval=x", "evaluate.data.eval: set evaluate.data.eval=x"),
    ],
)  # fmt: skip
def test_an_error_of_a_step_names_keys_that_can_be_typed(key, message, says):
    with pytest.raises(InputError) as caught, plans.of_step("evaluate"):
        raise InputError(message, key)
    assert str(caught.value) == says


# ----------------------------------------------------------------- what an earlier command left under a name


def left_in(storage, *overrides: str, **changes) -> dict:
    """Writes and returns iterate.json of an iteration named `it`, whose only round has ended."""
    plan = plans.read(DEMO, [f"run.storage_path={storage}", "run.name=it", *overrides])
    left = {"plan": plan.essence(), "pinned": {}, "rounds": [row(1)], "goes_on": True, "ended": True}
    left |= {"version": "models:/rlhf-dpo/1"} | changes
    (storage / "it").mkdir()
    (storage / "it/iterate.json").write_text(json.dumps(left))
    return left


@pytest.mark.parametrize("fresh", ["true", "false"])
def test_a_name_is_that_of_a_run_or_of_an_iteration_or_of_a_sweep(fresh, tmp_path, capsys):
    commands = {
        "a run": ("job.json", ["collect", "jobs/demo/collect.yaml"]),
        "an iteration": ("iterate.json", ["iterate", DEMO]),
        "a sweep": ("sweep.json", ["sweep", "jobs/demo/rm.yaml", "lora.r=8,16"]),
    }
    for owner, (file, _) in commands.items():
        folder = tmp_path / file / "x"
        folder.mkdir(parents=True)
        (folder / file).write_text("{}")
        for typed in (typed for kind, (_, typed) in commands.items() if kind != owner):
            name = [f"run.storage_path={folder.parent}", "run.name=x", f"run.fresh={fresh}"]
            assert main([*typed, *name]) == 2
            said = rf"run\.name: 'x' is the name of {owner} \(.*/x\); choose another name"
            assert re.search(said, error := capsys.readouterr().err), error
            assert [path.name for path in folder.iterdir()] == [file]


def test_what_no_finished_step_has_used_may_be_edited(tmp_path):
    """evaluate failed in the first round: its job is edited, and collect and dpo are not repeated."""
    left = left_in(tmp_path, ended=False, rounds=[])

    def recorded(*overrides: str) -> dict:
        return iterate.recorded(plans.read(DEMO, [f"run.storage_path={tmp_path}", "run.name=it", *overrides]))

    def finish(*steps: str) -> None:
        for step in steps:
            (tmp_path / f"it/round-1-{step}").mkdir()
            (tmp_path / f"it/round-1-{step}/result.json").write_text("{}")

    edited = ["evaluate.data.max_length=200", "evaluate.judge=null"]
    finish("collect", "dpo")
    assert recorded(*edited) == left
    for changed in ("dpo.trainer.beta=0.5", "iterate.baseline=first"):
        says = f"'it' is an iteration of other jobs: {changed.partition('=')[0]} changed since it began"
        with pytest.raises(InputError, match=says):
            recorded(*edited, changed)
    finish("evaluate")
    with pytest.raises(InputError, match=r"jobs: evaluate\.data\.max_length, evaluate\.judge changed"):
        recorded(*edited)
    assert recorded() == left


def test_an_edited_input_is_pinned_again(tmp_path, monkeypatch):
    monkeypatch.setattr(iterate, "pin_inputs", lambda job, known: (job, {"reward.0": "models:/rm/3"} | known))
    evaluate = {"policy": FIRST, "baseline": FIRST, "judge": "models:/old/1", "reward.0": "models:/rm/3"}
    left = left_in(tmp_path, "evaluate.judge=models:/old@champion", pinned={"evaluate": evaluate})
    for judge, kept in (("old", evaluate), ("new", {k: v for k, v in evaluate.items() if k != "judge"})):
        plan = plans.read(DEMO, [f"run.storage_path={tmp_path}", f"evaluate.judge=models:/{judge}@champion"])
        assert iterate.pinned(plan, left)[1]["evaluate"] == kept


def test_an_iteration_that_has_ended_draws_its_report_if_it_was_not_drawn(tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(iterate.report, "of_several", lambda runs, folder, _: drawn.append((folder, runs)))
    left_in(tmp_path)
    again = ["iterate", DEMO, f"run.storage_path={tmp_path}", "run.name=it", "iterate.rounds=1"]
    assert main([*again, "run.report=false"]) == 0 and not drawn
    assert re.search(r"iteration it has ended.*models:/rlhf-dpo/1", capsys.readouterr().out, re.DOTALL)
    assert main(again) == 0
    assert drawn == [(f"{tmp_path}/it", ["f1", "f1"])]
    (tmp_path / "it/report.html").write_text("x")
    assert main(again) == 0 and len(drawn) == 1
