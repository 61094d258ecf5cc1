"""Compares our PPO formulas with TRL 1.12's PPOTrainer. The test runs lines of TRL's source without changes.

Our results equal TRL's only if all completions have the maximum length. For shorter completions, TRL places the score one
position after the end, and its GAE also covers padding. Like `make bench`, `make test-all` installs TRL 1.12 separately.
"""

import ast
import textwrap
from types import SimpleNamespace

import pytest
import torch
from running import ROOT

from pipeline.ppo import functional as F
from pipeline.ppo.config import PPOConfig

SOURCE = ROOT / ".bench/trl/trl/experimental/ppo/ppo_trainer.py"
pytestmark = pytest.mark.skipif(not SOURCE.exists(), reason="TRL 1.12 is not installed: run make .bench/trl")
ROWS, ACTIONS = 5, 7


def lines(first, last):
    """Compiles TRL's lines from the line that starts with `first` to the line before `last`."""
    text = SOURCE.read_text().splitlines()
    start = next(i for i, line in enumerate(text) if line.strip().startswith(first))
    stop = next(i for i, line in enumerate(text) if i > start and line.strip().startswith(last))
    return compile(textwrap.dedent("\n".join(text[start:stop])), str(SOURCE), "exec")


def trl_functions():
    """Returns masked_mean, masked_var and masked_whiten of TRL 1.12 without importing the package."""
    tree = ast.parse(SOURCE.read_text())
    wanted = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("masked_")]
    names = {"torch": torch}
    exec(compile(ast.Module(wanted, []), str(SOURCE), "exec"), names)
    return names


@pytest.fixture(params=[0, 1, 2])
def world(request):
    """Returns a rollout of maximum-length completions as {name of TRL's variable: value}."""
    draw = torch.Generator().manual_seed(request.param)
    rand = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    nothing = torch.zeros(ROWS, ACTIONS, dtype=torch.bool)
    logprobs = rand(ROWS, ACTIONS) - 2
    return trl_functions() | {
        "args": SimpleNamespace(
            kl_coef=0.07, kl_estimator="k1", gamma=0.97, lam=0.9, whiten_rewards=False, cliprange=0.2,
            cliprange_value=0.2, vf_coef=0.1,
        ),
        "logprobs": logprobs, "ref_logprobs": logprobs + 0.3 * rand(ROWS, ACTIONS), "scores": rand(ROWS),
        "values": rand(ROWS, ACTIONS), "responses": torch.zeros(ROWS, ACTIONS),
        "padding_mask": nothing, "padding_mask_p1": nothing, "micro_batch_inds": torch.arange(ROWS),
        "sequence_lengths": torch.full((ROWS,), ACTIONS - 1), "sequence_lengths_p1": torch.full((ROWS,), ACTIONS),
        "new_logprobs": logprobs + 0.3 * rand(ROWS, ACTIONS), "vpred": rand(ROWS, ACTIONS), "empty_cache": lambda: None,
    }  # fmt: skip


MASK = torch.ones(ROWS, ACTIONS, dtype=torch.bool)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("whiten", [False, True])
def test_rewards_advantages_and_returns(world, estimator, whiten):
    args = world["args"]
    args.kl_estimator, args.whiten_rewards = estimator, whiten
    exec(lines("# 4. compute rewards", "# Do multiple epochs"), world)
    kl = F.kl_estimate(world["logprobs"], world["ref_logprobs"], estimator)
    rewards = F.token_rewards(world["scores"], kl, MASK, args.kl_coef)
    if whiten:
        rewards = F.whiten(rewards, MASK, shift_mean=False)
    advantages = F.gae(rewards, world["values"], MASK, args.gamma, args.lam)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(kl, world["kl"], **close)
    torch.testing.assert_close(rewards, world["rewards"], **close)
    torch.testing.assert_close(advantages + world["values"], world["returns"], **close)
    torch.testing.assert_close(F.whiten(advantages, MASK), world["advantages"], **close)


def test_losses_and_their_statistics(world):
    exec(lines("# 4. compute rewards", "# Do multiple epochs"), world)
    world |= {
        "mb_values": world["values"], "mb_return": world["returns"], "mb_advantage": world["advantages"],
        "mb_logprobs": world["logprobs"],
    }  # fmt: skip
    exec(lines("vpredclipped = torch.clamp(", "accelerator.backward(loss)"), world)
    args = world["args"]
    weights = F.loss_weights(MASK, "token", ROWS * ACTIONS, ROWS, ACTIONS)
    of_policy = (world["new_logprobs"], world["logprobs"], world["advantages"], MASK)
    policy, stats = F.policy_loss(*of_policy, weights, ROWS * ACTIONS, args.cliprange)
    of_critic = (world["vpred"], world["values"], world["returns"], MASK)
    value, value_stats = F.value_loss(*of_critic, ROWS * ACTIONS, args.cliprange_value)
    torch.testing.assert_close(policy, world["pg_loss"])
    torch.testing.assert_close(value, world["vf_loss"])
    torch.testing.assert_close(policy + args.vf_coef * value, world["loss"])
    torch.testing.assert_close(value_stats["clipfrac"], world["vf_clipfrac"])
    torch.testing.assert_close(stats["approxkl"], 0.5 * (world["logprobs_diff"] ** 2).mean())


def test_settings_have_the_names_and_defaults_of_the_last_ppo_config():
    """Users of TRL's removed PPOTrainer can reuse their settings."""
    tree = ast.parse((SOURCE.parent / "ppo_config.py").read_text())
    [config] = [n for n in tree.body if isinstance(n, ast.ClassDef)]
    theirs = {n.target.id for n in config.body if isinstance(n, ast.AnnAssign)}
    ours = set(PPOConfig.__dataclass_fields__)
    dropped = {
        "dataset_num_proc", "exp_name", "world_size", "num_total_batches", "micro_batch_size", "local_batch_size",
        "local_mini_batch_size", "mini_batch_size", "push_to_hub", "reward_model_path", "sft_model_path",
        "model_adapter_name", "ref_adapter_name", "ds3_gather_for_generation", "num_sample_generations",
        "stop_token", "stop_token_id", "run_name",
    }  # fmt: skip
    assert theirs - ours <= dropped, sorted(theirs - ours - dropped)
