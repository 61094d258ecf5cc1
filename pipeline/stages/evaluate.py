"""What did it bring? A policy and a baseline answer the same held-out prompts, side by side; the reward model is judged on held-out pairs.

    make evaluate    or    python -m pipeline evaluate jobs/demo/evaluate.yaml [section.key=value ...]

Nothing is trained and nothing is registered; the figures go to result.json and MLflow.
"""

from typing import Any

from pipeline.config import Job
from pipeline.run import launch
from pipeline.worker import Worker


def run(job: Job) -> dict[str, Any]:
    return launch(job, train)


def train(worker: Worker) -> dict[str, Any]:
    from pipeline import evaluation, roles
    from pipeline.ppo.config import PPOConfig

    args = PPOConfig(**worker.job.trainer)
    shared = roles.shared_base(worker)
    policy, baseline = None, None  # the bare base, unless the job names an adapter
    if "policy" in worker.work.inputs:
        shared.add(policy := "policy", folder=worker.input("policy"))
    if "baseline" in worker.work.inputs:
        shared.add(baseline := "reference", folder=worker.input("baseline"))
    rewards = roles.add_rewards(worker, shared)
    metrics, samples = evaluation.compare(
        worker,
        shared,
        worker.rows("eval"),
        evaluation.sampling(worker, shared, args),
        rewards,
        roles.judge(worker),
        policy,
        baseline,
    )
    pairs = worker.rows("pairs")
    if pairs is not None and "reward" in shared.roles:
        metrics |= evaluation.pair_accuracy(worker, shared, "reward", pairs)
    return worker.finish(metrics, samples=samples)
