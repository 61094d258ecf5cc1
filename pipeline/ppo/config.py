"""Defines `PPOConfig`, the section `trainer` of a PPO job. `PPOConfig` is plain data, and this module does not import torch.

job/schema.py checks types and ranges of fields when it reads a job. `PPOConfig` checks combinations of fields, and raises an
InputError with the key.

Fields are named as in TRL's last `PPOConfig` (1.12), or as in the configurations of TRL 1.16's GRPO and RLOO trainers. An
*episode* is one completion of one prompt. An *update* is one rollout and the optimizer steps on its episodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from pipeline.errors import blame_key
from pipeline.job.ranges import (
    Count,
    Factor,
    Fraction,
    Norm,
    Patience,
    Rate,
    Rows,
    Seed,
    Share,
    Steps,
    Weight,
    require_value,
)
from pipeline.ppo import estimators
from pipeline.ppo.estimators import Estimator

# Number of completions that a plan decodes at once, if the job does not set the number. Evaluations decode this many completions
# at once by default.
PLANNED_ROWS = 64
CHUNK_COMPLETIONS = 256  # default number of completions in a chunk


@dataclass(frozen=True)
class PPOConfig:
    """Settings of one PPO run.

    If a field has a symbol in the paper that introduced it, its docstring ends with that symbol in brackets.
    """

    # ---- amount of training, batch sizes
    total_episodes: Annotated[int, Ge(1), Le(10**12)] | None = None
    """Number of episodes in the run, over all workers. By default, the run makes `num_train_epochs` passes over the prompts."""
    num_train_epochs: Factor = 1.0
    """Passes over the prompts; fractions are allowed. Used only if `total_episodes` is None."""
    batch_size: Rows = 64
    """Episodes per update over all workers together: a multiple of `num_generations`."""
    num_ppo_epochs: Annotated[int, Ge(1), Le(10**6)] = 4
    """Passes over the episodes of each update. [K in the PPO paper]"""
    num_mini_batches: Rows = 1
    """Minibatches, and so optimizer steps, per pass: 1 to `batch_size`. Prompts are shuffled before each pass, together with
    their completions. If `num_mini_batches` divides the number of prompts, all completions of a prompt are in the same
    minibatch."""
    num_generations: Rows = 1
    """Completions per prompt. `rloo` and `grpo` compare them, and need at least 2. [G in GRPO, k in RLOO]"""
    per_device_train_batch_size: Rows = 16
    """Episodes per forward and backward pass on one worker. Affects memory and speed, not the result."""
    max_tokens_per_micro_batch: Count | None = None
    """Tokens per forward and backward pass on one worker, padding included. By default `per_device_train_batch_size`
    episodes; in passes without gradients, 16384 tokens on a GPU and 4096 on a CPU."""
    local_rollout_forward_batch_size: Rows | None = None
    """Completions per chunk, all of which a worker decodes at once. An update is split into chunks, which are sampled and scored
    one by one. Rollout workers share the chunks of an update (`rollout.num_workers`). By default, a chunk has 256 completions.
    The worker then decodes as many completions at once as fit into half of its free memory when the run starts."""

    # ---- rollout. There is no top-k and no top-p, so the log-probs belong to the distribution that tokens are sampled from.
    response_length: Rows = 53
    """Maximum length of a completion in tokens, the end-of-sequence token included."""
    min_new_tokens: Annotated[int, Ge(0), Le(2**20)] = 0
    """Minimum length of a completion in tokens, 0 to `response_length` - 1. Before that length, end-of-sequence tokens have
    probability 0 in sampling and in all log-probs."""
    temperature: Annotated[float, Ge(0.01), Le(100)] = 1.0  # vLLM raises lower temperatures to 0.01
    """Sampling temperature: divides the logits, in sampling and in all log-probs."""

    # ---- reward
    normalize_rewards: bool = False
    """Normalize the scores of reward adapters with the mean and standard deviation stored with their versions. Scores of Python
    functions, judges and other models have no stored constants, and are not normalized."""
    reward_timeout_s: Patience = 600.0
    """Seconds that an update waits for a judge or for a reward that is an async function. After this time, the run ends. To
    continue the run, repeat the command with the same run.name. -1: no limit."""
    reward_clip: Factor | None = None
    """Clip the weighted sum of the (normalized) scores to [-reward_clip, reward_clip]. By default no clipping."""
    missing_eos_penalty: Weight | None = None
    """Subtracted, after clipping, from the score of a completion truncated at `response_length`."""
    bootstrap_truncated: bool = False
    """Treat truncated completions as unfinished: the critic's value after the last token replaces the score."""
    mask_truncated_completions: bool = False
    """Exclude completions truncated at `response_length` from the loss (DAPO's overlong filtering)."""
    whiten_rewards: bool = False
    """Scale token rewards to unit variance over the batch, without changing their mean."""

    # ---- KL to the reference
    kl_coef: Weight = 0.05
    """KL coefficient, in reward per nat. With an adaptive `kl_controller`, this is the initial coefficient. [beta]"""
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimator of the KL per token in the reward or the loss (functional.kl_estimate). Metrics always report k1."""
    kl_in: Literal["reward", "loss"] = "reward"
    """reward: subtract the KL from each token's reward (PPO). loss: add the KL to the loss (GRPO), with k2 or k3 only."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """Keep `kl_coef` fixed, or adapt `kl_coef` to reach `kl_target`."""
    kl_target: Annotated[float, Ge(1e-6), Le(10**6)] = 6.0
    """Target of the adaptive controller: nats per completion, summed over its tokens. [KL_target, Ziegler et al.]"""
    kl_horizon: Annotated[float, Ge(1), Le(10**12)] = 10_000
    """Horizon of the adaptive controller: the coefficient changes by at most about 20 % in this many episodes."""
    sync_ref_model: bool = False
    """Mix the policy into the reference every `ref_model_sync_steps` updates."""
    ref_model_mixup_alpha: Share = 0.6
    """Weight of the policy when it is mixed into the reference. With a small weight and a mix after every update, the reference
    is an exponential moving average of the policy. [alpha]"""
    ref_model_sync_steps: Count = 512
    """Number of updates between two mixes of the policy into the reference."""

    # ---- advantages
    advantage_estimator: str = "gae"
    """gae, rloo, grpo, remax, reinforce_plus_plus, none, or your own as python:MODULE:FUNCTION (see ppo/estimators.py). gae uses
    a critic. rloo, grpo and remax subtract a baseline from a completion's reward: rloo the mean reward of the prompt's other
    completions, grpo the mean of all of them (and divides by their standard deviation), remax the score of the greedy
    completion. reinforce_plus_plus has no baseline, and whitens the rewards-to-go over the batch. none: the job has no reward,
    and learns from its `teacher` alone."""
    critic: Literal["adapter", "head"] = "adapter"
    """What predicts the values for gae. adapter: a separate role, which starts as a copy of the first reward adapter and its
    head, if there is one. head: a linear head on the policy's hidden states, which starts at 0 and needs no forward and
    backward of its own. With `head`, both the policy loss and the value loss train the policy's adapter."""
    gamma: Share = 1.0
    """Discount per token, for gae, remax and reinforce_plus_plus. [gamma]"""
    lam: Share = 0.95
    """Trade-off of gae: 1 uses all later rewards, and 0 uses one reward and the critic's next value. [lambda]"""
    teacher_coef: Weight = 0.0
    """Weight of the job's `teacher`. After whitening, each token's advantage grows by this weight times
    log p_teacher - log p_policy. 0: no teacher."""
    teacher_system: str | None = None
    """A system message that only the teacher gets, in front of each prompt. The prompts must have no system message."""
    whiten_advantages: bool | None = None
    """Whiten advantages over the batch and all workers. By default only for gae and reinforce_plus_plus."""
    scale_rewards: bool = True
    """For grpo: divide by the group's standard deviation (False: Dr. GRPO, with `loss_aggregation: constant`)."""

    # ---- loss
    cliprange: Factor = 0.2
    """Clip range of the probability ratio: [1 - cliprange, 1 + cliprange]. [epsilon]"""
    cliprange_high: Factor | None = None
    """Upper clip range: [1 - cliprange, 1 + cliprange_high]; a value above `cliprange` lets unlikely tokens gain more probability
    (DAPO's clip-higher, 0.28). By default `cliprange`. [epsilon_high]"""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Which probability ratio is clipped. token: each token's ratio. sequence: the completion's ratio to the power 1 / length
    (GSPO), for rloo and grpo. The sequence ratio is much closer to 1, so GSPO sets `cliprange` to about 0.0003."""
    loss_aggregation: Literal["token", "sequence", "constant"] | None = None
    """How the policy's loss, with its KL and entropy terms, is averaged over a minibatch. token: over tokens, so that long
    completions weigh more (DAPO). sequence: over each completion's tokens, and then over completions (GRPO). constant: the
    sum, divided by the number of completions times `response_length` (Dr. GRPO). By default sequence for grpo, as in its
    paper, else token. The value loss is always a mean over tokens."""
    dual_clip: Annotated[float, Gt(1), Le(10**6)] | None = None
    """Bound of dual clip, usually 3: for a negative advantage, the objective is at least this bound times the advantage. By
    default no bound. [c, Ye et al.]"""
    entropy_coef: Weight = 0.0
    """Coefficient of the entropy bonus: each nat of a token's entropy lowers the loss by this amount. [c2 in the PPO paper]"""
    vf_coef: Weight = 0.1
    """Coefficient of the value loss. With `critic: adapter`, policy and critic share no parameters, and the coefficient only
    scales the critic's gradient before `max_grad_norm` and `adam_epsilon` apply. The step size of the critic is
    `critic_learning_rate`. With `critic: head`, the coefficient weighs the value loss against the policy loss. If coefficient and
    rewards are large, the value loss moves the policy, and the KL grows without benefit. [c1 in the PPO paper]"""
    cliprange_value: Factor | None = 0.2
    """Clip range of the value loss: how far a value may be from its old value in the rollout, in units of the reward. With
    `normalize_values`, the unit is a standard deviation of the returns. null: no clipping."""
    normalize_values: bool = False
    """Normalize the critic's targets by the running mean and standard deviation of the returns."""
    critic_warmup_steps: Steps = 0
    """Number of first updates that train the critic alone. The policy's learning rate schedule begins after these updates."""
    target_kl: Factor | None = None
    """End an update before the optimizer step of a minibatch if the minibatch's approximate KL to the old policy (k2, mean nats
    per token) exceeds 1.5 times this value. By default, no update ends early."""

    # ---- optimizer (AdamW), schedule: one scheduler step for each update
    optim: Literal[
        "adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"
    ] = "adamw_torch"
    """The kind of AdamW, named as in transformers. fused: one kernel per step. 8bit: bitsandbytes stores each moment in one byte
    if a parameter has 4096 numbers or more. paged: moments move to CPU memory if GPU memory is full."""
    learning_rate: Rate = 3e-6
    """Initial learning rate of policy and critic."""
    critic_learning_rate: Annotated[float, Ge(0), Le(100)] | None = None
    """Initial learning rate of the critic. Must be above 0 with `critic: head`. By default `learning_rate`."""
    adam_beta1: Fraction = 0.9
    """Decay rate of Adam's first moment. [beta1]"""
    adam_beta2: Fraction = 0.999
    """Decay rate of Adam's second moment. [beta2]"""
    adam_epsilon: Annotated[float, Ge(1e-30), Le(1)] = 1e-5
    """Added to the root of the second moment. 1e-5 is the value of PPO's reference implementations. With torch's 1e-8, even
    tiny gradients late in training cause full steps. [epsilon]"""
    weight_decay: Annotated[float, Ge(0), Le(100)] = 0.0
    """AdamW's decoupled weight decay of adapters and heads."""
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
    ] = "linear"
    """Schedule of transformers.get_scheduler. Only schedules without further settings are supported."""
    warmup_steps: Steps = 0
    """Number of updates of linear warm-up: the n-th update uses n / (warmup_steps + 1) of the learning rate. The critic's warm-up
    begins with the run. The policy's warm-up begins when the policy begins to learn (`critic_warmup_steps`)."""
    max_grad_norm: Norm = 1.0
    """Maximum L2 norm of the gradients, which are clipped separately for policy and critic. With `critic: head`, the policy's
    gradient comes from both losses. 0: no clipping."""

    # ---- precision, memory
    bf16: bool = False
    """Compute matrix products in bfloat16 (autocast). On a CPU, also load the base in bfloat16. Adapters, heads, log-softmax,
    ratios and losses stay fp32."""
    gradient_checkpointing: bool | None = False
    """Recompute activations in the backward pass. Training is about a quarter slower, and needs far less memory. null: the
    worker recomputes if the activations would exceed its free memory."""

    # ---- run
    seed: Seed = 42
    """Seed of prompt order, minibatches and sampling. The random numbers of an episode depend on its number, not on batch or
    worker."""
    logging_steps: Count = 1
    """Updates between two log entries."""
    save_steps: Steps = 0
    """Updates between two checkpoints. 0: only at the end."""
    eval_steps: Steps = 0
    """Updates between two evaluations on the eval prompts. 0: only before and after training."""
    check_reference: bool = True
    """End the run if the KL to the reference is not 0 before the first update, because the policy should start as a copy of the
    reference."""

    def __post_init__(self) -> None:
        require = partial(require_value, self)
        name = self.advantage_estimator
        is_known = name in estimators.ESTIMATORS or name.startswith("python:")
        choices = f"{', '.join(estimators.ESTIMATORS)} or python:MODULE:FUNCTION"
        require("advantage_estimator", is_known, choices)
        with blame_key("advantage_estimator"):
            groups, inputs = self.estimator.compares_groups, self.estimator.reads
        unknown = sorted(inputs - estimators.TENSORS - {field.name for field in fields(self)})
        parameter_rule = (
            f"a function whose parameters are among {', '.join(sorted(estimators.TENSORS))} and the keys of trainer; "
            f"unknown: {', '.join(unknown)}"
        )
        require("advantage_estimator", not unknown, parameter_rule)

        require("min_new_tokens", self.min_new_tokens < self.response_length, "less than response_length")
        batch_rule = f"a multiple of num_generations ({self.num_generations}), because a prompt's completions stay together"
        require("batch_size", self.batch_size % self.num_generations == 0, batch_rule)
        minibatch_rule = f"at most batch_size ({self.batch_size})"
        require("num_mini_batches", self.num_mini_batches <= self.batch_size, minibatch_rule)
        group_rule = f"2 or more, because {name} compares the completions to a prompt"
        require("num_generations", self.num_generations > 1 or not groups, group_rule)
        level = f"'token' with advantage_estimator {name}, because its advantages differ from token to token"
        require("importance_sampling_level", self.importance_sampling_level == "token" or groups, level)
        kl_rule = "'k2' or 'k3' with kl_in: loss, because the gradient of k1 is 0 on average, and would not keep the policy close "
        kl_rule += "to the reference"
        require("kl_estimator", self.kl_in == "reward" or self.kl_estimator in ("k2", "k3"), kl_rule)

        truncation_keys = ("missing_eos_penalty", "bootstrap_truncated", "mask_truncated_completions")
        if len(set_keys := [key for key in truncation_keys if getattr(self, key)]) > 1:
            require(set_keys[-1], False, f"only one of {', '.join(truncation_keys)}: found {set_keys}")
        # transformers' polynomial schedule decays to 1e-7, so the initial rate must be larger.
        for key in ("learning_rate", "critic_learning_rate")[: 1 + self.uses_critic]:
            rate = getattr(self, key)
            is_allowed = rate is None or rate > 1e-7 or self.lr_scheduler_type != "polynomial"
            require(key, is_allowed, "above 1e-7 with lr_scheduler_type: polynomial")
        for key in ("vf_coef", "critic_learning_rate"):
            is_allowed = getattr(self, key) != 0 or self.critic == "adapter" or not self.uses_critic
            require(key, is_allowed, "above 0 if trainer.critic is head, because the value head starts at 0")
        for key in ("bootstrap_truncated", "normalize_values", "critic_warmup_steps"):
            is_allowed = self.uses_critic or not getattr(self, key)
            require(key, is_allowed, "off if there is no critic (advantage_estimator: gae has one)")

    @property
    def estimator(self) -> Estimator:
        return estimators.estimator_named(self.advantage_estimator)

    @property
    def whitens_advantages(self) -> bool:
        """Returns `whiten_advantages`, or the estimator's default if the key is None."""
        return self.estimator.whiten if self.whiten_advantages is None else self.whiten_advantages

    @property
    def aggregation(self) -> Literal["token", "sequence", "constant"]:
        """Returns `loss_aggregation`, or the estimator's default if the key is None."""
        return self.loss_aggregation or self.estimator.loss_aggregation

    @property
    def uses_critic(self) -> bool:
        return self.estimator.needs_critic

    @property
    def has_critic_adapter(self) -> bool:
        """Returns True if the critic is an adapter, with its own forward and backward passes."""
        return self.uses_critic and self.critic == "adapter"

    @property
    def learns_in_one_forward(self) -> bool:
        """Returns True if the training forward's log-probs can also serve as old log-probs.

        Reusing the log-probs requires that an update is one optimizer step on all completions, and that no advantage depends on
        old log-probs.
        """
        return (
            self.num_ppo_epochs == self.num_mini_batches == 1
            and not self.uses_critic
            and (self.kl_in == "loss" or self.kl_coef == 0)
            and not self.teacher_coef
            and not self.mask_truncated_completions
        )

    @property
    def prompts_per_update(self) -> int:
        return self.batch_size // self.num_generations

    def total_updates(self, n_prompts: int) -> int:
        """Returns the number of updates of a run on `n_prompts` training prompts, rounded up, so that the last batch is full."""
        episodes = self.total_episodes or self.num_train_epochs * n_prompts * self.num_generations
        return max(1, math.ceil(episodes / self.batch_size))

    def decoded(self, workers: int) -> int:
        """Returns the number of completions that each of `workers` workers decodes at once if the worker's memory allows."""
        share = math.ceil(self.prompts_per_update / workers) * self.num_generations
        return min(self.local_rollout_forward_batch_size or CHUNK_COMPLETIONS, share)

    def planned_rows(self, workers: int) -> int:
        """Returns the number of completions that a plan decodes at once: at most PLANNED_ROWS if the job sets no number."""
        rows = self.decoded(workers)
        return min(rows, PLANNED_ROWS) if self.local_rollout_forward_batch_size is None else rows

    def evaluates(self, update: int, total: int) -> bool:
        """Returns True if the trainer evaluates after this update, counted from 1. The stage evaluates after the last update."""
        return self.eval_steps > 0 and update % self.eval_steps == 0 and update < total

    def logs(self, update: int, total: int) -> bool:
        """Returns True if this update, counted from 1, logs its metrics. Every update with an evaluation does."""
        return update % self.logging_steps == 0 or update == total or self.evaluates(update, total)
