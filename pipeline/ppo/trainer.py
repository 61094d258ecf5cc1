"""Trains PPO on one shared base, in the order of the steps.

One update: prompts -> rollout -> scores -> old and reference log-probs, values -> token rewards -> advantages -> epochs x
minibatches x micro-batches -> metrics. Policy, reference, critic and reward are adapters on one frozen base
(models/adapters.py). Each runs its forward and backward separately, one after the other. A critic that is a head on the policy
shares the policy's.

Workers (torch.distributed, if it is initialized) share the episodes of an update. There is no DDP: losses are sums divided by
the number of actions in the full optimizer step over all workers. So gradients simply add up, in one all-reduce of the
adapters' gradients per step. The split of a step into micro-batches and over workers does not matter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from pipeline.checks import raise_if_failed
from pipeline.job.rollout import RolloutConfig
from pipeline.models.adapters import SharedBase
from pipeline.models.gpus import peak_flops
from pipeline.models.lora import cast_once
from pipeline.ppo import losses
from pipeline.ppo.clock import Phases
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.episodes import (
    Episodes,
    Totals,
    all_reduce,
    deal,
    minibatches,
    prompt_order,
    world,
)
from pipeline.ppo.functional import adapted_kl_coef
from pipeline.ppo.losses import POLICY_STATS, VALUE_STATS, RunningMoments
from pipeline.ppo.metrics import episode_metrics, off_policy_metrics, seconds_at_peak
from pipeline.ppo.rollouts import Rollout, Rollouts, RolloutWorkers, Versions, assembled
from pipeline.ppo.sampler import Chunk, Sampler, split_into_chunks
from pipeline.ppo.selfcheck import rollout as checks
from pipeline.ppo.teacher import Teacher
from pipeline.scoring import forward
from pipeline.scoring.rewards import AdapterReward, Reward, combined
from pipeline.system.rng import kept_rng_state, rng_state, set_rng_state
from pipeline.writing.rows import Decoder

STATE_FILE = "ppo_state.json"  # file in a checkpoint
# attributes of the trainer in that file
STATE = ("update", "kl_coef", "skipped_steps", "tokens", "history")

Rows = Sequence[dict[str, Any]]
OnUpdate = Callable[[dict[str, float], int, int], bool | None]


class PPOTrainer:
    """Trains the `policy` role (and `critic`) of `shared` on `prompts` against `rewards`.

    Args:
        shared: has the roles `policy`; `critic` with a head, for `gae`; and `reference`, without which the bare base is
            the reference.
        tokenizer: decodes completions for Python rewards; its pad id fills batches up.
        prompts: rows with `input_ids` (token ids) and `row` (JSON text of the data row: `prompt` and other columns).
        rewards: the weighted sum of their scores is an episode's score.
        evaluate: returns metrics of the policy on eval prompts; called on every rank every `eval_steps` updates.
        decoder: generates the completions. None means the base itself.
        on_update: called after each update with its metrics, its number (from 1) and the total number of updates. If it
            returns True, training ends.
        draws: epoch number -> indices of its prompts, the same number in each epoch. None means every prompt once.
        rollout: how far sampling may run ahead, and the off-policy correction. None means the defaults.
        rollout_workers: sample and score chunks for this trainer. None means that the trainer does.
        critic_reward: the reward that the critic was copied from. None means that the critic starts from 0.
        teacher: rates every token of the completions, with `teacher_coef`.
    """

    def __init__(
        self,
        shared: SharedBase,
        tokenizer: Any,
        args: PPOConfig,
        prompts: Rows,
        rewards: list[Reward],
        evaluate: Callable[[], dict[str, float]] | None = None,
        decoder: Decoder | None = None,
        on_update: OnUpdate | None = None,
        draws: Callable[[int], Any] | None = None,
        rollout: RolloutConfig | None = None,
        rollout_workers: RolloutWorkers | None = None,
        critic_reward: Reward | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.shared, self.tokenizer, self.args = shared, tokenizer, args
        self.prompts, self.rewards, self.evaluate, self.teacher = prompts, rewards, evaluate, teacher
        self.rollout_config = rollout or RolloutConfig()
        self.on_update, self.device = on_update, shared.device
        self.rank, self.workers = world()
        self.prompts_per_update = args.batch_size // args.num_generations
        if self.prompts_per_update < self.workers:
            raise ValueError(
                f"batch_size: {args.batch_size} is {self.prompts_per_update} prompts an update for {self.workers} workers; "
                "expected at least one prompt for each"
            )
        self.draws, self.prompts_per_epoch = draws, len(draws(0)) if draws else len(prompts)
        self.roles = ["policy", "critic"] if args.uses_critic else ["policy"]
        self.stored_roles = [*self.roles, "reference"] if args.sync_ref_model else self.roles  # they change
        reference = "reference" if "reference" in shared.roles else None
        self.sampler = Sampler(shared, tokenizer, args, rewards, reference, decoder)
        # Reads only the column of ids, if the rows have columns.
        columns: Any = prompts if hasattr(prompts, "column_names") else None
        ids = columns["input_ids"] if columns else (row["input_ids"] for row in prompts)
        self.longest = max(map(len, ids)) + args.response_length  # tokens of a prompt and its completion
        if not rollout_workers:
            self.sampler.fit_to_memory(args.decoded(self.workers), self.longest)
        self._prepare_roles(reference)
        self.total = args.total_updates(self.prompts_per_epoch)
        critic_rate = args.learning_rate if args.critic_learning_rate is None else args.critic_learning_rate
        rates = {"policy": args.learning_rate, "critic": critic_rate}
        # The policy's schedule starts with its first update, the critic's with the run.
        begins = {"policy": args.critic_warmup_steps, "critic": 0}
        self.optimizer = adamw(args, [(shared.parameters_of(role), rates[role]) for role in self.roles])
        factors = [learning_rate_factors(args, rates[role], begins[role], self.total) for role in self.roles]
        self.scheduler = LambdaLR(self.optimizer, factors)
        self.update = 0  # number of completed updates, which with the seed is also the position in the data
        self.kl_coef = args.kl_coef
        self.moments = RunningMoments()
        if critic_reward is not None:
            # The copied head predicts the raw score. Rescale it to the score of an episode.
            normal = args.normalize_rewards
            mean, std = (critic_reward.mean, critic_reward.std) if normal else (0.0, 1.0)
            slope = critic_reward.weight / std
            shared.heads["critic"].weight.data *= slope
            self.moments.center = -slope * mean  # a head has no bias
        self.folders: Mapping[str, str] = {}  # role -> the adapter folder that it must equal before it learns
        self.skipped_steps = 0
        self.history: list[dict[str, float]] = []
        self.tokens = 0  # tokens that all workers have sampled for training
        self.phases = Phases(self.device)
        staleness = self.rollout_config.staleness
        self.versions = Versions(shared, "policy", staleness) if staleness or rollout_workers else None
        self.rollouts = Rollouts(
            self.sampler, self.versions, rollout_workers, self._chunks, self.total, self.rank == 0
        )

    def _prepare_roles(self, reference: str | None) -> None:
        """Sets precision, checkpointing and trainable roles. All workers get the same adapters, and pack rows in the same way."""
        shared = self.shared
        if self.args.bf16:
            shared.autocast = torch.bfloat16
        if self.args.gradient_checkpointing:
            shared.enable_gradient_checkpointing()
        for role in self.roles:
            shared.set_trainable(role, True)
        if self.workers > 1:
            can_pack = torch.tensor(float(shared.can_pack), device=self.device)
            shared.can_pack = bool(all_reduce(can_pack, dist.ReduceOp.MIN))
            # New adapters are random, so all ranks get rank 0's, also for a reference that is a copy of such a policy.
            for role in filter(None, [*self.roles, reference]):
                for parameter in shared.parameters_of(role):
                    dist.broadcast(parameter.data, src=0)

    # ------------------------------------------------------------------------------------------ the loop

    def train(self) -> list[dict[str, float]]:
        """Runs to the last update, from the first or from a restored one. Returns the logged metrics."""
        while self.update < self.total:
            metrics = self.run_update()
            if self.args.logs(self.update, self.total):
                self.history.append(metrics)
            if self.on_update is not None and self.on_update(metrics, self.update, self.total):
                break
        return self.history

    def run_update(self) -> dict[str, float]:
        """Runs one update, from prompts to metrics. Returns the metrics."""
        args = self.args
        rollout, kl_coef = self.make_experience(), self.kl_coef
        episodes = rollout.episodes
        if self.update == 0:
            raise_if_failed(checks.check(self, episodes))
            sums = checks.sums_of(self)
        with self.phases("update"):
            learning_metrics = self.learn(episodes)
        if self.update == 0:
            raise_if_failed([checks.ranks_learned_equally(self, sums, learning_metrics)])
        metrics = episode_metrics(args, episodes, rollout.raw, kl_coef) | learning_metrics
        metrics |= {"objective/kl_coef": kl_coef, "lr": self.scheduler.get_last_lr()[0]}
        config = self.rollout_config
        if config.corrects or config.staleness:
            # The training forward gives old log-probs only for completions in the loss.
            mask = episodes.learn if self.old_from_training else episodes.mask
            metrics |= off_policy_metrics(episodes, config, mask)

        self.scheduler.step()
        # While only the critic learns, the KL is 0, and the controller would lower the coefficient.
        if args.kl_controller == "adaptive" and "policy" in self.learning:
            kl = metrics["objective/kl"]
            self.kl_coef = adapted_kl_coef(kl_coef, kl, args.batch_size, args.kl_target, args.kl_horizon)
        if args.normalize_values:
            before = self.moments.std
            self.moments.update(episodes.returns, episodes.learn)
            if self.moments.center is not None:  # keep a copied critic's values (PopArt, 1602.07714)
                self.shared.heads["critic"].weight.data *= before / self.moments.std
        self.update += 1
        if args.sync_ref_model and self.update % args.ref_model_sync_steps == 0:
            self.shared.average("reference", "policy", 1.0 - args.ref_model_mixup_alpha)
        if self.evaluate is not None and args.evaluates(self.update, self.total):
            with self.phases("evaluate"), kept_rng_state():
                metrics |= self.evaluate()
        return metrics | {"episode": float(self.update * args.batch_size)} | self._costs(episodes, metrics)

    def _costs(self, episodes: Episodes, metrics: dict[str, float]) -> dict[str, float]:
        """Returns seconds and memory of the update's phases, and the speed."""
        costs = self.phases.metrics()
        if self.rollouts.workers:
            costs |= self.rollouts.workers.measured()
        seconds = sum(costs.get(f"time/{phase}", 0.0) for phase in ("rollout", "score", "values", "update"))
        if "rollout/wait_seconds" in costs:
            costs["rollout/wait_fraction"] = costs["rollout/wait_seconds"] / seconds
        count = self.args.batch_size
        tokens = metrics["completions/mean_length"] * count
        self.tokens += round(tokens)
        costs |= {"train_samples_per_second": count / seconds, "train_tokens_per_second": tokens / seconds}
        if peak := peak_flops(self.device):
            adapters = sum(isinstance(reward, AdapterReward) for reward in self.rewards)
            parameters = self.shared.base.num_parameters()  # for NF4, the number before packing
            here = not self.rollouts.workers
            ideal = seconds_at_peak(self.args, sum(episodes.lengths()), parameters, adapters, here, peak)
            costs["mfu"] = ideal / seconds
        return costs

    # --------------------------------------------------------------------------------- rollout and scores

    def make_experience(self) -> Rollout:
        """Returns the next update's rollout, with everything about its episodes that is computed before the policy learns."""
        with self.phases("rollout"):
            rollout = self.rollout()
        with self.phases("score"):
            self.score(rollout)
        with self.phases("values"):
            self.reference_logprobs(rollout)
            self.logprobs_and_values(rollout.episodes)
            if self.teacher:
                self.teacher.rate(self.sampler, rollout.episodes)
        if self.versions and self.rollouts.workers:
            raise_if_failed([checks.sampled_by_its_version(self, self.versions, self.update, rollout.parts)])
        losses.fill_advantages(self.args, self.rollout_config, rollout.episodes, self.kl_coef)
        return rollout

    def rollout(self) -> Rollout:
        """Returns `num_generations` completions for each prompt of this worker's share of the next update."""
        parts, first = self.rollouts.chunks_for(self.update), self.update * self.args.batch_size
        if self.versions and self.rollouts.workers:
            raise_if_failed([checks.chunks_match_requests(self.versions, parts)])
        return Rollout(parts, assembled(parts, first, self.sampler.pad, self.device))

    def _chunks(self, update: int) -> list[Chunk]:
        """Returns this worker's share of an update in chunks, which are sampled and scored one by one."""
        args, count = self.args, self.prompts_per_update
        n, size = args.num_generations, args.decoded(self.workers)
        share = range(self.rank, count, self.workers)  # positions of this worker's prompts in the update
        order = prompt_order(update * count, count, self.prompts_per_epoch, args.seed, self.draws)
        rows = [self.prompts[order[place]] for place in share]
        prompt_ids = [[int(i) for i in row["input_ids"]] for row in rows]
        first = update * args.batch_size
        return [
            Chunk(
                update=update,
                rank=self.rank,
                number=number,
                version=max(0, update - self.rollout_config.staleness),
                rows=[i * n + g for i in places for g in range(n)],
                prompt_ids=[prompt_ids[i] for i in places],
                data=[rows[i]["row"] for i in places],
                episodes=[first + share[i] * n + g for i in places for g in range(n)],
            )
            for number, places in enumerate(split_into_chunks([len(ids) for ids in prompt_ids], size, n))
        ]

    def score(self, rollout: Rollout) -> None:
        """Fills the raw scores, `scores`, `greedy_scores`, and `learn` if truncated completions are excluded."""
        episodes = rollout.episodes
        rollout.raw = raw = {reward.name: [0.0] * len(episodes) for reward in self.rewards}
        for chunk, sampled in rollout.parts:
            if sampled.raw is None:
                self.sampler.score(chunk, sampled)
            for name, scores in (sampled.raw or {}).items():
                for row, score in zip(chunk.rows, scores, strict=True):
                    raw[name][row] = score
            if (greedy := sampled.greedy) and greedy.raw:
                paid = self._paid(greedy.raw, [completion.ended for completion in greedy.completions])
                of_prompts = torch.tensor(paid, device=self.device)
                episodes.greedy_scores[chunk.rows] = of_prompts.repeat_interleave(chunk.generations)
        paid = self._paid(raw, episodes.ended.tolist()) if self.rewards else [0.0] * len(episodes)
        episodes.scores = torch.tensor(paid, device=self.device, dtype=torch.float64)
        if self.args.mask_truncated_completions:
            episodes.learn = episodes.mask & episodes.ended.unsqueeze(-1)

    def _paid(self, raw: dict[str, list[float]], ended: list[bool]) -> list[float]:
        """Returns weighted sums, clipped, then minus the penalty for truncation. Clipping would otherwise hide the penalty."""
        scores = combined(self.rewards, raw, self.args.normalize_rewards)
        limit, penalty = self.args.reward_clip, self.args.missing_eos_penalty or 0.0
        clipped = scores if limit is None else [min(max(s, -limit), limit) for s in scores]
        return [s if e else s - penalty for s, e in zip(clipped, ended, strict=True)]

    def reference_logprobs(self, rollout: Rollout) -> None:
        for chunk, sampled in rollout.parts:
            if sampled.ref_logprobs is None:
                self.sampler.reference_logprobs(chunk, sampled)
            assert sampled.ref_logprobs is not None
            width = sampled.ref_logprobs.shape[1]
            rollout.episodes.ref_logprobs[chunk.rows, :width] = sampled.ref_logprobs.to(self.device)

    @torch.no_grad()
    def logprobs_and_values(self, episodes: Episodes) -> None:
        """Fills old log-probs, values and bootstrap, with the code of the training forward.

        Does nothing if the training forward gives the old log-probs.
        """
        if self.old_from_training:
            return
        for rows, part in forward.parts_of(
            self.shared, episodes, tokens=self.args.max_tokens_per_micro_batch
        ):
            width = part.mask.shape[1]
            states = forward.states(self.shared, "policy", part)
            # The sampler's log-probs differ by rounding, but the first ratio must be 1.
            episodes.old_logprobs[rows, :width] = self.sampler.logprobs("policy", part, states=states)[0]
            if self.args.uses_critic:
                values, last_value = self.values(part, None if self.args.has_critic_adapter else states)
                values, last_value = (self.moments.raw(output) for output in (values, last_value))
                episodes.values[rows, :width] = values.where(part.mask, 0.0)
                # The value after an end is 0, but a truncated completion would have continued.
                episodes.bootstrap[rows] = last_value.where(~part.ended, 0.0)

    @property
    def old_from_training(self) -> bool:
        """Returns True if the training forward gives this update's old log-probs. The first update's check needs them earlier."""
        return self.args.learns_in_one_forward and self.update > 0 and not self.rollout_config.corrects

    def values(self, part: Episodes, states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the critic's values (B, R) before each action, at the position of its log-prob, and (B,) after the last.

        `states` are the critic's hidden states, if already computed.
        """
        states = forward.states(self.shared, "critic", part) if states is None else states
        values = self.shared.head("critic", states)
        return values[:, :-1], values[:, -1]

    # ----------------------------------------------------------------------------------------- learning

    @property
    def learning(self) -> list[str]:
        """Returns the roles that learn in this update. In the first `critic_warmup_steps` updates, only the critic learns."""
        return self.roles if self.update >= self.args.critic_warmup_steps else ["critic"]

    def learn(self, episodes: Episodes) -> dict[str, float]:
        """Runs epochs x minibatches, with one optimizer step each. Returns the means of their statistics over the steps.

        `policy/first_ratio_error` is the root mean square of the log-ratio before the first step, in nats. If it exceeds
        rounding, old and new log-probs belong to different policies.
        """
        args, steps = self.args, 0
        sums: dict[str, float] = {}
        first_ratio: dict[str, float] = {}
        mine, episodes = episodes, episodes.gathered(args.batch_size)
        actions = episodes.learn.sum(-1).tolist()
        for minibatch in minibatches(args, self.update):
            rows = [row for row in minibatch.tolist() if actions[row]]
            totals = Totals.of(episodes.learn[rows])
            if not totals.actions:
                continue  # without any action, Adam's momentum alone would still move the weights
            packs = self._packs(episodes, rows)
            share = deal(episodes.lengths(packs), self.workers)[self.rank]
            rows = [row for i in share for row in packs[i]]
            self.optimizer.zero_grad(set_to_none=True)
            with cast_once():
                summed = self.accumulate(episodes, rows, totals)
            stats = self.sync(summed)
            # The sum over workers makes all of them take the same branch below.
            approxkl = stats.get("policy/approxkl_avg", 0.0)
            if "policy" in self.learning and not first_ratio:
                rms = first_ratio["policy/first_ratio_error"] = (2 * approxkl) ** 0.5
                if self.update == args.critic_warmup_steps:
                    # Later updates only report it: rounding has no sharp limit, and one outlier should not end a long run.
                    raise_if_failed([checks.first_ratio(self.shared, rms)])
            if args.target_kl and approxkl > 1.5 * args.target_kl:
                break  # skips this step and the remaining ones
            stats |= self.optimizer_step()
            sums = {key: sums.get(key, 0.0) + value for key, value in stats.items()}
            steps += 1
        if self.old_from_training and self.workers > 1:
            old = all_reduce(episodes.old_logprobs)  # each row is on one worker, and 0 on the others
            mine.old_logprobs = old[mine.indices, : mine.mask.shape[1]]
        counts = {"policy/steps": float(steps), "skipped_steps": float(self.skipped_steps)}
        return {key: value / max(steps, 1) for key, value in sums.items()} | first_ratio | counts

    def accumulate(self, episodes: Episodes, rows: list[int], totals: Totals) -> dict[str, Tensor]:
        """Runs forward and backward of this worker's rows of a minibatch, in micro-batches. Returns their statistics.

        An adapter's backward runs before the next adapter's forward. So only one role's activations are in memory, and a
        checkpointed layer is recomputed with the adapter of its forward. A critic that is a head reads the policy's hidden
        states, and one backward trains both. While only the critic learns, this trains only the head.

        Args:
            totals: counts over the complete minibatch, of all workers.
        """
        args, policy = self.args, "policy" in self.learning
        names = POLICY_STATS * policy + VALUE_STATS * args.uses_critic
        total = {name: torch.zeros((), device=self.device) for name in names}
        for micro_batch in forward.micro_batches_of(self.shared, episodes, rows, *self.limits):
            part = episodes.take(micro_batch)
            loss = torch.zeros((), device=self.device)
            stats: tuple[Tensor, ...] = ()
            if policy or not args.has_critic_adapter:
                with torch.set_grad_enabled(policy):
                    states = forward.states(self.shared, "policy", part)
            if policy:
                logprobs, entropy = self.sampler.logprobs("policy", part, args.entropy_coef > 0, states)
                if self.old_from_training:
                    part.old_logprobs = logprobs.detach()
                    episodes.old_logprobs[micro_batch, : part.mask.shape[1]] = part.old_logprobs
                loss, stats = losses.policy_objective(args, part, totals, logprobs, entropy, self.kl_coef)
            if args.has_critic_adapter:
                if policy:
                    loss.backward()
                loss, states = torch.zeros_like(loss), forward.states(self.shared, "critic", part)
            if args.uses_critic:
                values, _ = self.values(part, states)
                value_loss, value_stats = losses.value_objective(args, part, totals, values, self.moments)
                loss, stats = loss + args.vf_coef * value_loss, (*stats, *value_stats)
            loss.backward()
            for name, value in zip(names, stats, strict=True):
                total[name] += value
        return total

    def sync(self, stats: dict[str, Tensor]) -> dict[str, float]:
        """Sums gradients and statistics over the workers, in one flat all-reduce. Returns the statistics."""
        values = torch.stack(list(stats.values()))
        if self.workers > 1:
            parameters = [p for role in self.learning for p in self.shared.parameters_of(role)]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            flat = all_reduce(torch.cat([*(g.flatten() for g in grads), values]))
            *summed, values = flat.split([*(p.numel() for p in parameters), len(values)])
            for parameter, grad in zip(parameters, summed, strict=True):
                parameter.grad = grad.view_as(parameter)
        return dict(zip(stats, values.tolist(), strict=True))

    def optimizer_step(self) -> dict[str, float]:
        """Clips the gradients of policy and critic by their norms. Steps if the norms are finite. Returns the norms."""
        norms: dict[str, float] = {}
        for role in self.roles:
            parameters = self.shared.parameters_of(role)
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            norms[f"grad_norm/{role}"] = float(norm)
            if self.args.max_grad_norm > 0:
                nn.utils.clip_grads_with_norm_(parameters, self.args.max_grad_norm, norm)
        if all(map(math.isfinite, norms.values())):
            self.optimizer.step()
        else:
            self.skipped_steps += 1
        return norms

    # ------------------------------------------------------------------------------------------- helpers

    def _packs(self, episodes: Episodes, rows: list[int]) -> list[list[int]]:
        """Returns a minibatch in packs of completions. No pack is so large that other workers would wait for it."""
        completions, tokens = self.limits
        if self.workers > 1:
            lengths = episodes.lengths()
            fair = sum(lengths[row] for row in rows) // (2 * self.workers)
            tokens = min(tokens or fair, fair)
        return forward.in_packs(self.shared, episodes, rows, completions, tokens)

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Returns the maximum (completions, tokens) of a micro-batch in training."""
        tokens = self.args.max_tokens_per_micro_batch
        return (None, tokens) if tokens else (self.args.per_device_train_batch_size, None)

    def save(self, folder: str | Path) -> None:
        """Writes everything that `restore` needs to continue bit-identically on a CPU. Every rank calls it.

        Rank 0 writes adapters, optimizer and state; every rank writes its random state. The caller commits the folder
        atomically. No pickle is ever loaded: tensors are safetensors, or torch.save files read with weights_only. Other data is
        JSON.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(rng_state(), folder / f"rng_{self.rank}_of_{self.workers}.pt")
        if self.rank != 0:
            return
        for role in self.stored_roles:
            self.shared.save(role, folder / role)
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        if self.versions:
            self.versions.save(folder, self.update)
        state = {
            **{key: getattr(self, key) for key in STATE},
            "returns": vars(self.moments),
            "scheduler": self.scheduler.state_dict(),
            "decoding": {"workers": self.workers, "rows": self.sampler.rows},
        }
        (folder / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")

    def restore(self, folder: str | Path) -> None:
        """Continues from a folder written by `save`. Every rank calls it.

        Random states need the same number of workers. Only rewards in evaluations draw from them.
        """
        folder = Path(folder)
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        for role in self.stored_roles:
            self.shared.load(role, folder / role)
        optimizer = torch.load(folder / "optimizer.pt", weights_only=True, map_location=self.device)
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(state["scheduler"])
        for key in STATE:
            setattr(self, key, state[key])
        vars(self.moments).update(state["returns"])
        # Rounding depends on the number of rows decoded at once. So the number stays the same, unless less memory is free now.
        rows, now = state["decoding"]["rows"], self.sampler.rows
        same = state["decoding"]["workers"] == self.workers and not self.args.local_rollout_forward_batch_size
        if rows and now and same:
            self.sampler.rows = min(rows, now)
        if self.versions:
            self.versions.load(folder)
        random_state = folder / f"rng_{self.rank}_of_{self.workers}.pt"
        if random_state.exists():
            set_rng_state(torch.load(random_state, weights_only=True))


def learning_rate_factors(
    args: PPOConfig, learning_rate: float, begin: int, total: int
) -> Callable[[int], float]:
    """Returns the function from an update, counted from 0, to the factor of a role's learning rate.

    It is transformers' schedule over the updates from `begin` to `total`, and 0 before. transformers' warmup would waste the
    first update on a rate of 0. Here the n-th of w warmup updates has n / (w + 1) of the full rate.
    """
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=learning_rate)
    made = get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, total - begin)
    schedule = made.lr_lambdas[0]

    def factor(update: int) -> float:
        step = update - begin
        if step < 0:
            return 0.0
        return (step + 1) / (args.warmup_steps + 1) if step < args.warmup_steps else schedule(step)

    return factor


def adamw(args: PPOConfig, groups: Sequence[tuple[list[nn.Parameter], float]]) -> torch.optim.Optimizer:
    """Returns the AdamW of `args.optim` for groups of parameters, each with its learning rate."""
    make: Any = torch.optim.AdamW
    options: dict[str, Any] = {"fused": True} if args.optim == "adamw_torch_fused" else {}
    if not args.optim.startswith("adamw_torch"):
        import bitsandbytes

        kinds = {
            "adamw_8bit": "AdamW8bit",
            "paged_adamw_32bit": "PagedAdamW32bit",
            "paged_adamw_8bit": "PagedAdamW8bit",
        }
        make = getattr(bitsandbytes.optim, kinds[args.optim])
    return make(
        [{"params": parameters, "lr": rate} for parameters, rate in groups],
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        **options,
    )
