"""One run, seen from the driver: check everything, prepare the data, train on the cluster, register, say what came out.

    launch(job, train) -> the content of result.json

Whatever can be wrong is found before the first worker starts, and nothing is written to the registry until an
adapter exists, reloads as it was saved, and has been compared with what the store gives back.
"""

import contextlib
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipeline import cluster, console, lineage, registry, storage
from pipeline.cluster import Outcome
from pipeline.config import Job, gates, libraries
from pipeline.config.fields import fields_of
from pipeline.config.keys import TRAINERS
from pipeline.errors import InputError, summary
from pipeline.inputs import check_adapters, check_columns, check_sampler, pin_inputs
from pipeline.resume import begun, checkpoints
from pipeline.worker import Work

UNINTERESTING = ("runtime", "per_second", "num_tokens")  # of an evaluation's figures


def launch(job: Job, train: Any) -> dict[str, Any]:
    """Runs one stage from its job to its result.json; `train(worker)` is what every worker executes.

    Raises:
        InputError: when the job, the data or an input is wrong; nothing has been registered then.
    """
    started = time.monotonic()
    job = cluster.name_run(job)
    storage.require_writable(job.run.storage_path)
    if done := finished(job):
        return done
    registry.check(job)
    job, inputs = pin_inputs(job)
    earlier = begun.before(job)
    if earlier:  # not what an alias has become since
        inputs |= earlier.get("begun_with", {}).get("inputs", {})
    print(f"\n== {job.stage}  run {job.run.name}  {job.source}", flush=True)
    for warning in gates.unmeasured(job):
        print(f"warning: {warning}", flush=True)
    with libraries.asked(job) as check_libraries, cluster.session(job):
        work, rows, report = prepare(job, inputs)
        check_libraries()
        print(report.render(samples=not report.reused), flush=True)
        if earlier:
            earlier = begun.check(earlier, job, work.base["digest"], work.digests)
        with storage.claim(job.folder):
            result = _train_and_register(job, work, rows, report, train, earlier is None, started)
    drawn = None
    if job.run.report:
        from pipeline import report as pages

        drawn = pages.attach(result)
    say(result, drawn)
    return result


def _train_and_register(
    job: Job, work: Work, rows: dict[str, Any], report: Any, train: Any, anew: bool, started: float
) -> dict[str, Any]:
    """From a checked job to its result.json; from here on the run exists."""
    storage.wait_for_leavers(job.folder)
    if job.run.fresh:  # not before: a mistake in the job must not cost the run that it was to replace
        storage.empty(job.folder)
    checkpoints.repair(job.folder)
    begun.note(job, work.inputs, work.base["digest"], work.digests)
    with registry.run(job, work.digests, anew) as run_id, noted_failure(job, run_id, started):
        outcome = cluster.fit(replace(work, run_id=run_id), rows, train)
        version = None
        if job.mlflow.registered_model and outcome.adapter:
            with storage.local_copy(outcome.adapter) as folder:
                facts = lineage.read(folder, outcome.adapter)
                version = registry.publish(job, run_id, folder, outcome.metrics, facts)
        result = describe(job, work, report, outcome, version, run_id, time.monotonic() - started)
        storage.write_json(storage.join(job.folder, "result.json"), result)
    return result


@contextlib.contextmanager
def noted_failure(job: Job, run_id: str, started: float) -> Iterator[None]:
    """Leaves failed.json in the folder of a run that fails, for its report; a run that goes on again removes it."""
    path = storage.join(job.folder, "failed.json")
    storage.remove_file(path)
    try:
        yield
    except BaseException as error:
        failure = {
            "error": summary(error),
            "traceback": "".join(traceback.format_exception(error))[-8000:],
            "seconds": round(time.monotonic() - started, 2),
            "mlflow_run_id": run_id,
            "tracking_uri": registry.tracking_uri(job),
        }
        try:
            storage.write_json(path, failure)
        except Exception as other:  # a full disk, say: the failure itself is what its user has to see
            print(f"warning: {path} was not written ({type(other).__name__}: {other})", flush=True)
        raise


def finished(job: Job) -> dict[str, Any] | None:
    """The result of a run of this name that already ended; None for one to be continued, or to be started over.

    Raises:
        InputError: when the name belongs to a run of another stage, whose checkpoints this one cannot continue.
    """
    path, unfinished = (storage.join(job.folder, name) for name in ("result.json", begun.FILE))
    found = None if job.run.fresh else next((p for p in (path, unfinished) if storage.exists(p)), None)
    if found is None:
        return None
    result = begun.read(job, found)
    if found == unfinished:
        return None
    print(
        f"run {job.run.name} is finished ({path}); run.fresh=true starts it over, another run.name starts a new one"
    )
    return result | {"folder": job.folder}  # where it was found: it may have been moved since


