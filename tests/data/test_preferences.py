"""Preferences: every shape, prompts that both sides repeat, margins, and both sides as tokens."""

import pytest
from toy_data import ASIDE, BOT, NO, PREFERENCES, SYSTEM, USER, encoded, encoder, parsed

from pipeline.data.encode import Example
from pipeline.data.values import RowError


@pytest.mark.parametrize("row", PREFERENCES)
@pytest.mark.parametrize("stage", ["rm", "dpo"])
def test_preferences(row, stage):
    record = parsed({**row, "margin": 2}, stage)
    assert (record.prompt, record.pairs, record.margin) == ([USER], [([BOT], [NO])], 2.0)


REPEATED = [
    ("hi", [USER], [USER]),
    (" hi\n", [USER], [USER]),
    ([USER], [USER], [USER]),
    ("hi", [*ASIDE, USER], [*ASIDE, USER]),  # the last question of several
    ("before", [*ASIDE, USER], [*ASIDE, USER]),  # the first one
    ([SYSTEM, USER], [USER], [SYSTEM, USER]),  # adds instructions
    ([USER], [SYSTEM, USER], [SYSTEM, USER]),
    ("\n\nHuman: hi\n\nAssistant:", [USER], [USER]),
    ("ho", [USER], None),
    ([{"role": "user", "content": "ho"}], [USER], None),
    ([{"role": "system", "content": "t"}, USER], [SYSTEM, USER], None),
    ("so", [*ASIDE, USER], None),  # what the assistant said
]


@pytest.mark.parametrize(("given", "repeated", "prompt"), REPEATED)
@pytest.mark.parametrize("key", ["prompt", "messages"])
def test_a_prompt_that_both_sides_repeat(given, repeated, prompt, key):
    if key == "messages" and isinstance(given, str):
        given = [{"role": "user", "content": given.removeprefix("\n\nHuman:").removesuffix("\n\nAssistant:")}]
        if prompt == [*ASIDE, USER] and given[0]["content"] == "before":
            prompt = None  # a list of messages is the whole prompt, or its end
    row = {key: given, "chosen": [*repeated, BOT], "rejected": [*repeated, NO]}
    if prompt is None:
        with pytest.raises(RowError) as caught:
            parsed(row, "dpo")
        assert (caught.value.kind, caught.value.field) == ("prompts_differ", key)
    else:
        found = parsed(row, "dpo").prompt
        assert [{**turn, "content": turn["content"].strip()} for turn in found] == prompt


@pytest.mark.parametrize("margin", [0, 1 / 3, 3, 100])
def test_margins_that_a_reward_model_can_learn(margin):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}
    assert parsed(row, "rm").margin == margin
    with pytest.raises(RowError, match="swap `chosen` and `rejected`"):
        parsed({**row, "margin": -3}, "rm")


def test_preferences_as_tokens():
    row = {"prompt": [USER], "chosen": "yo", "rejected": "no"}
    tok, (example,) = encoded("rm", row)
    assert tok.decode(example.columns["chosen_ids"]) == "<s>\n\nHuman: hi\n\nAssistant: yo</s>"
    tok, (example,) = encoded("dpo", row)
    assert tok.decode(example.columns["prompt_ids"]) == "<s>\n\nHuman: hi\n\nAssistant:"
    assert tok.decode(example.columns["rejected_ids"]) == " no</s>"
    several = {"prompt": "p", "pos_answers": ["a", "b"], "neg_answers": ["c", "d"]}
    assert len(encoded("dpo", several)[1]) == 2


@pytest.mark.parametrize("stage", ["rm", "dpo", "pairs", "score"])
def test_a_pair_of_equal_tokens_is_refused(stage):
    from tokenizers import normalizers

    made = encoder(stage)
    made.backend.normalizer = normalizers.Lowercase()
    row = {"prompt": [USER], "chosen": "Yo", "rejected": "yO"}
    ((outcome,),) = made.encode([parsed(row, stage)])
    assert isinstance(outcome, RowError) and (outcome.kind, outcome.field) == ("equal_pair", "chosen")
    ((outcome,),) = made.encode([parsed({**row, "rejected": "yo!"}, stage)])
    assert isinstance(outcome, Example)


def test_an_empty_prompt_beside_sides_that_repeat_it_says_nothing():
    """Of distilabel's Capybara."""
    record = parsed({"prompt": "", "chosen": [USER, BOT], "rejected": [USER, NO]}, "rm")
    assert record.prompt == [USER]
    with pytest.raises(RowError, match="`prompt`"):
        parsed({"prompt": "", "chosen": "yo", "rejected": "no"}, "rm")
