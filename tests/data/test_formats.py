"""Every row shape and every row error; how rows become tokens, and which of the tokens are trained."""

import gzip
import json
from pathlib import Path

import pytest
from running import SHARED
from toy_data import CHATML, tokenizer, trained

from pipeline.data import formats, source
from pipeline.data.encode import Dropped, Encoder, Example
from pipeline.data.formats import RowError, parse
from pipeline.models.template import PLAIN

USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


def encoder(stage, template=None, max_length=500, too_long="error", apply=False, bos=True, ends=None):
    tok = tokenizer(template, bos)
    return Encoder(tok, stage, max_length, too_long, apply, ends or [tok.eos_token_id])


def encoded(stage, row, **options):
    made = encoder(stage, **options)
    outcomes = made.encode([parse(row, stage)])[0]
    return made.tokenizer, outcomes


# ---- shapes ----------------------------------------------------------------------------------------------------


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
NO = {"role": "assistant", "content": "no"}
PREFERENCES = [
    {"prompt": [USER], "chosen": "yo", "rejected": "no"},
    {"prompt": [USER], "chosen": [BOT], "rejected": [NO]},
    {"prompt": "hi", "chosen": [USER, BOT], "rejected": [USER, NO]},
    {"chosen": [USER, BOT], "rejected": [USER, NO]},
    {"chosen": "\n\nHuman: hi\n\nAssistant: yo", "rejected": "\n\nHuman: hi\n\nAssistant: no"},
    {"conversations": [{"from": "human", "value": "hi"}], "chosen": {"from": "gpt", "value": "yo"},
     "rejected": {"from": "gpt", "value": "no"}},
    {"conversations": [{"from": "human", "value": "hi"}], "chosen": BOT, "rejected": NO},
    {"prompt": [USER], "pos_answers": ["yo"], "neg_answers": ["no"]},
]  # fmt: skip


@pytest.mark.parametrize("row,prompt,completion", DEMONSTRATIONS)
def test_demonstrations(row, prompt, completion):
    record = parse(row, "sft")
    assert (record.prompt, record.pairs) == (prompt, [(completion,)])


@pytest.mark.parametrize("row", PREFERENCES)
@pytest.mark.parametrize("stage", ["rm", "dpo"])
def test_preferences(row, stage):
    record = parse({**row, "margin": 2}, stage)
    assert (record.prompt, record.pairs, record.margin) == ([USER], [([BOT], [NO])], 2.0)


def test_system_turns_and_answers_by_index():
    record = parse(
        {"system": "s", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        "sft",
    )
    assert record.prompt[0] == {"role": "system", "content": "s"}
    record = parse({"prompt": "p", "pos_answers": ["a", "b"], "neg_answers": ["c", "d"]}, "rm")
    assert record.pairs == [("a", "c"), ("b", "d")]


SYSTEM = {"role": "system", "content": "s"}
ASIDE = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "so"}]
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
            parse(row, "dpo")
        assert (caught.value.kind, caught.value.field) == ("prompts_differ", key)
    else:
        assert formats.said(parse(row, "dpo").prompt) == formats.said(prompt)


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
    record = parse({**row, "system": "s"}, stage)
    assert record.prompt == [SYSTEM, USER]
    assert all(completion[0]["content"] in ("yo", "no") for pair in record.pairs for completion in pair)


def test_prompts_carry_their_further_columns():
    record = parse({"prompt": "what?", "gold": 4}, "ppo")
    assert json.loads(record.row) == {"prompt": "what?", "gold": 4}
    assert parse({"prompt": "\n\nHuman: hi\n\nAssistant:"}, "ppo").prompt == [USER]
    assert parse(PREFERENCES[4], "ppo").prompt == [USER]
    assert parse({"messages": [USER]}, "evaluate").prompt == [USER]


