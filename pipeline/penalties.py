"""Defines Python rewards that penalize typical exploits of a reward model. A job adds a penalty to its reward, with a weight:

reward: [{reward: models:/rlhf-rm@champion}, {reward: python:pipeline.penalties:length, weight: 0.2}]
"""

import re
from collections.abc import Sequence
from typing import Any

from pipeline import statistics

MARKUP = re.compile(r"^\s*(?:[-*+] |\d+\. |#+ |```)|\*\*[^*\n]+\*\*", re.MULTILINE)


def length(completions: Sequence[str], **_: Any) -> list[float]:
    """Returns minus the number of words, in hundreds. Use this penalty if eval_rm_probe/repetition is above 0."""
    return [-len(text.split()) / 100 for text in completions]


def repetition(completions: Sequence[str], **_: Any) -> list[float]:
    """Returns minus the share of 4-grams of words that repeat earlier 4-grams. Use this penalty if eval_repetition grows."""
    return [-statistics.repetition(text.split()) for text in completions]


def markdown(completions: Sequence[str], **_: Any) -> list[float]:
    """Returns minus the number of list items, headings, code fences and bold passages per 100 words.

    Use this penalty if eval_rm_probe/markdown is above 0.
    """
    return [-100 * len(MARKUP.findall(text)) / max(100, len(text.split())) for text in completions]
