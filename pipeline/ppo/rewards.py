"""Scores of completions: a reward adapter on the shared base, another sequence-classification model, a Python function.

Each is a `Reward` with a name, a weight and the constants that make its scores comparable (mean and standard deviation
on reference samples, stored with the reward model's version). The trainer sums them, weighted.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import os
import sysconfig
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

import torch

from pipeline.errors import Failure, in_brief
from pipeline.models.adapters import SharedBase
from pipeline.models.special import ControlTokens, chat_ids, text_ids
from pipeline.ppo.batch import micro_batches


@dataclass
class Samples:
    """Completions to be scored. `rows` are the prompts' rows as they came from the data: `prompt` and all further columns."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    ended: list[bool]
    rows: list[dict[str, Any]]
    tokenizer: Any

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def prompts(self) -> list[str]:
        """The prompt as the data has it, or, where it is a list of messages, as the template rendered it."""
        return [
            row["prompt"]
            if isinstance(row.get("prompt"), str)
            else self.tokenizer.decode(ids, skip_special_tokens=True)
            for row, ids in zip(self.rows, self.prompt_ids, strict=True)
        ]

    @cached_property
    def completions(self) -> list[str]:
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in self.completion_ids]

    def columns(self) -> dict[str, list[Any]]:
        """The further columns, one value a row (None where a row lacks it); messages keep their list as `messages`."""
        names = sorted({key for row in self.rows for key in row} - {"prompt", "completion"})
        found = {name: [row.get(name) for row in self.rows] for name in names}
        if any(isinstance(row.get("prompt"), list) for row in self.rows):
            found.setdefault("messages", [row.get("prompt") for row in self.rows])
        return found

    def show(self, i: int) -> str:
        shown = (_brief(value) for value in (self.prompts[i], self.completions[i], self.rows[i]))
        return "prompt {}, completion {}, row {} (sample {} of {})".format(*shown, i, len(self))


def _brief(value: Any, most: int = 300) -> str:
    """A value in an error message: its repr, shortened; only its type where it has none."""
    try:
        text = repr(value)
    except Exception:  # an int of 5000 digits, or an object whose __repr__ fails
        return f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}..."


class Reward(ABC):
    """A source of scores. `normalized` scores are (score - mean) / std."""

    def __init__(self, name: str, weight: float = 1.0, mean: float = 0.0, std: float = 1.0) -> None:
        self.name, self.weight, self.mean, self.std = name, weight, mean, std
        if not (std > 0 and math.isfinite(mean) and math.isfinite(std) and math.isfinite(weight)):
            raise ValueError(
                f"reward {name!r}: weight {weight}, mean {mean}, std {std}; expected finite numbers, std above 0"
            )

    @abstractmethod
    def score(self, samples: Samples) -> list[float]:
        """One raw score for each sample."""

    def checked(self, samples: Samples) -> list[float]:
        """`score`, with the number and the finiteness of the results checked."""
        return self._check(self.score(samples), samples)

    def _check(self, scores: Any, samples: Samples) -> list[float]:
        # arrays and tensors, with a gradient too, have tolist
        listed = scores.tolist() if hasattr(scores, "tolist") else scores
        if not isinstance(listed, (list, tuple)):
            found = _brief(scores, 100)
        elif len(listed) != len(samples):
            found = f"{len(listed)} scores"
        else:
            values = [_number(score) for score in listed]
            wrong = next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
            if wrong is None:
                return values
            raise Failure(
                f"reward {self} returned {_brief(listed[wrong], 100)} for {samples.show(wrong)}; expected a finite number"
            )
        raise Failure(
            f"reward {self} returned {found} for {len(samples)} samples; expected a list of one number for each, of "
            f"which the first is for {samples.show(0)}"
        )

    def __str__(self) -> str:
        return repr(self.name)


def _number(score: Any) -> float:
    """A score as a float; NaN where it is no real number, or none that a float holds."""
    try:
        if hasattr(score, "item") and not isinstance(score, numbers.Number):
            score = score.item()  # of a list of arrays or tensors, each of one number
        return float(score) if isinstance(score, (numbers.Real, Decimal)) else math.nan
    except (OverflowError, ValueError, RuntimeError):  # 10**400, a signalling NaN, a tensor of two numbers
        return math.nan


class AdapterReward(Reward):
    """A reward adapter and head on the shared base: the score is the head's at the last token of prompt and completion."""

    def __init__(self, shared: SharedBase, role: str = "reward", rows: int = 64, **settings: Any) -> None:
        super().__init__(**{"name": role, **settings})
        self.shared, self.role, self.rows = shared, role, rows

    def score(self, samples: Samples) -> list[float]:
        texts = [p + c for p, c in zip(samples.prompt_ids, samples.completion_ids, strict=True)]
        run = lambda ids, mask: self.shared.scores(self.role, ids, lengths=mask.sum(-1))  # noqa: E731
        return in_batches(texts, self.rows, self.shared.device, run)


