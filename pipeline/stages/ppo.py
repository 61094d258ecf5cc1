"""PPO: the policy samples completions, rewards score them, and the policy learns to raise their scores.

    make ppo    or    python -m pipeline ppo jobs/demo/ppo.yaml [section.key=value ...]

The trainer is in pipeline/ppo. Policy, reference, reward and critic are adapters on one frozen base. The policy starts as the
sft adapter, and the frozen sft adapter is the reference. The critic starts as the reward adapter with its head, or is a head
on the policy (trainer.critic). The stage evaluates the policy on eval prompts before training, every trainer.eval_steps updates,
and after training. The gate reads the last evaluation.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.run.launch import Recipe
from pipeline.run.worker import Outcome, Worker
from pipeline.settle.work import Work

if TYPE_CHECKING:
    from pipeline.ppo.trainer import PPOTrainer
    from pipeline.run.best import Best
    from pipeline.stages.comparison import Comparison


def rollout_workers(work: Work) -> AbstractContextManager[Any]:
    """Runs the rollout workers of the job, if it has any, while its training workers train."""
    if not work.places.rollout:
        return nullcontext()
    from pipeline.rollout.pool import rollout_pool  # imports Ray

    return rollout_pool(work)


def train(worker: Worker) -> dict[str, Any]:
    from transformers import set_seed

    from pipeline.planning import plan
    from pipeline.ppo import teacher as teachers
    from pipeline.ppo.episodes import Prompts
    from pipeline.ppo.sampler import Roles, Sampler
    from pipeline.ppo.trainer import PPOTrainer
    from pipeline.run import best, roles
    from pipeline.stages import comparison as evaluation

    args = replace(worker.args, gradient_checkpointing=plan.recomputes_activations(worker))
    client = None
    if worker.companion:
        from pipeline.rollout.client import PoolClient  # imports Ray

        client = PoolClient(worker, worker.companion)
    set_seed(args.seed)  # every rank initializes new adapters with the same random numbers
    shared = roles.shared_base(worker)
    reference = roles.add_policy(worker, shared, args)
    rewards = roles.add_rewards(worker, shared)
    critic_source = roles.add_critic(worker, shared, args) if args.uses_critic else None
    teacher = None
    if args.teacher_coef:
        role = roles.add_frozen(worker, shared, "teacher", "teacher")
        prompts = worker.rows("train")["input_ids"]
        teacher = teachers.make_teacher(role, args.teacher_system, worker.tokenizer, prompts)
    held_out, mixture, comparison = worker.rows("eval"), worker.work.mixture, None
    if held_out is not None:
        judge, baseline = roles.load_judge(worker, shared), roles.start_role(worker, shared, reference)
        comparison = evaluation.Comparison(worker, shared, held_out, rewards, judge, baseline)
    parameters = {str(i): parameter for i, parameter in enumerate(shared.parameters_of("policy"))}
    tracker = best.make_tracker(worker.work.run, worker.work.gate, parameters, worker.report)

    with roles.trainers_decoder(worker, shared, args) as decoder:
        critic_reward = next((reward for reward in rewards if reward.name == critic_source), None)
        models = Roles(shared, rewards, critic_reward, teacher)
        draws = (lambda epoch: mixture.rows(epoch, args.seed)) if mixture else None
        trainer = PPOTrainer(
            Sampler(models, worker.tokenizer, args, decoder),
            Prompts(worker.rows("train"), draws),
            worker.work.rollout,
            client,
            roles.folders_of_roles(worker, shared),
        )
        if client:
            client.begin(trainer)
        if worker.resume:
            trainer.restore(worker.resume)
            worker.replay(list(_logged(trainer).items()))
            if tracker:
                tracker.load(worker.resume)
        if worker.rank == 0:
            print(f"training; each update samples {args.batch_size} completions", flush=True)
        if not (tracker and tracker.exhausted):
            evaluate = (lambda: comparison.of("policy")[0]) if comparison else None
            trainer.train(partial(_after_update, worker, trainer, tracker), evaluate)
    return _finish(worker, trainer, tracker, comparison)


RECIPE = Recipe(train, companion=rollout_workers)


def _after_update(
    worker: Worker,
    trainer: PPOTrainer,
    tracker: Best | None,
    metrics: dict[str, float],
    update: int,
    total: int,
) -> bool:
    """Logs an update, tracks the best evaluation, and saves a checkpoint if one is due. Returns True if training must stop."""
    from pipeline.models.tokenizer import warn_of_endless
    from pipeline.scoring.judges.reward import JudgeReward

    args = trainer.args
    if update == 1 and worker.rank == 0:
        warn_of_endless(1.0 - metrics["completions/clipped_ratio"], "the first completions")
    if args.logs(update, total):
        judges = [reward for reward in trainer.sampler.rewards if isinstance(reward, JudgeReward)]
        costs = {judge.name: judge.client.store.costs(judge.definition) for judge in judges}
        extra = {f"judges/{name}/{key}": value for name, cost in costs.items() for key, value in cost.items()}
        worker.log(metrics | extra, update, total)
    if tracker and args.evaluates(update, total):
        tracker.compare(metrics, update)
    is_due = update == total or (args.save_steps and update % args.save_steps == 0)
    if worker.notice.poll(update) or is_due:
        folder = os.path.join(worker.scratch, f"checkpoint-{update}")
        trainer.save(folder)
        if tracker and worker.rank == 0:
            tracker.save(folder)
        worker.checkpoint(folder, update)
    return bool(tracker and tracker.exhausted)


def _logged(trainer: PPOTrainer) -> dict[int, dict[str, float]]:
    """Returns {update: metrics} of all logged updates. The last update and every update with an evaluation are logged."""
    return {int(metrics["episode"]) // trainer.args.batch_size: metrics for metrics in trainer.history}


def _finish(
    worker: Worker, trainer: PPOTrainer, tracker: Best | None, comparison: Comparison | None
) -> dict[str, Any]:
    """Restores the best weights, evaluates them, and saves the policy. Returns the result of Worker.finish."""
    from pipeline.run import best, roles

    shared, last = trainer.shared, None
    if tracker and comparison and trainer.update == trainer.total:
        last = comparison.of("policy")
        tracker.compare(last[0], trainer.update)
    best_step = tracker.restore() if tracker else None
    end = best.describe_end(tracker, best_step, trainer.update, trainer.total)
    update = _logged(trainer)[end["kept"]["step"]]
    metrics = {name: value for name, value in update.items() if not name.endswith("/evaluate")}
    usage = {"tokens": trainer.tokens, "completions": trainer.update * trainer.args.batch_size}
    outcome = Outcome(metrics, end, usage)
    if comparison:
        evaluation = last if last and end["kept"]["step"] == trainer.update else comparison.of("policy")
        results, outcome.samples = evaluation
        outcome.metrics |= results
    prompts = worker.rows("train")
    probe = [list(row["input_ids"]) for row in prompts.select(range(min(4, len(prompts))))]
    return worker.finish(
        outcome,
        save=lambda folder: roles.save_policy(worker, shared, folder),
        outputs=lambda folder: roles.policy_outputs(shared, probe, folder),
    )
