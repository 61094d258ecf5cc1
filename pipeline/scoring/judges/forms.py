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
    questions = []
    for indices in members.values():
        if len(indices) < 2:
            raise InputError("a judge with `form: rank` compares completions, and this prompt has only one")
        by_text: dict[str, tuple[int, ...]] = {}
        for i in indices:
            by_text[completions[i]] = (*by_text.get(completions[i], ()), i)
        first = indices[0]
        for order in _orders(definition, prompts[first], list(by_text)) if len(by_text) > 1 else ():
            labeled = zip(completion_names(len(order)), order, strict=True)
            texts = "\n\n".join(f"Response {label}:\n{text}" for label, text in labeled)
            messages = _messages(definition, prompts[first], rows[first], completions=texts)
            questions.append(JudgeQuestion(messages, tuple(by_text[text] for text in order)))
    return questions


def completion_names(count: int) -> list[str]:
    """Returns the names of completions in a question: letters, or numbers if there are more than 26."""
    return list(ascii_uppercase[:count]) if count <= 26 else [f"R{i + 1}" for i in range(count)]


def _orders(definition: Definition, prompt: str, texts: list[str]) -> list[list[str]]:
    """Returns the orders in which the judge sees the completions. Orders depend only on the texts, so all processes agree."""
    order = sorted(texts)
    Random(hashlib.sha256("\0".join([definition.digest, prompt, *order]).encode()).digest()).shuffle(order)
    return [order, order[::-1]] if definition.orders == "both" else [order]


def _messages(definition: Definition, prompt: str, row: dict[str, Any], **texts: str) -> list[dict[str, str]]:
    lines = [
        f"{criterion['name']}: {criterion['text']} Choices: {', '.join(map(str, criterion['choices']))}"
        for criterion in definition.criteria or []
    ]
    values = {**row, "prompt": prompt, "low": f"{definition.low:g}", "high": f"{definition.high:g}"}
    values |= {"criteria": "\n".join(lines), "words": " or ".join(definition.words)} | texts
    # replaces all placeholders at once, because a completion may contain braces
    text = PLACEHOLDER.sub(lambda match: str(values.get(match[1], match[0])), definition.asks)
    system = [{"role": "system", "content": definition.system}] if definition.system else []
    return [*system, {"role": "user", "content": text}]


# ------------------------------------------------------------------------------------------ the score of an answer


def scores_in_answer(definition: Definition, question: JudgeQuestion, answer: dict[str, Any]) -> list[float]:
    """Returns a score from 0 to 1 for each completion of the question. Raises Unusable if the answer lacks a score.

    Args:
        answer: has `text`, and for `yes` also `top`, the likeliest first tokens, each as [token, log-prob].
    """
    parsers: dict[str, Callable[..., list[float]]]
    parsers = {"score": _score, "yes": _yes, "rank": _rank, "rubric": _rubric}
    return parsers[definition.form](definition, question, answer)


def _lines(answer: dict[str, Any], name: str) -> list[str]:
    """Returns the text after `NAME:` from all lines that begin with `NAME:`, without the judge's reasoning."""
    text = normalize_answer(answer["text"].rpartition("</think>")[2])
    return re.findall(rf"(?m)^{LEAD}{name}[. ]*: ?(.*)$", text)


def _score(definition: Definition, question: JudgeQuestion, answer: dict[str, Any]) -> list[float]:
    last = _lines(answer, "(?:final |overall )?score")[-1:]  # the last line; earlier lines may be quotations
    scale = re.escape(f"{definition.high:g}")
    match = re.fullmatch(rf"({NUMBER})(?: ?(?:/|out of) ?{scale})?", "".join(last))
    if not match:
        raise Unusable("the answer's last line `Score: NUMBER` is missing, or is no number")
    number = float(match[1])
    low, high = sorted((definition.low, definition.high))
    if not low <= number <= high:
        raise Unusable(f"it scores {number:g}, expected {low:g} to {high:g}")
    return [(number - definition.low) / (definition.high - definition.low)]


def _yes(definition: Definition, question: JudgeQuestion, answer: dict[str, Any]) -> list[float]:
    good, bad = map(normalize_answer, definition.words)
    shares = {good: 0.0, bad: 0.0}
    for token, logprob in answer["top"] or ():
        start = normalize_answer(str(token).strip().strip("▁Ġ"))
        matches = [word for word in shares if start and word.startswith(start)]
        if len(matches) == 1 and logprob <= 1e-3:  # a token may be the start of a word, such as Y
            shares[matches[0]] += math.exp(logprob)
    total = sum(shares.values())
    if not total >= LEAST_SHARE:
        words = " or ".join(definition.words)
        raise Unusable(f"the first token, in top_logprobs, is {words} with a probability of only {total:.2g}")
    return [shares[good] / total]


def _rank(definition: Definition, question: JudgeQuestion, answer: dict[str, Any]) -> list[float]:
    names = completion_names(len(question.rows))
    last = "".join(_lines(answer, "(?:final )?ranking")[-1:])
    order = [part.strip().removeprefix("response ").upper() for part in last.split(">")]
    if sorted(order) != sorted(names):
        raise Unusable(f"the answer's last line `Ranking: ` does not contain each of {', '.join(names)} once")
    return [1 - order.index(name) / (len(names) - 1) for name in names]


def _rubric(definition: Definition, question: JudgeQuestion, answer: dict[str, Any]) -> list[float]:
    total = weights = 0.0
    for criterion in definition.criteria or []:
        choices = [normalize_answer(str(choice)) for choice in criterion["choices"]]
        answers = _lines(answer, re.escape(normalize_answer(criterion["name"])))
        if len(answers) != 1 or answers[0] not in choices:
            raise Unusable(
                f"the answer needs one line `{criterion['name']}: ` with one of {', '.join(choices)}"
            )
        weight = float(criterion.get("weight", 1.0))
        total += weight * choices.index(answers[0]) / (len(choices) - 1)
        weights += weight
    return [total / weights]


def mean_scores(count: int, scored: Sequence[tuple[JudgeQuestion, list[float]]]) -> list[float]:
    """Returns the mean score of each of `count` samples, or 0.5 for a sample without a question."""
    row_scores: list[list[float]] = [[] for _ in range(count)]
    for question, scores in scored:
        for rows, score in zip(question.rows, scores, strict=True):
            for row in rows:
                row_scores[row].append(score)
    return [mean(scores or [0.5]) for scores in row_scores]
