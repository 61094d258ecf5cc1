"""Tests that each advantage estimator agrees with its definition, and that a job can have its own estimator."""

import sys
import textwrap

import pytest
import torch
import toy_ppo as toy

from pipeline.checks import CheckResult
from pipeline.errors import Failure, InputError
from pipeline.job import load_job
from pipeline.ppo import estimators
from pipeline.ppo.config import PPOConfig


@pytest.mark.parametrize("name", estimators.ESTIMATORS)
@pytest.mark.parametrize("more", [{}, dict(scale_rewards=False, gamma=0.7, lam=0.3)], ids=["", "others"])
def test_each_formula_equals_its_definition(name, more):
    estimator = estimators.ESTIMATORS[name]
    n = 3 if estimator.compares_groups else 1
    args = PPOConfig(advantage_estimator=name, num_generations=n, batch_size=6, **more)
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([4, 1, 5, 2, 5, 3])
    mask = torch.arange(5) < counts.unsqueeze(-1)
    tensors = {key: torch.randn(6, 5, generator=generator).double() for key in ("rewards", "values")}
    tensors = {key: tensor.where(mask, torch.nan) for key, tensor in tensors.items()}
    vectors = {key: torch.randn(6, generator=generator).double() for key in ("bootstrap", "greedy_scores")}
    found = estimators.call_formula(estimator.formula, args, {"mask": mask, **tensors, **vectors})
    for start in range(0, 6, n):
        rows = range(start, start + n)
        lists = {key: [tensor[i, : counts[i]].tolist() for i in rows] for key, tensor in tensors.items()}
        lists |= {key: vector[start : start + n].tolist() for key, vector in vectors.items()}
        for i, defined in zip(rows, estimators.call_formula(estimator.definition, args, lists), strict=True):
            assert found[i, : counts[i]].tolist() == pytest.approx(defined, abs=1e-5)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Writes a module of estimators that a job can import as `own_formulas`."""
    (tmp_path / "own_formulas.py").write_text(
        textwrap.dedent("""
        def best_of_group(rewards, mask, num_generations):
            total = (rewards * mask).sum(-1).view(-1, num_generations)
            best = (total == total.amax(-1, keepdim=True)).double()
            return best.reshape(-1, 1).expand_as(rewards)

        def with_critic(rewards, mask, values, gamma):
            return rewards - gamma * values

        def wrong_shape(rewards, mask):
            return rewards.sum(-1)

        def no_number(rewards, mask):
            return rewards / 0.0

        def unknown(rewards, weather):
            return rewards

        def wrong_definition(rewards, mask):
            return rewards

        wrong_definition.definition = lambda rewards: [[0.0] * len(paid) for paid in rewards]
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    estimators.estimator_named.cache_clear()
    yield "python:own_formulas:"
    sys.modules.pop("own_formulas", None)


def test_a_job_can_have_its_own_formula(mine, in_root):
    trainer = toy.trainer(advantage_estimator=f"{mine}best_of_group", num_generations=4)
    assert not trainer.args.uses_critic and trainer.roles == ["policy"]
    episodes = toy.first_episodes(trainer)
    assert set(episodes.advantages[episodes.mask].unique().tolist()) == {0.0, 1.0}
    assert len(trainer.train()) == trainer.total
    with pytest.raises(InputError, match="2 or more, because python:own_formulas:best_of_group compares"):
        PPOConfig(advantage_estimator=f"{mine}best_of_group")
    # If an estimator has a parameter `values`, the job gets a critic.
    job = load_job("jobs/demo/ppo.yaml", [f"trainer.advantage_estimator={mine}with_critic"])
    assert job.args.uses_critic
    toy.trainer(advantage_estimator=f"{mine}with_critic", gamma=0.5).train()


def test_the_self_check_compares_with_the_definition_if_there_is_one(mine, monkeypatch):
    found: list[CheckResult] = []
    monkeypatch.setattr("pipeline.ppo.trainer.raise_if_failed", found.extend)
    toy.trainer(advantage_estimator=f"{mine}best_of_group", num_generations=4).run_update()
    toy.trainer(advantage_estimator=f"{mine}wrong_definition").run_update()
    without, wrong = [one for one in found if one.check == "rewards and advantages are as defined"]
    assert without.holds and "no definition" in without.found
    assert wrong.holds is False and "advantages of" in wrong.found


@pytest.mark.parametrize(
    ("name", "message"), [("unknown", "unknown: weather"), ("missing", "has no attribute 'missing'")]
)
def test_an_invalid_function_is_rejected(mine, name, message):
    with pytest.raises(InputError, match=message) as caught:
        PPOConfig(advantage_estimator=mine + name)
    assert caught.value.key == "advantage_estimator"


@pytest.mark.parametrize(
    ("name", "says"), [("wrong_shape", r".*\[16\].*expected .* \(16, 8\)"), ("no_number", "NaN or a number")]
)
def test_an_invalid_result_of_a_formula_ends_the_run(mine, name, says):
    with pytest.raises(Failure, match=f"python:own_formulas:{name} returned {says}"):
        toy.trainer(advantage_estimator=mine + name).run_update()
