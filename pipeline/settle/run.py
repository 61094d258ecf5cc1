"""Settles a job: pins, fetches and checks all of its inputs before its rows are read.

work = settle(*pin_inputs(job))
with prepared(job) as (work, rows, report):     # so far, only the cache of tokenized rows is written
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from pipeline.config import Job, Model, libraries
from pipeline.config.identity import identity_of
from pipeline.errors import InputError
from pipeline.on_ray import placement, session
from pipeline.on_ray.placement import Places
from pipeline.settle import inputs as checks
from pipeline.settle.identity import gate_of, tracking_of
from pipeline.settle.places import places_of
from pipeline.settle.rows import tokenize
from pipeline.settle.work import Input, Sections, Work
from pipeline.system import console, terminal

# text before a command's title; `run` numbers its stages
ALONE = "=="
heading: ContextVar[str] = ContextVar("heading", default=ALONE)


def announce(job: Job, verb: str | None = None) -> None:
    """Checks the paths of a job and prints the header of the command. Raises InputError if a path does not exist."""
    checks.check_paths(job)
    title = f"{verb}  {job.stage}" if verb else f"{job.stage}  run {job.run.name}"
    terminal.say(f"\n{heading.get()} {title}  {job.source}")


def settle(job: Job, versions: Mapping[str, str]) -> Work:
    """Checks the base, its tokenizer and the inputs of a job. Returns them as work that has no rows yet.

    Args:
        versions: versions of the inputs, from inputs.pin_inputs.
    """
    from pipeline.models.base import base_identity, check_base
    from pipeline.models.compatibility import check_lora

    places, model = places_of(job, note=True), job.model
    files = check_base(model)
    if model.fsdp and files.config.get("quantization_config"):
        raise InputError(
            f"{model.name_or_path!r} has quantized weights, which FSDP cannot gather; set model.fsdp=false",
            "model.fsdp",
        )
    base = base_identity(model.name_or_path, model.revision)
    job = replace(job, model=replace(model, revision=base["revision"]))  # all workers use this commit
    work = work_of(job, places, base=base)
    room = checks.room_for_prompts(work.writes, work.data.max_length, base["context_length"])
    inputs = checks.checked(work, versions, files)
    weights = {f"reward.{index}": weight for index, (_, weight) in enumerate(job.rewards)}
    inputs = {name: replace(one, weight=weights.get(name, 1.0)) for name, one in inputs.items()}
    adapters = {name: one for name, one in inputs.items() if one.kind == "adapter"}
    if checks.makes_adapter(work.stage, work.args, adapters):
        check_lora(files, work.lora, work.stage.learns == "reward")
    elif unused := [key for key in job.overridden if key.partition(".")[0] == "lora"]:
        print(
            f"warning: {', '.join(unused)} changes nothing: the adapters that this job trains are copies of those it starts from; "
            "policy=base starts a new one",
            flush=True,
        )
    tokenizer = _tokenizer(work.model, adapters, "policy" in work.named)
    return replace(work, room=room, inputs=inputs, tokenizer=tokenizer)


def work_of(job: Job, places: Places, **known: Any) -> Work:
    """Returns the work of a job of which only `known` is found out yet, for example its base."""
    return Work(**vars(sections_of(job, places)), tracking=tracking_of(job), gate=gate_of(job), **known)


def sections_of(job: Job, places: Places) -> Sections:
    """Returns what a job says. It asks neither MLflow nor the code of judges, which the plan does not need."""
    return Sections(
        stage=job.facts,
        run=identity_of(job),
        places=places,
        model=job.model,
        lora=job.lora,
        data=job.data,
        trainer=job.trainer,
        args=job.args,
        rollout=job.rollout_config,
        serve=job.serve,
        options=job.run,
        bf16=job.bf16,
        named=job.inputs,
        keys={name: job.key_of(name) for name in job.inputs},
    )


def _tokenizer(model: Model, adapters: Mapping[str, Input], names_policy: bool) -> Any:
    """Returns the base's tokenizer with the chat template of the job, or else of the adapter that decides."""
    from pipeline.models.template import is_plain
    from pipeline.models.tokenizer import load_tokenizer

    # the policy decides, or else the reward
    policies = [name for name in adapters if name == "policy" or name.startswith("policies.")]
    rewards = [name for name in adapters if name.startswith("reward") and not names_policy]
    learned = next((adapters[name] for name in policies + rewards), None)
    template = model.chat_template
    if template is None and learned:
        saved = os.path.join(learned.folder, "chat_template.jinja")  # the template of the adapter's training
        template = saved if os.path.lexists(saved) else None
    tokenizer = load_tokenizer(model.name_or_path, model.revision, template, model.trust_remote_code)
    if learned and model.chat_template is None:  # text prompts are encoded as in training
        tokenizer.text_as_chat = bool(learned.facts.get("text_as_chat", not is_plain(tokenizer)))
    return tokenizer


@contextlib.contextmanager
def prepared(
    job: Job, pinned: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[Work, dict[str, Any], Any]]:
    """Yields the work of a job, its tokenized rows by name, and the report on them, with Ray if the job needs it.

    Its paths have been checked by `announce`. A stage without rows has no report.

    Args:
        pinned: versions of inputs that the run began with; they count even if aliases have moved.
    """
    job, versions = checks.pin_inputs(job, pinned)
    session.set_environment()
    checks.check_sampler(job.rollout_config, job.model)
    with checks_of_libraries(job) as check_libraries:
        with console.waiting("checking the model"):
            work = settle(job, versions)  # before Ray starts
        if work.stage.runs_in == "here":
            placement.check_fits(work.places)
            yield work, {}, None
            return
        with session.session(work.places, work.run.storage_path, work.uri):
            work, rows, report = tokenize(work)
            check_libraries()
            yield work, rows, report


def read_only(job: Job) -> Any:
    """Returns the report on the rows of another machine's job. This machine may lack GPUs and their packages."""
    job, versions = checks.pin_inputs(job)
    session.set_environment()
    asks = not job.scaling.get("use_gpu")
    with checks_of_libraries(job) if asks else contextlib.nullcontext(lambda: None) as check_libraries:
        with console.waiting("checking the model"):
            work = settle(job, versions)
        # Reading rows needs none of the run's resources, so this machine reads them in this process.
        places = replace(placement.ROWS, in_process=not placement.on_cluster())
        with session.session(places, work.run.storage_path, work.uri):
            report = tokenize(replace(work, places=places))[-1]
            check_libraries()
            return report


@contextlib.contextmanager
def checks_of_libraries(job: Job) -> Iterator[Callable[[], None]]:
    """Yields a function that raises InputError if TRL or peft rejects a key of the job.

    Their import takes seconds. For a job on Ray, another process imports them while this one reads the rows. A job in process
    imports them anyway, so it does so when the rows are read.
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
