"""Tests that a run registers exactly the adapter of its best step, and stops early if the eval metric gets worse."""

import math
import re

import pytest
import torch
from resumed import assert_equal, interrupted
from running import ROOT, client, stage
from safetensors.torch import load_file

from pipeline import registry
from pipeline.errors import Failure, SelfCheckFailed
from pipeline.job import load_job
from pipeline.run.best import WEIGHTS, Best, describe_end, make_tracker
from pipeline.settle.identity import gate_of

# With few pairs, many epochs and ten times the usual learning rate, training soon overfits.
OVERFIT = [
    "data.batch_size=8", "trainer.per_device_train_batch_size=8", "trainer.num_train_epochs=12", "trainer.learning_rate=2e-2",
    "trainer.lr_scheduler_type=constant", "trainer.logging_steps=5", "run.load_best_model_at_end=true", "run.early_stopping_patience=3",
]  # fmt: skip


def weights():
    return {"adapter": torch.nn.Parameter(torch.zeros(2))}


def compared(best, *figures):
    """Returns `best` after one evaluation per value of `figures`. At each evaluation, all weights equal the step number."""
    for step, value in enumerate(figures, best.stale + (best.step or 0) + 1):
        best.parameters["adapter"].data.fill_(step)
        best.compare({best.metric: value}, step)
    return best


@pytest.mark.parametrize(
    ("greater", "figures", "step"),
    [
        (False, [3.0, 1.0, 2.0], 2),
        (True, [3.0, 1.0, 2.0], 1),
        (False, [1.0, 1.0], 1),
        (False, [math.nan, 2.0, math.nan], 2),
    ],
)
def test_the_best_step_is_the_first_with_the_best_metric(greater, figures, step):
    best = compared(Best("eval_x", greater, None, weights()), *figures)
    assert best.restore() == step and not best.exhausted
    assert best.parameters["adapter"].tolist() == [step, step]
    kept = describe_end(best, best.restore(), 3, 3)["kept"]
    assert kept == {"step": step, "by": "eval_x", "value": figures[step - 1]}


def test_a_metric_that_is_always_nan_keeps_the_last_weights():
    best = compared(Best("eval_x", False, 2, weights()), math.nan, math.nan)
    assert best.exhausted and best.restore() is None and best.parameters["adapter"].tolist() == [2.0, 2.0]
    end = describe_end(best, None, 2, 9)
    assert end["kept"] == {"step": 2, "by": None}
    assert end["ended"] == {"step": 2, "of": 9, "early": "eval_x was no number in 2 evaluations"}
    with pytest.raises(Failure, match="the evaluation has no metric eval_x, but eval_loss"):
        best.compare({"eval_loss": 1.0, "epoch": 1.0}, 1)


@pytest.mark.parametrize(
    ("verb", "more", "expected"),
    [
        ("rm", ["run.load_best_model_at_end=false"], None),
        ("sft", ["run.load_best_model_at_end=true"], ("eval_loss", False)),
        ("ppo", ["run.load_best_model_at_end=true", "judge=null"], ("eval_reward", True)),
        ("ppo", ["run.early_stopping_patience=1", "run.metric_for_best_model=eval_kl"], ("eval_kl", False)),
    ],
)  # fmt: skip
def test_the_default_metric_depends_on_the_stage(verb, more, expected, in_root):
    evaluates = "trainer.eval_steps=1" if verb == "ppo" else "trainer.eval_strategy=epoch"
    job = load_job(f"jobs/demo/{verb}.yaml", [evaluates, *more], verb)
    best = make_tracker(job.run, gate_of(job), {})
    assert (best and (best.metric, best.greater_is_better)) == expected


@pytest.fixture
def few(tmp_path_factory):
    """Returns settings that overfit on 24 pairs of the demo, with 40 eval pairs."""
    folder = tmp_path_factory.mktemp("few")
    for name, split, count in (("train", "preferences", 24), ("eval", "preferences_eval", 40)):
        lines = (ROOT / f"jobs/demo/data/{split}.jsonl").read_text().splitlines(True)[:count]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return [*OVERFIT, *(f"data.{name}={folder}/{name}.jsonl" for name in ("train", "eval"))]


