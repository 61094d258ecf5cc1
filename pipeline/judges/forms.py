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

from pipeline.config.judge import PLACEHOLDER, Definition
from pipeline.errors import InputError
from pipeline.figures import mean

NUMBER = r"[-+]?\d+(?:\.\d+)?"
TOP_LOGPROBS = 20  # alternatives to a token, the most that endpoints give


class Unusable(Exception):
    """An answer that means no score, or none at all. The message says why."""

    wait = 0.0  # seconds until the endpoint may be asked again


@dataclass(frozen=True)
class Question:
    """One request's worth of completions.

    `rows` are their numbers among the samples, in the order in which the judge sees them.
    """

    messages: list[dict[str, str]]
    rows: tuple[int, ...]


def questions(given: Definition, prompts: Sequence[str], completions: Sequence[str], rows: Sequence[dict[str, Any]],
              groups: Sequence[int]) -> list[Question]:  # fmt: skip
    """Returns what to ask. For `rank`, completions of the same number in `groups` share a question."""
    if given.form != "rank":
        numbers = range(len(prompts))
        return [
            Question(_messages(given, prompts[i], rows[i], completion=completions[i]), (i,)) for i in numbers
        ]
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    asked = []
    for several in members.values():
        if len(several) < 2:
            raise InputError("a judge with `form: rank` compares completions, and this prompt has only one")
        for order in _orders(given, prompts[several[0]], [completions[i] for i in several]):
            shown = [several[place] for place in order]
            named = zip(labels(len(shown)), shown, strict=True)
            texts = "\n\n".join(f"Response {label}:\n{completions[i]}" for label, i in named)
            messages = _messages(given, prompts[shown[0]], rows[shown[0]], completions=texts)
            asked.append(Question(messages, tuple(shown)))
    return asked


def labels(count: int) -> list[str]:
    """Returns the names of completions in a question: letters, or numbers if there are too many."""
    return list(ascii_uppercase[:count]) if count <= 26 else [f"R{i + 1}" for i in range(count)]


def _orders(given: Definition, prompt: str, texts: list[str]) -> list[list[int]]:
    """Returns the orders in which completions are shown, drawn from the texts, so all processes agree."""
    drawn = sorted(range(len(texts)), key=lambda place: texts[place])
    Random(hashlib.sha256("\0".join([given.digest, prompt, *sorted(texts)]).encode()).digest()).shuffle(drawn)
    return [drawn, drawn[::-1]] if given.orders == "both" else [drawn]


def _messages(given: Definition, prompt: str, row: dict[str, Any], **shown: str) -> list[dict[str, str]]:
    lines = [
        f"{one['name']}: {one['text']} Choices: {', '.join(map(str, one['choices']))}"
        for one in given.criteria or []
    ]
    values = {**row, "prompt": prompt, "low": f"{given.low:g}", "high": f"{given.high:g}"}
    values |= {"criteria": "\n".join(lines), "words": " or ".join(given.words)} | shown
    # At once, because a completion may have braces
    text = PLACEHOLDER.sub(lambda found: str(values.get(found[1], found[0])), given.asks)
    system = [{"role": "system", "content": given.system}] if given.system else []
    return [*system, {"role": "user", "content": text}]


# ------------------------------------------------------------------------------------------ what an answer means


def scores_of(given: Definition, question: Question, answer: dict[str, Any]) -> list[float]:
    """Returns a score from 0 to 1 for each row of the question. Raises Unusable if the answer lacks one.

    Args:
        answer: `text`, and for `yes` the `top` tokens of the first place, as [token, log-prob].
    """
    read: dict[str, Callable[..., list[float]]]
    read = {"score": _score, "yes": _yes, "rank": _rank, "rubric": _rubric}
    return read[given.form](given, question, answer)


def _lines(text: str, name: str, value: str) -> list[str]:
    """Returns the values of all lines `NAME: VALUE`, whatever their case, with or without Markdown."""
    plain = re.sub(r"[*_`#]", "", text)
    return re.findall(rf"(?im)^[ \t\->]*{re.escape(re.sub(r'[*_`#]', '', name))}[ \t]*:[ \t]*({value})[ \t.]*$", plain)  # fmt: skip


def _score(given: Definition, question: Question, answer: dict[str, Any]) -> list[float]:
    found = _lines(answer["text"], "Score", rf"{NUMBER}(?:[ \t]*/[ \t]*{given.high:g})?")
    if len(found) != 1:
        raise Unusable(f"it has {len(found)} lines `Score: NUMBER`, expected one")
    number = float(found[0].partition("/")[0])
    low, high = sorted((given.low, given.high))
    if not low <= number <= high:
        raise Unusable(f"it scores {number:g}, expected {low:g} to {high:g}")
    return [(number - given.low) / (given.high - given.low)]


def _yes(given: Definition, question: Question, answer: dict[str, Any]) -> list[float]:
    good, bad = given.words
    shares = {good.lower(): 0.0, bad.lower(): 0.0}
    for token, logprob in answer["top"] or ():
        start = str(token).strip().strip("▁Ġ").lower()
        if start and logprob <= 1e-3:  # a small vocabulary may begin Yes with Y
            for word in shares:
                shares[word] += math.exp(logprob) * word.startswith(start)
    if not sum(shares.values()) > 0:
        raise Unusable(f"its first token is neither {good} nor {bad}, or it has no top_logprobs")
    return [shares[good.lower()] / sum(shares.values())]


def _rank(given: Definition, question: Question, answer: dict[str, Any]) -> list[float]:
    known = labels(len(question.rows))
    found = _lines(answer["text"], "Ranking", r"\w+(?:[ \t]*>[ \t]*\w+)*")
    order = [part.strip().upper() for part in found[0].split(">")] if len(found) == 1 else []
    if sorted(order) != sorted(known):
        raise Unusable(f"it has no single line `Ranking: ` with each of {', '.join(known)} once")
    return [1 - order.index(label) / (len(known) - 1) for label in known]


def _rubric(given: Definition, question: Question, answer: dict[str, Any]) -> list[float]:
    total = weights = 0.0
    for one in given.criteria or []:
        choices = [str(choice).lower() for choice in one["choices"]]
        found = [choice.strip(" \t.").lower() for choice in _lines(answer["text"], one["name"], r"[^\n]*?")]
        if len(found) != 1 or found[0] not in choices:
            raise Unusable(f"it has no single line `{one['name']}: ` with one of {', '.join(choices)}")
        weight = float(one.get("weight", 1.0))
        total += weight * choices.index(found[0]) / (len(choices) - 1)
        weights += weight
    return [total / weights]


def means(count: int, scored: Sequence[tuple[Question, list[float]]]) -> list[float]:
    """Returns the mean score of each of `count` samples."""
    several: list[list[float]] = [[] for _ in range(count)]
    for question, scores in scored:
        for row, score in zip(question.rows, scores, strict=True):
            several[row].append(score)
    return [mean(scores) for scores in several]
