"""Policy and reward as folders for others: merged models for plain transformers, or adapters for plain peft.

    make export    or    python -m pipeline export jobs/demo/export.yaml [reward=null] [model.dtype=float32]
    make export ARGS="reward=null trainer.merge=false trainer.hub_model_id=OWNER/NAME [trainer.push_to_hub=true]"

With trainer.hub_model_id it prints what a push to the hub would do; trainer.push_to_hub=true pushes (commands/hub.py).

This is the only place that merges. The base is loaded as it is stored (never from nf4), each layer's sum is made in float32 and
rounded once to model.dtype. The folder holds safetensors, tokenizer, chat template, generation config (every token that ends a
completion) and a model card. It appears only after plain transformers has loaded it and answered like the registered adapter:
in float32 with the same greedy text and scores within 1e-5, in a shorter dtype within its rounding.
"""

import contextlib
import gc
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.commands import hub
from pipeline.config import Job
from pipeline.errors import Failure, InputError
from pipeline.models.hub import ADAPTER, announcement
from pipeline.runtime import resume
from pipeline.runtime.host import Host
from pipeline.runtime.run import finished, open_run
from pipeline.system import console, storage

# Prompts of the comparison, written with the chat template of the adapter.
PROBES = (
    "What is the capital of Peru?",
    "Name the continent of Norway.",
    "Write one sentence about the sea.",
    "What is 17 plus 25?",
    "Explain to a child why the sky is blue.",
    "Translate to French: Good morning.",
)
# {dtype: (limit of a score's difference, limit of a mean log-prob's difference)}: what rounding the merged weights explains
TOLERANCE = {"float32": (1e-5, 1e-4), "bfloat16": (0.1, 0.1), "float16": (0.02, 0.02)}


def run(job: Job) -> dict[str, Any]:
    if storage.is_remote(job.run.storage_path):
        raise InputError(
            f"{job.run.storage_path!r} is a bucket, and transformers writes to folders; export to one, e.g. "
            "run.storage_path=./exports, and copy it",
            key="run.storage_path",
        )
    before = hub.check(job)
    job = resume.named(job)
    result = finished(job) or export(job)
    return hub.push(job, result, before) if job.args.hub_model_id else result


def export(job: Job) -> dict[str, Any]:
    """Merges what the job names, in this process. Returns the content of result.json."""
    with open_run(job) as run:
        if job.args.merge:
            print(announcement(run.job.model.name_or_path, run.job.model.revision), flush=True)
        console.silence_libraries()
        host = Host(run.work)
        for folder in storage.folders(run.folder):  # left by an interrupted attempt
            storage.remove(storage.join(run.folder, folder))
        exported = {}
        for name in ("policy", "reward.0"):
            if name in run.work.inputs:
                folder = storage.join(run.folder, name.removesuffix(".0"))
                figures = write(host, name, folder) if job.args.merge else copy(host, name, folder)
                exported[name.removesuffix(".0")] = {"folder": folder, **figures}
        return run.finish(exported=exported)


def write(host: Host, name: str, folder: str) -> dict[str, float]:
    """Merges one adapter into `folder` and returns the differences. Raises Failure, and leaves no folder, if too large."""
    from pipeline.models.base import load_base

    model = replace(host.job.model, load_in_4bit=False)
    expected = expectations(host, name)
    with complete_or_none(folder) as partial:
        base = load_base(model, host.tokenizer if name != "policy" else None, host.device)
        merged = merge(base, host.input(name), model.dtype)
        describe(merged, host.tokenizer)
        merged.save_pretrained(partial)
        host.tokenizer.save_pretrained(partial)
        del base, merged
        gc.collect()  # a large model must fit only once into memory
        differences = compare(host, name, partial, expected)
        Path(partial, "README.md").write_text(hub.card(host, name, differences), encoding="utf-8")
    shown = "  ".join(f"{k} {v:.3g}" for k, v in differences.items())
    print(f"   {name.removesuffix('.0')}  {folder}  {shown}", flush=True)
    return differences


def copy(host: Host, name: str, folder: str) -> dict[str, float]:
    """Copies the adapter with its tokenizer and a card to `folder`."""
    with complete_or_none(folder) as partial:
        host.tokenizer.save_pretrained(partial)
        for file in ADAPTER:
            if os.path.isfile(source := os.path.join(host.input(name), file)):
                shutil.copyfile(source, os.path.join(partial, file))
        Path(partial, "README.md").write_text(hub.card(host, name), encoding="utf-8")
    print(f"   {name.removesuffix('.0')}  {folder}  the adapter", flush=True)
    return {}


