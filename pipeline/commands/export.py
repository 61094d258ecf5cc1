"""Exports policy and reward model to folders: merged models for plain transformers, or adapters for plain peft.

    make export    or    python -m pipeline export jobs/demo/export.yaml [reward=null] [model.dtype=float32]
    make export ARGS="reward=null trainer.merge=false trainer.hub_model_id=OWNER/NAME [trainer.push_to_hub=true]"

trainer.hub_model_id and trainer.push_to_hub=true push the folder to the Hub (commands/hub.py).

Only `export` merges adapters. The base is loaded with its original weights, never in NF4. Each merged weight is computed in
float32 and rounded once to model.dtype. The exported folder contains safetensors, tokenizer, chat template, generation config and
a model card. `export` fails if transformers cannot load the merged model, or if the model's outputs differ from the adapter's. In
float32, greedy completions must be identical, and scores may differ by 1e-5. Other dtypes allow for rounding errors.
"""

import gc
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.commands import hub
from pipeline.errors import Failure, InputError
from pipeline.job import Job, lora
from pipeline.job.identity import identity_of
from pipeline.job.job import Export
from pipeline.models import adapter_files, transformers4
from pipeline.run.launch import finished_result, open_run, write_result
from pipeline.run.model_host import ModelHost
from pipeline.run.resume import find_earlier
from pipeline.run_folder import Result
from pipeline.settle.identity import with_run_name
from pipeline.settle.work import Work
from pipeline.system import console, storage
from pipeline.system.hub import ADAPTER, base_config, loading_message

# Prompts on which a merged model is compared with its adapter
PROBES = (
    "What is the capital of Peru?",
    "Name the continent of Norway.",
    "Write one sentence about the sea.",
    "What is 17 plus 25?",
    "Explain to a child why the sky is blue.",
    "Translate to French: Good morning.",
)
# {dtype: (score, mean log-prob)}: largest differences that rounding the merged weights can cause
TOLERANCE = {"float32": (1e-5, 1e-4), "bfloat16": (0.1, 0.1), "float16": (0.02, 0.02)}


def run(job: Job) -> Result:
    if storage.is_remote(job.run.storage_path):
        raise InputError(
            f"{job.run.storage_path!r} is a bucket, but transformers writes only to local folders; set, e.g., "
            "run.storage_path=./exports, and copy the folder to the bucket",
            key="run.storage_path",
        )
    args = Export(**job.trainer)
    hub.check_push(args)
    job = with_run_name(job)
    earlier = find_earlier(identity_of(job))
    if not (result := finished_result(earlier)):
        with open_run(job, earlier) as (work, _, report):
            result = write_result(work, report, {"exported": write_all(work)})
    if not args.hub_model_id:
        return result
    return hub.push_to_hub(args, "policy" if job.policy else "reward", job.model.name_or_path, result)


def write_all(work: Work) -> dict[str, Any]:
    """Exports the policy and the reward of a job in this process. Returns the value of `exported` in result.json."""
    if work.args.merge:
        print(loading_message(work.model.name_or_path, work.model.revision), flush=True)
    console.silence_libraries()
    host = ModelHost(work)
    exported = {}
    for name in ("policy", "reward.0"):
        kind = name.removesuffix(".0")
        folder = storage.join(work.folder, kind)
        for old_folder in (folder, f"{folder}.partial"):  # folders that an interrupted export left
            shutil.rmtree(old_folder, ignore_errors=True)
        if name in work.inputs:
            exported[kind] = {"folder": folder, **write_export(host, name, folder)}
    return exported


def write_export(host: ModelHost, name: str, folder: str) -> dict[str, float]:
    """Writes one adapter to `folder`, merged into its base or as an adapter. Creates `folder` only when all files are complete.

    Returns the differences between the merged model and the adapter. Raises Failure if a difference is too large.
    """
    differences, partial = None, f"{folder}.partial"
    try:
        transformers4.save_tokenizer(host.tokenizer, partial)
        if host.args.merge:
            expected = expected_outputs(host, name)
            save_merged(host, name, partial)
            gc.collect()  # frees the merged model before it is loaded again
            differences = compare_outputs(host, name, partial, expected)
        else:
            for file in ADAPTER:
                if os.path.isfile(source := os.path.join(host.input(name), file)):
                    shutil.copyfile(source, os.path.join(partial, file))
        Path(partial, "README.md").write_text(hub.model_card(host, name, differences), encoding="utf-8")
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    summary = "  ".join(f"{key} {value:.3g}" for key, value in (differences or {}).items())
    print(f"   {name.removesuffix('.0')}  {folder}  {summary or 'the adapter'}", flush=True)
    if not host.args.merge:
        print(f"   {vllm_command(host.work.model.name_or_path, folder, name.removesuffix('.0'))}", flush=True)
    return differences or {}


def vllm_command(base: str, folder: str, name: str) -> str:
    """Returns the command with which vLLM serves an adapter as `name`, or the reason why vLLM cannot serve it.

    The head of a reward adapter needs vLLM 0.31 or newer.
    """
    adapter = adapter_files.read_settings(folder)
    if setting := lora.ignored_by_vllm(adapter):
        return f"vLLM would ignore the adapter's {setting}; merge the adapter instead (trainer.merge=true)"
    # a power of two, at least 8
    rank = max(8, 1 << (adapter_files.largest_rank_in_folder(folder) - 1).bit_length())
    words = ["vllm", "serve", base, "--tokenizer", folder, "--enable-lora", "--max-lora-rank", str(rank)]
    words += ["--lora-modules", f"{name}={folder}"]
    if name == "reward":
        words += ["--runner", "pooling", "--convert", "classify", "--dtype", "float32"]
        words += ["--hf-overrides", '{"num_labels": 1}', "--pooler-config", '{"use_activation": false}']
    return shlex.join(words)