def test_transcripts_split_at_paragraphs_only_and_render_back():
    text = "\n\nHuman: Is it Human: or\nAssistant: here?\n\nAssistant: No.\n\nA second one.\n\nHuman: ok\n\nAssistant:"
    record = parse({"prompt": text}, "ppo")
    assert [turn["role"] for turn in record.prompt] == ["user", "assistant", "user"]
    assert record.prompt[1]["content"] == "No.\n\nA second one."
    assert encoder("ppo").render(record.prompt, True).replace("</s>", "") == "<s>" + text


def test_texts_without_markers_are_cut_at_white_space():
    record = parse({"chosen": "The cat sat here", "rejected": "The cat saw it"}, "rm")
    assert (record.prompt, record.pairs) == ("The cat", [(" sat here", " saw it")])


def nested(depth: int) -> list:
    """Lists inside each other."""
    return [nested(depth - 1)] if depth else []


# ---- errors ----------------------------------------------------------------------------------------------------

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
    ("score", {"prompt": "a", "completion": "b", "x": nested(65)}, "nested", ("x" + 64 * "[0]")[:80]),
    ("evaluate", {"prompt": "a", "completion": 5}, "wrong_type", "completion"),
    ("rm", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("nan")}, "not_finite", "margin"),
    ("rm", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1e38}, "margin", "margin"),
    ("rm", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 101}, "margin", "margin"),
    ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": -0.5}, "margin", "margin"),
    ("rm", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": True}, "wrong_type", "margin"),
    ("rm", {"prompt": "a", "chosen": "b", "rejected": " b "}, "equal_pair", "chosen"),
    ("rm", {"prompt": "a", "chosen": "b", "rejected": ""}, "empty_completion", "rejected"),
    ("rm", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1"}, "wrong_type", "margin"),
    ("rm", {"chosen": "x y", "rejected": "z y"}, "empty_prompt", "chosen"),
    (
        "dpo",
        {"chosen": [USER, BOT], "rejected": [{**USER, "content": "ho"}, NO]},
        "prompts_differ",
        "rejected",
    ),
    ("dpo", {"chosen": [USER, BOT, USER], "rejected": [USER, NO]}, "wrong_role", "chosen"),
    (
        "rm",
        {"prompt": "a", "pos_answers": ["b"], "neg_answers": ["c", "d"]},
        "unequal_answers",
        "neg_answers",
    ),
    (
        "rm",
        {"prompt": "a", "pos_answers": ["b", "c"], "neg_answers": ["d", "c"]},
        "equal_pair",
        "pos_answers[1]",
    ),
    ("rm", {"prompt": "a", "pos_answers": "b", "neg_answers": "c"}, "wrong_type", "pos_answers"),
    ("ppo", {"prompt": [USER, BOT]}, "wrong_role", "prompt"),
    ("ppo", {"question": "x"}, "missing_field", "prompt"),
    ("sft", {"messages": [USER, {**BOT, "weight": 0.5}]}, "weight", "messages[1].weight"),
    ("sft", {"messages": [USER, {**BOT, "train": "no"}]}, "weight", "messages[1].train"),
    ("sft", {"messages": [{**USER, "weight": 1}, BOT]}, "weight", "messages[0].weight"),
    ("sft", {"messages": [USER, {**BOT, "weight": 0}]}, "weight", "messages"),
    ("sft", {"prompt": [USER], "completion": [{**BOT, "weight": 0}]}, "weight", "completion"),
    ("sft", {"prompt": "a", "completion": "b", "label": False}, "label", "label"),
    ("sft", {"messages": [USER, BOT], "label": False}, "label", "label"),
]


@pytest.mark.parametrize("stage,row,kind,field", ERRORS)
def test_row_errors(stage, row, kind, field):
    with pytest.raises(RowError) as caught:
        parse(row, stage)
    assert (caught.value.kind, caught.value.field) == (kind, field)
    assert caught.value.found and caught.value.expected


@pytest.mark.parametrize("margin", [0, 1 / 3, 3, 100])
def test_margins_that_a_reward_model_can_learn(margin):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}
    assert parse(row, "rm").margin == margin
    with pytest.raises(RowError, match="swap `chosen` and `rejected`"):
        parse({**row, "margin": -3}, "rm")


