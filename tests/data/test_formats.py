"""Tests that rows in all formats become the same record, and that errors of bad rows give kind and field."""

import json

import pytest
from toy_data import ASIDE, BOT, NO, PREFERENCES, SYSTEM, USER, WEATHER, parsed

from pipeline.data.values import RowError

ASKED = "\n\nHuman: hi\n\nAssistant:"
SINGLE = [  # the same demonstration in each row format
    {"messages": [USER, BOT]},
    {"messages": json.dumps([USER, BOT])},
    {"messages": [{**USER, "tool_calls": None}, {**BOT, "tool_calls": None}]},  # Arrow adds null fields
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    {"conversations": [{"from": "User", "value": "hi"}, {"from": "ASSISTANT", "value": "yo"}]},
    {"instruction": "hi", "input": "", "output": "yo"},
    {"prompt": [USER], "completion": [BOT]},
    {"prompt": [USER], "answer": "yo"},
    {"prompt": ASKED, "completion": " yo"},
    {"prompt": ASKED.strip(), "completion": " yo"},
]  # fmt: skip


@pytest.mark.parametrize("row", SINGLE)
def test_a_demonstration_in_every_format(row):
    record = parsed(row, "sft")
    assert (record.prompt, record.pairs) == ([USER], [([BOT],)])
    assert parsed({**row, "system": "s"}, "sft").prompt == [SYSTEM, USER]
    for name, value, label in (("label", True, True), ("kto_tag", 0, False)):
        record = parsed({**row, name: value}, "kto")
        assert (record.prompt, record.pairs, record.labels) == ([USER], [([BOT],)], (label,))
        assert not record.unread


@pytest.mark.parametrize("row", PREFERENCES)
def test_a_pair_in_every_format(row):
    for stage in ("rm", "dpo"):
        record = parsed({**row, "margin": 2}, stage)
        assert (record.prompt, record.pairs, record.margin) == ([USER], [([BOT], [NO])], 2.0)
    record = parsed(row, "kto")
    assert (record.prompt, record.pairs, record.labels) == ([USER], [([BOT],), ([NO],)], (True, False))


ENDS = [([BOT], [NO])]
OTHERS = [  # stage, row, prompt, completions
    ("sft", {"prompt": "a b", "completion": " c"}, "a b", [(" c",)]),
    ("sft", {"prompt": "a b", "answer": " c"}, "a b", [(" c",)]),
    ("sft", {"prompt": "[1, 2]", "completion": '["x"]'}, "[1, 2]", [('["x"]',)]),
    ("sft", {"prompt": "hi", "completion": [BOT, NO]}, "hi", [(f"{BOT['content']}\n\n{NO['content']}",)]),
    ("sft", {"instruction": "a", "input": "b", "output": "yo"}, [{"role": "user", "content": "a\n\nb"}], [([BOT],)]),
    ("sft", {"instruction": "and?", "history": [["hi", "yo"]], "output": "bye", "system": "s"}, [SYSTEM, USER, BOT, {"role": "user", "content": "and?"}], [([{"role": "assistant", "content": "bye"}],)]),
    ("ppo", {"instruction": "hi", "history": "[]"}, [USER], []),
    ("rm", {"prompt": "p", "pos_answers": ["a", "b"], "neg_answers": ["c", "d"]}, "p", [("a", "c"), ("b", "d")]),
    ("rm", {"chosen": "The cat sat here", "rejected": "The cat saw it"}, "The cat", [(" sat here", " saw it")]),
    # a row format of the dataset Capybara
    ("rm", {"prompt": "", "chosen": [USER, BOT], "rejected": [USER, NO]}, [USER], ENDS),
    ("rm", {"prompt": "hi", "pos_answers": ["yo"], "neg_answers": ["no"], "system": "s"}, [SYSTEM, USER], ENDS),
    ("rm", {"chosen": [USER, BOT], "rejected": [USER, NO], "system": "s"}, [SYSTEM, USER], ENDS),
    ("sft", {"messages": [SYSTEM, USER, BOT], "system": " s\n"}, [SYSTEM, USER], [([BOT],)]),
    ("ppo", {"prompt": "hi", "system": "s"}, [SYSTEM, USER], []),
    ("ppo", {"prompt": ASKED}, [USER], []),
    ("ppo", PREFERENCES[4], [USER], []),
    ("evaluate", {"messages": [USER]}, [USER], []),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "row", "prompt", "pairs"), OTHERS)
