"""A teacher is a frozen role of the base. It rates each token of the policy by its own log-probability.

The advantage of a token grows by teacher_coef * (log p_teacher - log p_policy). Without other rewards, the policy gradient is
an estimate from the sampled tokens of the gradient of the reverse KL from policy to teacher (on-policy distillation; Agarwal et
al. 2023, 2306.13649, eq. 4 with the reverse KL).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipeline.errors import InputError
from pipeline.models.template import DATE
from pipeline.ppo.episodes import Episodes
from pipeline.ppo.sampler import Sampler
from pipeline.scoring import forward


@dataclass(frozen=True)
class Teacher:
    """The teacher's role, and the tokens that replace the start of each prompt for it.

    Args:
        role: a frozen role, or None for the bare base.
        head: first tokens of every prompt of the policy.
        own_head: replacement for the teacher: a system message and these tokens.
    """

    role: str | None
    head: Sequence[int] = ()
    own_head: Sequence[int] = ()

    @torch.no_grad()
    def rate(self, sampler: Sampler, episodes: Episodes) -> None:
        """Fills `teacher_logprobs` (B, R), in nats, at the sampling temperature."""
        seen = self._as_seen(episodes)
        for rows, part in forward.parts_of(
            sampler.shared, seen, tokens=sampler.args.max_tokens_per_micro_batch
        ):
            width = part.mask.shape[1]
            episodes.teacher_logprobs[rows, :width] = sampler.logprobs(self.role, part)[0]

    def _as_seen(self, episodes: Episodes) -> Episodes:
        """Returns the episodes with the teacher's own start of each prompt."""
        ids = episodes.input_ids
        own = torch.tensor(self.own_head, dtype=ids.dtype, device=ids.device).expand(len(ids), -1)
        longer = len(self.own_head) - len(self.head)
        ids = torch.cat([own, ids[:, len(self.head) :]], 1)
        return replace(episodes, input_ids=ids, starts=episodes.starts + longer)


def made(role: str | None, system: str | None, tokenizer: Any, prompts: Iterable[Sequence[int]]) -> Teacher:
    """Returns the teacher of a run.

    Args:
        prompts: token ids of each prompt.

    Raises:
        InputError: if `system` is set and the template supports none, or a prompt is not a chat or has its own.
    """
    if not system:
        return Teacher(role)
    key = "trainer.teacher_system"

    def rendered(question: str, *before: dict[str, str]) -> list[int]:
        turns = [*before, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, date_string=DATE
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    try:
        plain, other = rendered("?"), rendered("Why")
        told = rendered("?", {"role": "system", "content": system})
    except Exception as error:  # raised by the template, or by transformers if there is none
        raise InputError(f"the chat template takes no system message ({error}); remove it", key) from error
    if plain == told:
        raise InputError("the chat template leaves system messages out; remove it", key)
    start = _shared(plain, told)
    end = min(_shared(plain[::-1], told[::-1]), len(plain) - start, len(told) - start)
    opening = plain[: _shared(plain, other)]  # the start of any chat without a system message
    for number, ids in enumerate(prompts, 1):
        if list(ids[: len(opening)]) != opening:
            why = "is no chat, or has a system message of its own; remove the key, or that prompt"
            raise InputError(f"prompt {number} of data.train {why}", key)
    return Teacher(role, plain[: len(plain) - end], told[: len(told) - end])


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the number of equal first tokens."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
