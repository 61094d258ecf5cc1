"""Continuous batching by vLLM, in a process of its own beside the replica: `rollout.engine: vllm`. Needs the extra `vllm`.

A completion depends on its prompt, version and seed, up to rounding; it is another one than that of transformers, whose random
numbers are other ones. Greedy completions are the same but for close calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from pipeline.errors import InputError
from pipeline.models import adapter_files
from pipeline.ppo.vllm_engine import seed_of
from pipeline.serving.batching import Batcher, Row, Token


class VllmBatcher(Batcher):
    """Rows become vLLM's requests; as many wait here, and not there, as do not fit into a batch.

    Args:
        llm: a vllm.LLM that takes adapters, with raw log-probs.
        most_rank: of an adapter, as it was started with.
    """

    def __init__(
        self, llm: Any, most_rank: int, rows: int, queue: int, eos: Sequence[int], min_new_tokens: int = 0
    ) -> None:
        super().__init__(rows, queue, eos, min_new_tokens)
        self.engine, self.most_rank = llm.llm_engine, most_rank
        self.adapters: dict[str, Any] = {}  # role -> LoRARequest
        self.requests: dict[str, Row] = {}  # by their id at vLLM
        self.numbers = itertools.count(1)  # of adapters, by which vLLM caches prompts, and of requests
        self.thread.start()

    def add(self, role: str, folder: str) -> None:
        from vllm.lora.request import LoRARequest

        if (rank := adapter_files.rank(folder)) > self.most_rank:
            raise InputError(
                f"its rank is {rank}, and vLLM was started for ranks up to {self.most_rank}; start the server again"
            )
        adapter = LoRARequest(role, next(self.numbers), folder)
        self.engine.add_lora(adapter)
        self.adapters[role] = adapter

    def remove(self, role: str) -> None:
        self.engine.remove_lora(self.adapters.pop(role).lora_int_id)

    def close(self) -> None:
        super().close()
        self.engine.engine_core.shutdown()  # private, as in ppo/vllm_engine.py

    def _joining(self) -> list[Row]:
        joining: list[Row] = []
        while self.waiting and len(self.rows) + len(joining) < self.most_rows:
            joining.append(self.waiting.popleft())
        return joining

    def _turn(self, joining: list[Row]) -> None:
        for row in joining:
            if not row.cancelled:
                self._begin(row)
        if gone := [name for name, row in self.requests.items() if row.cancelled]:
            self.engine.abort_request(gone)
            for name in gone:
                del self.requests[name]
        if self.requests:
            for output in self.engine.step():
                self._deliver(output)
        self.rows = list(self.requests.values())

    def _begin(self, row: Row) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=row.temperature,
            top_p=row.top_p,
            max_tokens=row.max_new_tokens,
            min_tokens=min(self.min_new_tokens, row.max_new_tokens),
            stop_token_ids=list(self.eos),
            ignore_eos=True,  # stop at the ids above and at no others
            seed=seed_of(row.seed, row.number),
            logprobs=row.top,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name = f"row-{next(self.numbers)}"
        adapter = self.adapters[row.role] if row.role else None
        try:
            self.engine.add_request(name, {"prompt_token_ids": row.prompt}, params, lora_request=adapter)
        except ValueError as error:  # this row alone
            row.deliver(error)
            return
        self.requests[name] = row

    def _deliver(self, output: Any) -> None:
        """The new tokens of a request; it leaves with its last one."""
        row = self.requests.get(output.request_id)
        if row is None:  # aborted in the meantime
            return
        [written] = output.outputs
        ids = list(written.token_ids)
        for i, token in enumerate(ids):
            known = written.logprobs[i] if row.top is not None else {}
            ranked = sorted((found.rank, other, found.logprob) for other, found in known.items())
            top = [(other, logprob) for rank, other, logprob in ranked if rank <= (row.top or 0)]
            last = output.finished and i == len(ids) - 1
            row.deliver(Token(token, known[token].logprob if known else 0.0, top, last))
        if output.finished:
            del self.requests[output.request_id]
            if not ids:
                row.deliver(RuntimeError(f"vLLM ended it ({written.finish_reason})"))

    def _reset(self) -> None:
        """vLLM does not recover from an error in its process: the replica is to be started again."""
        self.requests, self.rows = {}, []
        self.closed = True
