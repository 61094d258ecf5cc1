"""Defines the advantage estimators, each with a formula, a definition and defaults.

To add an estimator, write a formula and a definition here, and one line in ESTIMATORS. A job can also use its own formula without
a change to this file: `trainer.advantage_estimator: python:MODULE:FUNCTION`. The function may have a definition as its attribute
`definition`.

The parameter names of a formula or definition determine its inputs:

* `rewards` (B, R): reward of each action, on the rows of this worker. The `num_generations` completions of a prompt are
  adjacent rows, and are all on one worker.
* `mask` (B, R): bool, True at actions.
* `values` (B, R) and `bootstrap` (B,): the critic's value before each action, and after the last action of a truncated
  completion (0 if it ended). An estimator with a parameter `values` or `bootstrap` needs a critic.
* `greedy_scores` (B,): score of the greedy completion to each row's prompt. Greedy completions are sampled only for an estimator
  with a parameter `greedy_scores`.
* any key of the job's `trainer` section. An estimator with a parameter `num_generations` compares the completions to a prompt.
  The job then needs at least 2 completions per prompt, and the estimator's `rewards` are float64.

The arguments and the result of a formula are tensors. A definition computes the same advantages as its formula, with plain loops
over one prompt's completions, and shares no code with the formula. The arguments of a definition are lists of numbers per
completion, without padding and mask. The self-check of the first rollout compares the results of formula and definition.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pipeline.system.functions import import_function

if TYPE_CHECKING:
    from torch import Tensor

Rows = list[list[float]]  # for each completion of a prompt, a list with a number per action

# parameters of formulas that are not keys of `trainer`
TENSORS = frozenset(("rewards", "mask", "values", "bootstrap", "greedy_scores"))


@dataclass(frozen=True)
class Estimator:
    """Turns token rewards into advantages.

    Args:
        formula: returns the advantages (B, R). Advantages at masked positions are ignored.
        definition: returns the advantages of one prompt's completions. Without a definition, the self-check skips the advantages.
        whiten: default of `whiten_advantages`.
        loss_aggregation: default of `loss_aggregation`.
    """

    formula: Callable[..., Tensor]
    definition: Callable[..., Rows] | None = None
    whiten: bool = False
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"

    @property
    def reads(self) -> frozenset[str]:
        """Returns the names of the formula's parameters."""
        return frozenset(inspect.signature(self.formula).parameters)

    @property
    def needs_critic(self) -> bool:
        return not self.reads.isdisjoint(("values", "bootstrap"))

    @property
    def needs_greedy(self) -> bool:
        """Returns True if the estimator reads the score of a greedy completion to each prompt."""
        return "greedy_scores" in self.reads

    @property
    def compares_groups(self) -> bool:
        """Returns True if the estimator compares the completions of a prompt with each other."""
        return "num_generations" in self.reads


def call_formula(function: Callable[..., Any], args: Any, inputs: Mapping[str, Any]) -> Any:
    """Calls a formula or definition with values for the parameters in its signature.

    Args:
        args: a PPOConfig, for the parameters that are keys of the trainer section.
        inputs: {parameter: value} of the other parameters. The values are tensors or lists.
    """
    names = inspect.signature(function).parameters
    return function(**{name: inputs[name] if name in inputs else getattr(args, name) for name in names})


# ------------------------------------------------------------------------------------------------------ formulas


def _gae(
    rewards: Tensor, mask: Tensor, values: Tensor, bootstrap: Tensor, gamma: float, lam: float
) -> Tensor:
    """Computes generalized advantage estimation (Schulman et al. 2015, eq. 16)."""
    from pipeline.ppo import functional

    return functional.gae(rewards, values, mask, gamma, lam, bootstrap)


def _reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Returns for each action the discounted sum of its reward and all later rewards (Hu 2025, REINFORCE++, 2501.03262).

    REINFORCE++ is GAE with lam = 1 and without a critic.
    """
    from pipeline.ppo import functional

    return functional.gae(rewards, rewards.new_zeros(rewards.shape), mask, gamma, 1.0)


def _remax(rewards: Tensor, mask: Tensor, greedy_scores: Tensor, gamma: float) -> Tensor:
    """Returns the reward to go minus the greedy completion's score, discounted in the same way (Li et al. 2023, algorithm 1)."""
    remaining = mask.flip(-1).cumsum(-1).flip(-1) - 1  # for each action, the number of later actions
    return _reward_to_go(rewards, mask, gamma) - greedy_scores.unsqueeze(-1) * gamma**remaining


