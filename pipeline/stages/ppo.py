"""PPO: the sft adapter writes completions, rewards score them, and what scores well becomes more likely.

    make ppo    or    python -m pipeline ppo jobs/demo/ppo.yaml [section.key=value ...]

Our own trainer (pipeline/ppo) on one frozen base: policy, reference, reward and critic are adapters on it. The policy starts
as the sft adapter and that adapter, frozen, is the reference; the critic starts as the reward adapter with its head, or is a
head on the policy (trainer.critic). The policy answers held-out prompts before and after training, which decides the gate,
and every trainer.eval_steps updates.
"""

import os
from dataclasses import replace
from typing import Any

from pipeline.config import Job
from pipeline.runtime.run import launch
from pipeline.runtime.worker import Worker


def run(job: Job) -> dict[str, Any]:
    if not job.rollout_config.workers[1]:
        return launch(job, train)
    from pipeline.rollout.pool import rollout_pool

    return launch(job, train, companion=rollout_pool)


def train(worker: Worker) -> dict[str, Any]:
    from transformers import set_seed

    from pipeline import evaluation
    from pipeline.models.tokenizer import warn_of_endless
    from pipeline.planning import plan
    from pipeline.ppo import clock
    from pipeline.ppo.trainer import PPOTrainer
    from pipeline.runtime import best, roles

    args = replace(worker.job.args, gradient_checkpointing=plan.recomputes(worker))
    rollout_workers = None
    if worker.companion:
        from pipeline.rollout.client import Client  # imports Ray

        rollout_workers = Client(worker, worker.companion)
    set_seed(args.seed)  # new adapters are made of random numbers: the same ones on every rank
    shared = roles.shared_base(worker)
    reference = roles.add_policy(worker, shared, args)
    rewards = roles.add_rewards(worker, shared)
    copied = roles.add_critic(worker, shared, args) if args.uses_critic else None

    held_out, mixture = worker.rows("eval"), worker.work.mixture
    comparison = held_out is not None and evaluation.Comparison(
        worker, shared, held_out, rewards, roles.judge(worker, shared), roles.start(worker, shared, reference)
    )

    learning = {str(i): parameter for i, parameter in enumerate(shared.parameters_of("policy"))}
    tracked = best.Best.of(worker.job, learning, worker.report)

    def on_update(metrics: dict[str, float], update: int, total: int) -> bool:
        if update == 1 and worker.rank == 0:
            warn_of_endless(1.0 - metrics["completions/clipped_ratio"], "the first completions")
        if args.logs(update, total):
            worker.log(metrics, update, total)
        if tracked and args.evaluates(update, total):
            tracked.compare(metrics, update)
        due = update == total or (args.save_steps and update % args.save_steps == 0)
        if worker.notice.poll(update) or due:
            folder = os.path.join(worker.scratch, f"checkpoint-{update}")
            trainer.save(folder)
            if tracked and worker.rank == 0:
                tracked.save(folder)
            worker.checkpoint(folder, update)
        return bool(tracked and tracked.exhausted)

    def logged() -> dict[int, dict[str, float]]:
        """Returns {update: its metrics} of all logged updates, including the last one and each evaluated one."""
        return {int(metrics["episode"]) // args.batch_size: metrics for metrics in trainer.history}

    with roles.trainers_decoder(worker, shared, args) as decoder:
        trainer = PPOTrainer(
            shared,
            worker.tokenizer,
            args,
            prompts=worker.rows("train"),
            rewards=rewards,
            evaluate=(lambda: comparison.of("policy")[0]) if comparison else None,
            decoder=decoder,
            on_update=on_update,
            draws=(lambda epoch: mixture.rows(epoch, args.seed)) if mixture else None,
            rollout=worker.job.rollout_config,
            rollout_workers=rollout_workers,
            critic_reward=next((reward for reward in rewards if reward.name == copied), None),
        )
        if rollout_workers:
            rollout_workers.begin(trainer)
        if worker.resume:
            trainer.restore(worker.resume)
            worker.replay(list(logged().items()))
            if tracked:
                tracked.load(worker.resume)
        if worker.rank == 0:
            print(f"training; each update samples {args.batch_size} completions", flush=True)
        if not (tracked and tracked.exhausted):
            trainer.train()

    if tracked and comparison and trainer.update == trainer.total:
        tracked.compare(comparison.of("policy")[0], trainer.update)
    kept = tracked.restore() if tracked else None
    worker.end = best.outcome(tracked, kept, trainer.update, trainer.total)
    worker.usage = {"tokens": trainer.tokens, "completions": trainer.update * args.batch_size}
    worker.end["timeline"] = clock.typical(trainer.timelines)
    update = logged()[worker.end["kept"]["step"]]
    metrics = {name: value for name, value in update.items() if not name.endswith("/evaluate")}
    samples: list[dict[str, Any]] = []
    if comparison:
        figures, samples = comparison.of("policy")
        metrics |= figures
    prompts = worker.rows("train")
    probe = [list(row["input_ids"]) for row in prompts.select(range(min(4, len(prompts))))]
    return worker.finish(
        metrics,
        save=lambda folder: roles.save_policy(worker, shared, folder),
        outputs=lambda folder: roles.outputs(shared, probe, folder),
        samples=samples,
    )
