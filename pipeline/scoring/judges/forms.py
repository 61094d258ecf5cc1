"""Makes a judge's questions about completions, and converts answers to scores, by the judge's form."""

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
from pipeline.job.judge import PLACEHOLDER, Definition, normalize_answer
from pipeline.statistics import mean

NUMBER = r"[-+]?\d+(?:\.\d+)?"
LEAD = r"[ >+-]*(?:\d+[.)] )?"  # start of a line in a list or a quotation, before `NAME:`
LEAST_SHARE = 0.5  # minimum probability that the first token begins an expected word, such as yes or no
TOP_LOGPROBS = 20  # `top_logprobs` of a request, the maximum that endpoints allow


class Unusable(Exception):
    """Raised for an answer without a score, or for no answer. The message gives the reason."""

    wait = 0.0  # seconds before the next request, if the endpoint sends Retry-After


@dataclass(frozen=True)
class JudgeQuestion:
    """A question about one or more completions.

    `rows` contains, for each text that the judge sees, the numbers of the samples with this text.
    """

    messages: list[dict[str, str]]
    rows: tuple[tuple[int, ...], ...]


def make_questions(definition: Definition, prompts: Sequence[str], completions: Sequence[str], rows: Sequence[dict[str, Any]],
              groups: Sequence[int]) -> list[JudgeQuestion]:  # fmt: skip
    """Returns the questions about completions. For `rank`, completions with the same number in `groups` share a question."""
    if definition.form != "rank":
        numbers = range(len(prompts))
        return [
            JudgeQuestion(_messages(definition, prompts[i], rows[i], completion=completions[i]), ((i,),))
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
        for order in _orders(definition, prompts[first], list(by_text)) if len(by_text) > 1 else ():
            named = zip(completion_names(len(order)), order, strict=True)
            texts = "\n\n".join(f"Response {label}:\n{text}" for label, text in named)
            messages = _messages(definition, prompts[first], rows[first], completions=texts)
            asked.append(JudgeQuestion(messages, tuple(by_text[text] for text in order)))
    return asked


def completion_names(count: int) -> list[str]:
    """Returns the names of completions in a question: letters, or numbers if there are more than 26."""
    return list(ascii_uppercase[:count]) if count <= 26 else [f"R{i + 1}" for i in range(count)]


def _orders(definition: Definition, prompt: str, texts: list[str]) -> list[list[str]]:
    """Returns the orders in which the question shows texts. Orders depend only on the texts, so all processes agree."""
    drawn = sorted(texts)
    Random(hashlib.sha256("\0".join([definition.digest, prompt, *drawn]).encode()).digest()).shuffle(drawn)
    return [drawn, drawn[::-1]] if definition.orders == "both" else [drawn]


def _messages(definition: Definition, prompt: str, row: dict[str, Any], **shown: str) -> list[dict[str, str]]:
    lines = [
        f"{one['name']}: {one['text']} Choices: {', '.join(map(str, one['choices']))}"
        for one in definition.criteria or []
    ]
    values = {**row, "prompt": prompt, "low": f"{definition.low:g}", "high": f"{definition.high:g}"}
    values |= {"criteria": "\n".join(lines), "words": " or ".join(definition.words)} | shown
    # replaces all placeholders at once, because a completion may contain braces
    text = PLACEHOLDER.sub(lambda found: str(values.get(found[1], found[0])), definition.asks)
    system = [{"role": "system", "content": definition.system}] if definition.system else []
    return [*system, {"role": "user", "content": text}]


# ------------------------------------------------------------------------------------------ the score of an answer


def scores_in_answer(definition: Definition, question: JudgeQuestion, answer: dict[str, Any]) -> list[float]:
    """Returns a score from 0 to 1 for each completion of the question. Raises Unusable if the answer lacks a score.

    Args:
        answer: has `text`, and for `yes` also `top`, the likeliest first tokens, each as [token, log-prob].
    """
    read: dict[str, Callable[..., list[float]]]
    read = {"score": _score, "yes": _yes, "rank": _rank, "rubric": _rubric}
    return read[definition.form](definition, question, answer)


def _lines(answer: dict[str, Any], name: str) -> list[str]:
    """Returns the text after `NAME:` from all lines that begin with `NAME:`, without the judge's reasoning."""
    text = normalize_answer(answer["text"].rpartition("</think>")[2])
    return re.findall(rf"(?m)^{LEAD}{name}[. ]*: ?(.*)$", text)


def _score(definition: Definition, question: JudgeQuestion, answer: dict[str, Any]) -> list[float]:
    last = _lines(answer, "(?:final |overall )?score")[-1:]  # the last line; earlier lines may be quotations
    scale = re.escape(f"{definition.high:g}")
    found = re.fullmatch(rf"({NUMBER})(?: ?(?:/|out of) ?{scale})?", "".join(last))
    if not found:
        raise Unusable("the answer's last line `Score: NUMBER` is missing, or is no number")
    number = float(found[1])
    low, high = sorted((definition.low, definition.high))
    if not low <= number <= high:
        raise Unusable(f"it scores {number:g}, expected {low:g} to {high:g}")
    return [(number - definition.low) / (definition.high - definition.low)]


def _yes(definition: Definition, question: JudgeQuestion, answer: dict[str, Any]) -> list[float]:
    good, bad = map(normalize_answer, definition.words)
    shares = {good: 0.0, bad: 0.0}
    for token, logprob in answer["top"] or ():
        start = normalize_answer(str(token).strip().strip("▁Ġ"))
        begun = [word for word in shares if start and word.startswith(start)]
        if len(begun) == 1 and logprob <= 1e-3:  # a token may be the start of a word, such as Y
            shares[begun[0]] += math.exp(logprob)
    total = sum(shares.values())
    if not total >= LEAST_SHARE:
        words = " or ".join(definition.words)
        raise Unusable(f"the first token, in top_logprobs, is {words} with a probability of only {total:.2g}")
    return [shares[good] / total]


def _rank(definition: Definition, question: JudgeQuestion, answer: dict[str, Any]) -> list[float]:
    known = completion_names(len(question.rows))
    last = "".join(_lines(answer, "(?:final )?ranking")[-1:])
    order = [part.strip().removeprefix("response ").upper() for part in last.split(">")]
    if sorted(order) != sorted(known):
        raise Unusable(f"the answer's last line `Ranking: ` does not contain each of {', '.join(known)} once")
    return [1 - order.index(label) / (len(known) - 1) for label in known]


def _rubric(definition: Definition, question: JudgeQuestion, answer: dict[str, Any]) -> list[float]:
    total = weights = 0.0
    for one in definition.criteria or []:
        choices = [normalize_answer(str(choice)) for choice in one["choices"]]
        found = _lines(answer, re.escape(normalize_answer(one["name"])))
        if len(found) != 1 or found[0] not in choices:
            raise Unusable(f"the answer needs one line `{one['name']}: ` with one of {', '.join(choices)}")
        weight = float(one.get("weight", 1.0))
        total += weight * choices.index(found[0]) / (len(choices) - 1)
        weights += weight
    return [total / weights]


def mean_scores(count: int, scored: Sequence[tuple[JudgeQuestion, list[float]]]) -> list[float]:
    """Returns the mean score of each of `count` samples, or 0.5 for a sample without a question."""
    several: list[list[float]] = [[] for _ in range(count)]
    for question, scores in scored:
        for rows, score in zip(question.rows, scores, strict=True):
            for row in rows:
                several[row].append(score)
    return [mean(scores or [0.5]) for scores in several]
