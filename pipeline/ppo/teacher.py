"""Distills a teacher into the policy. The teacher is a frozen role that computes the log-probability of each sampled token.

teacher_coef * (log p_teacher - log p_policy) is added to the advantage of each token. Without other rewards, the policy gradient
on the sampled tokens estimates the gradient of the reverse KL, KL(policy || teacher) (on-policy distillation; Agarwal et al.
2023, 2306.13649, eq. 4 with the reverse KL).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pipeline.data.messages import shared_length
from pipeline.errors import InputError
from pipeline.models.template import DATE
from pipeline.ppo.episodes import Episodes


@dataclass(frozen=True)
class Teacher:
    """The teacher's role, and the tokens with which the teacher's prompts start.

    Args:
        role: a frozen role, or None for the bare base.
        head: the first tokens of each of the policy's prompts.
        own_head: the tokens that replace `head` in the teacher's prompts. `own_head` contains the system message.
    """

    role: str | None
    head: Sequence[int] = ()
    own_head: Sequence[int] = ()

    def as_seen(self, episodes: Episodes) -> Episodes:
        """Returns the episodes with `own_head` in place of `head` at the start of each prompt."""
        ids = episodes.input_ids
        own_head = torch.tensor(self.own_head, dtype=ids.dtype, device=ids.device).expand(len(ids), -1)
        shift = len(self.own_head) - len(self.head)
        ids = torch.cat([own_head, ids[:, len(self.head) :]], 1)
        return replace(episodes, input_ids=ids, starts=episodes.starts + shift)


def make_teacher(
    role: str | None, system: str | None, tokenizer: Any, prompts: Iterable[Sequence[int]]
) -> Teacher:
    """Returns the teacher of a run.

    Args:
        system: the teacher's system message, if any.
        prompts: token ids of each prompt.

    Raises:
        InputError: if the chat template cannot render the system message, or if a prompt already has a system message or is not a
            chat.
    """
    if not system:
        return Teacher(role)
    key = "trainer.teacher_system"

    def rendered(question: str, *preceding: dict[str, str]) -> list[int]:
        messages = [*preceding, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, date_string=DATE
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    try:
        plain, other_plain = rendered("?"), rendered("Why")
        prompted = rendered("?", {"role": "system", "content": system})
    except Exception as error:  # raised by the template, or by transformers if there is no template
        raise InputError(
            f"the chat template supports no system message ({error}); remove the key", key
        ) from error
    if plain == prompted:
        raise InputError("the chat template ignores system messages; remove the key", key)
    start = shared_length(plain, prompted)
    end = min(shared_length(plain[::-1], prompted[::-1]), len(plain) - start, len(prompted) - start)
    opening = plain[: shared_length(plain, other_plain)]  # the start of any chat without a system message
    for number, ids in enumerate(prompts, 1):
        if list(ids[: len(opening)]) != opening:
            problem = "is no chat, or already has a system message; remove the key, or that prompt"
            raise InputError(f"prompt {number} of data.train {problem}", key)
    return Teacher(role, plain[: len(plain) - end], prompted[: len(prompted) - end])