class ModelReward(Reward):
    """A sequence-classification model that is not on this base. Held in memory in full, beside the base.

    With `tokenizer=None` it reads the policy's token ids; with a tokenizer of its own, the text, through its own chat
    template where the prompt is a list of messages. Special tokens in that text are text, or, with `control`, tokens.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, rows: int = 64, control: bool = False, **settings: Any
    ) -> None:
        super().__init__(**{"name": "model", **settings})
        self.model, self.tokenizer, self.rows = model.eval().requires_grad_(False), tokenizer, rows
        self.control = ControlTokens(tokenizer, as_text=not control) if tokenizer is not None else None

    def score(self, samples: Samples) -> list[float]:
        if self.control is None:
            texts = [p + c for p, c in zip(samples.prompt_ids, samples.completion_ids, strict=True)]
        else:
            texts = [self._encode(samples, i, self.control) for i in range(len(samples))]
        run = lambda ids, mask: self.model(input_ids=ids, attention_mask=mask).logits[:, 0].float()  # noqa: E731
        pad = getattr(self.model.config.get_text_config(), "pad_token_id", None) or 0
        return in_batches(texts, self.rows, next(self.model.parameters()).device, run, pad)

    def _encode(self, samples: Samples, i: int, control: ControlTokens) -> list[int]:
        prompt, completion = samples.rows[i].get("prompt"), samples.completions[i]
        if isinstance(prompt, list) and self.tokenizer.chat_template is not None:
            messages = [*prompt, {"role": "assistant", "content": completion}]
            return chat_ids(control, messages)
        ids = text_ids(control, samples.prompts[i] + completion)
        eos = self.tokenizer.eos_token_id
        return [*ids, eos] if samples.ended[i] and eos is not None and ids[-1] != eos else ids


class FunctionReward(Reward):
    """A Python function `f(prompts, completions, **columns) -> list of numbers`, sync or async, TRL's convention.

    It gets what its signature names, or with **kwargs everything: `prompts`, `completions`, `completion_ids` and the data's
    further columns, a list each. What it raises stops the run: a Failure with the sample and the function's own frames.
    """

    def __init__(self, function: Callable[..., Any], **settings: Any) -> None:
        super().__init__(**{"name": getattr(function, "__name__", type(function).__name__), **settings})
        self.function = function

    def score(self, samples: Samples) -> list[float]:
        try:
            return self._call(samples, range(len(samples)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: it would end the worker as if its work were done
            ordinary = isinstance(error, Exception)
            more = f" for {self._culprit(samples)}" if ordinary else "; expected a list of numbers"
            raise Failure(f"reward {self} raised {in_brief(error, 500)}{more}:\n{_frames(error)}") from error

    def __str__(self) -> str:
        place = (getattr(self.function, key, None) for key in ("__module__", "__qualname__"))
        return f"{self.name!r} ({':'.join(part for part in place if part)})"

    def _call(self, samples: Samples, rows: Sequence[int]) -> Any:
        texts = {"prompts": samples.prompts, "completions": samples.completions}
        columns = {**samples.columns(), "completion_ids": samples.completion_ids, **texts}
        parameters = inspect.signature(self.function).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            columns = {name: values for name, values in columns.items() if name in parameters}
        result = self.function(**{name: [values[i] for i in rows] for name, values in columns.items()})
        if inspect.isawaitable(result):
            # in a thread of its own: the caller (a notebook) may have a running event loop in this one
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(asyncio.run, _wait(result)).result()
        return result

    def _culprit(self, samples: Samples) -> str:
        """The first sample that makes the function raise when it gets it alone."""
        for i in range(len(samples)):
            try:
                self._call(samples, [i])
            except Exception:  # the original error is on its way up; here only its place is looked for
                return samples.show(i)
        return f"a batch of {len(samples)} samples (each alone does not make it raise)"


async def _wait(result: Any) -> Any:
    return await result


LIBRARIES = ("<frozen ", *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")))


def _frames(error: BaseException, most: int = 10) -> str:
    """The traceback inside a reward function, as text: neither this package's frames nor a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    called = max((i for i, frame in enumerate(frames) if frame.filename == __file__), default=-1)
    inside = frames[called + 1 :]
    own = [frame for frame in inside if not frame.filename.startswith(LIBRARIES)]
    return "".join(traceback.format_list((own or inside)[-most:])).rstrip()


@torch.no_grad()
def in_batches(
    texts: Sequence[Sequence[int]],
    rows: int,
    device: torch.device,
    run: Callable[..., torch.Tensor],
    pad: int = 0,
) -> list[float]:
    """`run(ids, mask) -> (B,)` over right-padded batches of like lengths; results in the order of `texts`."""
    scores = torch.zeros(len(texts))
    for some in micro_batches([len(text) for text in texts], rows, None):
        width = len(texts[some[-1]])
        ids = torch.tensor([list(texts[i]) + [pad] * (width - len(texts[i])) for i in some], device=device)
        mask = torch.tensor(
            [[1] * len(texts[i]) + [0] * (width - len(texts[i])) for i in some], device=device
        )
        scores[some] = run(ids, mask).float().cpu()
    return scores.tolist()


def weighted(
    rewards: Sequence[Reward], samples: Samples, normalize: bool
) -> tuple[list[float], dict[str, list[float]]]:
    """The weighted sum of all rewards for each sample, and each reward's raw scores by name."""
    raw = {reward.name: reward.checked(samples) for reward in rewards}
    if len(raw) < len(rewards):
        raise ValueError(f"two rewards have the same name: {[reward.name for reward in rewards]}")
    total = [0.0] * len(samples)
    for reward in rewards:
        for i, score in enumerate(raw[reward.name]):
            total[i] += reward.weight * ((score - reward.mean) / reward.std if normalize else score)
    return total, raw
