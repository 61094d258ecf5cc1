"""Decodes with vLLM in a separate process on the same device, with `rollout.engine: vllm`. Needs the extra `vllm`.

vLLM loads a second copy of the base, and gets the adapters from the trainer. Decoding with vLLM pays off for large models and
long completions. vLLM's kernels differ from the trainer's kernels, so the log-probs differ slightly. PPO's old log-probs always
come from the trainer. functional.off_policy_weights corrects for the difference between vLLM's and the trainer's log-probs. Up to
rounding, a completion depends only on the seed, the row's number, its prompt and its role. vLLM's random numbers differ from
SlotDecoder's. Greedy completions of both decoders are equal, unless two tokens are almost equally likely.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch

from pipeline.errors import InputError
from pipeline.job import lora
from pipeline.models import adapter_files
from pipeline.models.adapters import SharedBase
from pipeline.system.hub import source
from pipeline.writing.rows import Completion, Decoder, Row, Sampling, seed_of


class VllmDecoder(Decoder):
    """Sends each row to vLLM as a separate request.

    Args:
        llm: a vllm.LLM, from `start_llm`.
        max_rank: maximum rank of an adapter, as set when vLLM was started.
        max_rows: maximum rows in vLLM at the same time, or None.
        shared: the SharedBase whose roles `changed` passes to vLLM, or None if all roles come from folders (`add`).
        folder: the folder in which `changed` passes adapters to vLLM. `close` removes the folder.
    """

    def __init__(
        self,
        llm: Any,
        max_rank: int = 0,
        max_rows: int | None = None,
        shared: SharedBase | None = None,
        folder: str | Path = "",
    ) -> None:
        self.llm, self.max_rank, self.max_rows = llm, max_rank, max_rows
        self.shared, self.folder = shared, Path(folder)
        self.adapters: dict[str, Any] = {}  # role -> LoRARequest
        self.requests: dict[str, Row] = {}  # vLLM's request id -> row
        self.numbers = itertools.count(1)  # counter for the ids of adapters and requests

    @property
    def rows(self) -> list[Row]:  # type: ignore[override]
        return list(self.requests.values())

    def add(self, role: str, folder: str) -> None:
        if (rank := adapter_files.largest_rank_in_folder(folder)) > self.max_rank:
            raise InputError(
                f"the adapter has rank {rank}, but vLLM was started for ranks up to {self.max_rank}; restart the server"
            )
        self._register(role, role, next(self.numbers), folder)
        self.llm.llm_engine.add_lora(self.adapters[role])

    def remove(self, role: str) -> None:
        self.llm.llm_engine.remove_lora(self.adapters.pop(role).lora_int_id)

    def changed(self, role: str | None) -> None:
        """Passes the adapter to vLLM with a new id. With the old id, vLLM would reuse cached keys and values of prompts."""
        if role is None:
            return
        assert self.shared
        number, previous = next(self.numbers), self.adapters.get(role)
        folder = self.folder / str(number)
        self.shared.save(role, folder)
        self._register(role, str(number), number, str(folder))
        if previous:
            shutil.rmtree(self.folder / previous.lora_name, ignore_errors=True)

    def _register(self, role: str, name: str, number: int, folder: str) -> None:
        from vllm.lora.request import LoRARequest

        self.adapters[role] = LoRARequest(name, number, folder)

    def generate(
        self, role: str | None, prompts: Sequence[Sequence[int]], numbers: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [sampling_params(sampling, number, logprobs=0) for number in numbers],
            lora_request=self.adapters[role] if role else None,
            use_tqdm=False,
        )
        return [
            Completion(
                list(result.token_ids),  # token ids, including the end-of-sequence token
                result.finish_reason == "stop",
                [
                    float(candidates[token].logprob)
                    for candidates, token in zip(result.logprobs, result.token_ids, strict=True)
                ],
            )
            for result in (output.outputs[0] for output in outputs)
        ]

    def fits(self, joining: Sequence[Row], row: Row) -> bool:
        return self.max_rows is None or len(self.requests) + len(joining) < self.max_rows

    def join(self, rows: Sequence[Row]) -> None:
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        for row in rows:
            params = sampling_params(
                row.sampling, row.number, logprobs=row.top, output_kind=RequestOutputKind.DELTA
            )
            name = f"row-{next(self.numbers)}"
            adapter = self.adapters[row.role] if row.role else None
            prompt = {"prompt_token_ids": list(row.prompt)}
            try:
                self.llm.llm_engine.add_request(name, prompt, params, lora_request=adapter)
            except VLLMClientError as error:  # only this row fails
                row.error = error
                continue
            self.requests[name] = row

    def step(self) -> None:
        engine = self.llm.llm_engine
        if cancelled := [name for name, row in self.requests.items() if row.cancelled]:
            engine.abort_request(cancelled)
            for name in cancelled:
                del self.requests[name]
        for output in engine.step() if self.requests else ():
            if row := self.requests.get(output.request_id):  # None if the row was cancelled
                self._note(row, output)

    def _note(self, row: Row, output: Any) -> None:
        """Appends new tokens to their row, and removes the row after its last token."""
        [result] = output.outputs
        for i, token in enumerate(result.token_ids):
            candidates = result.logprobs[i] if row.top is not None else {}
            ranked = sorted((entry.rank, option, entry.logprob) for option, entry in candidates.items())
            row.tokens.append(token)
            row.logprobs.append(candidates[token].logprob if candidates else 0.0)
            row.tops.append([(option, logprob) for rank, option, logprob in ranked if rank <= (row.top or 0)])
        if output.finished:
            del self.requests[output.request_id]
            row.ended = result.finish_reason == "stop"
            if not row.done:
                row.error = RuntimeError(f"vLLM ended the completion early ({result.finish_reason})")

    def reset(self) -> None:
        """Removes all rows and raises RuntimeError, because vLLM cannot continue after an error in its process."""
        self.requests = {}
        raise RuntimeError("vLLM has ended; start the process again")

    def close(self) -> None:
        """Ends vLLM's process, which frees its memory.

        Uses a private attribute of vLLM. Remove this method when vLLM has a public method for this (https://github.com/vllm-project/vllm/pull/36283).
        """
        self.llm.llm_engine.engine_core.shutdown()
        if self.folder.name:
            shutil.rmtree(self.folder, ignore_errors=True)


def start_llm(model: str, device: torch.device | str, longest: int, rank: int, **options: Any) -> Any:
    """Starts a vllm.LLM in a separate process. Raises ValueError if vLLM does not support adapters of rank `rank`.

    Args:
        model: folder or Hub id of the base.
        longest: maximum tokens of a prompt with its completion.
        rank: maximum rank of the adapters, or 0 if there are none.
        options: other arguments of vllm.LLM.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM

    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # vLLM would count torch's cached memory as used
    with own_device(device, options.get("tensor_parallel_size", 1)):
        return LLM(
            source(model),
            enable_lora=rank > 0,
            max_lora_rank=accepted_rank(rank or 1),
            max_model_len=longest,
            generation_config="vllm",  # ignore the model's generation config
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **options,
        )


def sampling_params(sampling: Sampling, number: int, logprobs: int | None, **options: Any) -> Any:
    """Returns the vllm.SamplingParams for a row.

    Args:
        logprobs: number of alternatives to report with each token. With 0, reports only the sampled token's
            log-prob. With None, reports no log-probs.
    """
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_new_tokens,
        # vLLM also masks the model's EOS, which is one of `sampling.eos`.
        min_tokens=min(sampling.min_new_tokens, sampling.max_new_tokens),
        stop_token_ids=list(sampling.eos),
        ignore_eos=True,  # stop only at stop_token_ids
        seed=seed_of(sampling.seed, number),
        logprobs=logprobs,
        detokenize=False,
        **options,
    )


