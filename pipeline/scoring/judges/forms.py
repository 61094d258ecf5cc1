"""Questions to a judge about completions, and the scores that an answer means, by the judge's form."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from string import ascii_uppercase
from typing import Any

from pipeline.errors import InputError
from pipeline.job.judge import PLACEHOLDER, Definition, plain
from pipeline.statistics import mean

NUMBER = r"[-+]?\d+(?:\.\d+)?"
LEAD = r"[ >+-]*(?:\d+[.)] )?"  # start of a line in a list or a quotation
LEAST_SHARE = 0.5  # minimum probability of both words together, for the first token
TOP_LOGPROBS = 20  # alternatives per token; endpoints return at most this many


class Unusable(Exception):
    """An answer that means no score, or none at all. The message says why."""

    wait = 0.0  # seconds until the endpoint may be asked again


@dataclass(frozen=True)
class Question:
    """One request's worth of completions.

    `rows` are the numbers of the samples with each text, in the order in which the judge sees the texts.
    """

    messages: list[dict[str, str]]
    rows: tuple[tuple[int, ...], ...]


def questions(given: Definition, prompts: Sequence[str], completions: Sequence[str], rows: Sequence[dict[str, Any]],
              groups: Sequence[int]) -> list[Question]:  # fmt: skip
    """Returns what to ask. For `rank`, completions of the same number in `groups` share a question."""
    if given.form != "rank":
        numbers = range(len(prompts))
        return [
            Question(_messages(given, prompts[i], rows[i], completion=completions[i]), ((i,),))
            for i in numbers
        ]
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    asked = []
    for several in members.values():
        if len(several) < 2:
            raise InputError("a judge with `form: rank` compares completions, and this prompt has only one")
        by_text: dict[str, tuple[int, ...]] = {}
        for i in several:
            by_text[completions[i]] = (*by_text.get(completions[i], ()), i)
        first = several[0]
        for order in _orders(given, prompts[first], list(by_text)) if len(by_text) > 1 else ():
            named = zip(labels(len(order)), order, strict=True)
            texts = "\n\n".join(f"Response {label}:\n{text}" for label, text in named)
            messages = _messages(given, prompts[first], rows[first], completions=texts)
            asked.append(Question(messages, tuple(by_text[text] for text in order)))
    return asked


def labels(count: int) -> list[str]:
    """Returns the names of completions in a question: letters, or numbers if there are too many."""
    return list(ascii_uppercase[:count]) if count <= 26 else [f"R{i + 1}" for i in range(count)]


def _orders(given: Definition, prompt: str, texts: list[str]) -> list[list[str]]:
    """Returns the orders in which texts are shown, drawn from them, so all processes agree."""
    drawn = sorted(texts)
    Random(hashlib.sha256("\0".join([given.digest, prompt, *drawn]).encode()).digest()).shuffle(drawn)
    return [drawn, drawn[::-1]] if given.orders == "both" else [drawn]


def _messages(given: Definition, prompt: str, row: dict[str, Any], **shown: str) -> list[dict[str, str]]:
    lines = [
        f"{one['name']}: {one['text']} Choices: {', '.join(map(str, one['choices']))}"
        for one in given.criteria or []
    ]
    values = {**row, "prompt": prompt, "low": f"{given.low:g}", "high": f"{given.high:g}"}
    values |= {"criteria": "\n".join(lines), "words": " or ".join(given.words)} | shown
    # Replaces all fields at once, because a completion may contain braces
    text = PLACEHOLDER.sub(lambda found: str(values.get(found[1], found[0])), given.asks)
    system = [{"role": "system", "content": given.system}] if given.system else []
    return [*system, {"role": "user", "content": text}]


# ------------------------------------------------------------------------------------------ the score of an answer


def scores_of(given: Definition, question: Question, answer: dict[str, Any]) -> list[float]:
    """Returns a score from 0 to 1 for each completion of the question. Raises Unusable if the answer lacks one.

    Args:
        answer: `text`, and for `yes` the `top` tokens of the first place, as [token, log-prob].
    """
    read: dict[str, Callable[..., list[float]]]
    read = {"score": _score, "yes": _yes, "rank": _rank, "rubric": _rubric}
    return read[given.form](given, question, answer)


def _lines(answer: dict[str, Any], name: str) -> list[str]:
    """Returns what follows `NAME:` in all lines that begin so, after the judge's thoughts."""
    text = plain(answer["text"].rpartition("</think>")[2])
    return re.findall(rf"(?m)^{LEAD}{name}[. ]*: ?(.*)$", text)


def _score(given: Definition, question: Question, answer: dict[str, Any]) -> list[float]:
    last = _lines(answer, "(?:final |overall )?score")[-1:]  # earlier lines may be quotations
    scale = re.escape(f"{given.high:g}")
    found = re.fullmatch(rf"({NUMBER})(?: ?(?:/|out of) ?{scale})?", "".join(last))
    if not found:
        raise Unusable("its last line `Score: NUMBER` is missing, or is no number")
    number = float(found[1])
    low, high = sorted((given.low, given.high))
    if not low <= number <= high:
        raise Unusable(f"it scores {number:g}, expected {low:g} to {high:g}")
    return [(number - given.low) / (given.high - given.low)]


def _yes(given: Definition, question: Question, answer: dict[str, Any]) -> list[float]:
    good, bad = map(plain, given.words)
    shares = {good: 0.0, bad: 0.0}
    for token, logprob in answer["top"] or ():
        start = plain(str(token).strip().strip("▁Ġ"))
        begun = [word for word in shares if start and word.startswith(start)]
        if len(begun) == 1 and logprob <= 1e-3:  # a small vocabulary may begin Yes with Y
            shares[begun[0]] += math.exp(logprob)
    total = sum(shares.values())
    if not total >= LEAST_SHARE:
        words = " or ".join(given.words)
        raise Unusable(f"its first token, in top_logprobs, is {words} with a probability of only {total:.2g}")
    return [shares[good] / total]


def _rank(given: Definition, question: Question, answer: dict[str, Any]) -> list[float]:
    known = labels(len(question.rows))
    last = "".join(_lines(answer, "(?:final )?ranking")[-1:])
    order = [part.strip().removeprefix("response ").upper() for part in last.split(">")]
    if sorted(order) != sorted(known):
        raise Unusable(f"its last line `Ranking: ` lacks each of {', '.join(known)} once")
    return [1 - order.index(label) / (len(known) - 1) for label in known]


def _rubric(given: Definition, question: Question, answer: dict[str, Any]) -> list[float]:
    total = weights = 0.0
    for one in given.criteria or []:
        choices = [plain(str(choice)) for choice in one["choices"]]
        found = _lines(answer, re.escape(plain(one["name"])))
        if len(found) != 1 or found[0] not in choices:
            raise Unusable(f"it has no single line `{one['name']}: ` with one of {', '.join(choices)}")
        weight = float(one.get("weight", 1.0))
        total += weight * choices.index(found[0]) / (len(choices) - 1)
        weights += weight
    return [total / weights]


def means(count: int, scored: Sequence[tuple[Question, list[float]]]) -> list[float]:
    """Returns the mean score of each of `count` samples; 0.5 for one that was asked nothing about."""
    several: list[list[float]] = [[] for _ in range(count)]
    for question, scores in scored:
        for rows, score in zip(question.rows, scores, strict=True):
            for row in rows:
                several[row].append(score)
    return [mean(scores or [0.5]) for scores in several]
