"""Evaluation: compares a policy with a baseline on eval prompts, and tests a reward model on eval pairs.

    make evaluate    or    python -m pipeline evaluate jobs/demo/evaluate.yaml [section.key=value ...]
    make evaluate ARGS="policy=null baseline=null judge=null data.eval=null"      the reward model alone, on data.pairs

`evaluate` trains and registers nothing. The metrics go to result.json, evaluation.json (with tables) and MLflow. If the `gate`
of the job passes, the alias moves to the evaluated policy, or to the evaluated reward if there is no policy.

Inference runs in Ray Train's workers, because they gather results, log to MLflow and restart after a lost node. The workers write
their results in parts, from which a killed evaluation resumes.
"""

from typing import Any

from pipeline import registry, run_folder
from pipeline.run.launch import Recipe
from pipeline.run.summary import best_of_n_table, probes_table, subsets_table
from pipeline.run.worker import Outcome, Worker
from pipeline.run_folder import Result
from pipeline.settle.work import Work
from pipeline.system import storage, terminal


def show_tables(result: Result) -> None:
    """Prints the tables of evaluation.json, and the faults of the reward."""
    evaluation = storage.read_json(storage.join(result["folder"], run_folder.EVALUATION))
    tables = [subsets_table(subsets)] if (subsets := evaluation["pairs"].get("subsets")) else []
    for name, benchmark in evaluation["benchmarks"].items():
        tables.append(subsets_table({**benchmark["subsets"], **benchmark["levels"]}, name, "rows", "score"))
    if evaluation["probes"]:
        tables.append(probes_table(evaluation["probes"]))
    if evaluation["best_of_n"]:
        tables.append(best_of_n_table(evaluation["best_of_n"]))
    for fault in evaluation["pairs"].get("faults", ()):
        terminal.say(f"warning: data.pairs: {fault}", result=True)
    for table in tables:
        terminal.say(f"\n{table}", result=True)


def promote_policy(work: Work, result: Result) -> registry.Version | None:
    """Moves the alias to the evaluated version, if the job has a gate and the metrics pass it."""
    versions = work.versions
    candidate = versions.get("policy") or versions.get("reward.0")
    if not (work.gate.conditions and candidate):
        return None
    other_versions = {name: version for name, version in versions.items() if version != candidate}
    measured = registry.measured_on(work.digests, other_versions, work.gate)
    return registry.promote(work.uri, work.gate, candidate, result["metrics"], measured)


def train(worker: Worker) -> dict[str, Any]:
    from pipeline.models.tokenizer import eos_ids, warn_of_endless
    from pipeline.run import roles
    from pipeline.stages import benchmarks, pairs, probes
    from pipeline.stages import comparison as evaluation

    shared = roles.shared_base(worker)
    rewards, judge = roles.add_rewards(worker, shared), roles.load_judge(worker, shared)
    metrics: dict[str, float] = {}
    samples: list[dict[str, Any]] = []
    tables: dict[str, Any] = {"pairs": {}, "benchmarks": {}, "probes": {}, "best_of_n": []}
    prompts, preferences, benchmark_rows = (worker.rows(name) for name in ("eval", "pairs", "benchmarks"))
    ends = eos_ids(worker.tokenizer)
    if prompts is not None:
        policy = roles.add_frozen(worker, shared, "policy", "policy")
        baseline = roles.add_frozen(worker, shared, "baseline", "reference")
        decoder = roles.make_decoder(worker, shared, [policy, baseline])
        comparison = evaluation.Comparison(worker, shared, prompts, rewards, judge, baseline, decoder)
        metrics, samples = comparison.of(policy)
        metrics |= comparison.length_controlled()
        if n := worker.args.best_of_n:
            tables["best_of_n"] = comparison.best_of(policy, n)
            metrics["eval_best_of_n"] = tables["best_of_n"][-1]["gold"]
        if worker.rank == 0:
            warn_of_endless(metrics["eval_eos_rate"], "the policy's completions")
    if preferences is not None:
        results, tables["pairs"] = pairs.measure_pairs(worker, rewards, judge, preferences, ends)
        metrics |= results
        if worker.args.probes:
            results, tables["probes"] = probes.measure_probes(worker, rewards, preferences, ends)
            metrics |= results
    if benchmark_rows is not None:
        results, tables["benchmarks"] = benchmarks.measure_benchmarks(worker, rewards, benchmark_rows, ends)
        metrics |= results
    if worker.rank == 0:
        document = {"metrics": metrics, "inputs": worker.work.versions, "samples": samples, **tables}
        worker.work.lease.require()
        storage.write_json(storage.join(worker.work.folder, run_folder.EVALUATION), document)
    return worker.finish(Outcome(metrics, samples=samples))


RECIPE = Recipe(train, register=promote_policy, show=show_tables)