def test_a_misspelt_field_names_the_near_one_and_the_shapes():
    with pytest.raises(RowError) as caught:
        parse({"promt": "a", "completion": "b"}, "sft")
    assert "is `promt` meant to be `prompt`?" in str(caught.value)
    assert "prompt+completion | prompt+answer" in str(caught.value)


# ---- tokens ----------------------------------------------------------------------------------------------------

CONVERSATION = {
    "messages": [USER, BOT, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "bye"}]
}


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


def test_a_template_that_rewrites_earlier_turns():
    """Like Qwen3's: the last completion begins with empty thoughts, earlier ones do not."""
    thoughts = CHATML.replace(
        "{{ m.content | trim }}",
        "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content | trim }}",
    )
    tok = tokenizer(thoughts)
    ends = [tok.eos_token_id, tok.convert_tokens_to_ids("<|im_end|>")]
    tok, (example,) = encoded("sft", CONVERSATION, template=thoughts, ends=ends)
    assert trained(tok, example) == ["yo<|im_end|>", "<think></think>bye<|im_end|>"]
    shifting = "{{ messages | length }}" + CHATML
    _, (error,) = encoded("sft", CONVERSATION, template=shifting)
    assert isinstance(error, RowError) and error.kind == "template"


REASONED = {
    "messages": [
        USER,
        {"role": "assistant", "content": "<think>\none\n</think>\n\nyo"},
        {"role": "user", "content": "yo and?"},
        {"role": "assistant", "content": "<think>\ntwo\n</think>\n\nbye"},
    ]
}
LAST = {  # what is trained of the last completion, without and with thoughts
    "qwen3": ("<think>\n\n</think>\n\nbye", "<think>\ntwo\n</think>\n\nbye"),
    "qwen3_5_think": ("\n</think>\n\nbye", "two\n</think>\n\nbye"),  # the prompt ends on <think>
    "qwen3_instruct_2507": ("bye", "<think>\ntwo\n</think>\n\nbye"),
}


@pytest.mark.parametrize("name", LAST)
@pytest.mark.parametrize("row", [CONVERSATION, REASONED], ids=["plain", "reasoned"])
def test_templates_that_take_thoughts_out_of_earlier_turns(name, row):
    """The real ones of Qwen3, on several turns: each completion is trained as it is written, and nothing beside it."""
    import trl

    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    tok = tokenizer(template)
    ends = [tok.eos_token_id, tok.convert_tokens_to_ids("<|im_end|>")]
    tok, (example,) = encoded("sft", row, template=template, ends=ends)
    assert isinstance(example, Example), example
    kept = name == "qwen3_instruct_2507" and row is REASONED
    first = "<think>\none\n</think>\n\nyo" if kept else "yo"
    assert trained(tok, example) == [f"{first}<|im_end|>", f"{LAST[name][row is REASONED]}<|im_end|>"]
    pair = {"prompt": row["messages"][:3], "chosen": row["messages"][3:], "rejected": "no"}
    if row is CONVERSATION:
        tok, (example,) = encoded("dpo", pair, template=template, ends=ends)
        assert tok.decode(example.columns["chosen_ids"]) == f"{LAST[name][0]}<|im_end|>"


def test_a_template_that_asks_in_another_way_than_it_writes():
    """DeepSeek R1's: the prompt ends on <think>, the completion is written without it."""
    asks = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    for stage, row in (("sft", CONVERSATION), ("dpo", {"prompt": [USER], "chosen": "a", "rejected": "b"})):
        _, (error,) = encoded(stage, row, template=asks)
        assert isinstance(error, RowError) and error.kind == "template" and "<think>" in error.found


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


def test_a_template_that_refuses_a_row():
    picky = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + CHATML
    )
    row = {"messages": [{"role": "system", "content": "s"}, USER, BOT]}
    _, (error,) = encoded("sft", row, template=picky)
    assert isinstance(error, RowError) and "no system turns" in str(error)


