"""A label, or two scores, pick the better of two completions; what a label means is known or asked for, never guessed."""

import pytest

from pipeline.data.reshape import Preprocess, Rule, derived, ordered, vote
from pipeline.data.shapes import kind_of
from pipeline.data.values import Dropped, RowError
from pipeline.errors import InputError

ROW = {"prompt": "q", "first": "A", "second": "B"}


def made(row, rule=None):
    (made,) = kind_of("rm", Preprocess(rule=rule)).rows({**ROW, **row})
    return made


@pytest.mark.parametrize(
    ("values", "first", "second", "tie"),
    [
        ([1, 2], 1, 2, 1.5),
        (["1", "2", "1"], "1", " 2", "1.5"),
        ([1.0, 2.0, 1.5, None], 1.2, 1.51, 1.5),
        ([1.0003, 1.98], 1, 2, 1.5),
        (["1", "2", "tie"], "1", 2, "Tie"),
        (["model_a", "model_b", "tie (bothbad)"], "model_a", "model_b", "tie"),
        (["A", "B", "C"][:2], "a", "B", "tie"),
        (["a"], "A", "b", "draw"),
        (["output_1", "output_2"], "output_1", "Output 2", "both"),
        (["first", "second", "neither"], "first", "second", "same"),
        ([[1, 2, 1], [2, 2, 2]], 1, 2, 1.5),
    ],
)
def test_what_values_mean_follows_from_them_where_they_can_mean_one_thing(values, first, second, tie):
    rule = derived(values, {})
    assert (vote(first, rule), vote(second, rule), vote(tie, rule)) == ("first", "second", None)


def test_a_rare_value_without_a_meaning_is_an_error_of_its_row():
    rule = derived([*"ab" * 10, "C?"], {})
    assert (vote("A", rule), vote("b", rule)) == ("first", "second")
    with pytest.raises(RowError, match=r"data\.label says what its values mean"):
        vote("C?", rule)


@pytest.mark.parametrize(
    ("values", "typed"),
    [
        ([0, 1], "set data.label='{first: 0, second: 1}' if 0 means that the first completion is better"),
        ([True, False], "{first: 0, second: 1}"),
        ([1, 1], "data.label="),  # 0 and 1, or 1 and 2?
        ([0, 1, 2], "{first: 0, second: 2}"),
        ([-1, 1], "{first: -1, second: 1}"),
        (["model_1"], "data.label="),  # or is the other one model_0?
        (["gpt-4", "claude"], "{first: claude, second: gpt-4}"),
        (["right"], "data.label="),  # the right-hand one, or the one that is right?
        (["left"], "data.label="),
        ([None, ""], "data.columns.label=COLUMN"),
    ],
)  # fmt: skip
def test_what_can_mean_several_things_is_asked_for(values, typed):
    with pytest.raises(InputError) as caught:
        derived(values, {"label": "verdict"})
    assert (
        typed in str(caught.value) and "'verdict'" in str(caught.value) and caught.value.key == "data.label"
    )


def test_the_label_picks_the_side():
    rule = Rule.of({"first": 1, "second": 2, "tie": 0})
    assert made({"label": 1}, rule) == {"prompt": "q", "chosen": "A", "rejected": "B"}
    assert made({"label": "2"}, rule) == {"prompt": "q", "chosen": "B", "rejected": "A"}
    assert (
        made({"label": 0}, rule)
        == made({"label": None}, rule)
        == made({"label": 1.5}, rule)
        == Dropped("tie")
    )
    swapped = Rule.of({"first": 1, "second": 0})  # SHP's
    assert made({"label": 0}, swapped)["chosen"] == "B" and made({"label": 0.7}, swapped)["chosen"] == "A"
    graded = Rule.of({"first": -3, "second": 3})  # HelpSteer3's
    assert made({"label": -1}, graded)["chosen"] == "A" and made({"label": 0}, graded) == Dropped("tie")
    names = Rule.of({"first": ["gpt-4", "gpt-3"], "second": "claude"})
    assert made({"label": "GPT-3"}, names)["chosen"] == "A"


@pytest.mark.parametrize(
    ("votes", "side"),
    [
        ([1, 1, 2], "first"), ([2, 2, 0], "second"), ([1, 2, 0], None), ([0, 0, 1], None), ([1, 2], None),
        ([1, None, None], "first"), ([None, None, ""], None), (["2", 2, "1"], "second"),
    ],
)  # fmt: skip
def test_of_several_votes_the_most_count(votes, side):
    assert vote(votes, Rule.of({"first": 1, "second": 2, "tie": 0})) == side


