"""`/v1/completions`: prompts as texts or token ids, without the chat template. Evaluation tools use it."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import torch

from pipeline.models.adapters import SharedBase
from pipeline.models.logprobs import LOGIT_CHUNK
from pipeline.ppo import forward
from pipeline.ppo.episodes import collate_ids
from pipeline.serving import protocol
from pipeline.serving.answer import Answer, limit, submit
from pipeline.serving.models import Served
from pipeline.serving.protocol import CompletionRequest, Rated, Refused


async def complete(
    server: Any, asked: CompletionRequest, prompts: list[list[int]], served: Served
) -> dict[str, Any]:
    """Returns the completions of all prompts; with `echo`, each behind its prompt."""
    writes = asked.most_tokens != 0
    answers = [Answer(server, asked, prompt, served) for prompt in prompts if writes]
    rated = await _rate(server, asked, prompts, served) if asked.echo and asked.logprobs is not None else None
    try:
        submit(server.batcher, [row for answer in answers for row in answer.rows])
        await asyncio.gather(*(answer.finish() for answer in answers))
    finally:
        for answer in answers:
            answer.cancel()
    choices: list[dict[str, Any]] = []
    for index in range(len(prompts) * asked.n):
        number, choice = divmod(index, asked.n)
        text, tokens, reason = "", list(rated[number]) if rated else [], "length"
        if asked.echo:
            text = server.tokenizer.decode(prompts[number])
        if writes:
            answer = answers[number]
            text += answer.texts[choice].text
            tokens += [(token.id, token.logprob, token.top) for token in answer.tokens[choice]]
            reason = answer.reasons[choice] or "length"
        logprobs = None if asked.logprobs is None else protocol.text_logprobs(tokens, server.tokenizer)
        choices.append({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason})
    return {
        "id": f"cmpl-{secrets.token_hex(16)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": asked.model,
        "system_fingerprint": served.version,
        "choices": choices,
        "usage": protocol.usage(sum(map(len, prompts)), sum(answer.counted for answer in answers)),
    }


async def _rate(
    server: Any, asked: CompletionRequest, prompts: list[list[int]], served: Served
) -> list[list[Rated]]:
    """Computes log-probs of the prompts in the batcher's thread, one batch between two decoding steps."""
    shared, size = server.models.shared, server.args.local_rollout_forward_batch_size
    if server.job.rollout_config.engine == "vllm":
        raise Refused(400, "echo: no log-probs of prompts with rollout.engine=vllm", "echo")
    found: list[list[Rated]] = []
    async with limit(server.serve.timeout_s):
        for start in range(0, len(prompts), size):
            given = (shared, served.role, prompts[start : start + size], asked.logprobs or 0)
            found += await asyncio.wrap_future(server.batcher.run(lambda given=given: rate(*given)))
    return found


@torch.no_grad()
def rate(shared: SharedBase, role: str | None, prompts: list[list[int]], top: int) -> list[list[Rated]]:
    """Returns for each prompt its tokens with their log-probs at temperature 1 and the `top` most likely ids."""
    found: list[list[Rated]] = [[(prompt[0], None, [])] for prompt in prompts]
    longer = [i for i, prompt in enumerate(prompts) if len(prompt) > 1]
    if not longer:
        return found
    ids = [prompts[i] for i in longer]
    episodes = collate_ids([one[:1] for one in ids], [one[1:] for one in ids], shared.device)
    size = max(1, LOGIT_CHUNK[shared.device.type] // shared.vocab_size)
    for rows, part in forward.parts_of(shared, episodes):
        for row, hidden in zip(rows, forward.states(shared, role, part), strict=True):
            targets = torch.tensor(ids[row][1:], device=shared.device)
            for states, actions in zip(hidden[: len(targets)].split(size), targets.split(size), strict=True):
                with shared.use(role):
                    logprobs = shared.logits(states).log_softmax(-1)
                own = logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1).tolist()
                values, most_likely = logprobs.topk(top)
                tops = (
                    list(zip(*one, strict=True))
                    for one in zip(most_likely.tolist(), values.tolist(), strict=True)
                )
                found[longer[row]] += zip(actions.tolist(), own, tops, strict=True)
    return found