def test_text_rows_and_the_chat_template():
    row = {"prompt": "hi", "completion": " yo"}
    tok, (example,) = encoded("sft", row)
    assert tok.decode(example.columns["input_ids"]) == "<s>hi yo</s>"
    assert trained(tok, example) == [" yo</s>"]
    tok, (example,) = encoded("sft", row, apply=True)
    assert tok.decode(example.columns["input_ids"]) == "<s>\n\nHuman: hi\n\nAssistant: yo</s>"
    tok, (example,) = encoded("sft", row, bos=False)
    assert tok.decode(example.columns["input_ids"]) == "hi yo</s>"


def test_todays_date_is_not_in_a_prompt():
    dated = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}"
    assert encoder("ppo", template=dated).render([USER], True) == "26 Jul 2024"


def test_preferences_as_tokens():
    row = {"prompt": [USER], "chosen": "yo", "rejected": "no"}
    tok, (example,) = encoded("rm", row)
    assert tok.decode(example.columns["chosen_ids"]) == "<s>\n\nHuman: hi\n\nAssistant: yo</s>"
    tok, (example,) = encoded("dpo", row)
    assert tok.decode(example.columns["prompt_ids"]) == "<s>\n\nHuman: hi\n\nAssistant:"
    assert tok.decode(example.columns["rejected_ids"]) == " no</s>"
    several = {"prompt": "p", "pos_answers": ["a", "b"], "neg_answers": ["c", "d"]}
    assert len(encoded("dpo", several)[1]) == 2


def test_too_long():
    row = {"prompt": "abc", "completion": "defghij"}
    for too_long, outcome in (("error", RowError), ("drop", Dropped)):
        assert isinstance(encoded("sft", row, max_length=8, too_long=too_long)[1][0], outcome)
    tok, (example,) = encoded("sft", row, max_length=8, too_long="truncate")
    assert tok.decode(example.columns["input_ids"]) == "<s>abcdefg" and example.truncated
    pair = {"prompt": "abc", "chosen": "same then a", "rejected": "same then b"}
    for stage in ("rm", "dpo"):
        options = {"max_length": 10, "too_long": "truncate"}
        assert encoded(stage, pair, **options)[1] == [Dropped("equal_after_truncation")]
    tok, (example,) = encoded("ppo", {"prompt": "abcdefghij"}, max_length=4, too_long="truncate")
    assert tok.decode(example.columns["input_ids"]) == "<s>hij"
    assert encoded("sft", row, max_length=3, too_long="truncate")[1] == [Dropped("too_long")]


# ---- what is learned, not what was written ------------------------------------------------------------------


HEAD, TAIL = CHATML.split("{{ m.content | trim }}")
DROPS = HEAD + "{{ m.content if m.role == 'user' }}" + TAIL
SAYS_THE_SAME = HEAD + "{{ m.content if m.role == 'user' else 'Sure.' }}" + TAIL
FORGETS_THE_PROMPT = HEAD + "{{ m.content if m.role != 'user' }}" + TAIL
LOWERS = HEAD + "{{ m.content | lower }}" + TAIL
ROWS = {
    "sft": {"messages": [USER, BOT]},
    "rm": {"prompt": [USER], "chosen": "yo", "rejected": "no"},
    "dpo": {"prompt": [USER], "chosen": "yo", "rejected": "no"},
    "score": {"prompt": [USER], "completion": "yo"},
    "pairs": {"prompt": [USER], "chosen": "yo", "rejected": "no"},
    "ppo": {"prompt": [USER]},
}


@pytest.mark.parametrize(
    ("stage", "template"),
    [(stage, template) for stage in ROWS if stage != "ppo" for template in (DROPS, SAYS_THE_SAME)]
    + [(stage, FORGETS_THE_PROMPT) for stage in ROWS],
)
def test_a_template_that_leaves_a_turn_out_is_refused(stage, template):
    tok = tokenizer(template)
    ends = [tok.eos_token_id, tok.convert_tokens_to_ids("<|im_end|>")]
    _, (found,) = encoded(stage, ROWS[stage], template=template, ends=ends)
    kind = "empty_prompt" if template is FORGETS_THE_PROMPT else "empty_completion"
    assert isinstance(found, RowError) and found.kind == kind, found