def test_a_value_that_the_first_rows_do_not_explain_is_no_tie():
    with pytest.raises(
        RowError, match=r"found 0; expected 1 \(first\), 2 \(second\); data\.label says"
    ) as caught:
        vote(0, derived([1, 2], {}))
    assert caught.value.kind == "unclear_label"
    assert made({"label": 3}, Rule.of({"first": 1, "second": 2})).kind == "unknown_label"


def test_the_higher_score_is_chosen():
    assert made({"first_score": 3, "second_score": "12"})["chosen"] == "B"
    assert made({"first_score": 0.5, "second_score": -1})["chosen"] == "A"
    assert made({"first_score": 3, "second_score": 3.0}) == Dropped("tie")
    assert made({"first_score": 3, "second_score": None}) == Dropped("tie")
    assert made({"first_score": "high", "second_score": 3}).field == "first_score"
    assert "whether `first` or `second` is better" in str(made({}))


def test_prompts_need_no_side():
    assert next(iter(kind_of("ppo").rows({**ROW, "label": 7}))) == {**ROW, "label": 7}


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ({"first": [1, 2], "second": "b"}, 1.2),
        ({"first": [1, 2], "second": [3, 4]}, 2.5),
        ({"first": 1, "second": 2}, 3),
    ],
)
def test_a_value_that_the_rule_does_not_name_is_no_side(label, value):
    """Only of one number each is there a between."""
    with pytest.raises(KeyError):
        Rule.of(label).side(value)
    assert Rule.of({"first": 1, "second": 4}).side(1.2) == "first"


@pytest.mark.parametrize("score", [float("nan"), "nan", float("inf")])
def test_a_score_that_is_no_number_picks_no_side(score):
    with pytest.raises(RowError, match="finite"):
        ordered({"first": "a", "second": "b", "first_score": score, "second_score": 1.0}, None)


@pytest.mark.parametrize("blank", [None, "", " "])
def test_nothing_is_no_score_and_no_label(blank):
    """Null in Parquet, empty text in CSV."""
    assert made({"first_score": blank, "second_score": 1}) == Dropped("tie")
    assert made({"label": [1, blank, blank]}, Rule((1.0,), (2.0,)))["chosen"] == "A"
    assert made({"label": blank}, Rule((1.0,), (2.0,))) == Dropped("tie")


@pytest.mark.parametrize(
    ("first", "second", "label", "known"),
    [
        ("response_0", "response_1", "better_response_id", True),
        ("response_0", "response_1", "safer_response_id", True),
        ("summaries.0.text", "summaries.1.text", "choice", True),
        ("response_0", "response_1", "label", False),  # 1: is response_0 better?
        ("human_ref_A", "human_ref_B", "choice", False),
        ("answer_1", "answer_2", "choice", False),
    ],
)
def test_the_names_of_columns_say_what_0_and_1_mean(first, second, label, known):
    columns = {"first": first, "second": second, "label": label}
    if known:
        rule = derived([0, 1], columns)
        assert (rule.side(0), rule.side("1")) == ("first", "second")
    else:
        with pytest.raises(InputError, match="whose meaning is ambiguous"):
            derived([0, 1], columns)


@pytest.mark.parametrize(
    ("label", "value", "made"),
    [
        ({"good": 4, "bad": 2}, 5, True),
        ({"good": 4, "bad": 2}, "4", True),
        ({"good": 4, "bad": 2}, 2, False),
        ({"good": 4, "bad": 2}, -1.5, False),
        ({"good": 4, "bad": 2}, 3, None),
        ({"good": 4, "bad": 2}, "", None),
        ({"good": 1, "bad": 3}, 0, True),  # the fewer the better
        ({"good": 1, "bad": 3}, 4, False),
        ({"good": ["helpful", "great"], "bad": "harmful"}, "Great", True),
        ({"good": "helpful", "bad": "harmful"}, "harmful", False),
    ],
)
def test_thresholds_make_labels_of_ratings(label, value, made):
    row = {"prompt": "q", "completion": "a", "label": value}
    (found,) = kind_of("kto", Preprocess(rule=Rule.of(label))).rows(row)
    assert found == (Dropped("tie") if made is None else row | {"label": made})


def test_a_rating_that_data_label_does_not_name():
    row = {"prompt": "q", "completion": "a", "label": "so so"}
    (found,) = kind_of("kto", Preprocess(rule=Rule.of({"good": "helpful", "bad": 2}))).rows(row)
    assert found.kind == "unknown_label"
