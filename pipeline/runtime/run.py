"""One run, seen from the driver: check everything, prepare the data, do the work, register, say what came out.

    launch(job, train) -> the content of result.json        of a stage that trains or evaluates in Ray Train's workers
    with open_run(job) as run: ...                          what every run has in common, whatever it does inside

Whatever can be wrong is found before the first worker starts, and nothing is written to the registry until an
adapter exists, reloads as it was saved, and has been compared with what the store gives back.
"""

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pipeline import registry
from pipeline.config import Job, gates, libraries
from pipeline.config.stages import STAGE
from pipeline.errors import InputError, summary
from pipeline.registry import lineage
from pipeline.runtime import begun, checkpoints, driver
from pipeline.runtime.driver import Outcome
from pipeline.runtime.inputs import (
    check_adapters,
    check_columns,
    check_paths,
    check_sampler,
    makes_adapter,
    pin_inputs,
)
from pipeline.runtime.worker import Work, Worker
from pipeline.system import console, storage
from pipeline.system.credentials import without_credentials

UNINTERESTING = ("runtime", "per_second", "num_tokens")  # of an evaluation's figures


@dataclass
class Run:
    """A job that can run: all of it has been checked, its rows are tokenised, and Ray is there."""

    work: Work
    rows: dict[str, Any]  # tokenised, by name: train, eval, pairs
    report: Any  # what became of the rows
    started: float  # time.monotonic() of the command
    continues: bool = False  # an attempt that was cut short, from its last checkpoint or part
    mlflow_run_id: str | None = None  # once there is one

    @property
    def job(self) -> Job:
        """Named, and with every version that it names pinned."""
        return self.work.job

    @property
    def folder(self) -> str:
        return self.work.job.folder


# What a stage registers or promotes: from the run and its outcome to a version, or None.
Register = Callable[[Run, Outcome], registry.Version | None]


def once(job: Job, execute: Callable[[Job], dict[str, Any]]) -> dict[str, Any]:
    """The result of a job: that of a finished run of its name, which is read and nothing else, or of `execute(job)`.

    Raises:
        InputError: when the name belongs to a run of another stage, or the storage path cannot be written to.
    """
    job = driver.name_run(job)
    storage.require_writable(job.run.storage_path)
    return finished(job) or execute(job)


def launch(
    job: Job, train: Callable[[Worker], dict[str, Any]], register: Register | None = None
) -> dict[str, Any]:
    """Runs one stage from its job to its result.json; `train(worker)` is what every worker executes.

    Args:
        register: makes or promotes the run's version before it counts as finished; None: registers the adapter.

    Raises:
        InputError: when the job, the data or an input is wrong; nothing has been registered then.
    """

    def execute(job: Job) -> dict[str, Any]:
        with open_run(job) as run:
            result = _train_and_register(run, train, register or publish)
        drawn = None
        if job.run.report:
            from pipeline import report as pages

            with console.waiting("drawing the report"):
                drawn = pages.attach(result)
        say(result, drawn)
        return result

    return once(job, execute)


@contextlib.contextmanager
def open_run(job: Job) -> Iterator[Run]:
    """A run of its own: checked, with its folder to itself, and continuing what was begun under its name.

    A failure inside leaves failed.json, for the run's report; a run that goes on again removes it.

    Raises:
        InputError: when the job, the data or an input is wrong, another process runs under that name, or what was begun
            cannot be continued to the same end.
    """
    begin(job)
    with console.waiting("opening MLflow"):
        registry.check(job)
    earlier = begun.before(job)
    pinned = begun.versions(earlier, job) if earlier else {}
    for warning in gates.unmeasured(job):
        print(f"warning: {warning}", flush=True)
    with checked(job, pinned) as run:
        print(run.report.render(samples=not run.report.reused), flush=True)
        if earlier:
            run.continues = begun.same_content(earlier, run.job, run.work.base["digest"], run.work.digests)
        with storage.claim(run.folder):
            if not job.run.fresh and storage.exists(storage.join(run.folder, "result.json")):
                raise InputError(
                    f"{job.run.name!r} was finished by another process meanwhile; the same command shows its result",
                    key="run.name",
                )
            storage.wait_for_leavers(run.folder)
            if job.run.fresh:  # not before: a mistake in the job must not cost the run that it was to replace
                storage.empty(run.folder)
            checkpoints.repair(run.folder)
            begun.note(run.job, run.work.inputs, run.work.base["digest"], run.work.digests)
            with noted_failure(run):
                yield run


def begin(job: Job) -> None:
    """The first second of a run: the paths of its job lead somewhere, and its name is on the screen.

    Raises:
        InputError: when one of them does not.
    """
    check_paths(job)
    print(f"\n== {job.stage}  run {job.run.name}  {job.source}", flush=True)


