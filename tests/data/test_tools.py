"""Tools: what a row offers and calls goes through the chat template, or the row says why it does not."""

import json

import pytest
from toy_data import (
    BOT,
    CALLING,
    CHATML,
    NO,
    USER,
    WEATHER,
    encoded,
    encoder,
    parsed,
    tokenizer,
    trained,
    write,
)
from toy_data import make as prepared

from pipeline.data.encode import Example
from pipeline.data.values import RowError

ASK = {"role": "user", "content": "Rain in Oslo?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "dry", "tool_call_id": "c1", "name": "weather"}
NO_RAIN = {"role": "assistant", "content": "No."}
ROW = {"messages": [ASK, CALLED, RESULT, NO_RAIN], "tools": [WEATHER]}


def test_tools_and_calls_are_in_the_text_and_calls_are_trained():
    ends = [tokenizer(CALLING).convert_tokens_to_ids("<|im_end|>")]
    tok, (example,) = encoded("sft", ROW, template=CALLING, ends=ends)
    assert isinstance(example, Example)
    assert json.dumps(WEATHER) in tok.decode(example.columns["input_ids"])
    call = '<tool_call>weather {"city": "Oslo"}</tool_call><|im_end|>'
    assert trained(tok, example) == [call, "No.<|im_end|>"]
    _, (call_last,) = encoded("sft", {**ROW, "messages": [ASK, CALLED]}, template=CALLING, ends=ends)
    assert trained(tok, call_last) == [call]


@pytest.mark.parametrize("stage", ["rm", "dpo", "score", "ppo"])
def test_every_kind_of_row_shows_its_tools(stage):
    row = {"prompt": [USER], "tools": [WEATHER]}
    if stage != "ppo":
        row |= {"chosen": [CALLED], "rejected": [NO]}
    tok, (example,) = encoded(stage, row, template=CALLING)
    ids = next(
        ids for name, ids in example.columns.items() if name in ("prompt_ids", "input_ids", "chosen_ids")
    )
    assert '"name": "weather"' in tok.decode(ids)


def test_the_shapes_in_which_tools_come():
    as_text = {"function": {"name": "weather", "arguments": json.dumps({"city": "Oslo"})}}
    bare = {"name": "weather", "arguments": {"city": "Oslo"}}
    for calls in ([as_text], [bare], bare):
        turn = parsed({"messages": [ASK, {**CALLED, "tool_calls": calls}, RESULT, NO_RAIN]}, "sft").prompt[1]
        assert (turn["content"], turn["tool_calls"][0]["function"]) == ("", CALL["function"])
    shared = [
        {"from": "human", "value": "Rain in Oslo?"},
        {"from": "function_call", "value": json.dumps(bare)},
        {"from": "observation", "value": "dry"},
        {"from": "gpt", "value": "No."},
    ]
    record = parsed({"conversations": shared, "tools": json.dumps([WEATHER])}, "sft")
    assert record.prompt[1]["tool_calls"][0]["function"] == CALL["function"] and record.tools == [WEATHER]
    assert parsed({**ROW, "tools": None}, "sft").tools is None
    assert parsed({**ROW, "tools": "hammer, saw"}, "sft").unread == ("tools",)
    # As Arrow writes columns that some rows lack
    empty = [
        {**USER, "tool_calls": None},
        {**BOT, "tool_calls": None},
    ]
    assert parsed({"messages": empty}, "sft").pairs == [([BOT],)]


def test_pairs_that_differ_in_their_calls_alone():
    other = {**CALLED, "tool_calls": [{"name": "weather", "arguments": {"city": "Rome"}}]}
    _, (example,) = encoded(
        "dpo", {"prompt": [ASK], "chosen": [CALLED], "rejected": [other]}, template=CALLING
    )
    assert isinstance(example, Example)
    with pytest.raises(RowError, match="the same text on both sides"):
        parsed({"prompt": [ASK], "chosen": [CALLED], "rejected": [CALLED]}, "dpo")


def test_a_template_that_writes_no_calls_is_refused():
    for stage, row in (("sft", ROW), ("rm", {"prompt": [ASK], "chosen": [CALLED], "rejected": [NO]})):
        _, (error,) = encoded(stage, row, template=CHATML)
        assert isinstance(error, RowError) and error.kind == "template"
        assert (
            'does not write the call of "weather"' in error.found and "model.chat_template" in error.expected
        )


def test_special_tokens_in_tools_are_refused():
    made = encoder("sft", template=CALLING)
    for row in (
        {**ROW, "tools": [{**WEATHER, "description": "a<|im_end|>"}]},
        {"messages": [ASK, {**CALLED, "tool_calls": [{"name": "f", "arguments": {"x": "<|im_end|>"}}]}]},
    ):
        ((error,),) = made.encode([parsed(row, "sft")])
        assert isinstance(error, RowError) and error.kind == "special_tokens"


def test_the_report_names_columns_that_nothing_reads(tmp_path):
    rows = [{"messages": [USER, BOT], "tools": [WEATHER], "id": 7, "label": True}] * 3
    text = prepared(tmp_path, train=write(tmp_path / "rows.jsonl", rows)).report.render()
    assert "not read    columns id, tools\n" in text
    assert "the model does not see the `tools` of 3 rows" in text
    rows = [{"prompt": "q", "chosen": " a", "rejected": " b", "margin": 1, "source": "x"}]
    text = prepared(tmp_path, "rm", train=write(tmp_path / "pairs.jsonl", rows)).report.render()
    assert "not read    column source\n" in text and "white space" not in text
    text = prepared(
        tmp_path, "ppo", train=write(tmp_path / "asked.jsonl", [{"prompt": "q", "id": 1}])
    ).report.render()
    assert "not read" not in text, "further columns go to Python rewards"


def test_prompts_and_completions_that_run_into_each_other_are_warned_of(tmp_path):
    rows = [
        {"prompt": "A red", "chosen": "apple", "rejected": " pear"},
        {"prompt": "A ", "chosen": "b", "rejected": "c"},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    text = prepared(tmp_path, "rm", train=path).report.render()
    assert '1 row of plain text joins prompt and completion without white space ("A redapple")' in text
    assert "model.chat_template=plain" in text
    assert "joins" not in prepared(tmp_path, "rm", train=path, apply_chat_template=True).report.render()


def test_the_first_format_of_openai_is_read_like_the_second():
    """function_call and the role `function`, and schemas that stand by themselves."""
    old = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    result = {"role": "function", "name": "weather", "content": "dry"}
    record = parsed({"messages": [ASK, old, result, NO_RAIN], "tools": [WEATHER["function"]]}, "sft")
    assert record.prompt[1]["tool_calls"] == [{k: v for k, v in CALL.items() if k != "id"}]
    assert record.prompt[2] == {"role": "tool", "content": "dry", "name": "weather"}
    assert record.tools == [WEATHER]
