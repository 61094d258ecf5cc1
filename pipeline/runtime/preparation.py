"""Prepares a run: checks everything that the job names, and tokenizes its rows. `validate` begins the same way.

with prepared(job) as run:      # so far, only the cache of tokenized rows is written
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipeline import registry
from pipeline.config import Job, libraries
from pipeline.config.job import transforms
from pipeline.config.stages import STAGE
from pipeline.errors import InputError
from pipeline.on_ray import placement, session
from pipeline.runtime import inputs as checks
from pipeline.runtime import judging
from pipeline.runtime.host import Host, Work
from pipeline.runtime.inputs import pin_inputs
from pipeline.system import console, functions, storage, terminal


@dataclass
class Run:
    """A job that is checked and whose rows are tokenized."""

    work: Work  # its run_id is set once there is one
    rows: dict[str, Any]  # tokenized, by name: train, eval, pairs
    report: Any  # on the rows, or None if the job reads none
    started: float  # time.monotonic() of the command
    continues: bool = False  # whether it resumes from a checkpoint or part of an earlier attempt

    @property
    def job(self) -> Job:
        """Returns the job with a name and with pinned versions."""
        return self.work.job

    @property
    def folder(self) -> str:
        return self.job.folder

    def data(self) -> dict[str, Any]:
        """Returns what result.json says of the rows."""
        return {"digests": self.work.digests, "report": self.report.to_dict()}

    def finish(self, **more: Any) -> dict[str, Any]:
        """Writes result.json: what every run has, and `more` of this one. From here on the run is finished."""
        if judges := judging.costs(self.work):
            more["judges"] = judges
            for name, one in judges.items():
                figures = "  ".join(f"{key} {value:g}" for key, value in one.items())
                terminal.say(f"judge of {name}: {figures}", result=True)
        self.work.lease.require()
        result = {
            "stage": self.job.stage,
            "name": self.job.run.name,
            "folder": self.folder,
            "inputs": self.work.versions,
            **more,
            "seconds": round(time.monotonic() - self.started, 2),
            "job": self.job.to_dict(),
        }
        storage.write_json(storage.join(self.folder, "result.json"), result)
        return result


# Before the title of a command; `rlhf` numbers its stages
ALONE = "=="
heading: ContextVar[str] = ContextVar("heading", default=ALONE)


def announce(job: Job, verb: str | None = None) -> None:
    """Checks the paths of a job and prints the header of the command. Raises InputError if a path does not exist."""
    checks.check_paths(job)
    title = f"{verb}  {job.stage}" if verb else f"{job.stage}  run {job.run.name}"
    terminal.say(f"\n{heading.get()} {title}  {job.source}")


@contextlib.contextmanager
def prepared(job: Job, pinned: dict[str, str] | None = None) -> Iterator[Run]:
    """Yields a run whose job is checked (its paths by `announce`) and whose rows are tokenized, with Ray if it needs it.

    `pinned` has the versions of inputs that the run began with; they count even if aliases have moved.
    """
    started = time.monotonic()
    job, versions = pin_inputs(placement.for_this_machine(job), pinned or {})
    session.set_environment()
    with checks_of_libraries(job) as check_libraries:
        with console.waiting("checking the model"):
            work = check_models(job, versions)  # before Ray starts
        if work.stage.runs_in == "here":
            placement.check_scaling(job)
            yield Run(work, {}, None, started)
            return
        with session.session(job):
            work, rows, report = tokenize(work)
            check_libraries()
            yield Run(work, rows, report, started)


def read_only(job: Job) -> Any:
    """Returns the report on the rows of a job that is for another machine: GPUs, and packages for them, may be missing here."""
    asks = not job.scaling.get("use_gpu")
    job, versions = pin_inputs(placement.for_this_machine(job))
    session.set_environment()
    if not placement.on_cluster():
        job = replace(job, scaling={"num_workers": 0})  # the rows are read in this process
    with checks_of_libraries(job) if asks else contextlib.nullcontext(lambda: None) as check_libraries:
        with console.waiting("checking the model"):
            work = check_models(job, versions, sampler=False)
        # Reading rows needs none of the run's resources.
        with session.session(job if job.in_process else replace(job, scaling={})):
            report = tokenize(work)[-1]
            check_libraries()
            return report


@contextlib.contextmanager
def checks_of_libraries(job: Job) -> Iterator[Callable[[], None]]:
    """Yields a function that raises InputError if TRL or peft rejects a key of the job.

    They take seconds to import. For a job on Ray, another process imports them while this one reads the rows. A job in process
    imports them in any case, so it does so when the rows are read.
    """
    if not job.in_process:
        with libraries.asked(job) as check:
            yield check
        return

    def check_here() -> None:
        console.silence_libraries()
        libraries.load()
        with libraries.asked(job) as check:
            check()

    yield check_here


def ray_for_rows(job: Job) -> Any:
    """Returns a function that starts Ray for the rows of an in-process job, or None if the job runs on Ray anyway."""
    return (lambda: session.session(replace(job, scaling={}))) if job.in_process else None


def tokenize(work: Work) -> tuple[Work, dict[str, Any], Any]:
    """Returns the work with the rows' digests, the tokenized rows by name, and the report on the rows."""
    from pipeline.data import read

    print("reading and tokenizing the rows", flush=True)
    job, context = work.job, work.base["context_length"]
    sets: dict[str, Any] = {}
    report: Any = None
    mixture: Any = None
    cache = job.data.cache_dir or storage.join(job.run.storage_path, "data")
    prepare = partial(
        read.prepare, tokenizer=work.tokenizer, cache_root=cache, ray_for_rows=ray_for_rows(job)
    )
    if job.data.train or job.data.eval:
        packing = bool(job.trainer.get("packing"))
        data = prepare(job.stage, job.data, context_length=work.room, packing=packing)
        report, mixture = data.report, data.mixture
        sets = {name: (data, name) for name in ("train", "eval") if getattr(data, name) is not None}
    for name in ("pairs", "benchmarks"):  # rows that `evaluate` only scores
        if not (scored_rows := getattr(job.data, name)):
            continue
        section = replace(job.data, train=None, eval=scored_rows, max_length=None)
        if name == "benchmarks":  # they have their own columns
            section = replace(section, columns=None, label=None, transform=None, group_by=None)
        try:
            scored = prepare(name, section, context_length=context)
        except InputError as error:
            key = f"data.{name}" if error.key == "data.eval" else error.key
            raise InputError(error.message, key) from error
        report, found = report or scored.report, scored.report
        for into, of in ((report.splits, found.splits), (report.sources, found.sources)):
            if "eval" in of:
                into[name] = of.pop("eval")
        sets[name] = (scored, "eval")
    rows = {name: getattr(tokenized, split) for name, (tokenized, split) in sets.items()}
    if STAGE[job.stage].scores:
        checks.check_columns(job, rows)
    checks.check_row_format(job, work.inputs.get("policy"), report.row_format())
    if job.data.train and job.stage == "kto":
        checks.check_labels(job, *report.labels())
    if job.data.train and job.stage == "ppo":
        checks.check_updates(job, len(mixture) if mixture else report.splits["train"].kept)
    digests = {name: tokenized.digests[split] for name, (tokenized, split) in sets.items()}
    if through := transforms(job.data):
        digests["transform"] = functions.digest(through.values())
    work = replace(
        work,
        digests=digests | checks.digests_of_functions(job),
        fingerprints={name: tokenized.fingerprints[split] for name, (tokenized, split) in sets.items()},
        mixture=mixture,
        row_format=report.row_format(),
        rows_from=report.splits["train"].versions if "train" in report.splits else {},
        judged_by=report.splits["train"].judges if "train" in report.splits else {},
    )
    return work, rows, report


