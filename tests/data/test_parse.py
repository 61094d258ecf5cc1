"""Every row error, with its kind and field."""

import gzip
import json

import pytest
from running import SHARED
from toy_data import BOT, NO, USER, parsed

from pipeline.data.shapes import kind_of, parse
from pipeline.data.values import RowError

ERRORS = [
    ("sft", [1], "not_object", ""),
    ("sft", {"promt": "a", "completion": "b"}, "missing_field", "prompt"),
    ("sft", {"prompt": "a"}, "missing_field", "completion"),
    ("sft", {"prompt": "a", "completion": None}, "null", "completion"),
    ("sft", {"prompt": 7, "completion": "b"}, "wrong_type", "prompt"),
    ("sft", {"prompt": "a", "completion": 3.5}, "wrong_type", "completion"),
    ("sft", {"prompt": " ", "completion": "b"}, "empty_prompt", "prompt"),
    ("sft", {"prompt": "a", "completion": " "}, "empty_completion", "completion"),
    ("sft", {"messages": []}, "empty_prompt", "messages"),
    ("sft", {"messages": [BOT]}, "empty_prompt", "messages"),
    ("sft", {"messages": "hi"}, "wrong_type", "messages"),
    ("sft", {"messages": [{"role": "user", "text": "x"}]}, "missing_field", "messages[0].content"),
    ("sft", {"messages": [{"role": "user", "content": None}, BOT]}, "null", "messages[0].content"),
    ("sft", {"messages": [{"role": "robot", "content": "x"}]}, "wrong_role", "messages[0].role"),
    ("sft", {"messages": [USER]}, "wrong_role", "messages"),
    ("sft", {"messages": [USER, {"role": "assistant", "content": ""}]}, "empty_completion", "messages"),
    ("sft", {"prompt": "a", "completion": "\ud800"}, "not_utf8", "completion"),
    ("sft", {"prompt": "a", "completion": "b", "x": {"y": ["\udfff"]}}, "not_utf8", "x.y[0]"),
    ("sft", {"prompt": "a", "completion": "b", "x": float("nan")}, "not_finite", "x"),
    ("ppo", {"prompt": "a", "weights": [1, {"w": float("-inf")}]}, "not_finite", "weights[1].w"),
    ("generate", {"prompt": "a", "id": 10**400}, "not_finite", "id"),
    ("evaluate", {"prompt": "a", "completion": 5}, "wrong_type", "completion"),
    ("evaluate", {"prompt": "a", "completion": 0}, "wrong_type", "completion"),
    ("evaluate", {"prompt": "a", "completion": False}, "wrong_type", "completion"),
    ("evaluate", {"prompt": "a", "completion": []}, "empty_prompt", "completion"),
    ("rm", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("nan")}, "not_finite", "margin"),
    ("rm", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1e38}, "margin", "margin"),
    ("rm", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 101}, "margin", "margin"),
    ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": -0.5}, "margin", "margin"),
    ("rm", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": True}, "wrong_type", "margin"),
    ("rm", {"prompt": "a", "chosen": "b", "rejected": " b "}, "equal_pair", "chosen"),
    ("rm", {"prompt": "a", "chosen": "b", "rejected": ""}, "empty_completion", "rejected"),
    ("rm", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1"}, "wrong_type", "margin"),
    ("rm", {"chosen": "x y", "rejected": "z y"}, "empty_prompt", "chosen"),
    ("kto", {"prompt": "a", "completion": "b", "label": "geography"}, "unclear_label", "label"),
    ("kto", {"prompt": "a", "completion": "b", "label": 4}, "unclear_label", "label"),
    ("kto", {"prompt": "a", "completion": "b", "label": None}, "null", "label"),
    ("kto", {"prompt": "a", "completion": "b", "label": []}, "unclear_label", "label"),
    ("kto", {"prompt": "a", "completion": "b"}, "missing_field", "label"),
    ("kto", {"prompt": "a", "completion": " ", "label": 1}, "empty_completion", "completion"),
    ("kto", {"messages": [USER], "label": True}, "wrong_role", "messages"),
    ("kto", {"messages": [USER, {**BOT, "weight": 0}, USER, BOT], "label": True}, "weight", "messages"),
    ("kto", {"prompt": "a", "chosen": "b", "rejected": " b "}, "equal_pair", "chosen"),
    ("dpo", {"chosen": [USER, BOT], "rejected": [{**USER, "content": "ho"}, NO]}, "prompts_differ", "rejected"),
    ("dpo", {"chosen": [USER, BOT, USER], "rejected": [USER, NO]}, "wrong_role", "chosen"),
    ("rm", {"prompt": "a", "pos_answers": ["b"], "neg_answers": ["c", "d"]}, "unequal_answers", "neg_answers"),
    ("rm", {"prompt": "a", "pos_answers": ["b", "c"], "neg_answers": ["d", "c"]}, "equal_pair", "pos_answers[1]"),
    ("rm", {"prompt": "a", "pos_answers": "b", "neg_answers": "c"}, "wrong_type", "pos_answers"),
    ("ppo", {"prompt": [USER, BOT]}, "wrong_role", "prompt"),
    ("ppo", {"question": "x"}, "missing_field", "prompt"),
    ("sft", {"messages": [USER, {**BOT, "weight": 0.5}]}, "weight", "messages[1].weight"),
    ("sft", {"messages": [USER, {**BOT, "train": "no"}]}, "weight", "messages[1].train"),
    ("sft", {"messages": [USER, {**BOT, "weight": 0}]}, "weight", "messages"),
    ("sft", {"prompt": [USER], "completion": [{**BOT, "weight": 0}]}, "weight", "completion"),
    ("sft", {"prompt": "a", "completion": "b", "label": False}, "label", "label"),
    ("sft", {"messages": [USER, BOT], "label": False}, "label", "label"),
    ("sft", {"prompt": "a", "completion": "b", "label": 0}, "label", "label"),
    ("sft", {"prompt": "a", "completion": "b", "label": "Undesirable"}, "label", "label"),
    ("sft", {"messages": [USER, BOT], "kto_tag": False}, "label", "kto_tag"),
    ("sft", {"messages": [USER, {**BOT, "tool_calls": [{"function": {}}]}]}, "wrong_type", "messages[1].tool_calls[0]"),
    ("sft", {"prompt": "a", "completion": [{**BOT, "tool_calls": [{"name": "f"}]}]}, "wrong_type", "completion"),
]  # fmt: skip


@pytest.mark.parametrize("stage,row,kind,field", ERRORS)
def test_row_errors(stage, row, kind, field):
    with pytest.raises(RowError) as caught:
        parsed(row, stage)
    assert (caught.value.kind, caught.value.field) == (kind, field)
    assert caught.value.found and caught.value.expected


def test_a_misspelt_field_names_the_near_one_and_the_shapes():
    with pytest.raises(RowError) as caught:
        parsed({"promt": "a", "completion": "b"}, "sft")
    assert "is `promt` meant to be `prompt`?" in str(caught.value)
    assert "prompt+completion | prompt+answer" in str(caught.value)


@pytest.mark.skipif(not SHARED.exists(), reason="third-party data is not here")
def test_real_preferences():
    kinds = {}
    with gzip.open(SHARED / "data" / "hh_harmless_test.jsonl.gz") as file:
        for line in file:
            try:
                parsed(json.loads(line), "rm")
            except RowError as error:
                kinds[error.kind] = kinds.get(error.kind, 0) + 1
    assert kinds == {"empty_completion": 4, "prompts_differ": 5}
    for row in json.loads((SHARED / "data" / "lf_dpo_en_demo.json").read_text()):
        assert parsed(row, "dpo").prompt[-1]["role"] == "user"


@pytest.mark.parametrize("label", [" false", "0.0", -1.0, "No", "dislike", "unsafe", 0, False])
def test_a_completion_that_a_label_calls_bad_is_refused(label):
    with pytest.raises(RowError, match="not to be imitated"):
        parse({"prompt": "q", "completion": "a", "label": label}, kind_of("sft"))


@pytest.mark.parametrize(
    ("label", "unread"), [("yes", ()), (1.0, ()), ("geography", ("label",)), (3, ("label",))]
)
def test_a_label_that_is_no_verdict_is_a_column_that_is_not_read(label, unread):
    assert parse({"prompt": "q", "completion": "a", "label": label}, kind_of("sft")).unread == unread
