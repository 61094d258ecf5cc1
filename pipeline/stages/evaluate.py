"""What did it bring? A policy and a baseline answer the same held-out prompts, side by side; a reward model is judged on pairs.

    make evaluate    or    python -m pipeline evaluate jobs/demo/evaluate.yaml [section.key=value ...]
    make evaluate ARGS="policy=null baseline=null judge=null data.eval=null"      the reward model alone, on data.pairs

Nothing is trained and nothing is registered; the figures go to result.json, evaluation.json (with tables) and MLflow. A
`gate` says what they must show: if it holds, the alias moves to the registered policy (or, alone, reward) that was evaluated.

Inference runs in Ray Train's workers and not in Ray Data's actors: they have the rank, the gathering of results, the MLflow
run and the restart after a lost node already, and scale over rows just as well.
"""

from typing import Any

from pipeline import registry, storage
from pipeline.config import Job
from pipeline.resume import begun
from pipeline.run import launch
from pipeline.worker import Worker


def run(job: Job) -> dict[str, Any]:
    result = launch(job, train)
    folder = result["folder"]
    found = begun.read_left(storage.join(folder, "evaluation.json"), {"pairs": dict, "metrics": dict})
    if found["pairs"]:
        from pipeline.evaluation.pairs import table

        print("\n" + table(found["pairs"]), flush=True)
    inputs = result.get("inputs", {})
    judged = inputs.get("policy") or inputs.get("reward.0")
    if job.gate and judged:
        version = registry.promote(job, judged, result["metrics"])
        print(f"   {version}  (gate {version.gate})", flush=True)
        result |= {"registered_model": version.name, "version": version.version}
        result |= {"alias": version.alias, "gate": version.gate}
        storage.write_json(storage.join(folder, "result.json"), result)
    return result


def train(worker: Worker) -> dict[str, Any]:
    from pipeline import evaluation, roles
    from pipeline.evaluation import pairs
    from pipeline.ppo.config import PPOConfig

    args = PPOConfig(**worker.job.trainer)
    shared = roles.shared_base(worker)
    rewards, judge = roles.add_rewards(worker, shared), roles.judge(worker, shared)
    metrics: dict[str, float] = {}
    samples: list[dict[str, Any]] = []
    tables: dict[str, Any] = {}
    prompts, preferences = worker.rows("eval"), worker.rows("pairs")
    if prompts is not None:
        metrics, samples = evaluation.compare(
            worker,
            shared,
            prompts,
            evaluation.sampling(worker, shared, args),
            rewards,
            judge,
            policy=roles.add_frozen(worker, shared, "policy", "policy"),
            baseline=roles.add_frozen(worker, shared, "baseline", "reference"),
        )
    if preferences is not None:
        found, tables = pairs.judge_rewards(worker, rewards, judge, preferences)
        metrics |= found
    if worker.rank == 0:
        written = {"metrics": metrics, "inputs": worker.work.inputs, "samples": samples, "pairs": tables}
        storage.write_json(storage.join(worker.job.folder, "evaluation.json"), written)
    return worker.finish(metrics, samples=samples)
