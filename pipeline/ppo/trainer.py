"""PPO on one shared base, in the order in which things happen.

An update: sample prompts -> rollout -> score -> old and reference log-probs, values -> token rewards -> advantages ->
epochs x minibatches x micro-batches -> metrics. Policy, reference, critic and reward are adapters on one frozen base
(see models/adapters.py); each role runs forward and backward by itself, one after the other.

Workers (torch.distributed, if it is initialised) share the episodes of an update. There is no DDP: losses are sums
divided by the number of actions in the whole optimizer step over all workers, so gradients just add up, in one
all-reduce of the adapters' gradients for each step. Micro-batches, accumulation and workers then change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import get_scheduler

from pipeline.models.adapters import SharedBase
from pipeline.ppo.advantages import RunningMoments, estimate_advantages
from pipeline.ppo.batch import Episodes, all_reduce, collate, deal, micro_batches, prompt_order, world
from pipeline.ppo.checks import check_first_ratio, of_rollout, require
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.functional import (
    AdaptiveKLController,
    importance_weights,
    kl_estimate,
    policy_loss,
    token_rewards,
    value_loss,
    whiten,
)
from pipeline.ppo.metrics import episode_metrics
from pipeline.ppo.phases import Phases
from pipeline.ppo.rewards import Reward, Samples, weighted
from pipeline.ppo.rollout import Completion, Engine, Sampling, TransformersEngine
from pipeline.ppo.state import kept_rng_state, restore_state, save_state

POLICY_STATS = (
    "loss/policy_avg",
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "val/ratio",
    "policy/entropy_avg",
)
VALUE_STATS = ("loss/value_avg", "val/clipfrac_avg")

Rows = Sequence[dict[str, Any]]
OnStep = Callable[[dict[str, float], int, int], None]


class PPOTrainer:
    """Trains the `policy` role (and `critic`) of `shared` on `prompts` against `rewards`.

    Args:
        shared: with roles `policy`; `critic` with a head (for `gae`); `reference`, or none: the bare base is it.
        tokenizer: decodes completions for Python rewards and for show; its pad id fills batches up.
        prompts: rows with `input_ids` (token ids) and `row` (JSON text of the data row: `prompt` and further columns).
        rewards: their weighted sum is the score.
        evaluate: figures of the policy on held-out prompts, asked for on every rank after each `eval_steps` updates.
        eos: ids that end a completion; None: those of the tokenizer and the base's generation config.
        engine: samples the completions; None: the base itself.
        on_step: called after each update with its metrics, its number (from 1) and the number of updates.
    """

    def __init__(
        self,
        shared: SharedBase,
        tokenizer: Any,
        args: PPOConfig,
        prompts: Rows,
        rewards: list[Reward],
        evaluate: Callable[[], dict[str, float]] | None = None,
        eos: Sequence[int] | None = None,
        engine: Engine | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self.shared, self.tokenizer, self.args = shared, tokenizer, args
        self.prompts, self.rewards, self.evaluate = prompts, rewards, evaluate
        self.on_step, self.device = on_step, shared.device
        self.rank, self.workers = world()
        self.prompts_per_update = args.batch_size // args.num_generations
        self._check_inputs()
        self.roles = ["policy", "critic"] if args.uses_critic else ["policy"]
        self.reference = "reference" if "reference" in shared.roles else None
        self.sampling = Sampling.of(args, tokenizer, shared, eos)
        rows, self.pad = args.local_rollout_forward_batch_size, tokenizer.pad_token_id or 0
        self.engine = engine or TransformersEngine(shared, "policy", rows, self.pad)
        if args.bf16:
            shared.autocast = torch.bfloat16
        if args.gradient_checkpointing:
            shared.enable_gradient_checkpointing()
        for role in self.roles:
            shared.set_trainable(role, True)
            for parameter in shared.parameters_of(role):
                if self.workers > 1:  # new heads and adapters are random: all start from rank 0's
                    dist.broadcast(parameter.data, src=0)
        own = args.critic_learning_rate  # 0 is a rate, too
        rates = {"policy": args.learning_rate, "critic": args.learning_rate if own is None else own}
        self.optimizer = torch.optim.AdamW(
            [{"params": shared.parameters_of(role), "lr": rates[role]} for role in self.roles],
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,  # 1e-5 in PPO's lineage, not torch's 1e-8
            weight_decay=args.weight_decay,
        )
        self.total = args.total_updates(len(prompts))
        self.scheduler = get_scheduler(args.lr_scheduler_type, self.optimizer, args.warmup_steps, self.total)
        self.update = 0  # updates done; with the seed it is also the position in the data
        self.kl_coef = args.kl_coef
        self.moments = RunningMoments()
        self.skipped_steps = 0
        self.history: list[dict[str, float]] = []
        self.phases = Phases(self.device)

    def _check_inputs(self) -> None:
        if "policy" not in self.shared.roles or (self.args.uses_critic and "critic" not in self.shared.roles):
            raise ValueError(
                f"the shared base has roles {self.shared.roles}; expected policy, and critic for gae"
            )
        if not self.rewards:
            raise ValueError("no reward: PPO needs at least one")
        if len(self.prompts) == 0:
            raise ValueError("no prompt to learn from")
        if self.prompts_per_update < self.workers:
            raise ValueError(
                f"batch_size: {self.args.batch_size} is {self.prompts_per_update} prompts an update for {self.workers} "
                "workers; expected at least one prompt for each"
            )
        if self.args.sync_ref_model and "reference" not in self.shared.roles:
            raise ValueError(
                "sync_ref_model: there is no reference adapter to move; add one as a copy of the policy"
            )

    # ------------------------------------------------------------------------------------------ the loop

    def train(self) -> list[dict[str, float]]:
        """Run to the last update (from wherever `restore` left off). Returns the history of metrics."""
        while self.update < self.total:
            metrics = self.step()
            if self.args.logs(self.update, self.total):
                self.history.append(metrics)
            if self.on_step is not None:
                self.on_step(metrics, self.update, self.total)
        return self.history

    def step(self) -> dict[str, float]:
        """One update, from prompts to metrics."""
        args = self.args
        with self.phases("rollout"):
            episodes, samples, greedy = self.rollout()
        with self.phases("score"):
            raw = self.score(episodes, samples)
            greedy_scores = self.greedy_scores(greedy)
        with self.phases("values"):
            self.logprobs_and_values(episodes)
        kl_coef, learns = self.kl_coef, self.update >= args.critic_warmup_steps
        rewards = self.rewards_and_advantages(episodes, greedy_scores)
        if self.update == 0:
            require(of_rollout(self, episodes, rewards))
        with self.phases("update"):
            learned = self.learn(episodes, policy=learns)
        metrics = episode_metrics(args, episodes, rewards, raw, kl_coef) | learned
        metrics |= {"objective/kl_coef": kl_coef, "lr": self.scheduler.get_last_lr()[0]}

        self.scheduler.step()
        if args.kl_controller == "adaptive":
            # nats per completion against a target per completion; the coefficient goes into the checkpoint
            controller = AdaptiveKLController(self.kl_coef, args.kl_target, args.kl_horizon)
            self.kl_coef = controller.update(metrics["objective/kl"], args.batch_size)
        if args.normalize_values:
            self.moments.update(episodes.returns, episodes.learn)
        self.update += 1
        if args.sync_ref_model and self.update % args.ref_model_sync_steps == 0:
            self.shared.average("reference", "policy", 1.0 - args.ref_model_mixup_alpha)
        if self.evaluate is not None and args.evaluates(self.update, self.total):
            with self.phases("evaluate"), kept_rng_state():
                metrics |= self.evaluate()
        cost = self.phases.metrics()
        seconds = sum(cost.get(f"time/{phase}", 0.0) for phase in ("rollout", "score", "values", "update"))
        tokens = metrics["completions/mean_length"] * args.batch_size
        speed = {
            "train_samples_per_second": args.batch_size / seconds,
            "train_tokens_per_second": tokens / seconds,
        }
        return metrics | {"episode": float(self.update * args.batch_size)} | cost | speed

    # --------------------------------------------------------------------------------- rollout and scores

    def rollout(self) -> tuple[Episodes, Samples, Samples | None]:
        """This worker's share of the next prompts, `num_generations` completions to each, and for remax a greedy one."""
        n = self.args.num_generations
        numbers = prompt_order(
            self.update * self.prompts_per_update, self.prompts_per_update, len(self.prompts), self.args.seed
        )
        mine = range(self.rank, self.prompts_per_update, self.workers)
        rows = [self.prompts[numbers[i]] for i in mine]
        # Indices in the global batch. Sampling is keyed by these, not by rank.
        places = [i * n + g for i in mine for g in range(n)]
        ids = [self._prompt_ids(row) for row in rows]
        prompts = [p for p in ids for _ in range(n)]
        self.engine.sync()
        first = self.update * self.args.batch_size
        completions = self.engine.generate(prompts, [first + place for place in places], self.sampling)
        samples = self._samples([row for row in rows for _ in range(n)], prompts, completions)
        greedy = None
        if self.args.advantage_estimator == "remax":
            greedy = self._samples(rows, ids, self.engine.generate(ids, range(len(ids)), self._greedy()))
        return collate(prompts, completions, places, self.pad, self.device), samples, greedy

    def score(self, episodes: Episodes, samples: Samples) -> dict[str, list[float]]:
        """Fill `scores`; returns each reward's raw scores."""
        total, raw = weighted(self.rewards, samples, self.args.normalize_rewards)
        episodes.scores = torch.tensor(self._bounded(total, episodes.ended.tolist()), device=self.device)
        if self.args.mask_truncated_completions:
            episodes.learn = episodes.mask & episodes.ended.unsqueeze(-1)
        return raw

    def greedy_scores(self, greedy: Samples | None) -> Tensor | None:
        """remax's baseline, one for each episode: the score of the greedy completion to its prompt."""
        if greedy is None:
            return None
        total, _ = weighted(self.rewards, greedy, self.args.normalize_rewards)
        baseline = torch.tensor(self._bounded(total, greedy.ended), device=self.device)
        return baseline.repeat_interleave(self.args.num_generations)

    def _bounded(self, scores: list[float], ended: list[bool]) -> list[float]:
        """Clip, then take the penalty off completions that were cut off (so that no clip hides it)."""
        limit, penalty = self.args.reward_clip, self.args.missing_eos_penalty or 0.0
        clipped = scores if limit is None else [min(max(s, -limit), limit) for s in scores]
        return [s if e else s - penalty for s, e in zip(clipped, ended, strict=True)]

    @torch.no_grad()
    def logprobs_and_values(self, episodes: Episodes) -> None:
        """Fill old and reference log-probs, values and bootstrap: each once, by the code that training runs."""
        everything, size = range(len(episodes)), self.args.local_rollout_forward_batch_size
        for rows in self._micro_batches(episodes, size, everything):
            part = episodes.take(rows)
            width = part.mask.shape[1]
            # Not the sampler's: only these agree with the training forward, so that the first ratio is 1.
            episodes.old_logprobs[rows, :width] = self.logprobs("policy", part)[0]
            episodes.ref_logprobs[rows, :width] = self.logprobs(self.reference, part)[0]
            if self.args.uses_critic:
                values, after = self.values(part)
                values, after = (v * self.moments.std + self.moments.mean for v in (values, after))
                episodes.values[rows, :width] = values.where(part.mask, 0.0)
                # After the end there is no value (0); a completion that was cut off would have gone on.
                episodes.bootstrap[rows] = after.where(~part.ended, 0.0)

    def logprobs(
        self, role: str | None, part: Episodes, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs (B, R) of the actions, with the temperature and the barred ends that they were sampled with."""
        sampling = self.sampling
        barred = sampling.eos if sampling.min_new_tokens else ()
        actions = (part.input_ids, part.starts, part.mask)
        return self.shared.logprobs(
            role, *actions, sampling.temperature, barred, sampling.min_new_tokens, entropy
        )

    def values(self, part: Episodes) -> tuple[Tensor, Tensor]:
        """The critic's output (B, R) before each action, one place earlier like its log-prob, and (B,) after the last."""
        everywhere = self.shared.values("critic", part.input_ids)
        steps = torch.arange(part.mask.shape[1], device=self.device)
        places = (part.starts.unsqueeze(-1) + steps - 1).clamp(max=everywhere.shape[1] - 1)
        last = (part.starts + part.counts - 1).unsqueeze(-1)
        return everywhere.gather(1, places), everywhere.gather(1, last).squeeze(-1)

    @torch.no_grad()
    def rewards_and_advantages(self, episodes: Episodes, greedy_scores: Tensor | None) -> Tensor:
        """Fill advantages and returns; returns the token rewards (B, R)."""
        args = self.args
        scores, bootstrap = episodes.scores, torch.zeros_like(episodes.bootstrap)
        if args.bootstrap_truncated:
            # the value takes the score's place: with both, the completion's worth would count twice
            scores, bootstrap = scores.where(episodes.ended, 0.0), episodes.bootstrap
        kl = kl_estimate(episodes.old_logprobs, episodes.ref_logprobs, args.kl_estimator)
        coefficient = self.kl_coef if args.kl_in == "reward" else 0.0
        rewards = token_rewards(scores, kl, episodes.mask, coefficient)
        if args.whiten_rewards:
            # the mean stays: to move it would pay or fine every token for existing
            rewards = whiten(rewards, episodes.mask, shift_mean=False, all_reduce=all_reduce)
        episodes.advantages, episodes.returns = estimate_advantages(
            args, rewards, episodes.values, episodes.mask, bootstrap, greedy_scores, episodes.learn
        )
        if args.use_vllm and args.vllm_importance_sampling_clip_max:
            episodes.advantages *= importance_weights(
                episodes.old_logprobs,
                episodes.sampler_logprobs,
                episodes.mask,
                args.vllm_importance_sampling_clip_max,
            )
        return rewards

    # ----------------------------------------------------------------------------------------- learning

    def learn(self, episodes: Episodes, policy: bool = True) -> dict[str, float]:
        """Epochs x minibatches, an optimizer step each; returns means over the steps. `policy=False`: the critic alone."""
        args, steps = self.args, 0
        sums: dict[str, float] = {}
        # Actions of each episode of the *global* batch, so that every worker knows every minibatch's count.
        actions = torch.zeros(args.batch_size, device=self.device)
        actions[episodes.places] = episodes.learn.sum(-1).float()
        actions = all_reduce(actions).cpu()
        row_of = {place: row for row, place in enumerate(episodes.places.tolist())}
        dealt = deal(args.batch_size, args.num_ppo_epochs, args.num_mini_batches, args.seed, self.update)
        for places in dealt:
            rows = [row_of[place] for place in places.tolist() if place in row_of]
            tokens = float(actions[places].sum())
            if tokens == 0:
                continue  # no action on any worker: no step, for Adam's momentum would move the weights by itself
            self.optimizer.zero_grad(set_to_none=True)
            stats = self.sync(self.accumulate(episodes, rows, tokens, policy), policy)
            # Of all workers, so that they agree on what follows.
            approxkl = stats.get("policy/approxkl_avg", 0.0)
            if policy and steps == 0:
                check_first_ratio(self.shared, self.update, approxkl)
            if args.early_stop_kl and approxkl > 1.5 * args.early_stop_kl:
                break  # too far already: not this step, and no further one
            stats |= self.optimizer_step()
            sums = {key: sums.get(key, 0.0) + value for key, value in stats.items()}
            steps += 1
        counts = {"policy/steps": float(steps), "skipped_steps": float(self.skipped_steps)}
        return {key: value / max(steps, 1) for key, value in sums.items()} | counts

    def accumulate(
        self, episodes: Episodes, rows: list[int], tokens: float, policy: bool
    ) -> dict[str, Tensor]:
        """Forward and backward of a minibatch, in micro-batches, each role by itself; returns statistics.

        `tokens` is the number of actions of the whole minibatch, over all workers: every sum is divided by it, so that
        gradients and statistics of micro-batches and workers add up. One backward a role, before the next role's forward:
        activations of one role at a time, and a checkpointed layer that runs again in backward finds its own adapter.
        """
        names = POLICY_STATS * policy + VALUE_STATS * self.args.uses_critic
        total = {name: torch.zeros((), device=self.device) for name in names}
        teaches = episodes.learn.any(-1).tolist()  # a row without an action to learn from costs nothing
        rows = [row for row in rows if teaches[row]]
        for some in self._micro_batches(episodes, self.args.per_device_train_batch_size, rows):
            part = episodes.take(some)
            stats: tuple[Tensor, ...] = ()
            if policy:
                loss, stats = self.policy_objective(part, tokens)
                loss.backward()
            if self.args.uses_critic:
                loss, clipfrac = self.value_objective(part, tokens)
                (self.args.vf_coef * loss).backward()
                stats += (loss.detach(), clipfrac)
            for name, value in zip(names, stats, strict=True):
                total[name] += value
        return total

    def policy_objective(self, part: Episodes, tokens: float) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Clipped surrogate, with the KL in the loss and the entropy bonus where they are asked for; and POLICY_STATS."""
        args = self.args
        logprobs, entropy = self.logprobs("policy", part, entropy=args.entropy_coef > 0)
        loss, stats = policy_loss(
            logprobs, part.old_logprobs, part.advantages, part.learn, args.cliprange, args.dual_clip, tokens
        )
        if args.kl_in == "loss":
            kl = kl_estimate(logprobs, part.ref_logprobs, args.kl_estimator)
            loss = loss + self.kl_coef * kl.where(part.learn, 0.0).sum() / tokens
        if entropy is None:  # by sampling: minus the mean log-prob of what was drawn
            bonus = -part.old_logprobs.where(part.learn, 0.0).sum() / tokens
        else:
            bonus = entropy.where(part.learn, 0.0).sum() / tokens
            loss = loss - args.entropy_coef * bonus
        return loss, (loss.detach(), stats["approxkl"], stats["clipfrac"], stats["ratio"], bonus.detach())

    def value_objective(self, part: Episodes, tokens: float) -> tuple[Tensor, Tensor]:
        """Clipped value loss, in the critic's own units (normalised returns with `normalize_values`)."""
        values, _ = self.values(part)
        old, returns = ((x - self.moments.mean) / self.moments.std for x in (part.values, part.returns))
        loss, stats = value_loss(values, old, returns, part.learn, self.args.cliprange_value, tokens)
        return loss, stats["clipfrac"]

    def sync(self, stats: dict[str, Tensor], policy: bool) -> dict[str, float]:
        """Add up gradients and statistics over the workers: one flat all-reduce."""
        values = torch.stack(list(stats.values()))
        if self.workers > 1:
            learning = self.roles if policy else ["critic"]
            parameters = [p for role in learning for p in self.shared.parameters_of(role)]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            flat = all_reduce(torch.cat([*(g.flatten() for g in grads), values]))
            *summed, values = flat.split([*(p.numel() for p in parameters), len(values)])
            for parameter, grad in zip(parameters, summed, strict=True):
                parameter.grad = grad.view_as(parameter)
        return dict(zip(stats, values.tolist(), strict=True))

    def optimizer_step(self) -> dict[str, float]:
        """Clip policy and critic each by its own norm, and step; with a gradient that is not finite, leave all as it is."""
        stats, finite = {}, True
        for role in self.roles:
            grads = [p.grad for p in self.shared.parameters_of(role) if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
            stats[f"grad_norm/{role}"] = float(norm)
            if not torch.isfinite(norm):
                finite = False
            elif self.args.max_grad_norm > 0 and norm > self.args.max_grad_norm:
                for grad in grads:
                    grad.mul_(self.args.max_grad_norm / (norm + 1e-6))
        if finite:
            self.optimizer.step()
        else:
            self.skipped_steps += 1
        return stats

    # -------------------------------------------------------------------------------------------- small

    def _samples(self, rows: Rows, prompts: list[list[int]], completions: list[Completion]) -> Samples:
        tokens, ended = [r.tokens for r in completions], [r.ended for r in completions]
        return Samples(prompts, tokens, ended, [json.loads(row["row"]) for row in rows], self.tokenizer)

    def _prompt_ids(self, row: dict[str, Any]) -> list[int]:
        ids = [int(i) for i in row["input_ids"]]
        config = self.shared.base.config.get_text_config()
        room = getattr(config, "max_position_embeddings", None)
        if not ids or (room is not None and len(ids) + self.args.response_length > room):
            raise ValueError(
                f"a prompt of {len(ids)} tokens with response_length {self.args.response_length}; expected at least one token, "
                f"and together no more than the model's {room} positions: {str(row['row'])[:200]}"
            )
        return ids

    def _greedy(self) -> Sampling:
        s = self.sampling
        return Sampling(s.max_new_tokens, s.eos, s.min_new_tokens, temperature=0.0, seed=s.seed)

    def _micro_batches(self, episodes: Episodes, size: int, rows: Sequence[int]) -> list[list[int]]:
        """Rows sorted by length, cut by number or by token budget."""
        lengths = episodes.lengths()
        batches = micro_batches([lengths[row] for row in rows], size, self.args.micro_batch_tokens)
        return [[rows[i] for i in batch] for batch in batches]

    def stored_roles(self) -> list[str]:
        return [*self.roles, "reference"] if self.args.sync_ref_model else self.roles

    def save(self, folder: str | Path) -> None:
        """Write everything that `restore` needs. Every rank calls it, with its own or the same folder."""
        save_state(self, folder)

    def restore(self, folder: str | Path) -> None:
        """Continue from a folder that `save` wrote."""
        restore_state(self, folder)
