"""Defines rewards: an adapter on the shared base, another sequence-classification model, or a Python function.

Each `Reward` has a name, a weight, and the mean and standard deviation that normalize its scores. A reward adapter's constants
are measured on eval completions and stored with its version. A completion's score is the weighted sum of all rewards.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import sysconfig
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import set_seed

from pipeline.errors import Failure, InputError, in_brief, is_out_of_memory
from pipeline.models.adapters import SharedBase
from pipeline.models.control_tokens import ControlTokens, chat_ids, text_ids
from pipeline.models.packing import micro_batches
from pipeline.scoring import forward
from pipeline.scoring.forward import FORWARD_TOKENS
from pipeline.system import loop, process
from pipeline.system.rng import kept_rng_state
from pipeline.writing.rows import Completion


@dataclass
class Samples:
    """Completions to score, with the data rows of their prompts: `prompt` and all other columns."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    ended: list[bool]
    rows: list[dict[str, Any]]
    tokenizer: Any
    # Seed of each completion, for functions that draw random numbers. If `seeds` is empty, every seed is 0.
    seeds: Sequence[int] = ()
    # Number of each completion's prompt. If `groups` is empty, all completions have different prompts.
    groups: Sequence[int] = ()
    # {name of a reward: its notes on each sample}
    notes: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seeds = list(self.seeds) or [0] * len(self)
        self.groups = list(self.groups) or [*range(len(self))]

    @classmethod
    def of(
        cls,
        prompts: list[list[int]],
        completions: Sequence[Completion],
        rows: list[dict[str, Any]],
        tokenizer: Any,
        seeds: Sequence[int] = (),
        per_prompt: int = 1,
    ) -> Samples:
        """Returns sampled completions as samples. `per_prompt` consecutive completions have the same prompt."""
        tokens, ended = [c.tokens for c in completions], [c.ended for c in completions]
        groups = [i // per_prompt for i in range(len(tokens))]
        return cls(prompts, tokens, ended, rows, tokenizer, seeds, groups)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def prompts(self) -> list[str]:
        """Returns the prompts as text. If a prompt is a list of messages, decodes its token ids."""
        row_prompts = [row.get("prompt") for row in self.rows]
        return [
            prompt if isinstance(prompt, str) else self.tokenizer.decode(ids, skip_special_tokens=True)
            for prompt, ids in zip(row_prompts, self.prompt_ids, strict=True)
        ]

    @cached_property
    def completions(self) -> list[str]:
        """Returns the completions as text, without special tokens."""
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in self.completion_ids]

    def columns(self) -> dict[str, list[Any]]:
        """Returns all columns except prompt and completion. The value of a row that lacks the column is None.

        The column `messages` has the prompts if they are lists of messages.
        """
        names = sorted({key for row in self.rows for key in row} - {"prompt", "completion"})
        columns = {name: [row.get(name) for row in self.rows] for name in names}
        if any(isinstance(row.get("prompt"), list) for row in self.rows):
            columns.setdefault("messages", [row.get("prompt") for row in self.rows])
        return columns

    def show(self, i: int) -> str:
        """Returns a shortened text of sample `i` for an error message."""
        values = (_brief(value) for value in (self.prompts[i], self.completions[i], self.rows[i]))
        return "prompt {}, completion {}, row {} (sample {} of {})".format(*values, i, len(self))