@contextlib.contextmanager
def complete_or_none(folder: str) -> Iterator[str]:
    """Yields the path of a folder to fill, which becomes `folder` at the block's end, and is deleted after an error."""
    partial = f"{folder}.partial"
    try:
        yield partial
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def merge(base: Any, adapter: str, dtype: str) -> Any:
    """Returns the base with the adapter in its weights, and with the adapter's head if it has one, in `dtype`."""
    import torch
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = PeftModel.from_pretrained(base, adapter)
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            weight = layer.get_base_layer().weight
            stored = weight.dtype
            weight.data = weight.data.float()  # peft would round the change before it adds it
            layer.merge(safe_merge=True)
            weight.data = weight.data.to(stored)
    return model.unload().to(getattr(torch, dtype))


def describe(model: Any, tokenizer: Any) -> None:
    """Sets how to pad, and which tokens end a completion."""
    from transformers import GenerationConfig

    from pipeline.models.tokenizer import eos_ids

    model.config.pad_token_id = model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if model.can_generate():
        ends = eos_ids(tokenizer, model.generation_config)
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
        )


# ------------------------------------------------------------------------------------------- the comparison


def probes(host: Host) -> list[list[int]]:
    """Returns token ids of the PROBES, as the chat template writes them."""
    encode = host.tokenizer.apply_chat_template
    turns = ([{"role": "user", "content": text}] for text in PROBES)
    return [[*encode(one, add_generation_prompt=True, return_dict=False)] for one in turns]


def completion_length(host: Host, rows: list[list[int]]) -> int:
    """Returns the maximum number of new tokens: the job's, or what the context leaves after the probes."""
    context = host.work.base["context_length"]
    most = host.job.args.response_length
    return min(most, context - max(map(len, rows))) if context else most


def expectations(host: Host, name: str) -> list[Any]:
    """Returns what the adapter on its frozen base answers to each probe: a greedy completion, or a score."""

    from pipeline.inference.decoder import SlotDecoder
    from pipeline.inference.rows import Sampling
    from pipeline.models.tokenizer import eos_ids
    from pipeline.runtime import roles

    work = replace(host.work, job=replace(host.job, model=replace(host.job.model, load_in_4bit=False)))
    shared = roles.shared_base(Host(work))
    shared.add("exported", folder=host.input(name), head=name != "policy")
    rows = probes(host)
    if name != "policy":
        return [shared.score("exported", row) for row in rows]
    ends = tuple(eos_ids(host.tokenizer, shared.base.generation_config))
    greedy = Sampling(completion_length(host, rows), ends, temperature=0.0)
    decoder = SlotDecoder(shared, 1, host.tokenizer.pad_token_id)
    return decoder.generate("exported", rows, range(len(rows)), greedy)


def compare(host: Host, name: str, folder: str, expected: list[Any]) -> dict[str, float]:
    """Compares the folder in plain transformers with the adapter. Returns the differences, or raises Failure if too large."""
    import torch
    import transformers

    dtype = host.job.model.dtype
    kind = "AutoModelForCausalLM" if name == "policy" else "AutoModelForSequenceClassification"
    model = getattr(transformers, kind).from_pretrained(
        folder, dtype=getattr(torch, dtype), trust_remote_code=host.job.model.trust_remote_code
    )
    model = model.to(host.device).eval()
    score_limit, text_limit = TOLERANCE[dtype]
    if name != "policy":
        differences = [_score(model, row) - score for row, score in zip(probes(host), expected, strict=True)]
        worst = max(abs(d) / max(1.0, abs(s)) for d, s in zip(differences, expected, strict=True))
        if not worst <= score_limit:
            raise Failure(
                f"the exported reward differs from the adapter by {worst:.3g} (limit {score_limit:g}); nothing was exported"
            )
        return {"largest_score_difference": worst}
    pairs = list(zip(probes(host), expected, strict=True))
    same = [_greedy(host, model, row) == completion.tokens for row, completion in pairs]
    apart = max(
        abs(_logprob(model, row, completion.tokens) - sum(completion.logprobs)) / len(completion.tokens)
        for row, completion in pairs
    )
    if not apart <= text_limit or (dtype == "float32" and not all(same)):
        raise Failure(
            f"the exported policy differs from the adapter: {sum(same)} of {len(same)} greedy completions are equal, log-probs "
            f"differ by {apart:.3g} per token (limit {text_limit:g}); nothing was exported"
        )
    return {"same_greedy_completions": sum(same) / len(same), "largest_logprob_difference": apart}


def _score(model: Any, row: list[int]) -> float:
    import torch

    ids = torch.tensor([row], device=model.device)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().item()


def _greedy(host: Host, model: Any, row: list[int]) -> list[int]:
    import torch

    ids = torch.tensor([row], device=model.device)
    most = completion_length(host, probes(host))
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most
    )
    return out[0, len(row) :].tolist()


def _logprob(model: Any, row: list[int], completion: list[int]) -> float:
    """Returns the log-prob of a completion: the sum over its tokens, in nats."""
    import torch

    ids = torch.tensor([row + completion], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=ids).logits.float()[0, len(row) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[0, len(row) :, None]).sum().item()