@pytest.mark.parametrize("stage", ["rm", "dpo", "pairs", "score"])
def test_a_pair_of_equal_tokens_is_refused(stage):
    from tokenizers import normalizers

    made = encoder(stage)
    made.backend.normalizer = normalizers.Lowercase()
    row = {"prompt": [USER], "chosen": "Yo", "rejected": "yO"}
    ((found,),) = made.encode([parse(row, stage)])
    assert isinstance(found, RowError) and (found.kind, found.field) == ("equal_pair", "chosen")
    ((found,),) = made.encode([parse({**row, "rejected": "yo!"}, stage)])
    assert isinstance(found, Example)


CUTS = HEAD + "{{ m.content[:20] if m.role == 'assistant' else m.content }}" + TAIL
CUTS_EARLIER = HEAD + "{{ m.content if loop.last or m.role == 'user' else m.content[:20] }}" + TAIL
CUTS_QUESTIONS = HEAD + "{{ m.content[:20] if m.role == 'user' else m.content }}" + TAIL
BLOCKS = HEAD + "{% generation %}{{ m.content[:20] }}{% endgeneration %}" + TAIL
STRIPS = HEAD + "{{ m.content.split() | join(' ') }}" + TAIL
LONG = {"role": "assistant", "content": "Yes, but  not before\n the evening of the day after."}
ASKED = {"role": "user", "content": "Could you say that again, at greater length?"}


@pytest.mark.parametrize("template", [CUTS, LOWERS, CUTS_EARLIER, CUTS_QUESTIONS, BLOCKS, STRIPS])
@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "ppo"])
def test_a_template_that_changes_words_is_refused(stage, template):
    other = {**LONG, "content": LONG["content"] + " No."}
    turns = [USER, LONG, ASKED] if template is CUTS_EARLIER else [ASKED]
    row = {"sft": {"messages": [*turns, LONG]}, "ppo": {"prompt": turns}}.get(
        stage, {"prompt": turns, "chosen": [LONG], "rejected": [other]}
    )
    _, (found,) = encoded(stage, row, template=template)
    unread = stage == "ppo" and template is CUTS  # an assistant's turn there is none
    unlearned = stage != "sft" and template is CUTS_EARLIER
    if template is STRIPS or unread or unlearned:
        assert isinstance(found, Example), found
    else:
        assert isinstance(found, RowError) and (found.kind, found.field[:9]) == ("template", "messages["), (
            found
        )
        assert "changes the words" in found.found


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "score", "ppo"])
def test_words_that_the_tokenizer_does_not_see_are_none(stage):
    """A normaliser may strike out all that a text says."""
    from tokenizers import normalizers

    tok = tokenizer()
    tok.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    row = {"prompt": "\u200b" if stage == "ppo" else "hi", "completion": "\u200b"}
    row |= {"chosen": "yo", "rejected": "\u200b"} if stage in ("rm", "dpo") else {}
    (found,) = Encoder(tok, stage, 99, "error", False, [tok.eos_token_id]).encode([parse(row, stage)])[0]
    assert isinstance(found, RowError), found
    assert found.kind == ("empty_prompt" if stage == "ppo" else "empty_completion")


def test_a_template_may_raise_anything():
    for wrong in (
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ range(10 ** 9) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ):
        _, (error,) = encoded("ppo", ROWS["ppo"], template=wrong)
        assert isinstance(error, RowError) and error.kind == "template", wrong


def test_a_huge_text_is_not_tokenised(monkeypatch):
    row = {"prompt": "abc", "completion": "d" * (2 << 20)}
    for too_long, outcome in (("error", RowError), ("drop", Dropped)):
        made = encoder("sft", too_long=too_long)
        monkeypatch.setattr(made, "_encodings", lambda texts, _: texts and pytest.fail("tokenised"))
        found = made.encode([parse(row, "sft"), parse(row, "sft")])
        assert [isinstance(one, outcome) for (one,) in found] == [True, True]
    _, (found,) = encoded("sft", row)
    assert found.found == "2,097,155 characters"
    tok, (example,) = encoded("sft", row, too_long="truncate", max_length=9)
    assert tok.decode(example.columns["input_ids"]) == "<s>abcddddd"


