"""A judge as a reward."""

from __future__ import annotations

from functools import partial
from typing import Any

from pipeline.job.judge import Definition
from pipeline.scoring.judges import forms
from pipeline.scoring.judges.client import Asked, Client
from pipeline.scoring.judges.store import Store, folder
from pipeline.scoring.rewards import Reward, Samples
from pipeline.system import loop


class JudgeReward(Reward):
    """Scores from 0 to 1 by the answers of a judge.

    It leaves in `notes` of the samples, by its name, what the judge said about each one (`words`). `rank`
    also leaves the `orders`: the place, counted from 0, at which each order shows the sample, and the score.

    Args:
        given: the definition.
        storage_path, run: where answers are kept, and the run that pays for them.
        reward_timeout_s: seconds without a usable answer after which the run ends; -1: no limit.
    """

    def __init__(
        self, given: Definition, storage_path: str, run: str, reward_timeout_s: float = -1, **settings: Any
    ) -> None:
        super().__init__(**{"name": "judge", **settings})
        self.given, self.columns, self.compares = given, frozenset(given.columns), given.form == "rank"
        store = Store(folder(storage_path, given), run)
        self.client = Client(given, store, f"reward {self.name!r} (judge {given.model})", reward_timeout_s)

    def score(self, samples: Samples) -> list[float]:
        given = self.given
        asked = forms.questions(given, samples.prompts, samples.completions, samples.rows, samples.groups)
        several = [one for one in asked for _ in range(given.draws)]
        requests = [
            Asked(one.messages, number % given.draws, partial(forms.scores_of, given, one))
            for number, one in enumerate(several)
        ]
        answers = loop.run_coroutine(self.client.answers(requests))
        scored = [
            (one, forms.scores_of(given, one, answer)) for one, answer in zip(several, answers, strict=True)
        ]
        notes: list[dict[str, Any]] = [{"words": [], "orders": []} for _ in samples.rows]
        for (one, scores), answer in zip(scored, answers, strict=True):
            for place, (rows, score) in enumerate(zip(one.rows, scores, strict=True)):
                for row in rows:
                    notes[row]["words"].append(answer["text"])
                    notes[row]["orders"] += [(place, score)] if self.compares else []
        samples.notes[self.name] = notes
        return forms.means(len(samples), scored)
