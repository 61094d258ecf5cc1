"""Tests how rows become tokens: which tokens are trained, what happens to long rows, and which rows are rejected."""

import json

import pytest
from tokenizers import normalizers
from toy_data import (
    BOT,
    CALLING,
    CHATML,
    CONVERSATION,
    NO,
    USER,
    WEATHER,
    encoded,
    encoder,
    parsed,
    tokenizer,
)

from pipeline.data.encode import Encoder, Example
from pipeline.data.formats import kind_of
from pipeline.data.tasks import decode_sample
from pipeline.data.values import Dropped, RowError
from pipeline.models.template import PLAIN

FIRST, QUESTION, LAST = CONVERSATION["messages"][1:]
UNMARKED = PLAIN.read_text().replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
CHAT = {"template": CHATML, "ends": ("</s>", "<|im_end|>")}
CALLS = CHAT | {"template": CALLING}
CUT = {"overlong": "truncate"}
TEXT = {"prompt": "hi", "completion": " yo"}
PAIR = {"prompt": [USER], "chosen": "yo", "rejected": "no"}
ASK = {"role": "user", "content": "Rain in Oslo?"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}],
}
RESULT = {"role": "tool", "content": "dry"}
SILENT = {"role": "assistant", "content": ""}
TOOLS = {"messages": [ASK, CALLED, RESULT, LAST], "tools": [WEATHER]}
HI, AND = "\n\nHuman: hi\n\nAssistant:", "\n\nHuman: and?\n\nAssistant:"
SAYS, ASKS = "<|im_start|>assistant\n", "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
OFFER = f"<s><|im_start|>system\n{json.dumps(WEATHER)}\n<|im_end|>\n" + ASKS.format("Rain in Oslo?")
CALL = '⟦<tool_call>weather {"city": "Oslo"}</tool_call><|im_end|>⟧'

TRAINED = [  # stage, row, options of the encoder, expected text with the trained part in brackets
    ("sft", TEXT, {}, ["<s>hi⟦ yo</s>⟧"]),
    ("sft", TEXT, {"bos": False}, ["hi⟦ yo</s>⟧"]),
    ("sft", TEXT, {"apply": True}, [f"<s>{HI}⟦ yo</s>⟧"]),
    # All assistant turns are trained, including the token that ends a turn.
    ("sft", CONVERSATION, {}, [f"<s>{HI}⟦ yo</s>⟧{AND}⟦ bye</s>⟧"]),
    ("sft", CONVERSATION, {"template": UNMARKED}, [f"<s>{HI}⟦ yo</s>⟧{AND}⟦ bye</s>⟧"]),
    # White space after the completion is not trained. EOS is appended if the template writes no end of turn.
    ("sft", CONVERSATION, CHAT, [f"<s>{ASKS.format('hi')}⟦yo<|im_end|>⟧\n{ASKS.format('and?')}⟦bye<|im_end|>⟧"]),
    ("sft", CONVERSATION, {"template": CHATML}, [f"<s>{ASKS.format('hi')}⟦yo<|im_end|>\n⟧{ASKS.format('and?')}⟦bye<|im_end|>\n</s>⟧"]),
    # Tool calls are trained, but tool results are not.
    ("sft", TOOLS, CALLS, [f"{OFFER}{CALL}\n<|im_start|>tool\ndry<|im_end|>\n{SAYS}⟦bye<|im_end|>⟧"]),
    ("sft", {**TOOLS, "messages": [ASK, CALLED]}, CALLS, [OFFER + CALL]),
    ("rm", PAIR, {}, [f"<s>{HI}\n  chosen   ⟦ yo</s>⟧\n  rejected ⟦ no</s>⟧"]),
    ("dpo", {"prompt": "p", "pos_answers": ["a", "b"], "neg_answers": ["c", "d"]}, {},
     ["<s>p\n  chosen   ⟦a</s>⟧\n  rejected ⟦c</s>⟧", "<s>p\n  chosen   ⟦b</s>⟧\n  rejected ⟦d</s>⟧"]),
    ("kto", {"prompt": [USER], "completion": [BOT], "label": "bad"}, {}, [f"<s>{HI}⟦ yo</s>⟧"]),
    ("kto", PAIR, {}, [f"<s>{HI}⟦ yo</s>⟧", f"<s>{HI}⟦ no</s>⟧"]),
    # Long rows are truncated.
    ("sft", {"prompt": "abc", "completion": "defghij"}, {"max_length": 8, **CUT}, ["<s>abc⟦defg⟧"]),
    ("kto", {"prompt": "hi", "completion": " abcdef", "label": 1}, {"max_length": 6, **CUT}, ["<s>hi⟦ ab⟧"]),
    ("ppo", {"prompt": "abcdefghij"}, {"max_length": 4, **CUT}, ["<s>hij"]),
]  # fmt: skip
WEIGHED = [  # turns, other fields of the row, and the only trained turn
    ([{**USER, "weight": None}, {**FIRST, "weight": 0}, QUESTION, {**LAST, "weight": 1}], {}, "bye"),
    ([USER, {**FIRST, "train": False}, QUESTION, LAST], {}, "bye"),
    ([USER, FIRST, QUESTION, {**LAST, "weight": 0.0}], {}, "yo"),
    ([USER, {**FIRST, "loss": False}, QUESTION, {**LAST, "loss": True}], {}, "bye"),
    # the system prompt is added as a turn before the row's turns
    (
        [USER, FIRST, QUESTION, {**LAST, "train": False}],
        {"system": "s"},
        "yo",
    ),
]