# ---- files -----------------------------------------------------------------------------------------------------


def read(path, chunk_bytes=source.CHUNK, stage="sft"):
    """(number in the file, row) of all chunks of a file."""
    import hashlib

    found = []
    for chunk in source.plan(source.find(str(path), "data.train"), "train", stage, chunk_bytes):
        before = source.lines_before(chunk)
        found += [(number + before, row) for number, row, _ in source.rows(chunk, hashlib.sha256())]
    return found


@pytest.mark.parametrize("chunk_bytes", [1, 3, 17, 64, 1 << 20])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_byte_ranges_hold_each_line_once_with_its_number(tmp_path, chunk_bytes, end):
    values = ["x" * (i * 7 % 23) for i in range(20)]
    lines = [json.dumps(value) for value in values]
    lines.insert(5, "")
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + end)
    expected = [(number, json.loads(line)) for number, line in enumerate(lines, 1) if line]
    assert read(path, chunk_bytes) == expected


def test_arrays_gzip_and_byte_order_marks(tmp_path):
    rows = [{"prompt": "é" * i, "completion": "[,]"} for i in range(300)]
    texts = {"a.json": json.dumps(rows), "b.json": json.dumps(rows, indent=2, ensure_ascii=False)}
    texts["c.jsonl"] = "\ufeff" + "\r\n".join(json.dumps(row) for row in rows)
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
        (tmp_path / (name + ".gz")).write_bytes(gzip.compress(text.encode()))
        for path in (tmp_path / name, tmp_path / (name + ".gz")):
            assert read(path) == list(enumerate(rows, 1)), path


def test_arrays_longer_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "BLOCK", 64)
    rows = [{"prompt": "p" * (i % 200), "n": i} for i in range(200)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert [row for _, row in read(tmp_path / "a.json")] == rows


@pytest.mark.parametrize(
    "name,content,kind,line",
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "not_json", 2),
        ("a.jsonl", b'{"a": 1}\n\n{"a": "\xff"}\n', "not_utf8", 3),
        ("a.json", b'[{"a": 1}, {"a": 2}, {"a"', "not_json", 3),
        ("a.json", b'[{"a": 1}, {"a": 2}', "not_json", 3),
        ("a.json", b'[{"a": 1}, {"a": "\xff"}]', "not_utf8", 1),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 9, mtime=0)[:-12], "truncated_gzip", None),
        ("a.json.gz", gzip.compress(b'[{"a": 1}]', mtime=0)[:-9], "truncated_gzip", None),
        ("a.jsonl.gz", b'{"a": 1}\n', "truncated_gzip", 1),
    ],
)
def test_damaged_files(tmp_path, name, content, kind, line):
    (tmp_path / name).write_bytes(content)
    number, error = read(tmp_path / name)[-1]
    assert isinstance(error, RowError) and error.kind == kind
    assert line in (number, None)


PAIR = '"prompt": "a", "chosen": "b", "rejected": "c"'
VALUES = [
    (f'{{{PAIR}, "x": NaN}}', "not_finite", "x"),
    (f'{{{PAIR}, "x": [-Infinity]}}', "not_finite", "x[0]"),
    (f'{{{PAIR}, "margin": 1e400}}', "not_finite", "margin"),
    (f'{{{PAIR}, "margin": {"9" * 5000}}}', "not_finite", "margin"),
    (f'{{{PAIR}, "x": {{"y": -{"9" * 5000}}}}}', "not_finite", "x.y"),
    (f'{{{PAIR}, "x": "\\ud83d"}}', "not_utf8", "x"),
    (f'{{{PAIR}, "\\udc00": 1}}', "not_utf8", ""),
    (f'{{{PAIR}, "prompt": "other"}}', "repeated_key", ""),
    (f'{{{PAIR}, "x": [{{"y": 1, "y": 1}}]}}', "repeated_key", "x[0]"),
    (f'{{{PAIR}, "x": {"[" * 100}{"]" * 100}}}', "nested", "x" + 20 * "[0]"),
    (f'{{{PAIR}, "x": {"[" * 100_000}{"]" * 100_000}}}', "nested", ""),
    (f'{{{PAIR}, "x": {"[" * 100_000}', "nested", ""),
]