def _brief(value: Any, limit: int = 300) -> str:
    """Returns the repr of a value, shortened to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


class Reward(ABC):
    """Scores completions.

    Args:
        name: name in metrics and messages.
        weight: weight of its scores in the weighted sum.
        mean, std: normalized scores are (score - mean) / std. By default, normalization changes nothing.
    """

    columns: frozenset[str] = frozenset()  # columns of the data that the reward needs
    compares = False  # whether the reward compares a prompt's completions with each other

    def __init__(self, name: str, weight: float = 1.0, mean: float = 0.0, std: float = 1.0) -> None:
        self.name, self.weight, self.mean, self.std = name, weight, mean, std
        if not (std > 0 and math.isfinite(mean) and math.isfinite(std) and math.isfinite(weight)):
            raise ValueError(
                f"reward {name!r}: weight {weight}, mean {mean}, std {std}; expected finite numbers, std above 0"
            )

    @abstractmethod
    def score(self, samples: Samples) -> list[float]:
        """Returns one raw score for each sample. The method `checked` checks the result."""

    def checked(self, samples: Samples) -> list[float]:
        """Returns the scores from `score` as floats.

        Raises:
            InputError: if the result is not a list of one number for each sample.
            Failure: if a number is not finite.
        """
        result = self.score(samples)
        # Arrays and tensors, also tensors that require gradients, have the method tolist.
        scores = result.tolist() if hasattr(result, "tolist") else result
        is_list = isinstance(scores, (list, tuple))
        if not is_list or len(scores) != len(samples):
            found = f"{len(scores)} scores" if is_list else _brief(result, 100)
            raise InputError(
                f"reward {self} returned {found} (samples: {len(samples)}); expected a list of one number for each sample; "
                f"the first is {samples.show(0)}"
            )
        values = [_number(score) for score in scores]
        for i, value in enumerate(values):
            if value is None or not math.isfinite(value):
                problem = f"reward {self} returned {_brief(scores[i], 100)} for {samples.show(i)}"
                if scores[i] is None:
                    raise InputError(f"{problem}; return a number, or remove such rows from the data")
                raise (InputError if value is None else Failure)(f"{problem}; expected a finite number")
        return [value for value in values if value is not None]

    def __str__(self) -> str:
        return repr(self.name)


def _number(score: Any) -> float | None:
    """Returns a score as a float (infinite if too large), or None if it is not a real number."""
    try:
        return float(score.item() if hasattr(score, "item") else score)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # a tensor of two numbers raises RuntimeError
        return None


class AdapterReward(Reward):
    """Scores completions with a reward adapter on the shared base. The adapter's head reads the last token of the completion.

    Args:
        role: the adapter's role on `shared`.
        rows, tokens: limits of a forward pass. By default, rows are unlimited, and tokens are limited to FORWARD_TOKENS.
        settings: name (default: the role), weight, mean and std of `Reward`.
    """

    def __init__(
        self,
        shared: SharedBase,
        role: str = "reward",
        rows: int | None = None,
        tokens: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**{"name": role, **settings})
        self.shared, self.role, self.rows, self.tokens = shared, role, rows, tokens

    @torch.no_grad()
    def score(self, samples: Samples) -> list[float]:
        sequences = forward.collate_ids(samples.prompt_ids, samples.completion_ids, self.shared.device)
        scores = torch.zeros(len(sequences))
        for rows, batch in forward.parts_of(self.shared, sequences, self.rows, self.tokens):
            states = forward.action_states(self.shared, self.role, batch, last=True)
            scores[rows] = self.shared.head(self.role, states).squeeze(1).float().cpu()
        return scores.tolist()


class ModelReward(Reward):
    """Scores completions with a separate sequence-classification model. The score is the model's only logit.

    Args:
        tokenizer: the model's tokenizer. The tokenizer encodes prompt and completion as text, with its chat template if the
            prompt is a list of messages. Without a tokenizer, the model reads the policy's token ids.
        rows, tokens, settings: as for `AdapterReward`.
        control: whether the tokenizer encodes special tokens in the text as special tokens, or else as ordinary text.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        rows: int | None = None,
        tokens: int | None = None,
        control: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(**{"name": "model", **settings})
        self.model, self.tokenizer, self.rows = model.eval().requires_grad_(False), tokenizer, rows
        self.tokens = tokens
        self.control = ControlTokens(tokenizer, as_text=not control) if tokenizer is not None else None

    @torch.no_grad()
    def score(self, samples: Samples) -> list[float]:
        if self.control is None:
            token_ids = [p + c for p, c in zip(samples.prompt_ids, samples.completion_ids, strict=True)]
        else:
            token_ids = [self._encode(samples, i, self.control) for i in range(len(samples))]
        pad = getattr(self.model.config.get_text_config(), "pad_token_id", None) or 0
        device = next(self.model.parameters()).device
        scores = torch.zeros(len(token_ids))
        lengths, tokens = [len(ids) for ids in token_ids], self.tokens or FORWARD_TOKENS[device.type]
        for batch in micro_batches(lengths, self.rows, tokens, device.type):
            width = lengths[batch[-1]]  # the last row of a micro-batch is the longest
            ids = [token_ids[i] + [pad] * (width - lengths[i]) for i in batch]
            mask = [[1] * lengths[i] + [0] * (width - lengths[i]) for i in batch]
            ids, mask = (torch.tensor(rows, device=device) for rows in (ids, mask))
            scores[batch] = self.model(input_ids=ids, attention_mask=mask).logits[:, 0].float().cpu()
        return scores.tolist()

    def _encode(self, samples: Samples, i: int, control: ControlTokens) -> list[int]:
        """Returns sample `i` as ids of the model's tokenizer. Adds EOS to plain text if the completion has ended."""
        prompt, completion = samples.rows[i].get("prompt"), samples.completions[i]
        if isinstance(prompt, list) and self.tokenizer.chat_template is not None:
            messages = [*prompt, {"role": "assistant", "content": completion}]
            return chat_ids(control, messages)
        ids = text_ids(control, samples.prompts[i] + completion)
        eos = self.tokenizer.eos_token_id
        return [*ids, eos] if samples.ended[i] and eos is not None and ids[-1] != eos else ids


