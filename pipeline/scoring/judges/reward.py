"""Makes a reward of a judge."""

from __future__ import annotations

from typing import Any

from pipeline.job.judge import Definition
from pipeline.scoring.judges import forms
from pipeline.scoring.judges.client import JudgeClient
from pipeline.scoring.judges.store import Store, answers_folder
from pipeline.scoring.rewards import Reward, Samples
from pipeline.system import loop


class JudgeReward(Reward):
    """Scores completions from 0 to 1, according to the answers of a judge.

    The reward adds its notes to the samples: `words`, the judge's answers about each sample, and for `rank` also `orders`. An
    order is (the sample's position in a question, counted from 0, its score).

    Args:
        definition: the judge's definition.
        storage_path: where answers are stored.
        run: the run whose budget pays for answers.
        reward_timeout_s: seconds without a usable answer after which the run ends. -1 means no limit.
    """

    def __init__(
        self,
        definition: Definition,
        storage_path: str,
        run: str,
        reward_timeout_s: float = -1,
        **settings: Any,
    ) -> None:
        super().__init__(**{"name": "judge", **settings})
        self.definition, self.columns = definition, frozenset(definition.columns)
        self.compares = definition.form == "rank"
        store = Store(answers_folder(storage_path, definition), run)
        self.client = JudgeClient(
            definition, store, f"reward {self.name!r} (judge {definition.model})", reward_timeout_s
        )

    def score(self, samples: Samples) -> list[float]:
        definition = self.definition
        questions = forms.make_questions(
            definition, samples.prompts, samples.completions, samples.rows, samples.groups
        )
        requests = [(question, draw) for question in questions for draw in range(definition.draws)]
        answers = loop.run_coroutine(self.client.answers(requests))
        scored = [
            (question, forms.scores_in_answer(definition, question, answer))
            for (question, _), answer in zip(requests, answers, strict=True)
        ]
        notes: list[dict[str, Any]] = [{"words": [], "orders": []} for _ in samples.rows]
        for (question, scores), answer in zip(scored, answers, strict=True):
            for position, (rows, score) in enumerate(zip(question.rows, scores, strict=True)):
                for row in rows:
                    notes[row]["words"].append(answer["text"])
                    notes[row]["orders"] += [(position, score)] if self.compares else []
        samples.notes[self.name] = notes
        return forms.mean_scores(len(samples), scored)
