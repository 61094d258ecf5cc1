"""Demonstrations: every shape, and which of their tokens are trained."""

import pytest
from toy_data import BOT, CHATML, CONVERSATION, USER, encoded, parsed, tokenizer, trained

from pipeline.models.template import PLAIN

DEMONSTRATIONS = [
    ({"prompt": "a b", "completion": " c"}, "a b", " c"),
    ({"prompt": "a b", "answer": " c"}, "a b", " c"),
    ({"messages": [USER, BOT]}, [USER], [BOT]),
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, [USER], [BOT]),
    (
        {"conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yo"}]},
        [USER],
        [BOT],
    ),
    ({"instruction": "hi", "output": "yo"}, [USER], [BOT]),
    ({"instruction": "hi", "input": "", "output": "yo"}, [USER], [BOT]),
    ({"instruction": "a", "input": "b", "output": "yo"}, [{"role": "user", "content": "a\n\nb"}], [BOT]),
    ({"prompt": [USER], "completion": [BOT]}, [USER], [BOT]),
    ({"prompt": [USER], "completion": "yo"}, [USER], [BOT]),
    ({"prompt": "\n\nHuman: hi\n\nAssistant:", "completion": " yo"}, [USER], [BOT]),
    ({"prompt": "Human: hi\n\nAssistant:", "completion": " yo"}, [USER], [BOT]),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, BOT]}, [USER], [BOT]),
]


@pytest.mark.parametrize("row,prompt,completion", DEMONSTRATIONS)
def test_demonstrations(row, prompt, completion):
    record = parsed(row, "sft")
    assert (record.prompt, record.pairs) == (prompt, [(completion,)])


def test_all_assistant_turns_are_trained_with_their_end():
    unmarked = PLAIN.read_text().replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    for template in (None, unmarked):
        tok, (example,) = encoded("sft", CONVERSATION, template=template)
        assert trained(tok, example) == [" yo</s>", " bye</s>"]
        assert example.columns["input_ids"].count(tok.bos_token_id) == 1


def test_white_space_behind_the_end_is_not_trained():
    tok = tokenizer(CHATML)
    ends = [tok.eos_token_id, tok.convert_tokens_to_ids("<|im_end|>")]
    tok, (example,) = encoded("sft", CONVERSATION, template=CHATML, ends=ends)
    assert trained(tok, example) == ["yo<|im_end|>", "bye<|im_end|>"]
    assert example.columns["input_ids"][-1] == ends[1]


def test_the_end_is_added_where_the_template_has_none():
    tok, (example,) = encoded("sft", CONVERSATION, template=CHATML)
    assert trained(tok, example)[-1].endswith("bye<|im_end|>\n</s>")


WEIGHED = [
    {"weight": 0},
    {"weight": 0.0},
    {"train": False},
]


@pytest.mark.parametrize("mark", WEIGHED)
@pytest.mark.parametrize("template", [None, CHATML], ids=["generation", "chatml"])
def test_turns_that_are_not_to_be_trained(mark, template):
    first, question, last = CONVERSATION["messages"][1:]
    turns = [{**USER, "weight": None}, {**first, **mark}, question, {**last, "weight": 1}]
    tok = tokenizer(template)
    ends = [tok.eos_token_id, tok.convert_tokens_to_ids("<|im_end|>")]
    tok, (example,) = encoded("sft", {"messages": turns}, template=template, ends=ends)
    assert trained(tok, example) == [" bye</s>" if template is None else "bye<|im_end|>"]
    for system in ({}, {"system": "s"}):  # a system turn of the row shifts the others
        turns = [USER, first, question, {**last, **mark}]
        tok, (example,) = encoded("sft", {"messages": turns, **system}, template=template, ends=ends)
        assert trained(tok, example) == [" yo</s>" if template is None else "yo<|im_end|>"]
    tok, (example,) = encoded("sft", {"messages": turns}, template=CHATML)
    assert "</s>" not in "".join(trained(tok, example)), "the end that is added to an untrained completion"
    rows = {"prompt": [USER], "completion": [{**first, **mark}, question, last]}
    tok, (example,) = encoded("sft", rows, template=template, ends=ends)
    assert trained(tok, example) == [" bye</s>" if template is None else "bye<|im_end|>"]


def test_text_rows_and_the_chat_template():
    row = {"prompt": "hi", "completion": " yo"}
    tok, (example,) = encoded("sft", row)
    assert tok.decode(example.columns["input_ids"]) == "<s>hi yo</s>"
    assert trained(tok, example) == [" yo</s>"]
    tok, (example,) = encoded("sft", row, apply=True)
    assert tok.decode(example.columns["input_ids"]) == "<s>\n\nHuman: hi\n\nAssistant: yo</s>"
    tok, (example,) = encoded("sft", row, bos=False)
    assert tok.decode(example.columns["input_ids"]) == "hi yo</s>"
