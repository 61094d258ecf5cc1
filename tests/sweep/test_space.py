"""Tests that a sweep makes a job for each combination of values, and reports an error in any job before a trial starts."""

import pytest

from pipeline.__main__ import main
from pipeline.sweep.space import read_sweep, split_values

pytestmark = pytest.mark.usefixtures("in_root")
RM, DPO, KTO = "jobs/demo/rm.yaml", "jobs/demo/dpo.yaml", "jobs/demo/kto.yaml"


def test_a_list_is_split_at_commas_outside_of_brackets_and_quotes():
    text = "1e-4,[q_proj,v_proj],{a: 1, b: [2,3]},'a,b'"
    assert split_values(text) == ["1e-4", "[q_proj,v_proj]", "{a: 1, b: [2,3]}", "'a,b'"]
    for text in (">= 0.1", "[q_proj,v_proj]", "python:m:f", "a,,b", "[a,b"):
        assert split_values(text) == [text]


def test_every_combination_is_a_trial_with_its_own_job():
    sweep = read_sweep(
        RM, ["trainer.learning_rate=1e-4,3e-4", "lora.r=8,16", "trainer.seed=2", "run.name=mine"]
    )
    assert [trial.name for trial in sweep.trials] == [
        f"learning_rate-{rate}_r-{r}" for rate in ("1e-4", "3e-4") for r in (8, 16)
    ]
    last = sweep.trials[-1].job
    assert (last.trainer["learning_rate"], last.lora["r"], last.trainer["seed"]) == (3e-4, 16, 2)
    assert last.folder == f"{sweep.folder}/learning_rate-3e-4_r-16" and sweep.folder.endswith("runs/mine")
    assert last.mlflow.registered_model is None and sweep.job.mlflow.registered_model == "rlhf-rm"
    assert {trial.job.data.cache_dir for trial in sweep.trials} == {f"{sweep.job.run.storage_path}/data"}


def test_the_default_name_depends_on_the_values_and_not_on_where_trials_run():
    def name(*arguments):
        return read_sweep(RM, list(arguments)).job.run.name

    first = name("trainer.learning_rate=1e-4,3e-4")
    assert first.startswith("sweep-rm-")
    assert name("trainer.learning_rate=1e-4,3e-4", "run.max_failures=7", "scaling.num_workers=2") == first
    assert name("trainer.learning_rate=1e-4,2e-4") != first
    assert name("trainer.learning_rate=1e-4,3e-4", "trainer.seed=9") != first


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        (RM, [], "no key varies"),
        (RM, ["trainer.learning_rat=1e-4,3e-4"], "did you mean trainer.learning_rate"),
        (RM, ["trainer.learning_rate=loguniform(1e-5,1e-3)"], "trainer.learning_rate: found"),
        (RM, ["lora.r=8,16", "sweep.max_trial=2"], "sweep.max_trial: unknown key; did you mean max_trials?"),
        (RM, ["lora.r=8,16,32", "sweep.max_trials=2"], "3 trials, but at most 2"),
        (RM, ["run.name=a,b"], "run.name: a sweep cannot vary this key"),
        (RM, ["trainer.eval_steps=1,2"], "trainer.eval_steps: a sweep cannot vary this key"),
        (RM, ["lora.r=8,16", "data.eval=null", "trainer.eval_strategy=no", "gate={}"], "there are none"),
        (RM, ["lora.r=8,16", "run.metric_for_best_model=eval_acuracy"], "did you mean eval_accuracy"),
        (RM, ["trainer.center_rewards_coefficient=0,0.01"], "run.metric_for_best_model=eval_accuracy"),
        (DPO, ["trainer.beta=0.1,0.3"], "run.metric_for_best_model=eval_rewards/accuracies"),
        (KTO, ["trainer.beta=0.1,0.3", "run.metric_for_best_model=eval_rewards/margins"], "because trainer.beta changes its scale"),
        ("jobs/demo/evaluate.yaml", ["trainer.seed=1,2"], "`evaluate` does not train"),
    ],
)  # fmt: skip
def test_an_error_is_reported_before_anything_starts(path, arguments, message, capsys, tmp_path):
    assert main(["sweep", path, *arguments, f"run.storage_path={tmp_path}"]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_beta_can_be_varied_with_a_metric_that_does_not_depend_on_it():
    more = ["run.metric_for_best_model=eval_rewards/accuracies", "data.batch_size=16,32"]
    sweep = read_sweep(DPO, ["trainer.beta=0.1,0.3", *more])
    assert (sweep.metric, sweep.greater, len(sweep.trials)) == ("eval_rewards/accuracies", True, 4)