def prepare(job: Job, inputs: dict[str, str]) -> tuple[Work, dict[str, Any], Any]:
    """All that workers start from: tokenizer, base, inputs that fit to it; the tokenised rows by name; their report."""
    from pipeline.data.read import prepare as prepare_data

    work = models(job, inputs)
    cache = job.data.cache_dir or storage.join(job.run.storage_path, "data")
    rows: dict[str, Any] = {}
    digests, fingerprints = {}, {}
    if job.data.train or job.data.eval:
        room, packing = room_for_prompts(job, work.base["context_length"]), bool(job.trainer.get("packing"))
        data = prepare_data(job.stage, job.data, work.tokenizer, room, cache, packing=packing)
        rows = {name: found for name in ("train", "eval") if (found := getattr(data, name)) is not None}
        digests, fingerprints, report = dict(data.digests), dict(data.fingerprints), data.report
    if job.data.pairs:
        held_out = replace(job.data, eval=job.data.pairs, max_length=None)
        try:
            pairs = prepare_data("pairs", held_out, work.tokenizer, work.base["context_length"], cache)
        except InputError as error:  # it knows the set as what it was given for
            raise InputError(str(error).replace("data.eval", "data.pairs")) from error
        rows["pairs"], digests["pairs"] = pairs.eval, pairs.digests["eval"]
        fingerprints["pairs"] = pairs.fingerprints["eval"]
        if not job.data.eval:
            report = pairs.report
    if job.stage in ("ppo", "evaluate", "generate", "score"):
        check_columns(job, rows)
    return replace(work, digests=digests, fingerprints=fingerprints), rows, report


def models(job: Job, inputs: dict[str, str]) -> Work:
    """The base, its tokenizer, and inputs that fit to it: what there is to say before any row is read."""
    from pipeline.models.base import base_identity, check_weights
    from pipeline.models.tokenizer import load_tokenizer

    check_sampler(job)
    check_experts(job)
    model = job.model
    base = base_identity(model.name_or_path, model.revision)
    check_weights(model)
    adapters = check_adapters(job, inputs, base)
    learned = adapters.get("policy") or (adapters.get("reward.0") if not job.policy else None)
    template = model.chat_template
    if template is None and learned and os.path.exists(saved := os.path.join(learned, "chat_template.jinja")):
        template = saved  # the one that it was trained with
    tokenizer = load_tokenizer(model.name_or_path, model.revision, template, model.trust_remote_code)
    return Work(job, tokenizer, base, digests={}, fingerprints={}, run_id="", inputs=inputs)


def check_experts(job: Job) -> None:
    """Refuses a loss that balances experts, of a base that has none: TRL says so when it has loaded the model."""
    from pipeline.models.base import base_config

    if not job.trainer.get("router_aux_loss_coef"):
        return
    config = base_config(job.model.name_or_path, job.model.revision)
    if not any("expert" in key for key in [*config, *(config.get("text_config") or {})]):
        raise InputError(
            f"trainer.router_aux_loss_coef: found {job.trainer['router_aux_loss_coef']}, but {job.model.name_or_path} has no "
            "experts to balance; take it out"
        )


def room_for_prompts(job: Job, context: int | None) -> int | None:
    """The longest row: the context, less the reply that is still to be written into it."""
    if context is None or job.stage not in ("ppo", "evaluate", "generate"):
        return context
    length = fields_of(TRAINERS[job.stage])["response_length"].default
    reply = job.trainer.get("response_length", length)
    if reply > context - 2:
        raise InputError(
            f"trainer.response_length: {reply} tokens leave no room for a prompt in the model's context of {context}; "
            f"type trainer.response_length={context // 2}"
        )
    room, longest = context - reply, job.data.max_length
    if longest is not None and longest > room:
        raise InputError(
            f"data.max_length: {longest} tokens of a prompt and the trainer.response_length={reply} of its reply exceed "
            f"the model's context of {context}; type data.max_length={room}, or a smaller trainer.response_length"
        )
    return room


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
        "folder": job.folder,
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
        "versions": lineage.versions(),
        "job": job.to_dict(),
    }


def say(result: dict[str, Any], drawn: str | None) -> None:
    """The end of a run: samples side by side, held-out figures before and after, the version, where it lies.

    Args:
        drawn: where its report was drawn, or None.
    """
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
    where = result["folder"]
    print(f"   {result['seconds']:.0f} s  {where}/{'report.html' if drawn else 'result.json'}", flush=True)
