"""One run, seen from the driver: check everything, prepare the data, train on the cluster, register, say what came out.

    launch(job, train) -> the content of result.json

Whatever can be wrong is found before the first worker starts, and nothing is written to the registry until an
adapter exists, reloads as it was saved, and has been compared with what the store gives back.
"""

import importlib
import os
import time
from dataclasses import replace
from typing import Any

from pipeline import cluster, console, lineage, registry, storage
from pipeline.cluster import Outcome
from pipeline.config import Job
from pipeline.errors import InputError
from pipeline.worker import Work

UNINTERESTING = ("runtime", "per_second", "num_tokens")  # of an evaluation's figures


def launch(job: Job, train: Any) -> dict[str, Any]:
    """Runs one stage from its job to its result.json; `train(worker)` is what every worker executes.

    Raises:
        InputError: when the job, the data or an input is wrong; nothing has been registered then.
    """
    started = time.monotonic()
    job = cluster.name_run(job)
    if done := finished(job):
        return done
    storage.require_writable(job.run.storage_path)
    registry.check(job)
    job, inputs = pin_inputs(job)
    print(f"\n== {job.stage}  run {job.run.name}  {job.source}", flush=True)
    with cluster.session(job):
        work, rows, report = prepare(job, inputs)
        print(report.render(), flush=True)
        with registry.run(job, work.digests) as run_id:
            outcome = cluster.fit(replace(work, run_id=run_id), rows, train)
            version = None
            if job.mlflow.registered_model and outcome.adapter:
                facts = lineage.read(outcome.adapter, outcome.adapter)
                version = registry.publish(job, run_id, outcome.adapter, outcome.metrics, facts)
            result = describe(job, work, report, outcome, version, run_id, time.monotonic() - started)
            storage.write_json(storage.join(cluster.folder(job), "result.json"), result)
    say(result)
    return result


def finished(job: Job) -> dict[str, Any] | None:
    """The result of a run of this name that already ended; `run.fresh=true` clears it away instead."""
    path = storage.join(cluster.folder(job), "result.json")
    if job.run.fresh:
        storage.remove(cluster.folder(job))
    if not storage.exists(path):
        return None
    result = storage.read_json(path)
    if result["stage"] != job.stage:
        raise InputError(
            f"run.name: {job.run.name!r} is the name of a finished {result['stage']} run in {job.run.storage_path}; "
            f"choose another name, e.g. run.name={job.stage}-{job.run.name}"
        )
    print(
        f"run {job.run.name} is finished ({path}); run.fresh=true starts it over, another run.name starts a new one"
    )
    return result


def prepare(job: Job, inputs: dict[str, str]) -> tuple[Work, dict[str, Any], Any]:
    """All that workers start from: tokenizer, base, inputs that fit to it; the tokenised rows by name; their report."""
    from pipeline.data.read import prepare as prepare_data
    from pipeline.models.base import base_identity, check_weights
    from pipeline.models.tokenizer import load_tokenizer

    model = job.model
    base = base_identity(model.name_or_path, model.revision)
    check_weights(model)
    policy = check_adapters(job, inputs, base).get("policy")
    template = model.chat_template
    if template is None and policy and os.path.exists(saved := os.path.join(policy, "chat_template.jinja")):
        template = saved  # the one that the policy was trained with
    tokenizer = load_tokenizer(model.name_or_path, model.revision, template, model.trust_remote_code)
    cache = job.data.cache_dir or storage.join(job.run.storage_path, "data")
    room = room_for_prompts(job, base["context_length"])
    data = prepare_data(job.stage, job.data, tokenizer, room, cache, packing=bool(job.trainer.get("packing")))
    rows = {name: found for name in ("train", "eval") if (found := getattr(data, name)) is not None}
    digests, fingerprints = dict(data.digests), dict(data.fingerprints)
    if job.data.pairs:
        held_out = replace(job.data, eval=job.data.pairs, max_length=None)
        pairs = prepare_data("rm", held_out, tokenizer, base["context_length"], cache)
        rows["pairs"], digests["pairs"] = pairs.eval, pairs.digests["eval"]
        fingerprints["pairs"] = pairs.fingerprints["eval"]
    work = Work(job, tokenizer, base, digests, fingerprints, run_id="", inputs=inputs)
    return work, rows, data.report