def largest_lora_rank(shared: SharedBase, roles: Sequence[str | None]) -> int:
    """Returns the largest rank of the roles' adapters, or 0 without adapters. Raises InputError if vLLM cannot run an adapter."""
    configs = [shared.configs[role] for role in roles if role]
    for config in configs:
        if ignored := lora.ignored_by_vllm(vars(config)):
            problem = f"vLLM ignores {ignored} of an adapter; train an adapter without lora.{ignored}"
            raise InputError(problem, "rollout.engine")
    return max((config.r for config in configs), default=0)


def accepted_rank(rank: int) -> int:
    """Returns the smallest max_lora_rank that vLLM accepts and that is at least `rank`. Raises ValueError if all are smaller."""
    from vllm.config.lora import MaxLoRARanks  # undocumented; remove when vllm.LLM accepts any rank

    ranks = [r for r in sorted(get_args(MaxLoRARanks)) if r >= rank]
    if not ranks:
        raise ValueError(
            f"rollout.engine: lora.r is {rank}; vLLM supports up to {max(get_args(MaxLoRARanks))}"
        )
    return ranks[0]


@contextmanager
def own_device(device: torch.device, count: int = 1) -> Iterator[None]:
    """Processes started within the block see only `count` GPUs of the node, beginning with `device`."""
    if device.type != "cuda":
        yield
        return
    key, index = "CUDA_VISIBLE_DEVICES", torch.cuda.current_device() if device.index is None else device.index
    visible = os.environ.get(key)
    devices = visible.split(",") if visible else [str(i) for i in range(index + count)]
    os.environ[key] = ",".join(devices[index : index + count])
    try:
        yield
    finally:
        del os.environ[key]
        if visible is not None:
            os.environ[key] = visible