def save_merged(host: ModelHost, name: str, folder: str) -> None:
    """Saves the merged model, with its padding token and the tokens that end a completion."""
    from transformers import GenerationConfig
    from transformers.utils import logging

    from pipeline.models.base import load_base
    from pipeline.models.tokenizer import eos_ids

    model, tokenizer = replace(host.work.model, load_in_4bit=False), host.tokenizer
    base = load_base(model, tokenizer if name != "policy" else None, host.device)
    merged = merge_adapter(base, host.input(name), model.dtype)
    merged.config.pad_token_id = merged.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if merged.can_generate():
        merged.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=eos_ids(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
        )
    logging.disable_progress_bar()  # hides the progress of save_pretrained
    merged.save_pretrained(folder)
    transformers4.add_old_names(folder, base_config(model.name_or_path, model.revision))


def merge_adapter(base: Any, adapter: str, dtype: str) -> Any:
    """Merges an adapter into the weights of its base. Returns the model in `dtype`, with the head of a reward adapter."""
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    from pipeline.models.adapters import as_peft_model

    model = as_peft_model(base, adapter)
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            weight = layer.get_base_layer().weight
            dtype_before = weight.dtype
            weight.data = weight.data.float()  # otherwise peft would round the adapter's weight update
            layer.merge(safe_merge=True)
            weight.data = weight.data.to(dtype_before)
    return model.unload().to(getattr(torch, dtype))


# ------------------------------------------------------------------------------------------- the comparison


def encode_probes(host: ModelHost) -> tuple[list[list[int]], int]:
    """Returns the token ids of PROBES with the chat template applied, and the maximum number of tokens of a completion."""
    encode = host.tokenizer.apply_chat_template
    conversations = ([{"role": "user", "content": text}] for text in PROBES)
    rows = [[*encode(messages, add_generation_prompt=True, return_dict=False)] for messages in conversations]
    context, limit = host.work.base["context_length"], host.args.response_length
    return rows, min(limit, context - max(map(len, rows))) if context else limit


def expected_outputs(host: ModelHost, name: str) -> list[Any]:
    """Returns the output of the adapter on its frozen base for each probe: a greedy completion, or a score."""
    from pipeline.models.tokenizer import eos_ids
    from pipeline.run import roles
    from pipeline.writing.decoder import SlotDecoder
    from pipeline.writing.rows import Sampling

    work = replace(host.work, model=replace(host.work.model, load_in_4bit=False))
    shared = roles.shared_base(ModelHost(work))
    shared.add("exported", folder=host.input(name), head=name != "policy")
    rows, length = encode_probes(host)
    if name != "policy":
        return [shared.score("exported", row) for row in rows]
    ends = tuple(eos_ids(host.tokenizer))
    decoder = SlotDecoder(shared, 1, host.tokenizer.pad_token_id)
    return decoder.generate("exported", rows, range(len(rows)), Sampling(length, ends, temperature=0.0))


def compare_outputs(host: ModelHost, name: str, folder: str, expected: list[Any]) -> dict[str, float]:
    """Loads the exported folder with plain transformers, and compares its outputs with the adapter's.

    Returns the differences, or raises Failure if they are too large.
    """
    import torch
    import transformers

    dtype = host.work.model.dtype
    class_name = "AutoModelForCausalLM" if name == "policy" else "AutoModelForSequenceClassification"
    model = getattr(transformers, class_name).from_pretrained(
        folder, dtype=getattr(torch, dtype), trust_remote_code=host.work.model.trust_remote_code
    )
    model = model.to(host.device).eval()

    def batch(ids: list[int]) -> dict[str, Any]:
        row = torch.tensor([ids], device=model.device)
        return {"input_ids": row, "attention_mask": torch.ones_like(row)}

    rows, length = encode_probes(host)
    score_limit, text_limit = TOLERANCE[dtype]
    with torch.no_grad():
        if name != "policy":
            scores = [model(**batch(row)).logits.float().item() for row in rows]
            pairs = list(zip(scores, expected, strict=True))
            worst = max(abs(score - target) / max(1.0, abs(target)) for score, target in pairs)
            if not worst <= score_limit:
                raise Failure(
                    f"the exported reward differs from the adapter by {worst:.3g} (limit {score_limit:g}); nothing was exported"
                )
            return {"largest_score_difference": worst}
        equal, differences = 0, []
        for row, target in zip(rows, expected, strict=True):
            output = model.generate(**batch(row), do_sample=False, max_new_tokens=length)
            equal += output[0, len(row) :].tolist() == target.tokens
            logps = model(**batch(row + target.tokens)).logits.float()[0, len(row) - 1 : -1].log_softmax(-1)
            chosen = logps.gather(-1, torch.tensor(target.tokens, device=model.device)[:, None])
            differences.append(abs(chosen.sum().item() - sum(target.logprobs)) / len(target.tokens))
    difference = max(differences)
    if not difference <= text_limit or (dtype == "float32" and equal < len(rows)):
        raise Failure(
            f"the exported policy differs from the adapter: {equal} of {len(rows)} greedy completions are equal, log-probs "
            f"differ by {difference:.3g} per token (limit {text_limit:g}); nothing was exported"
        )
    return {"same_greedy_completions": equal / len(rows), "largest_logprob_difference": difference}