def test_other_rows(stage, row, prompt, pairs):
    record = parsed(row, stage)
    assert (record.prompt, record.pairs) == (prompt, pairs)


REPEATED = [
    ("hi", [USER], [USER]),
    (" hi\n", [USER], [USER]),
    ([USER], [USER], [USER]),
    ("hi", [*ASIDE, USER], [*ASIDE, USER]),  # `prompt` is the last of several questions
    ("before", [*ASIDE, USER], [*ASIDE, USER]),  # `prompt` is the first of several questions
    ([SYSTEM, USER], [USER], [SYSTEM, USER]),  # `prompt` has a system message that the conversation lacks
    ([USER], [SYSTEM, USER], [SYSTEM, USER]),
    (ASKED, [USER], [USER]),
    ("ho", [USER], None),
    # A `prompt` with messages must be the full prompt or its last messages.
    ([ASIDE[0]], [*ASIDE, USER], None),
    ([{"role": "user", "content": "ho"}], [USER], None),
    ([{"role": "system", "content": "t"}, USER], [SYSTEM, USER], None),
    ("so", [*ASIDE, USER], None),  # `prompt` is the text of an assistant turn
]


@pytest.mark.parametrize(("given", "repeated", "prompt"), REPEATED)
def test_a_prompt_that_both_completions_repeat(given, repeated, prompt):
    for key in ("prompt", "messages") if isinstance(given, list) else ("prompt",):
        row = {key: given, "chosen": [*repeated, BOT], "rejected": [*repeated, NO]}
        if prompt is None:
            with pytest.raises(RowError) as caught:
                parsed(row, "dpo")
            assert (caught.value.kind, caught.value.field) == ("prompts_differ", key)
        else:
            found = parsed(row, "dpo").prompt
            assert [{**turn, "content": turn["content"].strip()} for turn in found] == prompt


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
def test_conversations_in_other_formats(value):
    record = parsed({"conversations": value}, "sft")
    assert [*record.prompt, *record.pairs[0][0]] == TURNS
    assert parsed({"messages": value, "label": True}, "kto").pairs == [([TURNS[-1]],)]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
        [{"type": "text", "value": "hi"}],
        [{"text": "hi", "image_url": None}],
        ["h", "i"],
        [{"type": "text", "text": {"value": "hi", "annotations": []}}],
        [{"type": "output_text", "content": "hi"}],
    ],
)
def test_content_may_be_parts_of_text_under_any_key(content):
    assert parsed({"messages": [{"role": "user", "content": content}]}, "ppo").prompt == [USER]


def test_transcripts_split_at_paragraphs_only():
    text = "\n\nHuman: Is it Human: or\nAssistant: here?\n\nAssistant: No.\n\nA second one.\n\nHuman: ok\n\nAssistant:"
    record = parsed({"prompt": text}, "ppo")
    assert [turn["role"] for turn in record.prompt] == ["user", "assistant", "user"]
    assert record.prompt[1]["content"] == "No.\n\nA second one."


# ---- tools -----------------------------------------------------------------------------------------------------------

ASK = {"role": "user", "content": "Rain in Oslo?"}
BARE = {"name": "weather", "arguments": {"city": "Oslo"}}
OLD = {"role": "assistant", "content": None, "function_call": {**BARE, "arguments": '{"city": "Oslo"}'}}
CALLS = [  # the same tool call in every format
    *({"role": "assistant", "content": None, "tool_calls": calls} for calls in
      ([{"id": "c1", "type": "function", "function": BARE}], [{"function": OLD["function_call"]}], [BARE], BARE)),
    {"from": "function_call", "value": json.dumps(BARE)},
    OLD,  # OpenAI's first format
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER]), [WEATHER["function"]]])
def test_the_formats_of_tools(call, tools):
    if "from" in call:
        result, turns = {"from": "observation", "value": "dry"}, {"from": "human", "value": "Rain in Oslo?"}
        row = {"conversations": [turns, call, result, {"from": "gpt", "value": "No."}], "tools": tools}
    else:
        result = {"role": "function" if call is OLD else "tool", "content": "dry", "name": "weather"}
        row = {"messages": [ASK, call, result, BOT], "tools": tools}
    record = parsed(row, "sft")
    turn = record.prompt[1]
    assert (turn["content"], turn["tool_calls"][0]["function"], record.tools) == ("", BARE, [WEATHER])
    assert record.prompt[2]["role"] == "tool" and record.prompt[2].get("name") in ("weather", None)