def check_models(job: Job, versions: dict[str, str], sampler: bool = True) -> Work:
    """Checks the base, its tokenizer and the inputs, before any row is read; `sampler`: also the engine of rollouts."""
    from pipeline.models.base import base_identity, check_base
    from pipeline.models.compatibility import check_lora
    from pipeline.models.template import is_plain
    from pipeline.models.tokenizer import load_tokenizer

    if sampler:
        checks.check_sampler(job)
    model = job.model
    files = check_base(model)
    if model.fsdp and files.config.get("quantization_config"):
        raise InputError(
            f"{model.name_or_path!r} has quantized weights, which FSDP cannot gather; set model.fsdp=false",
            "model.fsdp",
        )
    base = base_identity(model.name_or_path, model.revision)
    room = checks.room_for_prompts(job, base["context_length"])
    model = replace(model, revision=base["revision"])  # the commit, for all workers
    job = replace(job, model=model)
    inputs = checks.checked(job, versions, base, files)
    adapters = {name: one for name, one in inputs.items() if one.kind == "adapter"}
    if checks.makes_adapter(job, adapters):
        check_lora(files, job.lora, STAGE[job.stage].learns == "reward")
    elif unused := [key for key in job.overridden if key.partition(".")[0] == "lora"]:
        print(
            f"warning: {', '.join(unused)} changes nothing: the adapters that this job trains are copies of those it starts from; "
            "policy=base starts a new one",
            flush=True,
        )
    # The adapter whose chat template counts: the policy's, or else the reward's
    policies = [name for name in adapters if name == "policy" or name.startswith("policies.")]
    rewards = [name for name in adapters if name.startswith("reward") and not job.policy]
    learned = next((adapters[name] for name in policies + rewards), None)
    template = model.chat_template
    if template is None and learned:
        saved = os.path.join(learned.folder, "chat_template.jinja")  # the adapter was trained with it
        template = saved if os.path.lexists(saved) else None
    tokenizer = load_tokenizer(model.name_or_path, model.revision, template, model.trust_remote_code)
    if learned and model.chat_template is None:  # text prompts are encoded as in training
        tokenizer.text_as_chat = bool(learned.facts.get("text_as_chat", not is_plain(tokenizer)))
    gate, uri = registry.gate_of(job), registry.tracking_uri(job)
    return Work(job, tokenizer, base, {}, {}, run_id=None, gate=gate, room=room, inputs=inputs, uri=uri)


def load_host(job: Job) -> Host:
    """Returns the models of a job in this process, without Ray; its inputs are pinned and checked."""
    from pipeline.models.hub import announcement

    session.set_environment()
    placement.check_scaling(job)
    with console.waiting("checking the models"):
        work = check_models(*pin_inputs(placement.for_this_machine(job)))
    print(announcement(work.job.model.name_or_path, work.job.model.revision), flush=True)
    console.silence_libraries()
    return Host(work)
