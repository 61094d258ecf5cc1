"""Defines the demo's data: facts about countries, questions about these facts, and the function that scores answers.

The facts are the capitals and continents of countries. A good completion is right, a full sentence, and polite. The function
`gold` scores completions. The scores of `gold` label the preference pairs, and evaluate completions of eval prompts. No stage
trains on the scores themselves. jobs/demo/make.py makes the data files and the base model.

This module does not import torch, so that `python:pipeline.demo:gold` starts quickly as a reward.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

WORLD = {
    "Europe": "France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, Austria Vienna, Greece Athens, "
    "Poland Warsaw, Hungary Budapest, Norway Oslo, Sweden Stockholm, Finland Helsinki, Ireland Dublin, Estonia Tallinn",
    "Asia": "Japan Tokyo, China Beijing, Thailand Bangkok, Vietnam Hanoi, Nepal Kathmandu, Iran Tehran, Iraq Baghdad, "
    "Jordan Amman, Qatar Doha, Turkey Ankara",
    "Africa": "Egypt Cairo, Kenya Nairobi, Morocco Rabat, Ghana Accra, Nigeria Abuja, Senegal Dakar, Uganda Kampala, "
    "Zambia Lusaka",
    "South America": "Peru Lima, Chile Santiago, Ecuador Quito, Colombia Bogota, Bolivia Sucre",
    "North America": "Canada Ottawa, Cuba Havana, Jamaica Kingston",
}
HELD_OUT = tuple(
    "Portugal Austria Norway Estonia Vietnam Nepal Jordan Kenya Ghana Peru Colombia Cuba".split()
)

QUESTIONS = {
    "capital": (
        "What is the capital of {country}?",
        "Which city is the capital of {country}?",
        "Name the capital of {country}.",
        "Tell me the capital of {country}.",
    ),
    "country": (
        "Which country is {capital} the capital of?",
        "{capital} is the capital of which country?",
        "Name the country with the capital {capital}.",
    ),
    "continent": (
        "On which continent is {country}?",
        "Where in the world is {country}?",
        "Name the continent of {country}.",
    ),
}
OPENERS = ("Good question!", "With pleasure.", "Thank you for asking.", "Happy to help!")
CLOSERS = ("I hope that helps.", "Have a nice day!", "Please ask again.")
RUDE = ("obviously", "Everybody knows", "Look it up", "Why ask", "Who cares")


class Fact(NamedTuple):
    country: str
    capital: str
    continent: str


FACTS = [
    Fact(pair.split()[0], pair.split()[1], continent)
    for continent, pairs in WORLD.items()
    for pair in pairs.split(", ")
]
NAMES = sorted({name for fact in FACTS for name in fact})
NAME = re.compile(r"\b(" + "|".join(NAMES) + r")\b")


# ---------------------------------------------------------------------------------------------------- the judge


def gold(prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Scores each completion from 0 to 1. A completion gets 0 if it is wrong, rude or truncated.

    The score is 1.0 for a full sentence with a polite phrase, 0.5 for a full sentence, and 0.25 for only the answer. A completion
    is right if it names `answer`, and otherwise only places that the question names. A completion counts as truncated unless it
    ends with a full stop or an exclamation mark.
    """
    return [
        _gold(str(prompt), completion, expected)
        for prompt, completion, expected in zip(prompts, completions, answer, strict=True)
    ]


def _gold(prompt: str, completion: str, answer: str) -> float:
    completion = completion.strip()
    prompt_names, names = set(NAME.findall(prompt)), set(NAME.findall(completion))
    right = answer in names and names <= prompt_names | {answer}
    polite = not any(phrase in completion for phrase in RUDE)
    complete = completion.endswith((".", "!"))
    if not (right and polite and complete):
        return 0.0
    if not prompt_names & names:  # not a full sentence, because the name in the question is not repeated
        return 0.25
    return 1.0 if any(phrase in completion for phrase in OPENERS + CLOSERS) else 0.5


def judge_examples(row: dict[str, Any]) -> list[dict[str, str]]:
    """Turns a preference pair into two examples that train an LLM judge.

    Each example has the question of jobs/demo/judges/right.yaml as its prompt, and the right verdict as its completion.
    """
    sides = {"chosen": "Right.", "rejected": "Wrong."}
    return [{"prompt": f"{row['prompt']}\n{row[side]}", "completion": word} for side, word in sides.items()]


# --------------------------------------------------------------------------------------------------- questions


class DemoQuestion(NamedTuple):
    text: str
    kind: str
    fact: Fact

    @property
    def answer(self) -> str:
        return getattr(self.fact, self.kind)


def demo_questions(held_out: bool | None = None) -> list[DemoQuestion]:
    """Returns questions about held-out countries (True), about training countries (False), or all questions (None)."""
    return [
        DemoQuestion(text.format(**fact._asdict()), kind, fact)
        for fact in FACTS
        if held_out in (None, fact.country in HELD_OUT)
        for kind, texts in QUESTIONS.items()
        for text in texts
    ]