def _above_group_mean(rewards: Tensor, mask: Tensor, num_generations: int) -> tuple[Tensor, Tensor]:
    """Returns (total rewards minus their group's mean, total rewards), each of shape (prompts, num_generations).

    If all totals of a group are equal, the differences are exactly 0, even if rounding changes the mean.
    """
    totals = rewards.double().where(mask, 0.0).sum(-1).view(-1, num_generations)
    is_tied = totals.amax(-1, keepdim=True) == totals.amin(-1, keepdim=True)
    return (totals - totals.mean(-1, keepdim=True)).where(~is_tied, 0.0), totals


def _rloo(rewards: Tensor, mask: Tensor, num_generations: int) -> Tensor:
    """Returns a completion's reward minus the mean reward of the prompt's other completions (Ahmadian et al. 2024)."""
    advantages, _ = _above_group_mean(rewards, mask, num_generations)
    # R - (mean of the others) = n / (n - 1) * (R - mean)
    advantages = advantages * num_generations / (num_generations - 1)
    return advantages.reshape(-1, 1).expand_as(rewards)


def _grpo(rewards: Tensor, mask: Tensor, num_generations: int, scale_rewards: bool) -> Tensor:
    """Subtracts the group's mean from a completion's reward, and divides by the group's standard deviation.

    See Shao et al. 2024, section 4.1.2. Dr. GRPO (Liu et al. 2025) does not divide.
    """
    advantages, totals = _above_group_mean(rewards, mask, num_generations)
    if scale_rewards:
        advantages = advantages / (totals.std(-1, keepdim=True) + 1e-4)
    return advantages.reshape(-1, 1).expand_as(rewards)


def _none(rewards: Tensor) -> Tensor:
    """Returns 0 for all actions. The advantages then come only from the teacher."""
    return rewards.new_zeros(rewards.shape)


# --------------------------------------------------------------------------------------------------- definitions


def _defined_gae(rewards: Rows, values: Rows, bootstrap: list[float], gamma: float, lam: float) -> Rows:
    """Computes delta_t = r_t + gamma V_{t+1} - V_t, and A_t = delta_t + gamma lambda A_{t+1}."""
    rows = []
    for row_rewards, row_values, next_value in zip(rewards, values, bootstrap, strict=True):
        row, advantage = [], 0.0
        for reward, value in zip(reversed(row_rewards), reversed(row_values), strict=True):
            advantage = reward + gamma * next_value - value + gamma * lam * advantage
            next_value = value
            row.append(advantage)
        rows.append(row[::-1])
    return rows


def _defined_reward_to_go(rewards: Rows, gamma: float) -> Rows:
    return [
        [sum(gamma ** (i - t) * row[i] for i in range(t, len(row))) for t in range(len(row))]
        for row in rewards
    ]


def _defined_remax(rewards: Rows, greedy_scores: list[float], gamma: float) -> Rows:
    rows = zip(_defined_reward_to_go(rewards, gamma), greedy_scores, strict=True)
    return [[row[t] - greedy * gamma ** (len(row) - 1 - t) for t in range(len(row))] for row, greedy in rows]


def _defined_rloo(rewards: Rows) -> Rows:
    totals = [sum(row) for row in rewards]
    means = [(sum(totals) - total) / (len(totals) - 1) for total in totals]
    return [[total - mean] * len(row) for total, mean, row in zip(totals, means, rewards, strict=True)]


def _defined_grpo(rewards: Rows, scale_rewards: bool) -> Rows:
    totals = [sum(row) for row in rewards]
    mean = sum(totals) / len(totals)
    deviation = math.sqrt(sum((total - mean) ** 2 for total in totals) / (len(totals) - 1))
    scale = deviation + 1e-4 if scale_rewards else 1.0
    return [[(total - mean) / scale] * len(row) for total, row in zip(totals, rewards, strict=True)]


def _defined_none(rewards: Rows) -> Rows:
    return [[0.0] * len(row) for row in rewards]


ESTIMATORS = {
    "gae": Estimator(_gae, _defined_gae, whiten=True),
    "rloo": Estimator(_rloo, _defined_rloo),
    "grpo": Estimator(_grpo, _defined_grpo, loss_aggregation="sequence"),
    "remax": Estimator(_remax, _defined_remax),
    "reinforce_plus_plus": Estimator(_reward_to_go, _defined_reward_to_go, whiten=True),
    "none": Estimator(_none, _defined_none),
}


@cache
def estimator_named(name: str) -> Estimator:
    """Returns the estimator for a name in ESTIMATORS, or for a formula python:MODULE:FUNCTION.

    Raises:
        InputError: if a Python function cannot be imported.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    formula = import_function(name)
    return Estimator(formula, getattr(formula, "definition", None))
