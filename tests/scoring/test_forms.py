"""Tests the questions that each judge form asks, and the scores of the answers. An unclear answer has no score."""

import math

import pytest

from pipeline.errors import InputError
from pipeline.job.judge import Definition
from pipeline.scoring.judges import forms
from pipeline.scoring.judges.forms import JudgeQuestion, Unusable, scores_in_answer

CRITERIA = [
    {"name": "correct", "text": "Is it true?", "choices": ["wrong", "partly", "right"], "weight": 3},
    {"name": "polite", "text": "Is it polite?", "choices": ["no", "yes"]},
]
FORMS = {
    "score": Definition("wise", "score"),
    "yes": Definition("wise", "yes"),
    "guard": Definition("wise", "yes", words=["safe", "unsafe"]),
    "alike": Definition("wise", "yes", words=["Right", "Rather not"]),
    "rank": Definition("wise", "rank"),
    "rubric": Definition("wise", "rubric", criteria=CRITERIA),
}
MARKED = [
    {"name": "_tone_", "text": "How is it?", "choices": ["bad ", "very_good"]},
    {"name": "As asked.", "text": "Is it as asked?", "choices": ["No.", "Yes."]},
]
FORMS["marked"] = Definition("wise", "rubric", criteria=MARKED)
ONE, THREE = JudgeQuestion([], ((0,),)), JudgeQuestion([], ((4,), (2,), (7,)))


def logprobs(**shares):
    return [[token, math.log(share)] for token, share in shares.items()]


@pytest.mark.parametrize(
    ("form", "answer", "scores"),
    [
        ("score", "I like it.\n**Score:** 10", [1.0]),
        ("score", "score: 5.5/10.", [0.5]),
        ("score", "It ends with:\n> Score: 10\nThat is a trick.\nScore: 5.5", [0.5]),
        ("score", "Score: 10\nScore: high", None),
        ("score", "Score\uff1a 10", [1.0]),
        ("score", 'I say "Score: 1".\n"Score: 10"', [1.0]),
        ("score", "<think>\nScore: 3\n</think>\nIt is good.", None),
        ("score", "The Score: 7 is mine", None),
        ("yes", logprobs(Yes=0.6, No=0.2, Maybe=0.2), [0.75]),
        ("yes", [[" yes", math.log(0.3)], ["Yes", math.log(0.3)], ["▁No", math.log(0.4)]], [0.6]),
        ("yes", [["Y", math.log(0.15)], ["N", math.log(0.45)], ["", math.log(0.4)]], [0.25]),
        ("yes", [['"Yes', math.log(0.5)], ["**No", math.log(0.25)], ["No.", math.log(0.25)]], [0.5]),
        ("yes", [["I", -1e-4], ["No", -16]], None),
        ("yes", logprobs(Yes=0.3, No=0.19, Maybe=0.51), None),
        ("yes", [["Yes", math.nan]], None),
        ("guard", logprobs(Safe=0.6, un=0.2, Yes=0.2), [0.75]),
        ("alike", logprobs(R=0.9, Right=0.1), None),
        ("rank", "Ranking: B > A > C", [0.5, 1.0, 0.0]),
        ("rank", "- ranking: c>a>b.", [0.5, 0.0, 1.0]),
        ("rank", "Ranking: B > A", None),
        ("rank", "Ranking: A > B > C\nRanking: C > B > A", [0.0, 0.5, 1.0]),
        ("rank", "**Ranking:** Response B > Response A > Response C", [0.5, 1.0, 0.0]),
        ("rubric", "correct: right\npolite: no", [0.75]),
        ("rubric", "* **Correct**: partly\n* **polite**: Yes.", [0.625]),
        ("rubric", "1. Correct\uff1a `Right`\r\n2. Polite:\u00a0no", [0.75]),
        ("marked", "Tone: very_good\nAs asked.: No.", [0.5]),
        ("marked", "*tone*: VERYGOOD.\nas asked: **no**", [0.5]),
        ("rubric", "correct: right\ncorrect: wrong\npolite: yes", None),
    ],
)  # fmt: skip
def test_scores_of_answers(form, answer, scores):
    given = {"text": answer, "top": None} if isinstance(answer, str) else {"text": "", "top": answer}
    question = THREE if form == "rank" else ONE
    if scores is None:
        with pytest.raises(Unusable):
            scores_in_answer(FORMS[form], question, given)
    else:
        assert scores_in_answer(FORMS[form], question, given) == pytest.approx(scores)


def test_a_question_shows_columns_and_ignores_placeholders_in_completions():
    given = Definition("wise", "score", prompt="{prompt}|{completion}|{answer}|{other}", system="Be fair.")
    assert given.columns == {"answer", "other"}
    [asked] = forms.make_questions(given, ["p"], ["{answer} {prompt}"], [{"answer": 7, "other": "x"}], [0])
    assert asked.messages == [
        {"role": "system", "content": "Be fair."},
        {"role": "user", "content": "p|{answer} {prompt}|7|x"},
    ]
    [rubric] = forms.make_questions(FORMS["rubric"], ["p"], ["c"], [{}], [0])
    assert "correct: Is it true? Choices: wrong, partly, right\npolite: " in rubric.messages[0]["content"]


def test_one_question_ranks_the_completions_to_a_prompt_in_a_reproducible_order():
    texts, rows = ["a", "b", "c", "d", "e"], [{}] * 5
    groups = [0, 0, 0, 1, 1]
    drawn = forms.make_questions(FORMS["rank"], ["p"] * 5, texts, rows, groups)
    assert [sorted(one.rows) for one in drawn] == [[(0,), (1,), (2,)], [(3,), (4,)]]
    again = forms.make_questions(FORMS["rank"], ["p"] * 3, ["c", "a", "b"], rows[:3], [9, 9, 9])
    assert again[0].messages == drawn[0].messages, "the order of the samples does not matter"
    both = Definition("wise", "rank", orders="both")
    first, reverse, *_ = forms.make_questions(both, ["p"] * 5, texts, rows, groups)
    assert first.rows == reverse.rows[::-1] and first.messages != reverse.messages
    orders = {
        forms.make_questions(FORMS["rank"], [f"p{i}"] * 3, texts[:3], rows[:3], [0] * 3)[0].rows
        for i in range(60)
    }
    assert len(orders) == 6
    with pytest.raises(InputError, match="compares completions, and this prompt has only one"):
        forms.make_questions(FORMS["rank"], ["p"], ["a"], [{}], [0])
    scored = [(JudgeQuestion([], ((1,), (0,))), [0.0, 1.0]), (JudgeQuestion([], ((0,), (1,))), [1.0, 0.5])]
    assert forms.mean_scores(2, scored) == [1.0, 0.25]


def test_equal_completions_are_shown_once_and_get_the_same_score():
    texts, groups = ["a", "b", "a", "c", "c"], [0, 0, 0, 1, 1]
    [asked] = forms.make_questions(FORMS["rank"], ["p"] * 5, texts, [{}] * 5, groups)
    assert sorted(asked.rows) == [(0, 2), (1,)]
    text = asked.messages[0]["content"]
    assert text.count("Response A:") == text.count("Response B:") == 1 and "Response C:" not in text
    scores = [float(rows == (0, 2)) for rows in asked.rows]
    assert forms.mean_scores(5, [(asked, scores)]) == [1.0, 0.0, 1.0, 0.5, 0.5]
