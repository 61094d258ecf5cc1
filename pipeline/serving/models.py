"""Loads the models of a replica: one base, its decoder, and one version for each model id.

If a model id stands for an alias in the registry, the replica loads the new version when the alias moves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from pipeline import registry
from pipeline.errors import in_brief
from pipeline.input_uri import InputURI
from pipeline.models import adapter_files
from pipeline.models.adapters import SharedBase
from pipeline.models.base import check_base
from pipeline.run import roles
from pipeline.run.model_host import ModelHost
from pipeline.scoring.rewards import Reward
from pipeline.serving.batching import Batcher
from pipeline.serving.protocol import TOP_LOGPROBS
from pipeline.settle.inputs import check_inputs, check_same_tokens
from pipeline.settle.work import Input, Work
from pipeline.writing.decoder import PREFILL_TOKENS, SlotDecoder
from pipeline.writing.memory import free_bytes, kv_bytes
from pipeline.writing.vllm import VllmDecoder, accepted_rank, start_llm

BASE = "base"  # the version name of the base without an adapter
MAX_ADAPTERS = 8  # maximum number of adapters in a vLLM batch; requests for further adapters wait
FREE_GPU_FRACTION = 0.1  # fraction of the GPU's memory that vLLM leaves unused
CACHE_FRACTION = {"cuda": 0.5, "cpu": 0.25}  # {device: fraction of its free memory for the KV cache}


@dataclass(frozen=True, eq=False)
class Served:
    """A loaded model version. `role` is the name of the version's adapter on the shared base, or None if there is no adapter."""

    version: str
    role: str | None = None
    reward: Reward | None = None


class Models:
    """Maps each model id to its loaded version.

    At the start, loads the versions that the driver pinned when it checked the job. When an alias moves, `follow_aliases` loads
    the new version. If loading fails, the previous version still answers requests.

    Args:
        shared: the base in this process, or None if only vLLM needs the base.
    """

    def __init__(self, host: ModelHost, shared: SharedBase | None, batcher: Batcher) -> None:
        self.host, self.shared, self.batcher = host, shared, batcher
        self.files = check_base(host.work.model)
        self.uri = host.work.uri
        self.policies: dict[str, Served] = {}  # {model id: policy}
        self.rewards: dict[str, Served] = {}
        self.remove: dict[str, Callable[[str], None]] = {}  # {role: function that unloads the role}
        self.unused: set[str] = set()  # roles that no model id used at the last poll
        self.loaded = 0
        for key, version in pinned_versions(host.work).items():
            self._serve(key, version, host.work.inputs.get(key))

    @property
    def versions(self) -> dict[str, str]:
        return {name: served.version for name, served in {**self.policies, **self.rewards}.items()}

    # --------------------------------------------------------------------------------------------- loading

    def _serve(self, key: str, version: str, model: Input | None) -> None:
        """Loads a version unless it is already loaded, and assigns it to a model id."""
        kind, _, name = key.partition(".")
        models = self.policies if kind == "policies" else self.rewards
        served = next((entry for entry in models.values() if entry.version == version), None)
        if served is None:
            self.loaded += 1
            role, reward = f"{kind}_{self.loaded}", None
            host = ModelHost(replace(self.host.work, inputs={key: model} if model else {}))
            if kind == "rewards":
                reward = roles.load_reward(host, self.shared, key, role)
                if self.shared is not None and hasattr(reward, "role"):
                    self.remove[role] = self.shared.remove
            elif model:
                self.batcher.decoder.add(role, host.input(key))
                self.remove[role] = self.batcher.decoder.remove
            served = Served(version, role if role in self.remove else None, reward)
        models[name] = served

    # ------------------------------------------------------------------------------------------- following

    def watch_aliases(self, poll_interval_s: float) -> None:
        """Polls the aliases forever. Loads the new version when an alias moves, and prints each change and each new problem."""
        printed: dict[str, str] = {}
        while True:
            time.sleep(poll_interval_s)
            try:
                changes = self.follow_aliases()
            except Exception as error:
                changes = {type(error).__name__: f"cannot resolve the aliases: {in_brief(error)}"}
            for cause, line in changes.items():
                if cause not in printed:  # prints a persistent problem only once
                    print(line, flush=True)
            printed = changes

    def follow_aliases(self) -> dict[str, str]:
        """Checks each alias once, loads the new versions of aliases that have moved, and unloads unused versions.

        Returns {cause: line to print}. While a problem persists, its cause stays the same, even if the text of the error changes.
        """
        changes = {}
        for key, reference in self.host.work.serve.inputs.items():
            name = key.partition(".")[2]
            old, problem = self.versions[name], f"cannot resolve {reference}"
            if not InputURI.parse(reference).alias:
                continue
            try:
                version = registry.pin(reference, self.uri)
                problem = f"cannot serve {version}"
                if version != old:
                    # Checks the version outside of the batcher's thread, because checks would delay the batch.
                    work = self.host.work
                    model = check_inputs(work, {key: version}, self.files)[key]
                    check_same_tokens(work, self.host.tokenizer, f"serve.{key}", model)
                    self.batcher.run(partial(self._serve, key, version, model)).result()
                    changes[f"{name} {version}"] = f"{name}: {version}"
            except Exception as error:
                changes[f"{name} {problem} {type(error)}"] = f"{problem} ({in_brief(error)}); keeping {old}"
        self.batcher.run(self._remove_unused).result()
        return changes

    def _remove_unused(self) -> None:
        """Unloads each role that no model id used at the last two polls, and that no unfinished completion uses.

        Waits for the second poll, because at the first poll a request may not have submitted its completions yet.
        """
        used = {served.role for served in (*self.policies.values(), *self.rewards.values())}
        unused = self.remove.keys() - used - self.batcher.roles()
        for role in unused & self.unused:
            self.remove.pop(role)(role)
        self.unused = unused - self.unused