@pytest.mark.parametrize(("stage", "row", "options", "expected"), TRAINED)
def test_what_is_trained(stage, row, options, expected):
    tok, examples = encoded(stage, row, **options)
    assert [decode_sample(tok, one.columns, one.prompt_tokens) for one in examples] == expected
    for one in examples:
        assert one.truncated == ("max_length" in options)
        ids = one.columns.get("input_ids", one.columns.get("prompt_ids", one.columns.get("chosen_ids")))
        assert ids.count(tok.bos_token_id) == options.get("bos", True)
        assert all(
            label in (-100, token) for label, token in zip(one.columns.get("labels", []), ids, strict=False)
        )
    if stage == "kto" and "chosen" in row:
        assert [one.columns["label"] for one in examples] == [True, False]


@pytest.mark.parametrize(("turns", "more", "words"), WEIGHED)
def test_turns_with_train_false(turns, more, words):
    rows = [{"messages": turns, **more}]
    if words == "bye":
        rows.append({"prompt": turns[:1], "completion": turns[1:], **more})
    for row in rows:
        for options, expected in (({}, f"⟦ {words}</s>⟧"), (CHAT, f"⟦{words}<|im_end|>⟧")):
            tok, (example,) = encoded("sft", row, **options)
            text = decode_sample(tok, example.columns)
            assert expected in text and text.count("⟦") == 1
    tok, (example,) = encoded("sft", rows[0], template=CHATML)
    trained = decode_sample(tok, example.columns).endswith("</s>⟧")
    assert trained == (words == "bye"), "the end that is added to an untrained completion"


@pytest.mark.parametrize("stage", ["rm", "dpo", "score", "ppo"])
def test_every_row_format_shows_its_tools(stage):
    row = {"prompt": [USER], "tools": [WEATHER]}
    row |= {} if stage == "ppo" else {"chosen": [CALLED], "rejected": [NO]}
    tok, (example,) = encoded(stage, row, template=CALLING)
    ids = next(ids for ids in example.columns.values() if isinstance(ids, list))
    assert '"name": "weather"' in tok.decode(ids)


def outcome(stage, row, normalizer=None, **options):
    """Returns the class Example if the row is encoded, otherwise the kind of its error or the reason for dropping it."""
    made = encoder(stage, **options)
    if normalizer:
        made.backend.normalizer = normalizer
    (one, *_) = made.encode([parsed(row, stage)])[0]
    return one.kind if isinstance(one, RowError) else one.reason if isinstance(one, Dropped) else type(one)


