"""Tests that `evaluate` names the fault of each broken judge, and reports no fault for a good judge."""

import math
import random
import re

import pytest
from judging import MODEL, chat, judging

from pipeline.errors import Failure, InputError
from pipeline.job.judge import Definition
from pipeline.scoring.judges import client
from pipeline.scoring.judges.reward import JudgeReward
from pipeline.stages import pairs

CRITERIA = [
    {"name": "correct", "text": "Is it true?", "choices": ["wrong", "right"]},
    {"name": "polite", "text": "Is it polite?", "choices": ["no", "yes"]},
]


class Tokenizer:
    """A tokenizer that decodes a completion to `good` or `bad`, followed by as many words as the completion has tokens."""

    def decode(self, ids, skip_special_tokens=True):
        return f"{'good' if ids[0] else 'bad'} " + "word " * len(ids)


def rows(count=120):
    """Returns preference pairs. In half of the pairs, the chosen completion is the longer one."""
    draw = random.Random(0)
    made = []
    for i in range(count):
        good, bad = [1] * (3 + i % 5), [0] * (3 + i % 5)
        (good if i % 2 else bad).extend([good[0] if i % 2 else 0] * draw.randint(2, 6))
        made.append(
            {
                "prompt_ids": [i],
                "chosen_ids": good,
                "rejected_ids": bad,
                "row": f'{{"prompt": "question {i}"}}',
            }
        )
    return made


def shown(asked):
    """Returns the responses that a question to the judge contains."""
    text = asked["messages"][-1]["content"]
    found = re.split(r"Response(?: \w)?:\n", text)[1:]
    return [one.split("\n\n")[0] for one in found]


def score(give):
    return lambda asked: f"Score: {give(shown(asked)[0])}"


def rank(prefers_first, swapped=False):
    def answer(asked):
        first, second = shown(asked)
        wins = prefers_first(first, second, asked) != swapped
        return "Ranking: A > B" if wins else "Ranking: B > A"

    return answer


def biased(first, second, asked):
    """Simulates a judge with position bias: in a fifth of the questions, it prefers the first response, even if it is bad."""
    return "good" in first or random.Random(str(asked)).random() < 0.4


def yes(share):
    """Returns a judge that answers Yes with the probability `share`."""

    def answer(asked):
        good = share(shown(asked)[0])
        shares = {"Yes": good, "No": 1 - good}
        return chat("Yes", top=[{"token": word, "logprob": math.log(one)} for word, one in shares.items()])

    return answer


BROKEN = {
    "a template that swaps answers": ("rank", rank(lambda a, b, _: "good" in a, swapped=True), r"prefers the rejected completion \(100%\); are chosen and rejected swapped"),
    "a position bias of a fifth": ("rank", rank(biased), r"prefers the completion that it sees first"),
    "the last place": ("rank", rank(lambda a, b, asked: "good" in a and random.Random(str(asked)).random() < 0.5), "sees last"),
    "a bias to length": ("score", score(lambda text: min(10, len(text) / 10)), "prefers the longer completion"),
    "a bias to brevity": ("score", score(lambda text: 10 - min(9, len(text) / 10)), "prefers the shorter completion"),
    "ties only": ("score", score(lambda text: 7), r"100% of the pairs have equal scores"),
    "chance": ("score", lambda asked: f"Score: {random.Random(str(asked)).uniform(1, 10)}", r"may be chance"),
    "another scale": ("score", score(lambda text: 85), r"no usable answer .*it scores 85, expected 1 to 10"),
    "a criterion missing": ("rubric", lambda asked: "correct: right", r"no usable answer .*needs one line `polite: `"),
    "no log-probs": ("yes", lambda asked: "Yes", r"no usable answer .*in top_logprobs, is Yes or No with a probability of only 0"),
}  # fmt: skip


def found(storage, form, answer):
    with judging(answer) as server:
        criteria = CRITERIA if form == "rubric" else None
        given = Definition(MODEL, form, f"{server.address}/v1", criteria=criteria)
        judge = JudgeReward(given, str(storage), "run", reward_timeout_s=0.2)
        try:
            made = pairs.score_both_sides([judge], rows(), 0, Tokenizer(), {0, 1})
        except (Failure, InputError) as error:
            return [str(error)]
        assert server.paid.total() == len(server.paid) == (120 if form == "rank" else len(server.paid))
        return pairs.pair_metrics(made)[1]["faults"]


@pytest.mark.parametrize("name", BROKEN)
def test_the_fault_of_a_broken_judge_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "PAUSES_S", (0.01, 0.05))
    form, answer, says = BROKEN[name]
    faults = found(tmp_path, form, answer)
    assert any(re.search(says, fault) for fault in faults), faults
    assert len(faults) == 1 or "bias" in name, faults


@pytest.mark.parametrize(
    ("form", "answer"),
    [("rank", rank(lambda a, b, _: "good" in a)), ("yes", yes(lambda text: 0.9 if "good" in text else 0.05))],
)  # fmt: skip
def test_a_good_judge_has_no_fault(form, answer, tmp_path):
    assert found(tmp_path, form, answer) == []