@contextlib.contextmanager
def checked(job: Job, pinned: dict[str, str] | None = None, ask_libraries: bool = True) -> Iterator[Run]:
    """Everything that a job names, checked (its paths already: `begin`), its rows tokenised, on a Ray for the block.

    Args:
        pinned: versions of inputs that the run was begun with: they count, whatever the job's aliases mean by now.
        ask_libraries: whether TRL and peft are to take their sections of the job.
    """
    started = time.monotonic()
    job, inputs = pin_inputs(job)
    inputs |= pinned or {}
    driver.set_environment()
    with libraries.asked(*([job] if ask_libraries else [])) as check_libraries:
        with console.waiting("checking the model"):
            work = models(job, inputs)  # a damaged one is not worth starting Ray for
        with driver.session(job):
            with console.waiting("tokenising the rows"):
                work, rows, report = prepare(job, inputs, work)
            check_libraries()
            yield Run(work, rows, report, started)


def _train_and_register(
    run: Run, train: Callable[[Worker], dict[str, Any]], register: Register
) -> dict[str, Any]:
    """From a run that is open to its result.json."""
    job = run.job
    with registry.run(job, run.work.digests, anew=not run.continues) as run_id:
        run.mlflow_run_id = run_id
        outcome = driver.fit(replace(run.work, run_id=run_id), run.rows, train)
        version = register(run, outcome)
        result = describe(run, outcome, version)
        storage.write_json(storage.join(run.folder, "result.json"), result)
    return result


def publish(run: Run, outcome: Outcome) -> registry.Version | None:
    """Registers the adapter that was trained; the alias moves to it if it has learned anything and the gate lets it."""
    if not outcome.adapter:
        return None
    with storage.local_copy(outcome.adapter) as folder:
        unchanged = nothing_learned(run, folder)
        if unchanged:
            print(f"warning: {unchanged}", flush=True)
        if not run.job.mlflow.registered_model:
            return None
        assert run.mlflow_run_id
        facts = lineage.read(folder, outcome.adapter)
        with console.waiting(f"registering {run.job.mlflow.registered_model}"):
            return registry.publish(run.job, run.mlflow_run_id, folder, outcome.metrics, facts, unchanged)


def nothing_learned(run: Run, adapter: str) -> str | None:
    """Why the alias must not move to an adapter that is, to the last bit, the one that training began with; None: it is not."""
    from pipeline.models import adapter_files

    start = run.work.inputs.get("policy")
    if adapter_files.learned(adapter, start and registry.fetch(start, registry.tracking_uri(run.job))):
        return None
    return (
        f"nothing was learned: after training the adapter is the same as {start or 'a new one'}. The learning rate was 0 at "
        "every step, as in a run that ends within its warm-up, or no gradient reached the adapter"
    )


@contextlib.contextmanager
def noted_failure(run: Run) -> Iterator[None]:
    """Leaves failed.json in the folder of a run that fails, for its report; a run that goes on again removes it.

    A run that was interrupted has not failed: it is unfinished.
    """
    path = storage.join(run.folder, "failed.json")
    storage.remove_file(path)
    try:
        yield
    except Exception as error:
        failure = {
            "error": without_credentials(summary(error)),
            "traceback": without_credentials("".join(traceback.format_exception(error)))[-8000:],
            "seconds": round(time.monotonic() - run.started, 2),
            "mlflow_run_id": run.mlflow_run_id,
            "tracking_uri": registry.tracking_uri(run.job),
        }
        try:
            storage.write_json(path, failure)
        except Exception as other:  # a full disk, say: the failure itself is what its user has to see
            print(f"warning: {path} was not written ({registry.first_line(other)})", flush=True)
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
    if result.get("job"):
        begun.say_what_differs(result["job"], job)
    return result | {"folder": job.folder}  # where it was found: it may have been moved since


def prepare(job: Job, inputs: dict[str, str], work: Work | None = None) -> tuple[Work, dict[str, Any], Any]:
    """All that workers start from: tokenizer, base, inputs that fit to it; the tokenised rows by name; their report.

    Args:
        work: `models` of the job, where they have been looked at already.
    """
    from pipeline.data.read import prepare as prepare_data

    work = work or models(job, inputs)
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
        except InputError as error:  # it was given them as rows to evaluate on
            key = "data.pairs" if error.key == "data.eval" else error.key
            raise InputError(error.message, key) from error
        rows["pairs"], digests["pairs"] = pairs.eval, pairs.digests["eval"]
        fingerprints["pairs"] = pairs.fingerprints["eval"]
        if not job.data.eval:
            report = pairs.report
        else:
            report.splits["pairs"] = pairs.report.splits["eval"]
    if STAGE[job.stage].scores:
        check_columns(job, rows)
    if job.stage == "ppo":
        check_updates(job, report.splits["train"].kept)
    return replace(work, digests=digests, fingerprints=fingerprints), rows, report