@pytest.mark.parametrize(
    ("text", "kind", "field"), VALUES, ids=[f"{kind}-{i}" for i, (_, kind, _) in enumerate(VALUES)]
)
@pytest.mark.parametrize("form", ["lines", "array", "gzip"])
def test_values_that_no_row_may_hold(tmp_path, form, text, kind, field):
    good = f'{{{PAIR}, "x": 1e308, "z": "\\u0000\\ud83d\\ude00", "": [{"7" * 300}]}}'
    name, content = {
        "lines": ("rows.jsonl", f"{good}\n{text}\n"),
        "array": ("rows.json", f"[{good}, {text}]"),
        "gzip": ("rows.jsonl.gz", f"{good}\n{text}\n"),
    }[form]
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if form == "gzip" else data)
    (_, first), (line, found) = read(tmp_path / name, stage="rm")
    parse(first, "rm")
    with pytest.raises(RowError) as caught:
        raise found if isinstance(found, RowError) else parse(found, "rm")
    assert (line, caught.value.kind) == (2, kind)
    assert caught.value.field.startswith(field) and len(str(caught.value)) < 400


def test_a_row_without_end_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "ROW", 1000)
    monkeypatch.setattr(source, "BLOCK", 512)
    good, large = '{"a": 1}', '{"a": "' + "x" * 5000 + '"}'
    lines = f"{good}\n{large}\n{good}\n"
    for name, data in (("a.jsonl", lines.encode()), ("a.jsonl.gz", gzip.compress(lines.encode()))):
        (tmp_path / name).write_bytes(data)
        for size in (100, 3000, 1 << 20):
            found = read(tmp_path / name, size)
            assert [row for _, row in found[::2]] == [{"a": 1}] * 2 and [n for n, _ in found] == [1, 2, 3]
            assert found[1][1].kind == "too_large"
    (tmp_path / "a.json").write_text(f"[{good}, {large}, {good}]")
    found = read(tmp_path / "a.json")
    assert [n for n, _ in found] == [1, 2] and found[1][1].kind == "too_large"
    assert "what stands behind it was not read" in str(found[1][1])


def test_an_array_without_end_is_not_decoded_again_and_again(tmp_path, monkeypatch):
    calls, decode = [], source.read_value
    monkeypatch.setattr(source, "BLOCK", 1 << 10)
    monkeypatch.setattr(
        source, "read_value", lambda text, at=0: (calls.append(len(text)), decode(text, at))[1]
    )
    (tmp_path / "a.json").write_bytes(b'[{"a": "' + b"x" * (1 << 20))
    ((_, error),) = read(tmp_path / "a.json")
    assert error.kind == "not_json" and sum(calls) < 5 << 20, "each block decodes all that was read before it"


def test_repeated_rows_pack_well_and_are_read(tmp_path):
    row = {"prompt": "a " * 400, "completion": "b"}
    content = (json.dumps(row).encode() + b"\n") * 32_000
    for name, unpacked in (
        ("a.jsonl.gz", content),
        ("a.json.gz", b"[" + content[:-1].replace(b"\n", b",") + b"]"),
    ):
        packed = gzip.compress(unpacked, 9)
        assert len(unpacked) > 200 * len(packed) and len(unpacked) > 24 << 20
        (tmp_path / name).write_bytes(packed)
        found = read(tmp_path / name)
        assert len(found) == 32_000 and found[-1] == (32_000, row)