def test_a_column_of_unrelated_tools_is_not_read():
    assert parsed({**SINGLE[0], "tools": None}, "sft").tools is None
    assert parsed({**SINGLE[0], "tools": "hammer, saw"}, "sft").unread == ("tools",)


# ---- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "label"),
    [(True, True), (1.0, True), ("1", True), ("thumbs up", True), ("\U0001f44d", True), ("Yes", True), (False, False), (0, False),
     ("-1", False), (" false", False), ("Thumbs down", False), ("\U0001f44e", False), ("geography", None), (3, None)],
)  # fmt: skip
def test_values_that_a_label_may_have(value, label):
    """kto trains on good and bad completions, sft only on good ones.

    sft ignores a column whose values mean neither good nor bad.
    """
    row = {"prompt": "q", "completion": "a", "label": value}
    if label is None:
        with pytest.raises(RowError, match="for ratings set data"):
            parsed(row, "kto")
    else:
        assert parsed(row, "kto").labels == (label,)
    if label is False:
        with pytest.raises(RowError, match="a completion with a bad label"):
            parsed(row, "sft")
    else:
        assert parsed(row, "sft").unread == (("label",) if label is None else ())


# ---- bad rows -------------------------------------------------------------------------------------------------------

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
ERRORS = [
    ("sft", [1], "not_object", ""),
    ("sft", {"promt": "a", "completion": "b"}, "missing_field", "prompt"),
    ("sft", {"prompt": "a", "completion": None}, "null", "completion"),
    ("sft", {"prompt": 7, "completion": "b"}, "wrong_type", "prompt"),
    ("sft", {"prompt": " ", "completion": "b"}, "empty_prompt", "prompt"),
    ("sft", {"instruction": "a", "history": [["b"]], "output": "c"}, "wrong_type", "history"),
    ("sft", {"prompt": "a", "completion": " "}, "empty_completion", "completion"),
    ("sft", {"messages": []}, "empty_prompt", "messages"),
    ("sft", {"messages": "hi"}, "wrong_type", "messages"),
    ("sft", {"messages": [{"role": "user", "text": "x"}]}, "missing_field", "messages[0].content"),
    ("sft", {"messages": [{"role": "Robot", "content": "x"}]}, "wrong_role", "messages[0].role"),
    ("sft", {"messages": [USER]}, "wrong_role", "messages"),
    ("sft", {"messages": [USER, {"role": "assistant", "content": ""}]}, "empty_completion", "messages"),
    ("sft", {"messages": [{"role": "user", "content": ["a", {"type": "image_url"}]}]}, "wrong_type", "messages[0].content[1]"),
    ("sft", {"messages": [{"role": "user", "content": ["a", {"type": "text", "txt": "a"}]}]}, "missing_field", "messages[0].content[1].text"),
    ("sft", {"prompt": "a", "completion": "\ud800"}, "not_utf8", "completion"),
    ("sft", {"prompt": "a", "completion": "b", "\udfff": 1}, "not_utf8", ""),
    ("sft", {"messages": [USER, {**BOT, "thinking": ["a", 10**400]}]}, "not_finite", "messages[1].thinking[1]"),
    ("evaluate", {"prompt": "a", "completion": 0}, "wrong_type", "completion"),
    ("rm", {**PAIR, "margin": float("nan")}, "not_finite", "margin"),
    ("rm", {**PAIR, "margin": 101}, "margin", "margin"),
    ("rm", {**PAIR, "rejected": " b "}, "equal_pair", "chosen"),
    ("rm", {"chosen": "x y", "rejected": "z y"}, "empty_prompt", "chosen"),
    ("kto", {"messages": [USER, {**BOT, "weight": 0}, USER, BOT], "label": True}, "weight", "messages"),
    ("dpo", {"prompt": [USER], "chosen": [{"role": "assistant", "content": None, "tool_calls": [BARE]}],
             "rejected": [{"role": "assistant", "content": None, "tool_calls": [BARE]}]}, "equal_pair", "chosen"),
    ("dpo", {"chosen": [USER, BOT], "rejected": [{**USER, "content": "ho"}, NO]}, "prompts_differ", "rejected"),
    ("dpo", {"chosen": [USER, BOT, USER], "rejected": [USER, NO]}, "wrong_role", "chosen"),
    ("rm", {"prompt": "a", "pos_answers": ["b"], "neg_answers": ["c", "d"]}, "unequal_answers", "neg_answers"),
    ("rm", {"prompt": "a", "pos_answers": 1, "neg_answers": ["c"]}, "wrong_type", "pos_answers"),
    ("ppo", {"prompt": [USER, BOT]}, "wrong_role", "prompt"),
    ("sft", {"messages": [USER, {**BOT, "weight": 0}]}, "weight", "messages"),
    ("sft", {"messages": [USER, {**BOT, "weight": 0.5}]}, "weight", "messages[1].weight"),
    ("sft", {"prompt": [USER], "completion": [{**BOT, "loss": "half"}]}, "weight", "completion[0].loss"),
    ("sft", {"messages": [USER, BOT], "kto_tag": False}, "label", "kto_tag"),
    ("sft", {"messages": [USER, {**BOT, "tool_calls": [{"function": {}}]}]}, "wrong_type", "messages[1].tool_calls[0]"),
    ("sft", {"prompt": "a", "completion": [{**BOT, "thinking": "b"}]}, "wrong_type", "completion"),
    ("sft", {"prompt": "a", "completion": [BOT, USER, BOT]}, "wrong_role", "completion"),
    ("dpo", {"prompt": "a", "chosen": [BOT], "rejected": [NO, {"role": "tool", "content": "b"}, BOT]}, "wrong_role", "rejected"),
    ("sft", {"messages": [USER, {"role": "assistant", "content": "", "thinking": "b"}]}, "empty_completion", "messages"),
    ("sft", {"prompt": [USER], "completion": "a", "chat_template_kwargs": [1]}, "wrong_type", "chat_template_kwargs"),
    ("sft", {"messages": [SYSTEM, USER, BOT], "system": "t"}, "prompts_differ", "system"),
]  # fmt: skip