class FunctionReward(Reward):
    """Scores completions with a Python function `f(prompts, completions, **columns) -> list of numbers`, as in TRL.

    The function may be async. The function's arguments are lists: `prompts`, `completions`, `completion_ids`, `seeds`, `groups`
    and the data's other columns. The function receives the arguments in its signature, or all arguments if it accepts **kwargs.
    Completions to the same prompt have the same number in `groups`, and are in the same call. If the function raises, the run
    stops with a Failure that shows the sample and the function's own stack frames.

    Each completion has its own seed for random numbers (`seeds`). The first completion's seed also seeds the global generators of
    Python, numpy and torch. Scores that use a global generator depend on which completions share a call.

    Args:
        reward_timeout_s: seconds after which a call of an async function ends the run. -1 means no limit.
    """

    def __init__(self, function: Callable[..., Any], reward_timeout_s: float = -1, **settings: Any) -> None:
        super().__init__(**{"name": getattr(function, "__name__", type(function).__name__), **settings})
        self.function, self.reward_timeout_s = function, reward_timeout_s

    def score(self, samples: Samples) -> Any:
        with kept_rng_state():
            set_seed(samples.seeds[0])
            return self._call(samples, range(len(samples)))

    def __str__(self) -> str:
        names = (getattr(self.function, key, None) for key in ("__module__", "__qualname__"))
        return f"{self.name!r} ({':'.join(name for name in names if name)})"

    def _call(self, samples: Samples, rows: Sequence[int]) -> Any:
        """Returns the function's result for some of the samples."""
        columns = {"seeds": samples.seeds, "groups": samples.groups, **samples.columns()}
        columns["completion_ids"] = samples.completion_ids
        columns |= {"prompts": samples.prompts, "completions": samples.completions}
        is_async = False
        dtype, has_gradients = torch.get_default_dtype(), torch.is_grad_enabled()
        try:
            parameters = inspect.signature(self.function).parameters
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                columns = {name: values for name, values in columns.items() if name in parameters}
            result = self.function(**{name: [values[i] for i in rows] for name, values in columns.items()})
            if not (is_async := inspect.iscoroutine(result)):
                return result
            return loop.run_coroutine(self._in_time(result))
        except (KeyboardInterrupt, Failure):
            raise
        except BaseException as error:  # SystemExit would end the worker as if its work were done
            if is_out_of_memory(error) or process.received:  # a SIGTERM ends the run in any case
                raise
            # An async function may send requests that cost money, so it is not called again to find the sample.
            culprit = f"a batch of {len(rows)} samples" if is_async else self._culprit(samples, rows)
            hint = f" for {culprit}" if isinstance(error, Exception) else "; expected a list of numbers"
            raise Failure(f"reward {self} raised {in_brief(error, 500)}{hint}:\n{_frames(error)}") from error
        finally:  # training relies on these global settings, which a function may change
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(has_gradients)

    def _culprit(self, samples: Samples, rows: Sequence[int]) -> str:
        """Describes the first sample for which the function raises if it is called with this sample alone."""
        if len(rows) == 1:
            return samples.show(rows[0])
        for i in rows:
            try:
                self._call(samples, [i])
            except Exception:  # the caller reports the original error
                return samples.show(i)
        return f"a batch of {len(rows)} samples (the function raises for no single sample)"

    async def _in_time(self, result: Coroutine[Any, Any, Any]) -> Any:
        """Returns the result of an async function. Raises Failure after `reward_timeout_s`."""
        timeout = asyncio.timeout(self.reward_timeout_s if self.reward_timeout_s >= 0 else None)
        try:
            async with timeout:
                return await result
        except TimeoutError as error:
            if not timeout.expired():  # the function itself raised the error
                raise
            raise Failure(
                f"reward {self} took more than {self.reward_timeout_s:g} s (trainer.reward_timeout_s); to continue the run, "
                "repeat the command with the same run.name"
            ) from error


LIBRARIES = ("<frozen ", *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")))


def _frames(error: BaseException) -> str:
    """Returns the last 10 stack frames of a reward function as text. Omits libraries' frames, unless there are no others."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        frame for frame in frames if not frame.filename.startswith((__file__, str(loop.__file__), *LIBRARIES))
    ]
    return "".join(traceback.format_list((user_frames or frames[1:])[-10:])).rstrip()


def weighted_scores(rewards: Sequence[Reward], samples: Samples, normalize: bool) -> list[float]:
    """Returns for each sample the weighted sum of the rewards' scores."""
    return weighted_sum(rewards, raw_scores(rewards, samples), normalize)


def raw_scores(rewards: Sequence[Reward], samples: Samples) -> dict[str, list[float]]:
    """Returns each reward's raw scores by its name."""
    return {reward.name: reward.checked(samples) for reward in rewards}


def weighted_sum(
    rewards: Sequence[Reward], raw: Mapping[str, Sequence[float]], normalize: bool
) -> list[float]:
    """Returns the weighted sum of the raw scores of one or more rewards, normalized if requested."""
    totals = [0.0] * len(raw[rewards[0].name])
    for reward in rewards:
        for i, score in enumerate(raw[reward.name]):
            totals[i] += reward.weight * ((score - reward.mean) / reward.std if normalize else score)
    return totals