def models(job: Job, inputs: dict[str, str]) -> Work:
    """The base, its tokenizer, and inputs that fit to it: what there is to say before any row is read."""
    from pipeline.models.base import base_identity
    from pipeline.models.fit import check_base, check_lora
    from pipeline.models.template import is_plain
    from pipeline.models.tokenizer import load_tokenizer

    check_sampler(job)
    check_experts(job)
    model = job.model
    files = check_base(model, gpu=bool(job.scaling.get("use_gpu")))
    base = base_identity(model.name_or_path, model.revision)
    adapters = check_adapters(job, inputs, base, files)
    if makes_adapter(job, adapters):
        check_lora(files, job.lora, scorer=STAGE[job.stage].learns == "reward")
    learned = adapters.get("policy") or (adapters.get("reward.0") if not job.policy else None)
    template = model.chat_template
    if (
        template is None
        and learned
        and os.path.lexists(saved := os.path.join(learned, "chat_template.jinja"))
    ):
        template = saved  # the one that it was trained with
    tokenizer = load_tokenizer(model.name_or_path, model.revision, template, model.trust_remote_code)
    if learned and model.chat_template is None:  # text prompts become what they were in training
        trained = lineage.read(learned, "policy")
        tokenizer.text_as_chat = bool(trained.get("text_as_chat", not is_plain(tokenizer)))
    return Work(job, tokenizer, base, digests={}, fingerprints={}, run_id="", inputs=inputs)


def check_experts(job: Job) -> None:
    """Refuses a loss that balances experts, of a base that has none: TRL says so when it has loaded the model."""
    from pipeline.models.base_files import base_config

    if not job.trainer.get("router_aux_loss_coef"):
        return
    config = base_config(job.model.name_or_path, job.model.revision)
    if not any("expert" in key for key in [*config, *(config.get("text_config") or {})]):
        raise InputError(
            f"found {job.trainer['router_aux_loss_coef']}, but {job.model.name_or_path} has no "
            "experts to balance; take it out",
            key="trainer.router_aux_loss_coef",
        )


def room_for_prompts(job: Job, context: int | None) -> int | None:
    """The longest row: the context, less the completion that is still to be written into it."""
    if context is None or not STAGE[job.stage].writes:
        return context
    completion = job.args.response_length
    if completion > context - 2:
        raise InputError(
            f"{completion} tokens leave no room for a prompt in the model's context of {context}; "
            f"type trainer.response_length={context // 2}",
            key="trainer.response_length",
        )
    room, longest = context - completion, job.data.max_length
    if longest is not None and longest > room:
        raise InputError(
            f"{longest} tokens of a prompt and the trainer.response_length={completion} of its completion exceed "
            f"the model's context of {context}; type data.max_length={room}, or a smaller trainer.response_length",
            key="data.max_length",
        )
    return room


def check_updates(job: Job, prompts: int) -> None:
    """Refuses a ppo run that trains the critic alone, and warns of one that ends within its warm-up."""
    args = job.args
    updates = args.total_updates(prompts)
    has = f"the run has {updates} update{'s' * (updates > 1)}"
    if args.critic_warmup_steps >= updates:
        raise InputError(
            f"found {args.critic_warmup_steps}, but {has} ({prompts} prompts): the policy would "
            f"never learn; expected less than {updates}, or more trainer.total_episodes",
            key="trainer.critic_warmup_steps",
        )
    if args.total_episodes and args.total_episodes % args.batch_size:
        print(
            f"note: trainer.total_episodes={args.total_episodes} is rounded up to {updates * args.batch_size}, whole updates of "
            f"trainer.batch_size={args.batch_size}",
            flush=True,
        )
    if args.warmup_steps >= updates:
        print(
            f"warning: trainer.warmup_steps={args.warmup_steps}, but {has}: the learning rate never reaches "
            f"trainer.learning_rate={args.learning_rate:g}",
            flush=True,
        )


def describe(run: Run, outcome: Outcome, version: registry.Version | None) -> dict[str, Any]:
    """What result.json says: how a script, or the next stage, learns what happened."""
    return {
        "stage": run.job.stage,
        "name": run.job.run.name,
        "folder": run.folder,
        "metrics": outcome.metrics,
        "samples": outcome.samples,
        "checkpoint": outcome.checkpoint,
        "adapter": outcome.adapter,
        "mlflow_run_id": run.mlflow_run_id,
        "tracking_uri": registry.tracking_uri(run.job),
        "registered_model": version.name if version else None,
        "version": version.version if version else None,
        "alias": version.alias if version else None,
        "gate": version.gate if version else None,
        "inputs": run.work.inputs,
        "data": {"digests": run.work.digests, "report": run.report.to_dict()},
        "seconds": round(time.monotonic() - run.started, 2),
        "train_seconds": round(outcome.seconds, 2),
        "peak_memory_bytes": outcome.peak_memory,
        "versions": lineage.versions(),
        "job": run.job.to_dict(),
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
        gate = f"gate {version.gate}" if result["job"]["gate"] else "no gate set"
        print(f"   {'registered ' if result['adapter'] else ''}{version}  ({gate})")
    where = result["folder"]
    print(f"   {result['seconds']:.0f} s  {where}/{'report.html' if drawn else 'result.json'}", flush=True)