@pytest.mark.parametrize("stage,row,kind,field", ERRORS)
def test_row_errors(stage, row, kind, field):
    with pytest.raises(RowError) as caught:
        parsed(row, stage)
    assert (caught.value.kind, caught.value.field) == (kind, field)
    assert caught.value.found and caught.value.expected


def test_fields_that_nothing_reads_may_hold_anything():
    """Unread fields are passed to Python rewards, with null in place of NaN, and "?" in place of half a surrogate pair."""
    wrong = {"score": float("nan"), "more": [1, {"w": float("-inf"), "t": "a\ud800"}]}
    assert parsed({"prompt": "a", "completion": "b", **wrong}, "sft").unread == ("score", "more")
    assert parsed({"messages": [{**USER, **wrong}, BOT]}, "sft").prompt == [USER]
    row = json.loads(parsed({"prompt": "a", **wrong, "id": 1.5}, "ppo").row)
    assert row == {"prompt": "a", "score": None, "more": [1, {"w": None, "t": "a?"}], "id": 1.5}


def test_keys_of_messages_that_nothing_reads_are_counted_and_change_nothing():
    def turns(number, *given):
        return [{**turn, "id": number + i, "refusal": None, "audio": []} for i, turn in enumerate(given)]

    row = {"chosen": turns(1, USER, BOT), "rejected": turns(7, USER, NO), "source": "x"}
    for stage, unread in (
        ("dpo", ("chosen[].id", "rejected[].id", "source")),
        ("score", ("chosen[].id", "rejected[].id")),
    ):
        record = parsed(row, stage)
        assert (record.prompt, record.pairs, record.unread) == ([USER], [([BOT], [NO])], unread)
    weights = {"weight": 1, "train": "", "loss": None}
    record = parsed({"messages": json.dumps(turns(1, USER, {**BOT, **weights}))}, "sft")
    assert (record.prompt, record.pairs, record.unread) == ([USER], [([BOT],)], ("messages[].id",))
    row = {"prompt": [USER], "pos_answers": [turns(1, BOT)], "neg_answers": [turns(1, NO)]}
    assert parsed(row, "rm").unread == ("pos_answers[].id", "neg_answers[].id")


