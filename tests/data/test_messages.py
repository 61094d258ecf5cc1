"""Texts, messages and transcripts as the content of a row."""

import json

import pytest
from toy_data import BOT, NO, SYSTEM, USER, encoder, parsed

from pipeline.data.messages import message
from pipeline.data.shapes import kind_of, parse
from pipeline.data.values import RowError


def test_system_turns_and_answers_by_index():
    record = parsed(
        {"system": "s", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        "sft",
    )
    assert record.prompt[0] == {"role": "system", "content": "s"}
    record = parsed({"prompt": "p", "pos_answers": ["a", "b"], "neg_answers": ["c", "d"]}, "rm")
    assert record.pairs == [("a", "c"), ("b", "d")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "completion": "yo"},
        {"prompt": "\n\nHuman: hi\n\nAssistant:", "completion": "yo"},
        {"instruction": "hi", "output": "yo"},
        {"prompt": "hi", "chosen": "yo", "rejected": "no"},
        {"prompt": "hi", "pos_answers": ["yo"], "neg_answers": ["no"]},
        {"chosen": [USER, BOT], "rejected": [USER, NO]},
        {"chosen": "hi yo", "rejected": "hi no"},
        {"prompt": "hi"},
    ],
)
def test_the_system_prompt_of_a_row_is_part_of_it(row):
    stage = "sft" if {"completion", "output"} & row.keys() else "rm" if len(row) > 1 else "ppo"
    record = parsed({**row, "system": "s"}, stage)
    assert record.prompt == [SYSTEM, USER]
    assert all(completion[0]["content"] in ("yo", "no") for pair in record.pairs for completion in pair)


def test_transcripts_split_at_paragraphs_only_and_render_back():
    text = "\n\nHuman: Is it Human: or\nAssistant: here?\n\nAssistant: No.\n\nA second one.\n\nHuman: ok\n\nAssistant:"
    record = parsed({"prompt": text}, "ppo")
    assert [turn["role"] for turn in record.prompt] == ["user", "assistant", "user"]
    assert record.prompt[1]["content"] == "No.\n\nA second one."
    assert encoder("ppo").render(record.prompt, True).replace("</s>", "") == "<s>" + text


def test_texts_without_markers_are_cut_at_white_space():
    record = parsed({"chosen": "The cat sat here", "rejected": "The cat saw it"}, "rm")
    assert (record.prompt, record.pairs) == ("The cat", [(" sat here", " saw it")])


@pytest.mark.parametrize("case", [str.lower, str.title, str.upper])
def test_roles_in_any_case(case):
    turns = [{"role": case("user"), "content": "hi"}, {"role": case("assistant"), "content": "yo"}]
    assert parsed({"messages": turns}, "sft").pairs == [([BOT],)]
    shared = [{"from": case("human"), "value": "hi"}, {"from": case("gpt"), "value": "yo"}]
    assert parsed({"conversations": shared}, "sft").prompt == [USER]
    pair = {"prompt": "hi", "chosen": turns, "rejected": [turns[0], NO]}  # both sides repeat the prompt
    assert (parsed(pair, "dpo").prompt, parsed(pair, "dpo").pairs) == ([USER], [([BOT], [NO])])
    with pytest.raises(RowError, match="expected one of system, developer, user, human"):
        parsed({"messages": [{"role": case("robot"), "content": "hi"}, BOT]}, "sft")


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        [{"type": "text", "value": "ab"}],
        [{"text": "ab", "image_url": None}],
        ["a", "b"],
        [{"type": "text", "text": {"value": "ab", "annotations": []}}],
        [{"type": "output_text", "content": "ab"}],
    ],
)
def test_content_may_be_parts_of_text_whatever_their_key(content):
    assert message({"role": "user", "content": content}, "messages[0]")["content"] == "ab"


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "messages[0].content[1]"),
        ({"type": "image", "text": None}, "messages[0].content[1]"),
        ({"type": "text", "txt": "a"}, "messages[0].content[1].text"),
        (7, "messages[0].content[1]"),
    ],
)
def test_parts_that_are_no_text_are_refused(part, field):
    with pytest.raises(RowError) as caught:
        message({"role": "user", "content": ["a", part]}, "messages[0]")
    assert caught.value.field == field


def test_a_list_of_messages_may_be_its_json_text():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    record = parse({"messages": json.dumps(turns)}, kind_of("sft"))
    assert (record.prompt, record.pairs) == (turns[:1], [(turns[1:],)])
    assert parse({"prompt": "[1, 2]", "completion": '["x"]'}, kind_of("sft")).prompt == "[1, 2]"


TURNS = [USER, BOT, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "bye"}]


@pytest.mark.parametrize(
    "value",
    [
        [{"input": "hi", "output": "yo"}, {"input": "and?", "output": "bye"}],
        ["hi", "yo", "and?", "bye"],
        "\n\nHuman: hi\n\nAssistant: yo\n\nHuman: and?\n\nAssistant: bye",
        json.dumps([{"input": "hi", "output": "yo"}, {"input": "and?", "output": "bye"}]),
        [{"role": "prompter", "content": "hi"}, {"role": "ai", "content": "yo"}, *TURNS[2:]],
    ],
    ids=["capybara", "lima", "transcript", "json", "openassistant"],
)
@pytest.mark.parametrize("field", ["messages", "conversations"])
def test_conversations_of_other_forms(value, field):
    record = parsed({field: value}, "sft")
    assert [*record.prompt, *record.pairs[0][0]] == TURNS
    assert parsed({field: value, "label": True}, "kto").pairs == [([TURNS[-1]],)]


def test_a_list_of_texts_is_no_prompt():
    with pytest.raises(RowError, match=r"`prompt\[0\]`: found \"hi\"; expected a message"):
        parsed({"prompt": ["hi", "yo"], "completion": "a"}, "sft")