LONG = {"prompt": "p", "chosen": "x" * 30 + "a", "rejected": "x" * 30 + "b"}
INVISIBLE = {"normalizer": normalizers.Replace("\u200b", "")}
LOWER = {"normalizer": normalizers.Lowercase()}
OTHER_CALL = {**CALLED, "tool_calls": [{"name": "weather", "arguments": {"city": "Rome"}}]}
EVIL = [{"name": "f", "arguments": {"x": "<|im_end|>"}}]


@pytest.mark.parametrize(
    ("stage", "row", "options", "kind"),
    [
        ("sft", {"prompt": "abc", "completion": "defghij"}, {"max_length": 8}, "overlong"),
        ("sft", {"prompt": "abc", "completion": "defghij"}, {"max_length": 3, **CUT}, "prompt_too_long"),
        *((stage, LONG, {"max_length": 20, **CUT}, "equal_after_truncation") for stage in ("rm", "dpo")),
        # The tokenizer encodes this text to no tokens.
        *((stage, {"prompt": "hi", "completion": "\u200b"}, INVISIBLE, "empty_completion") for stage in ("sft", "score")),
        ("dpo", {**PAIR, "rejected": "\u200b"}, INVISIBLE, "empty_completion"),
        ("ppo", {"prompt": "\u200b"}, INVISIBLE, "empty_prompt"),
        # The texts of the two completions differ, but their tokens are equal.
        *((stage, {**PAIR, "rejected": "yO"}, LOWER, "equal_pair") for stage in ("rm", "score")),
        ("dpo", {"prompt": [ASK], "chosen": [CALLED], "rejected": [OTHER_CALL]}, CALLS, Example),
        # Truncation would remove the header of a turn.
        ("ppo", {"prompt": [USER]}, {"max_length": 9, **CUT}, "overlong"),
        # An empty turn would teach the policy to end immediately.
        ("sft", {"messages": [USER, SILENT, USER, BOT]}, {}, "empty_completion"),
        ("sft", {"prompt": [USER], "completion": [SILENT, USER, BOT]}, {}, "empty_completion"),
        ("sft", {"prompt": [USER, SILENT, USER], "completion": "yo"}, {}, Example),
        ("sft", {"messages": [USER, {**SILENT, "weight": 0}, USER, BOT]}, {}, Example),
        ("ppo", {"prompt": [USER, SILENT, USER]}, {}, Example),
        # The template CHAT writes no tool calls. The last two rows have special tokens, in a tool description and in a call.
        ("sft", TOOLS, CHAT, "template"),
        ("rm", {"prompt": [ASK], "chosen": [CALLED], "rejected": [NO]}, CHAT, "template"),
        ("sft", {**TOOLS, "tools": [{**WEATHER, "description": "a<|im_end|>"}]}, CALLS, "special_tokens"),
        ("sft", {"messages": [ASK, {**CALLED, "tool_calls": EVIL}]}, CALLS, "special_tokens"),
    ],
)  # fmt: skip
def test_rows_that_are_left_out(stage, row, options, kind):
    assert outcome(stage, row, **options) == kind


def test_a_token_across_the_border_belongs_to_the_completion():
    """A token that contains text of prompt and completion is trained, as in TRL.

    The report shows the completions of an rm pair from the start of a word.
    """
    tok = tokenizer()
    tok.backend_tokenizer.add_tokens(["ab"])
    pair = {"prompt": "xa", "chosen": "b is north", "rejected": "b is not"}
    for stage, name in (("rm", "chosen_ids"), ("dpo", "chosen_ids"), ("kto", "completion_ids")):
        made = Encoder(tok, kind_of(stage), 99, "error", False, [tok.eos_token_id])
        example = made.encode([parsed(pair, stage)])[0][0]
        assert tok.decode(example.columns[name]).endswith("ab is north</s>") and example.prompt_tokens == 2
    _, (example,) = encoded("rm", {"prompt": "q", "chosen": " the north", "rejected": " the nose"})
    shown = "<s>q\n  chosen   ⟦ the north</s>⟧\n  rejected ⟦ the nose</s>⟧"
    assert decode_sample(tok, example.columns, example.prompt_tokens) == shown
