"""Pins and checks the base, the tokenizer and the inputs of a job before any row is read."""

import os
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from pipeline.errors import InputError
from pipeline.job import Job, Model
from pipeline.job.identity import identity_of
from pipeline.settle.identity import gate_of, tracking_of
from pipeline.settle.inputs import (
    check_inputs,
    check_same_tokens,
    makes_adapter,
    pin_inputs,
    room_for_prompts,
)
from pipeline.settle.placement import Places
from pipeline.settle.places import places_of
from pipeline.settle.work import Input, Sections, Work


def settle_job(job: Job, pinned: Mapping[str, str] = MappingProxyType({})) -> Work:
    """Checks the base, tokenizer and inputs of a job, and returns its Work object. Does not read the rows.

    Args:
        pinned: {input: version} from the start of the run; see inputs.pin_inputs.
    """
    from pipeline.models.base import base_identity, check_base
    from pipeline.models.compatibility import check_lora

    job, versions = pin_inputs(job, pinned)
    places, model = places_of(job, note=True), job.model
    files = check_base(model)
    if model.fsdp and files.config.get("quantization_config"):
        raise InputError(
            f"{model.name_or_path!r} has quantized weights, which FSDP cannot gather; set model.fsdp=false",
            "model.fsdp",
        )
    base = base_identity(model.name_or_path, model.revision)
    # All workers load the same commit of the base.
    job = replace(job, model=replace(model, revision=base["revision"]))
    work = work_of(job, places, base=base)
    room = room_for_prompts(work.writes, work.data.max_length, base["context_length"])
    inputs = check_inputs(work, versions, files)
    weights = {f"reward.{index}": weight for index, (_, weight) in enumerate(job.rewards)}
    inputs = {name: replace(job_input, weight=weights.get(name, 1.0)) for name, job_input in inputs.items()}
    adapters = {name: job_input for name, job_input in inputs.items() if job_input.kind == "adapter"}
    if makes_adapter(work.spec, work.args, adapters):
        check_lora(files, work.lora, work.spec.learns == "reward")
    elif lora_keys := [key for key in job.overridden if key.partition(".")[0] == "lora"]:
        print(
            f"warning: {', '.join(lora_keys)} changes nothing: the adapters that this job trains are copies of its input adapters; "
            "policy=base starts a new adapter",
            flush=True,
        )
    tokenizer = _tokenizer(work.model, adapters, "policy" in work.named)
    for name, adapter in adapters.items():
        check_same_tokens(work, tokenizer, work.keys[name], adapter)
    return replace(work, room=room, inputs=inputs, tokenizer=tokenizer)


def work_of(job: Job, places: Places, **values: Any) -> Work:
    """Returns a job's Work object. `values` sets fields such as `base`; the remaining fields have their defaults."""
    return Work(**vars(sections_of(job, places)), tracking=tracking_of(job), gate=gate_of(job), **values)


def sections_of(job: Job, places: Places) -> Sections:
    """Returns the Sections object of a job. Unlike `settle_job`, needs neither an MLflow store nor the code of judges."""
    return Sections(
        spec=job.spec,
        identity=identity_of(job),
        places=places,
        model=job.model,
        lora=job.lora,
        data=job.data,
        trainer=job.trainer,
        args=job.args,
        rollout=job.rollout_config,
        serve=job.serve,
        run=job.run,
        bf16=job.bf16,
        named=job.inputs,
        keys={name: job.key_of(name) for name in job.inputs},
    )


def _tokenizer(model: Model, adapters: Mapping[str, Input], names_policy: bool) -> Any:
    """Returns the base's tokenizer. The chat template comes from the job, or else an input adapter, or else the base."""
    from pipeline.models.template import is_plain
    from pipeline.models.tokenizer import load_tokenizer

    # Uses the policy's chat template, or the reward model's if the job names no policy.
    policies = [name for name in adapters if name == "policy" or name.startswith("policies.")]
    rewards = [name for name in adapters if name.startswith("reward") and not names_policy]
    adapter = next((adapters[name] for name in policies + rewards), None)
    template = model.chat_template
    if template is None and adapter:
        file = os.path.join(adapter.folder, "chat_template.jinja")  # template of the adapter's training
        template = file if os.path.lexists(file) else None
    tokenizer = load_tokenizer(model.name_or_path, model.revision, template, model.trust_remote_code)
    if adapter and model.chat_template is None:  # encodes plain-text prompts as in the adapter's training
        tokenizer.text_as_chat = bool(adapter.lineage.get("text_as_chat", not is_plain(tokenizer)))
    return tokenizer
