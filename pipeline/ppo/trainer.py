"""Trains PPO on one shared base. The methods are in the order of the steps of an update.

One update: prompts -> rollout -> scores -> old and reference log-probs, values -> token rewards -> advantages -> epochs x
minibatches x micro-batches -> metrics. Policy, reference, critic and reward are adapters on one frozen base
(models/adapters.py). The adapters run one after the other, each with its own forward and backward. A critic that is a head on the
policy uses the policy's forward and backward.

Workers (torch.distributed, if it is initialized) share the episodes of an update, without DDP. Losses are sums divided
by the number of actions in the full optimizer step over all workers. One all-reduce per step therefore adds up the adapters'
gradients. The split of a step into micro-batches and over workers does not change the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.checks import raise_if_failed
from pipeline.job.rollout import RolloutConfig
from pipeline.models.fsdp_sync import all_reduce, gather, world
from pipeline.models.gpus import model_flops_utilization
from pipeline.models.lora import cast_once
from pipeline.ppo import losses
from pipeline.ppo.clock import Phases
from pipeline.ppo.episodes import Episodes, Prompts, Totals, deal, minibatches, prompt_order
from pipeline.ppo.functional import adapted_kl_coef
from pipeline.ppo.losses import POLICY_STATS, VALUE_STATS, RunningMoments
from pipeline.ppo.metrics import count_passes, episode_metrics, off_policy_metrics
from pipeline.ppo.optimizer import optimizer_and_schedule
from pipeline.ppo.rollouts import Rollout, Rollouts, RolloutWorkers, assemble_episodes
from pipeline.ppo.sampler import Chunk, Sampler, split_into_chunks
from pipeline.ppo.selfcheck import rollout as checks
from pipeline.scoring import forward
from pipeline.scoring.rewards import AdapterReward, Reward, weighted_sum
from pipeline.system.rng import kept_rng_state, rng_state, set_rng_state

STATE_FILE = "ppo_state.json"  # file in a checkpoint with the trainer's attributes named in STATE
STATE = ("update", "kl_coef", "skipped_steps", "tokens", "history")

OnUpdate = Callable[[dict[str, float], int, int], bool | None]
Evaluate = Callable[[], dict[str, float]]


class PPOTrainer:
    """Trains the `policy` role (and `critic`) of the sampler's base on prompts.

    Args:
        sampler: has the roles, the rewards and the settings.
        rollout: configures how far sampling may run ahead of training, and the off-policy correction. By default
            `RolloutConfig()`.
        rollout_workers: sample and score chunks for this trainer. Without rollout workers, `sampler` samples and scores the
            chunks in this process.
        folders: {role: folder with the adapter that the role must equal before training}. A self-check compares role and file.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompts: Prompts,
        rollout: RolloutConfig | None = None,
        rollout_workers: RolloutWorkers | None = None,
        folders: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.sampler, self.prompts, self.args, self.folders = sampler, prompts, sampler.args, folders
        self.shared, self.device = sampler.shared, sampler.shared.device
        self.rollout_config = rollout or RolloutConfig()
        self.rank, self.workers = world()
        args = self.args
        if args.prompts_per_update < self.workers:
            raise ValueError(
                f"batch_size: {args.batch_size} makes {args.prompts_per_update} prompts per update for {self.workers} workers; "
                "expected at least one prompt per worker"
            )
        self.roles = ["policy", "critic"] if args.uses_critic else ["policy"]  # roles that learn
        if not rollout_workers:
            sampler.fit_to_memory(args.decoded(self.workers), prompts.longest)
        self._prepare_roles()
        self.total = args.total_updates(prompts.per_epoch)
        self.optimizer, self.scheduler = optimizer_and_schedule(args, self.shared, self.roles, self.total)
        self.update = 0  # number of completed updates, which determines the position in the data
        self.kl_coef = args.kl_coef
        self.moments = RunningMoments()
        if sampler.critic_reward is not None:
            self._scale_copied_critic(sampler.critic_reward)
        self.skipped_steps = 0
        self.history: list[dict[str, float]] = []  # metrics of the logged updates
        self.tokens = 0  # tokens that all workers have sampled for training
        self.phases = Phases(self.device)
        self.rollouts = Rollouts(
            sampler, self.rollout_config.staleness, rollout_workers, self._chunks, self.total
        )

    def _prepare_roles(self) -> None:
        """Sets precision, gradient checkpointing and trainable roles. Makes adapters and packing equal on all workers."""
        shared = self.shared
        if self.args.bf16:
            shared.autocast = torch.bfloat16
        if self.args.gradient_checkpointing:
            shared.enable_gradient_checkpointing()
        for role in self.roles:
            shared.set_trainable(role, True)
        if self.workers > 1:
            shared.can_pack = all(gather(shared.can_pack))
            # New adapters are random, so all ranks get the adapters of rank 0. The reference is broadcast, too, because it may be
            # a copy of a random policy.
            for role in filter(None, [*self.roles, self.sampler.reference]):
                for parameter in shared.parameters_of(role):
                    dist.broadcast(parameter.data, src=0)

    def _scale_copied_critic(self, reward: Reward) -> None:
        """Scales the head of a critic that was copied from a reward, so that the critic predicts an episode's score."""
        normal = self.args.normalize_rewards
        mean, std = (reward.mean, reward.std) if normal else (0.0, 1.0)
        slope = reward.weight / std
        self.shared.heads["critic"].weight.data *= slope
        self.moments.center = -slope * mean  # the offset is stored here, because the head has no bias

    @property
    def stored_roles(self) -> list[str]:
        """Returns the roles whose weights training changes. Checkpoints contain these roles."""
        return [*self.roles, "reference"] if self.args.sync_ref_model else self.roles

    # ------------------------------------------------------------------------------------------ the loop

    def train(
        self, on_update: OnUpdate | None = None, evaluate: Evaluate | None = None
    ) -> list[dict[str, float]]:
        """Runs the remaining updates. Returns the logged metrics.

        Args:
            on_update: called after each update with its metrics, its number (from 1) and the total number of updates. If
                `on_update` returns True, training ends.
            evaluate: returns metrics of the policy on eval prompts. Every rank calls `evaluate` every `eval_steps` updates.
        """
        while self.update < self.total:
            metrics = self.run_update(evaluate)
            if self.args.logs(self.update, self.total):
                self.history.append(metrics)
            if on_update is not None and on_update(metrics, self.update, self.total):
                break
        return self.history

    def run_update(self, evaluate: Evaluate | None = None) -> dict[str, float]:
        """Runs one update, from prompts to metrics. Returns the metrics."""
        args = self.args
        rollout, kl_coef = self.make_experience(), self.kl_coef
        episodes = rollout.episodes
        if self.update == 0:
            raise_if_failed(checks.check_first_rollout(self, episodes))
            sums = checks.sums_of(self)
        with self.phases("update"):
            learning_metrics = self.learn(episodes)
        if self.update == 0:
            raise_if_failed([checks.ranks_learned_equally(self, sums, learning_metrics)])
        metrics = episode_metrics(args, episodes, rollout.raw, kl_coef) | learning_metrics
        metrics |= {"objective/kl_coef": kl_coef, "lr": self.scheduler.get_last_lr()[0]}
        config = self.rollout_config
        if config.corrects or config.staleness:
            # If old log-probs come from the training forward, only completions that enter the loss have old log-probs.
            mask = episodes.learn if self.reuses_training_forward else episodes.mask
            metrics |= off_policy_metrics(episodes, config, mask)

        self.scheduler.step()
        # While only the critic is trained, the KL stays 0, so the controller would lower the coefficient without reason.
        if args.kl_controller == "adaptive" and "policy" in self.learning:
            kl = metrics["objective/kl"]
            self.kl_coef = adapted_kl_coef(kl_coef, kl, args.batch_size, args.kl_target, args.kl_horizon)
        if args.normalize_values:
            old_std = self.moments.std
            self.moments.update(episodes.returns, episodes.learn)
            if self.moments.center is not None:  # rescales the head to keep the values (PopArt, 1602.07714)
                self.shared.heads["critic"].weight.data *= old_std / self.moments.std
        self.update += 1
        if args.sync_ref_model and self.update % args.ref_model_sync_steps == 0:
            self.shared.average("reference", "policy", 1.0 - args.ref_model_mixup_alpha)
        if evaluate is not None and args.evaluates(self.update, self.total):
            with self.phases("evaluate"), kept_rng_state():
                metrics |= evaluate()
        return metrics | {"episode": float(self.update * args.batch_size)} | self._costs(episodes, metrics)

    def _costs(self, episodes: Episodes, metrics: dict[str, float]) -> dict[str, float]:
        """Returns the update's speed, and the seconds and peak memory of each phase."""
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
        adapters = sum(isinstance(reward, AdapterReward) for reward in self.sampler.rewards)
        passes = count_passes(self.args, adapters, sampled_here=not self.rollouts.workers)
        own_tokens = sum(episodes.lengths())
        return costs | model_flops_utilization(self.device, self.shared.base, own_tokens, passes, seconds)

    # --------------------------------------------------------------------------------- rollout and scores

    def make_experience(self) -> Rollout:
        """Returns the next update's rollout with all its scores, log-probs, values and advantages."""
        with self.phases("rollout"):
            rollout = self.rollout()
        with self.phases("score"):
            self.score(rollout)
        with self.phases("values"):
            self.reference_logprobs(rollout)
            self.logprobs_and_values(rollout.episodes)
            if teacher := self.sampler.teacher:
                episodes, logprobs = teacher.as_seen(rollout.episodes), rollout.episodes.teacher_logprobs
                self.sampler.fill_logprobs(teacher.role, episodes, logprobs)
        losses.fill_advantages(self.args, self.rollout_config, rollout.episodes, self.kl_coef)
        return rollout

    def rollout(self) -> Rollout:
        """Samples `num_generations` completions to each prompt of this worker's share of the next update."""
        parts, first_episode = self.rollouts.chunks_for(self.update), self.update * self.args.batch_size
        if self.rollouts.workers:
            raise_if_failed(checks.check_rollout_workers(self, parts))
        return Rollout(parts, assemble_episodes(parts, first_episode, self.sampler.pad, self.device))

    def _chunks(self, update: int) -> list[Chunk]:
        """Returns this worker's share of an update as chunks, which are sampled and scored one by one."""
        args, count = self.args, self.args.prompts_per_update
        n, size = args.num_generations, args.decoded(self.workers)
        share = range(self.rank, count, self.workers)  # positions of this worker's prompts in the update
        order = prompt_order(update * count, count, self.prompts.per_epoch, args.seed, self.prompts.draws)
        rows = [self.prompts.rows[order[position]] for position in share]
        prompt_ids = [[int(i) for i in row["input_ids"]] for row in rows]
        first_episode = update * args.batch_size
        return [
            Chunk(
                update=update,
                rank=self.rank,
                number=number,
                version=max(0, update - self.rollout_config.staleness),
                rows=[i * n + g for i in indices for g in range(n)],
                prompt_ids=[prompt_ids[i] for i in indices],
                data=[rows[i]["row"] for i in indices],
                episodes=[first_episode + share[i] * n + g for i in indices for g in range(n)],
            )
            for number, indices in enumerate(split_into_chunks([len(ids) for ids in prompt_ids], size, n))
        ]

    def score(self, rollout: Rollout) -> None:
        """Fills the raw scores, `scores` and `greedy_scores`. Fills `learn` if truncated completions are excluded."""
        episodes = rollout.episodes
        rollout.raw = raw = {reward.name: [0.0] * len(episodes) for reward in self.sampler.rewards}
        for chunk, sampled in rollout.parts:
            if sampled.raw is None:
                self.sampler.score(chunk, sampled)
            for name, scores in (sampled.raw or {}).items():
                for row, score in zip(chunk.rows, scores, strict=True):
                    raw[name][row] = score
            if (greedy := sampled.greedy) and greedy.raw:
                totals = self._paid(greedy.raw, [completion.ended for completion in greedy.completions])
                prompt_totals = torch.tensor(totals, device=self.device)
                episodes.greedy_scores[chunk.rows] = prompt_totals.repeat_interleave(chunk.generations)
        totals = self._paid(raw, episodes.ended.tolist()) if self.sampler.rewards else [0.0] * len(episodes)
        episodes.scores = torch.tensor(totals, device=self.device, dtype=torch.float64)
        if self.args.mask_truncated_completions:
            episodes.learn = episodes.mask & episodes.ended.unsqueeze(-1)

    def _paid(self, raw: dict[str, list[float]], ended: list[bool]) -> list[float]:
        """Returns each completion's clipped weighted sum of scores, minus the penalty for truncation.

        The penalty is subtracted after clipping, because clipping could otherwise remove the penalty.
        """
        scores = weighted_sum(self.sampler.rewards, raw, self.args.normalize_rewards)
        limit, penalty = self.args.reward_clip, self.args.missing_eos_penalty or 0.0
        clipped = scores if limit is None else [min(max(s, -limit), limit) for s in scores]
        return [s if e else s - penalty for s, e in zip(clipped, ended, strict=True)]

    def reference_logprobs(self, rollout: Rollout) -> None:
        """Fills the reference's log-probs, which rollout workers may have computed already."""
        for chunk, sampled in rollout.parts:
            if sampled.ref_logprobs is None:
                self.sampler.reference_logprobs(chunk, sampled)
            assert sampled.ref_logprobs is not None
            width = sampled.ref_logprobs.shape[1]
            rollout.episodes.ref_logprobs[chunk.rows, :width] = sampled.ref_logprobs.to(self.device)

    @torch.no_grad()
    def logprobs_and_values(self, episodes: Episodes) -> None:
        """Computes old log-probs, values and bootstrap with the code of the training forward.

        Does nothing if the old log-probs come from the training forward itself.
        """
        if self.reuses_training_forward:
            return
        for rows, batch in self.sampler.parts_of(episodes):
            width = batch.mask.shape[1]
            states = forward.action_states(self.shared, "policy", batch)
            # Does not use the sampler's log-probs, because they differ by rounding and the first ratio must be exactly 1.
            episodes.old_logprobs[rows, :width] = self.sampler.logprobs("policy", batch, states=states)[0]
            if self.args.uses_critic:
                values, last_value = self.values(batch, None if self.args.has_critic_adapter else states)
                values, last_value = (self.moments.raw(output) for output in (values, last_value))
                episodes.values[rows, :width] = values.where(batch.mask, 0.0)
                # After EOS, the value is 0. A truncated completion would have continued, so the critic's value is used.
                episodes.bootstrap[rows] = last_value.where(~batch.ended, 0.0)

    @property
    def reuses_training_forward(self) -> bool:
        """Returns True if old log-probs come from the training forward.

        Returns False in the first update, because its self-checks need old log-probs before the training forward.
        """
        return self.args.learns_in_one_forward and self.update > 0 and not self.rollout_config.corrects

    def values(self, episodes: Episodes, states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the critic's values (B, R) before each action, and (B,) after the last action.

        Args:
            states: the critic's hidden states. If `states` is None, this method computes the hidden states.
        """
        states = forward.action_states(self.shared, "critic", episodes) if states is None else states
        values = self.shared.head("critic", states)
        return values[:, :-1], values[:, -1]

    # ----------------------------------------------------------------------------------------- learning

    @property
    def learning(self) -> list[str]:
        """Returns the roles that learn in this update: in the first `critic_warmup_steps` updates, only the critic."""
        return self.roles if self.update >= self.args.critic_warmup_steps else ["critic"]

    def learn(self, own: Episodes) -> dict[str, float]:
        """Runs an optimizer step for each minibatch of each epoch. Returns the means of the steps' statistics.

        `policy/first_ratio_error` is the root mean square of the log-ratio before the first step, in nats. If this error is
        larger than rounding errors, old and new log-probs come from different policies.

        Args:
            own: the episodes that this worker has sampled.
        """
        args, steps, episodes = self.args, 0, own.gathered(self.args.batch_size)
        sums: dict[str, float] = {}
        first_ratio: dict[str, float] = {}
        actions = episodes.learn.sum(-1).tolist()
        for minibatch in minibatches(args, self.update):
            learned = [row for row in minibatch.tolist() if actions[row]]
            totals = Totals.of(episodes.learn[learned])
            if not totals.actions:
                continue  # without actions, Adam's momentum would still change the weights
            packs = self._packs(episodes, learned)
            share = deal(episodes.lengths(packs), self.workers)[self.rank]
            rows = [row for i in share for row in packs[i]]
            self.optimizer.zero_grad(set_to_none=True)
            with cast_once():
                summed = self.accumulate(episodes, rows, totals)
            stats = self.sync(summed)
            # The KL is equal on all workers, so all workers take the same branch below.
            approxkl = stats.get("policy/approxkl_avg", 0.0)
            if "policy" in self.learning and not first_ratio:
                rms = first_ratio["policy/first_ratio_error"] = (2 * approxkl) ** 0.5
                if self.update == args.critic_warmup_steps:
                    # Later updates only report the error, because one outlier should not end a long run.
                    raise_if_failed([checks.first_ratio(self.shared, rms)])
            if args.target_kl and approxkl > 1.5 * args.target_kl:
                break  # skips this optimizer step and the rest of the update
            stats |= self.optimizer_step()
            sums = {key: sums.get(key, 0.0) + value for key, value in stats.items()}
            steps += 1
        if self.reuses_training_forward and self.workers > 1:
            old = all_reduce(episodes.old_logprobs)  # only one worker has a row's log-probs; all others add 0
            own.old_logprobs = old[own.indices, : own.mask.shape[1]]
        counts = {"policy/steps": float(steps), "skipped_steps": float(self.skipped_steps)}
        return {key: value / max(steps, 1) for key, value in sums.items()} | first_ratio | counts

    def accumulate(self, episodes: Episodes, rows: list[int], totals: Totals) -> dict[str, Tensor]:
        """Runs forward and backward of this worker's rows of a minibatch, in micro-batches. Returns summed statistics.

        The backward of an adapter runs before the forward of the next adapter. Only one role's activations are therefore in
        memory, and a checkpointed layer is recomputed with the adapter of its forward. A critic that is a head on the policy
        reads the policy's hidden states, and one backward trains both. If only the critic learns, the backward trains only the
        head.

        Args:
            totals: numbers of actions and completions in the complete minibatch, over all workers.
        """
        args, policy = self.args, "policy" in self.learning
        names = POLICY_STATS * policy + VALUE_STATS * args.uses_critic
        total = {name: torch.zeros((), device=self.device) for name in names}
        for micro_batch in forward.micro_batches_of(self.shared, episodes, rows, *self.limits):
            batch = episodes.take(micro_batch)
            loss = torch.zeros((), device=self.device)
            stats: tuple[Tensor, ...] = ()
            if policy or not args.has_critic_adapter:
                with torch.set_grad_enabled(policy):
                    states = forward.action_states(self.shared, "policy", batch)
            if policy:
                logprobs, entropy = self.sampler.logprobs("policy", batch, args.entropy_coef > 0, states)
                if self.reuses_training_forward:
                    batch.old_logprobs = logprobs.detach()
                    episodes.old_logprobs[micro_batch, : batch.mask.shape[1]] = batch.old_logprobs
                loss, stats = losses.policy_objective(args, batch, totals, logprobs, entropy, self.kl_coef)
            if args.has_critic_adapter:
                if policy:
                    loss.backward()
                loss, states = torch.zeros_like(loss), forward.action_states(self.shared, "critic", batch)
            if args.uses_critic:
                values, _ = self.values(batch, states)
                value_loss, value_stats = losses.value_objective(args, batch, totals, values, self.moments)
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
            *sums, values = flat.split([*(p.numel() for p in parameters), len(values)])
            for parameter, grad in zip(parameters, sums, strict=True):
                parameter.grad = grad.view_as(parameter)
        return dict(zip(stats, values.tolist(), strict=True))

    def optimizer_step(self) -> dict[str, float]:
        """Clips the gradients of policy and critic. Runs the optimizer if all gradient norms are finite. Returns the norms."""
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
        """Groups the rows of a minibatch into packs of completions. Limits the packs' size to balance load over the workers."""
        completions, tokens = self.limits
        if self.workers > 1:
            lengths = episodes.lengths()
            fair_share = sum(lengths[row] for row in rows) // (2 * self.workers)
            tokens = min(tokens or fair_share, fair_share)
        return forward.in_packs(self.shared, episodes, rows, completions, tokens)

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Returns the maximum (completions, tokens) of a micro-batch in training."""
        tokens = self.args.max_tokens_per_micro_batch
        return (None, tokens) if tokens else (self.args.per_device_train_batch_size, None)

    def save(self, folder: str | Path) -> None:
        """Writes everything that `restore` needs to continue bit-identically on a CPU. Every rank calls this method.

        Rank 0 writes adapters, optimizer and state. Every rank writes its random state. The caller commits the folder
        atomically. `restore` loads no pickle: tensors are in safetensors files or in torch.save files that are read with
        weights_only, and other data is JSON.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(rng_state(), folder / f"rng_{self.rank}_of_{self.workers}.pt")
        if self.rank != 0:
            return
        for role in self.stored_roles:
            self.shared.save(role, folder / role)
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        if self.rollouts.versions:
            self.rollouts.versions.save(folder, self.update)
        state = {
            **{key: getattr(self, key) for key in STATE},
            "returns": vars(self.moments),
            "scheduler": self.scheduler.state_dict(),
            "decoding": {"workers": self.workers, "rows": self.sampler.rows},
        }
        (folder / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")

    def restore(self, folder: str | Path) -> None:
        """Continues from a folder written by `save`. Every rank calls this method.

        Random states are restored only for the same number of workers. Only rewards in evaluations use these random states.
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
        # Rounding depends on the number of rows decoded at once. Therefore, the checkpoint's number is restored, unless fewer
        # rows fit now.
        rows, fitting_rows = state["decoding"]["rows"], self.sampler.rows
        same = state["decoding"]["workers"] == self.workers and not self.args.local_rollout_forward_batch_size
        if rows and fitting_rows and same:
            self.sampler.rows = min(rows, fitting_rows)
        if self.rollouts.versions:
            self.rollouts.versions.load(folder)
        random_state = folder / f"rng_{self.rank}_of_{self.workers}.pt"
        if random_state.exists():
            set_rng_state(torch.load(random_state, weights_only=True))