def pinned_versions(work: Work) -> dict[str, str]:
    """Returns the versions that the driver pinned, as {policies.ID or rewards.ID: version}."""
    return {key: work.versions.get(key, BASE) for key in work.serve.inputs}


# ------------------------------------------------------------------------------------------------- the decoder


def start_decoder(host: ModelHost) -> tuple[SharedBase | None, Batcher]:
    """Loads the base and starts the batcher, both without adapters. Returns (base, batcher).

    vLLM loads the base in its own process. With vLLM, this process also loads the base if there are reward models, or else
    returns None as the base.
    """
    work = host.work
    if work.rollout.engine == "vllm":
        needs_base = any(not InputURI.parse(source).is_function for source in work.serve.rewards.values())
        return roles.shared_base(host) if needs_base else None, _vllm(host)
    shared = roles.shared_base(host)
    device, free = shared.device, free_bytes(shared.device)
    kv_size = kv_bytes(shared.base.config.get_text_config(), shared.base.dtype.itemsize)
    max_positions = int(CACHE_FRACTION[device.type] * free / kv_size)
    decoder = SlotDecoder(
        shared,
        host.args.local_rollout_forward_batch_size,
        host.tokenizer.pad_token_id,
        max_positions=work.serve.cache_tokens or max_positions,
        look=1,  # reads tokens after each step, so that clients get each token immediately
        graphs=False,  # rows join and leave the batch too often for CUDA graphs
    )
    decoder.check()
    return shared, Batcher(decoder, work.serve.max_queue, PREFILL_TOKENS[device.type])


def _vllm(host: ModelHost) -> Batcher:
    work, rows = host.work, host.args.local_rollout_forward_batch_size
    # One adapter more than policies: after an alias has moved, the old version still finishes its requests.
    options: dict[str, Any] = {
        "max_loras": min(len(work.serve.policies) + 1, MAX_ADAPTERS),
        "max_logprobs": TOP_LOGPROBS,
        **roles.vllm_options(work.model, work.rollout, rows),
    }
    if host.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        fraction = work.rollout.gpu_memory_utilization or round(free / total - FREE_GPU_FRACTION, 2)
        options["gpu_memory_utilization"] = fraction
    inputs = [name for name in host.work.inputs if name.startswith("policies.")]
    rank = accepted_rank(
        max((adapter_files.largest_rank_in_folder(host.input(name)) for name in inputs), default=1)
    )
    llm = start_llm(work.model.name_or_path, host.device, roles.longest_row(host), rank, **options)
    return Batcher(VllmDecoder(llm, rank, rows), work.serve.max_queue)