def room_for_prompts(job: Job, context: int | None) -> int | None:
    """The longest row: the context, less the reply that `ppo` and `evaluate` still have to write into it."""
    if context is None or job.stage not in ("ppo", "evaluate"):
        return context
    from pipeline.ppo.config import PPOConfig

    reply = PPOConfig(**job.trainer).response_length
    if reply >= context:
        raise InputError(
            f"trainer.response_length: {reply} tokens leave no room for a prompt in the model's context of {context}; "
            f"type trainer.response_length={context // 2}"
        )
    return context - reply


def pin_inputs(job: Job) -> tuple[Job, dict[str, str]]:
    """Every model that the job names, by version instead of alias, so that it cannot change while the job runs.

    A base given as `models:/name@alias` stands for the base that this version was trained on.
    """
    uri = registry.tracking_uri(job)
    if job.model.name_or_path.startswith("models:/"):
        reference = registry.pin(job.model.name_or_path, uri)
        base = lineage.read(registry.fetch(reference, uri), reference)["base"]
        job = replace(
            job, model=replace(job.model, name_or_path=base["name_or_path"], revision=base["revision"])
        )
    inputs = {}
    for name in ("policy", "baseline"):
        if (reference := getattr(job, name)) and reference != "base":
            inputs[name] = registry.pin(reference, uri)
    for index, (source, _) in enumerate(job.rewards):
        inputs[f"reward.{index}"] = registry.pin(source, uri)
    for source in [*inputs.values(), job.judge or ""]:
        if source.startswith("python:"):
            check_function(source)
    return job, inputs


def check_adapters(job: Job, inputs: dict[str, str], base: dict[str, Any]) -> dict[str, str]:
    """{input: local folder} of those inputs that are adapters; each must have been trained on the job's base.

    Raises:
        InputError: when an adapter is missing or belongs to another base.
    """
    adapters = {}
    for name, reference in inputs.items():
        if reference.startswith("python:"):
            continue
        folder = registry.fetch(reference, registry.tracking_uri(job))
        if name.startswith("reward") and not lineage.is_adapter(folder):
            continue  # a reward model of its own: it brings its base along
        lineage.check_base(lineage.read(folder, reference), base, name, reference)
        adapters[name] = folder
    return adapters


def check_function(source: str) -> None:
    """Proves that `python:module:function` can be imported.

    Raises:
        InputError: naming the module or the function that is missing.
    """
    module_name, _, function = source.removeprefix("python:").partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not module_name.startswith(error.name):
            raise  # the module is there; something that it imports is not
        raise InputError(
            f"{source}: no module {module_name!r} can be imported from {os.getcwd()} (PYTHONPATH adds folders)"
        ) from error
    if not callable(getattr(module, function, None)):
        there = (
            ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")) or "none"
        )
        raise InputError(f"{source}: {module_name} has no function {function!r} (functions there: {there})")


def describe(
    job: Job,
    work: Work,
    report: Any,
    outcome: Outcome,
    version: registry.Version | None,
    run_id: str,
    seconds: float,
) -> dict[str, Any]:
    """What result.json says: how a script, or the next stage, learns what happened."""
    return {
        "stage": job.stage,
        "name": job.run.name,
        "metrics": outcome.metrics,
        "samples": outcome.samples,
        "checkpoint": outcome.checkpoint,
        "adapter": outcome.adapter,
        "mlflow_run_id": run_id,
        "tracking_uri": registry.tracking_uri(job),
        "registered_model": version.name if version else None,
        "version": version.version if version else None,
        "alias": version.alias if version else None,
        "gate": version.gate if version else None,
        "inputs": work.inputs,
        "data": {"digests": work.digests, "report": report.to_dict()},
        "seconds": round(seconds, 2),
        "train_seconds": round(outcome.seconds, 2),
        "peak_memory_bytes": outcome.peak_memory,
        "job": job.to_dict(),
    }


def say(result: dict[str, Any]) -> None:
    """The end of a run: samples side by side, held-out figures before and after, the version, where it lies."""
    if result["samples"]:
        print("\n" + console.sample_table(result["samples"]) + "\n")
    metrics = result["metrics"]
    for name in sorted(n.removeprefix("eval_") for n in metrics if n.startswith("eval_")):
        if not name.endswith(UNINTERESTING):
            before = metrics.get(f"before_{name}")
            was = f"{before:>10.4g} -> " if before is not None else " " * 14
            print(f"   {name:<28}{was}{metrics[f'eval_{name}']:.4g}")
    if result["version"]:
        version = registry.Version(*(result[k] for k in ("registered_model", "version", "alias", "gate")))
        print(f"   registered {version}  (gate {version.gate})")
    where = storage.join(result["job"]["run"]["storage_path"], result["name"])
    print(f"   {result['seconds']:.0f} s  {where}/result.json", flush=True)