@pytest.mark.parametrize("content", [b"\n", b" ", b" \n", b"\0", b"[" + b" " * 99, b'{"a": "' + b"b" * 99])
def test_a_gzip_stream_without_rows_is_not_read_to_its_end(tmp_path, monkeypatch, content):
    monkeypatch.setattr(source, "ROW", 1 << 18)
    monkeypatch.setattr(source, "BARREN", 1 << 19)
    monkeypatch.setattr(source, "BLOCK", 1 << 14)
    rows = [json.dumps({"a": i}) for i in range(5000)]
    good = ("[" + ",".join(rows) if content[:1] == b"[" else "\n".join(rows) + "\n").encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(good + content * ((64 << 20) // len(content))))
    unpacked = []
    monkeypatch.setattr(
        gzip.GzipFile,
        "read1",
        lambda self, size, was=gzip.GzipFile.read1: unpacked.append(was(self, size)) or unpacked[-1],
    )
    found = read(tmp_path / "a.jsonl.gz")
    errors = [error for _, error in found if isinstance(error, RowError)]
    assert len(found) - len(errors) == 5000 and 1 <= len(errors) <= 2, found[-3:]
    assert errors[-1].kind in ("truncated_gzip", "too_large", "not_json", "nested")
    assert sum(map(len, unpacked)) < 2 << 20


def test_pipes_devices_and_folders_that_lead_back(tmp_path):
    import os

    from pipeline.errors import InputError

    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "endless.jsonl").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe.jsonl", tmp_path / "endless.jsonl", "/dev/zero"):
        with pytest.raises(InputError, match="neither a file nor a folder"):
            source.find(str(path), "data.train")
    deep = tmp_path / "tree" / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "rows.jsonl").write_text("{}\n")
    for i in range(4):  # each a way back up: 4^40 paths for those who follow them all
        (deep / f"up{i}").symlink_to(tmp_path / "tree")
    for spec in ("tree", "tree/**/*.jsonl", "tree/**", "**/b/*.jsonl", "tree/a/*/*.jsonl"):
        (file,) = source.find(str(tmp_path / spec), "data.train")
        assert file.path.endswith("b/rows.jsonl")


@pytest.mark.parametrize(
    "name", ["a b.jsonl", "%20.jsonl", "a?.jsonl", "[x].jsonl", "'.jsonl", "é東\n\x1b[2J.jsonl", "#&;.jsonl"]
)
def test_file_names_of_any_kind(tmp_path, name):
    (tmp_path / name).write_text('{"a": 1}\n')
    for spec in (name, ".", "*.jsonl"):
        (file,) = source.find(str(tmp_path / spec), "data.train")
        assert read(file.path) == [(1, {"a": 1})]
    where = RowError("null", "\x1b[2J", "null", "a text", file=name, line=3).where()
    assert "\n" not in where and "\x1b" not in where


def test_files_that_are_not_there(tmp_path):
    from pipeline.errors import InputError

    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "table.parquet").write_text("")
    for spec, said in [
        ("row.jsonl", "rows.jsonl"),
        ("*.txt", "matches no file"),
        ("empty", "holds no data file"),
        ("table.parquet", "is not JSON"),
    ]:
        with pytest.raises(InputError, match=said) as caught:
            source.find(str(tmp_path / spec), "data.train")
        assert "data.train" in str(caught.value)
    assert len(source.find([str(tmp_path), str(tmp_path / "*.jsonl")], "data.train")) == 2


@pytest.mark.skipif(not SHARED.exists(), reason="third-party data is not here")
def test_real_preferences():
    bad = {}
    with gzip.open(SHARED / "data" / "hh_harmless_test.jsonl.gz") as file:
        for line in file:
            try:
                parse(json.loads(line), "rm")
            except RowError as error:
                bad[error.kind] = bad.get(error.kind, 0) + 1
    assert bad == {"empty_completion": 4, "prompts_differ": 5}
    for row in json.loads((SHARED / "data" / "lf_dpo_en_demo.json").read_text()):
        assert parse(row, "dpo").prompt[-1]["role"] == "user"