def test_an_overfit_ends_early_and_its_best_step_is_registered(storage, few):
    overfit = stage("rm", storage, "overfit", *few, "trainer.save_strategy=steps", "trainer.save_steps=2")
    curves = registry.read_curves(overfit["tracking_uri"], overfit["mlflow_run_id"])
    losses, accuracies = (dict(curves[name]) for name in ("eval_loss", "eval_accuracy"))
    best = min(list(losses)[1:], key=losses.get)  # without the first loss, which was measured at step 0
    kept, ended = overfit["kept"], overfit["ended"]
    assert kept == {"step": best, "by": "eval_loss", "value": losses[best]}
    # Patience 3: three epochs of three steps after the best step.
    assert ended["step"] == max(losses) == best + 9 < ended["of"] == 36
    assert ended["early"] == "eval_loss has not improved for 3 evaluations"
    figures = overfit["metrics"]
    assert figures["eval_loss"] == losses[best] < losses[best + 9]
    assert figures["eval_accuracy"] == pytest.approx(accuracies[best])
    version = client(storage).get_model_version("rlhf-rm", overfit["version"])
    assert version.tags["step"] == str(kept["step"])
    assert float(version.tags["eval_loss"]) == pytest.approx(losses[best], rel=1e-5)
    tags = client(storage).get_run(overfit["mlflow_run_id"]).data.tags
    assert tags["ended"].startswith(f"kept step {kept['step']} of {ended['step']}: the best eval_loss, 0.")
    # run.num_to_keep is 2, so the checkpoint of the best step has been deleted.
    registered = load_file(f"{overfit['adapter']}/adapter_model.safetensors")
    newest = max((storage / "overfit").glob("checkpoint_*[0-9]"))
    kept_there = {k.replace(".default", "").replace("score.modules_to_save", "score"): v
                  for k, v in load_file(newest / WEIGHTS).items()}  # fmt: skip
    assert registered.keys() == kept_there.keys()
    assert all(torch.equal(registered[key], kept_there[key]) for key in registered)
    last = load_file(newest / "adapter_model.safetensors")
    assert any(not torch.equal(registered[key], last[key]) for key in registered)


PPO = [
    "trainer.total_episodes=80", "trainer.batch_size=8", "trainer.response_length=12", "trainer.save_steps=2",
    "trainer.eval_steps=1", "policy=base", "reward=python:bad_rewards:length", "judge=null", "mlflow.registered_model=null",
    "run.load_best_model_at_end=true", "run.metric_for_best_model=eval_length", "run.greater_is_better=false", "run.early_stopping_patience=2",
]  # fmt: skip


def test_ppo_keeps_its_best_update_and_stops(storage, monkeypatch):
    """An interrupted run ends like an uninterrupted one. The reward is the completion's length, so the length grows."""
    few = ["data.train=jobs/demo/data/prompts_eval.jsonl"]
    expected = stage("ppo", storage, "best-ppo", *PPO, *few)
    curves = registry.read_curves(expected["tracking_uri"], expected["mlflow_run_id"])
    lengths = [value for _, value in curves["eval_length"]]
    kept, ended = expected["kept"], expected["ended"]
    best = min(range(len(lengths)), key=lengths.__getitem__)
    assert kept == {"step": best + 1, "by": "eval_length", "value": lengths[best]}
    assert ended["step"] == best + 3 == len(lengths) < ended["of"] == 10
    assert ended["early"] == "eval_length has not improved for 2 evaluations"
    assert expected["metrics"]["eval_length"] == lengths[best] < lengths[-1]
    assert expected["metrics"]["episode"] == 8 * kept["step"]
    with monkeypatch.context() as patch:
        interrupted(patch, "ppo", kept["step"] + 1)
        stage("ppo", storage, "best-ppo-cut", *PPO, *few, status=1)
    result = stage("ppo", storage, "best-ppo-cut", *PPO, *few)
    assert_equal(storage, expected, result)


def test_ppo_stops_at_a_condition_and_registers_its_policy(storage):
    """The KL grows from 0. At the first evaluation with a KL above the limit, the run registers its policy and ends."""
    limits = [
        "run.load_best_model_at_end=false",
        "run.early_stopping_patience=null",
        "run.stop_if.eval_kl='> 1e-9'",
    ]
    few = ["data.train=jobs/demo/data/prompts_eval.jsonl", "mlflow.registered_model=stopped"]
    result = stage("ppo", storage, "stop-ppo", *PPO, *few, *limits)
    assert result["ended"]["step"] == result["kept"]["step"] == 1 < result["ended"]["of"]
    assert re.fullmatch(r"eval_kl is \S+ \(run\.stop_if: > 1e-9\)", result["ended"]["early"])
    assert result["version"] == "1"


def test_a_sweep_gets_every_evaluation_and_can_stop_a_trial(tmp_path):
    told = []

    def report(figure, step):
        told.append((figure, step))
        return "not among the best" if step == 2 else None

    best = Best("eval_x", False, None, weights(), report)
    assert not compared(best, 1.0).exhausted
    assert compared(best, 0.5).exhausted and told == [(1.0, 1), (0.5, 2)]
    assert describe_end(best, best.restore(), 2, 9)["ended"] == {
        "step": 2,
        "of": 9,
        "early": "not among the best",
    }
    best.save(str(tmp_path))
    again = Best("eval_x", False, None, weights(), report)
    again.load(str(tmp_path))
    assert again.exhausted and len(told) == 2  # a trial that has been stopped reports no more evaluations
    with pytest.raises(SelfCheckFailed, match="eval_x is nan at step 3"):
        compared(best, math.nan)