THOUGHT = {**BOT, "reasoning_content": "Say yo."}


def test_thoughts_are_part_of_a_completion():
    record = parsed({"prompt": [USER], "chosen": [THOUGHT], "rejected": [BOT]}, "dpo")
    assert record.pairs == [([THOUGHT], [BOT])]
    with pytest.raises(RowError, match="the same text in both completions"):
        parsed({"prompt": [USER], "chosen": [THOUGHT], "rejected": [THOUGHT]}, "dpo")
    one, two = (parsed({"messages": [USER, turn]}, "sft").digests() for turn in (THOUGHT, BOT))
    assert one[:8] == two[:8] and one != two


# ---- lists in Python's notation, which pandas and datasets write to CSV ----------------------------------------------

TWO = [USER, {"content": 'it\'s "yo"', "role": "assistant"}]
ARRAY = "[{'content': 'hi', 'role': 'user'}\n {'content': 'yo', 'role': 'assistant'}]"
REPRS = [
    str(TWO), str([{"from": "human", "value": "hi"}]), f"array({ARRAY}, dtype=object)",
    "[ChatCompletionMessage(content='yo', role='assistant')]",
]  # fmt: skip
FIELDS = [("sft", "messages"), ("dpo", "prompt"), ("rm", "neg_answers"), ("score", "rejected")]
LISTS = ["['a', 'b']", "('a', 'b')", "['a' 'b']", "array(['a', 'b'], dtype=object)", "[\"it's\", 'b']"]
GIVEN = {"prompt": "hi", "chosen": "a", "rejected": "b", "completion": "c"}


@pytest.mark.parametrize(
    ("text", "stage", "field"),
    [*((text, "sft", "completion") for text in REPRS), *((str(TWO), *one) for one in FIELDS)],
)
def test_pythons_text_of_messages_is_rejected(text, stage, field):
    row = {field: text} if field in ("messages", "conversations") else {**GIVEN, field: text}
    row |= {"pos_answers": "a", "neg_answers": "b", field: text} if "answers" in field else {}
    with pytest.raises(RowError) as caught:
        parsed(row, stage)
    assert (caught.value.kind, caught.value.field) == ("python_text", field)
    assert "to_json or to_parquet" in caught.value.expected


@pytest.mark.parametrize("text", LISTS)
def test_pythons_text_of_a_list_is_rejected_where_a_list_is_expected(text):
    answers = {"prompt": "q", "pos_answers": "a", "neg_answers": "b"}
    rows = [
        ("rm", {**answers, "neg_answers": text}),
        ("sft", {"messages": text}),
        ("sft", {**SINGLE[0], "tools": str([WEATHER])}),
    ]
    for stage, row in (*rows, ("benchmarks", {"prompt": "q", "chosen": text, "rejected": "b"})):
        with pytest.raises(RowError, match="to_csv writes lists in Python's notation"):
            parsed(row, stage)
    assert parsed({"prompt": text, "completion": text}, "sft").pairs == [(text,)], "an answer may be code"
    cited = [f"{text}\n\nThis is a list." for text in (json.dumps(TWO), str(TWO))]
    for code in ("{'role': 'admin'}", json.dumps(BOT), "[", "{'from': 'NYC', 'to': 'LA'}", *cited):
        assert parsed({"prompt": "q", "completion": code}, "sft").pairs == [(code,)]
