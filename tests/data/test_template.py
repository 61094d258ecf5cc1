"""Tests chat templates: if they are used for plain-text rows, which tokens are trained, and which rows are rejected."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from running import ROOT
from settled import work_of
from toy_data import (
    BOT,
    CHATML,
    CONVERSATION,
    REASONED,
    THINKING,
    USER,
    encoded,
    encoder,
    trained,
    write,
)
from toy_data import make as prepared
from toy_models import BASE, make

from pipeline.data.encode import Example
from pipeline.data.formats import parse_row
from pipeline.data.tasks import decode_sample
from pipeline.data.values import RowError
from pipeline.errors import InputError
from pipeline.job import load_job
from pipeline.models.base import base_identity
from pipeline.models.template import PLAIN, text_as_chat
from pipeline.models.tokenizer import load_tokenizer
from pipeline.registry import lineage
from pipeline.run.worker import Outcome, Worker
from pipeline.settle.rows import check_row_format
from pipeline.settle.settle import settle_job
from pipeline.settle.work import Input

ROW = {"prompt": "What is it?", "completion": "A cat."}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Copies the demo's base model without its chat template."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(BASE, folder)
    (folder / "chat_template.jinja").unlink()
    return str(folder)


@pytest.mark.parametrize(
    ("base", "template", "applies", "expected"),
    [("bare", None, None, False), ("bare", "plain", None, True), ("bare", str(PLAIN), None, True), ("bare", "plain", False, False),
     ("bare", None, True, True), ("demo", None, None, True), ("demo", None, False, False)],
)  # fmt: skip
def test_a_named_template_applies_to_text(base, template, applies, expected, bare):
    tokenizer = load_tokenizer(bare if base == "bare" else BASE, chat_template=template)
    assert text_as_chat(tokenizer, applies) is expected


def test_the_report_says_whether_text_rows_are_chats(tmp_path):
    path = write(tmp_path / "rows.jsonl", [ROW, {**ROW, "prompt": "And this?"}])
    report = prepared(tmp_path, train=path).report
    assert (
        "no chat template is applied to 2 rows of plain text (to apply one, set model.chat_template=plain "
        in report.render()
    )
    assert report.row_format() == "text"
    report = prepared(tmp_path, train=path, apply_chat_template=True).report
    assert "template    the chat template is applied to 2 rows of plain text" in report.render()
    assert report.row_format() == "chat" and report.to_dict()["splits"]["train"]["text_rows"] == 2
    path = write(tmp_path / "chats.jsonl", [{"messages": [USER, BOT]}])
    report = prepared(tmp_path, train=path).report
    assert "plain text" not in report.render() and report.row_format() == "chat"
    assert "the base has no chat template, so 1 row of messages" in report.render()
    path = write(tmp_path / "both.jsonl", [ROW, {"messages": [USER, BOT]}])
    assert prepared(tmp_path, train=path).report.row_format() == "both"


def test_later_stages_follow_the_lineage_on_text_rows(bare, tmp_path):
    """If the policy was trained only on messages, ppo turns plain-text prompts into messages."""
    tokenizer = load_tokenizer(bare)
    for rows, chat in (("chat", True), ("text", False), ("both", False)):
        work = work_of(load_job(ROOT / "jobs/demo/sft.yaml"), tokenizer, row_format=rows)
        worker = SimpleNamespace(work=work, tokenizer=tokenizer)
        facts = Worker._lineage(worker, Outcome({}, {"kept": {"step": 1}}))
        assert (facts["rows"], facts["text_as_chat"]) == (rows, chat)
        folder = str(tmp_path / rows)
        make(folder, 0, head=False)
        tokenizer.save_pretrained(folder)
        lineage.write(folder, facts | {"base": base_identity(bare)})
        rewards = ["reward=python:pipeline.demo:gold", "judge=null"]
        given = [f"model.name_or_path={bare}", f"policy={folder}", *rewards]
        job = load_job(ROOT / "jobs/demo/ppo.yaml", given, "ppo")
        assert text_as_chat(settle_job(job).tokenizer, None) is chat
        inputs = {"reward.0": Input(folder, "adapter", folder, lineage.read(folder, folder))}
        for form, words in (("text", "plain text"), ("chat", "messages in the chat template")):
            why = f"^reward: .* was trained by sft on .*, and the models of this run read {words}; train sft with data"
            with nullcontext() if rows in (form, "both") else pytest.raises(InputError, match=why):
                check_row_format(job.data, inputs, {"reward.0": "reward"}, form)


def test_several_templates_without_a_default(tmp_path):
    base = tmp_path / "base"
    shutil.copytree(BASE, base)
    template = (base / "chat_template.jinja").read_text()
    (base / "chat_template.jinja").unlink()
    config = json.loads((base / "tokenizer_config.json").read_text())
    named = [{"name": name, "template": template} for name in ("rag", "tool_use", "default")]
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named[:2]}))
    several = r"has several chat templates \(rag, tool_use\) and none is called default"
    with pytest.raises(InputError, match=several):
        load_tokenizer(str(base))
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert load_tokenizer(str(base)).chat_template == template


# ---- which part is trained -------------------------------------------------------------------------------------


ENDS = ("</s>", "<|im_end|>")
LAST = {  # template: trained text of the last completion, without thoughts in the row and with thoughts
    "qwen3": ("<think>\n\n</think>\n\nbye", "<think>\ntwo\n</think>\n\nbye"),
    # The generation prompt of qwen3_5_think ends with <think>.
    "qwen3_5_think": ("\n</think>\n\nbye", "two\n</think>\n\nbye"),
    "qwen3_instruct_2507": ("bye", "<think>\ntwo\n</think>\n\nbye"),
}


@pytest.mark.parametrize("name", LAST)
@pytest.mark.parametrize("row", [CONVERSATION, REASONED], ids=["plain", "reasoned"])
def test_templates_that_remove_thoughts_from_earlier_turns(name, row):
    """With Qwen3's real templates, the trained text of each completion is exactly what the template writes."""
    template = real_template(name)
    tok, (example,) = encoded("sft", row, template=template, ends=ENDS)
    assert isinstance(example, Example), example
    kept = name == "qwen3_instruct_2507" and row is REASONED
    first = "<think>\none\n</think>\n\nyo" if kept else "yo"
    assert trained(tok, example) == [f"{first}<|im_end|>", f"{LAST[name][row is REASONED]}<|im_end|>"]
    pair = {"prompt": row["messages"][:3], "chosen": row["messages"][3:], "rejected": "no"}
    if row is CONVERSATION:
        tok, (example,) = encoded("dpo", pair, template=template, ends=ENDS)
        assert tok.decode(example.columns["chosen_ids"]) == f"{LAST[name][0]}<|im_end|>"


def real_template(name: str) -> str:
    """Returns a chat template that TRL ships."""
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


THOUGHT = {"role": "assistant", "content": "bye", "reasoning_content": "two"}


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_reach_the_template_in_every_stage(key):
    turn = {**BOT, key: "One <|im_end|> two."}
    tok, (example,) = encoded("sft", {"messages": [USER, turn]}, template=THINKING, ends=ENDS)
    assert trained(tok, example) == ["<think>One <|im_end|> two.</think>yo<|im_end|>"]
    ids = example.columns["input_ids"]
    assert ids.count(tok.convert_tokens_to_ids("<|im_end|>")) == 2, "a special token in thoughts is text"
    pair = {"prompt": [USER], "chosen": [turn], "rejected": [{**turn, key: "Three."}]}
    for stage in ("rm", "dpo", "kto", "score"):
        tok, (example, *_) = encoded(stage, pair, template=THINKING, ends=ENDS)
        shown = decode_sample(tok, example.columns, example.prompt_tokens)
        assert "⟦<think>One <|im_end|> two.</think>yo<|im_end|>⟧" in shown
        assert stage == "kto" or "⟦<think>Three.</think>yo<|im_end|>⟧" in shown
    tok, (example,) = encoded("ppo", {"prompt": [USER, turn, USER]}, template=THINKING)
    assert "<think>One <|im_end|> two.</think>yo" in tok.decode(example.columns["input_ids"])


@pytest.mark.parametrize("read", ["m.mood", "m['mood']", "m.get('mood')", "(m.mood if 'mood' in m)"])
def test_the_template_gets_any_key_that_it_reads(read):
    made = encoder(
        "sft",
        template="{# m.tone #}" + CHATML.replace("m.content", f"{read} ~ ' tone ' ~ m.content"),
        ends=ENDS,
    )
    row = {"messages": [{**USER, "mood": "", "tone": 1}, {**BOT, "mood": "sad", "tone": 2}], "id": 3}
    record = parse_row(row, made.kind)
    [[example]] = made.encode([record])
    assert trained(made.tokenizer, example) == ["sad tone yo<|im_end|>"]
    assert made.unread(record) == ("messages[].tone", "id")


def test_thoughts_of_earlier_turns_that_the_template_leaves_out_are_counted():
    """Qwen3's template drops the thoughts in turns before the last question."""
    turns = [USER, {**BOT, "thinking": "one"}, USER]
    for stage, row in (("sft", {"messages": [*turns, THOUGHT]}), ("ppo", {"prompt": turns})):
        made = encoder(stage, template=real_template("qwen3"), ends=ENDS)
        record = parse_row(row, made.kind)
        made.encode([record])
        assert made.unread(record) == ("thoughts before the last turn",)


CALL = {
    "role": "assistant",
    "content": "",
    "thinking": "Look.",
    "tool_calls": [{"name": "f", "arguments": {}}],
}


@pytest.mark.parametrize(
    ("name", "said"),
    [("qwen3", "<think>\none\n</think>"), ("lfm2_2_5", "\u200b"), ("phi3", "[THINK]a[/THINK]")],
)
def test_a_turn_with_only_thoughts_is_an_empty_one(name, said):
    """A turn without text counts as empty, with templates that keep thoughts and with templates that drop thoughts."""
    quiet = {"role": "assistant", "content": said}
    turns = [USER, quiet, USER, BOT]
    template = real_template(name)
    tok, (error,) = encoded("sft", {"messages": turns}, template=template, ends=ENDS)
    assert isinstance(error, RowError) and (error.kind, error.field) == ("empty_completion", "messages[1]")
    turns[1] = {**quiet, "weight": 0}
    tok, (example,) = encoded("sft", {"messages": turns}, template=template, ends=ENDS)
    assert [run.rpartition("yo")[1] for run in trained(tok, example)] == ["yo"]
    with pytest.raises(RowError, match="a turn with content"):
        encoded("dpo", {"prompt": [USER], "chosen": [quiet], "rejected": [BOT]}, template=template)
    turns[1] = {**CALL, "content": said}
    _, (example,) = encoded("sft", {"messages": turns}, template=real_template("qwen3"), ends=ENDS)
    assert isinstance(example, Example), "calls are no empty turn"


def test_a_template_that_drops_the_thoughts_of_the_last_turn_is_rejected():
    never = THINKING.replace("{% if m.reasoning_content", "{% if not loop.last and m.reasoning_content")
    words = "{{ m.content | trim }}"
    block = f"{{% if m.role == 'user' %}}{words}{{% else %}}{{% generation %}}{words}{{% endgeneration %}}{{% endif %}}"
    before = THINKING.replace(words, block)
    for template, stages in ((never, ("sft", "dpo")), (before, ("sft",))):
        for stage in stages:
            row = {"prompt": [USER], "chosen": [THOUGHT], "rejected": "no"}
            _, (error,) = encoded(
                stage, {"messages": [USER, THOUGHT]} if stage == "sft" else row, template=template
            )
            assert isinstance(error, RowError) and "omits the thoughts of this turn" in error.found, error


def test_a_row_sets_variables_of_the_template():
    made = encoder("ppo", template=THINKING)
    given = {"enable_thinking": False, "tone": "x", "date_string": None}
    for kwargs in (given, json.dumps(given)):
        record = parse_row({"prompt": [USER], "chat_template_kwargs": kwargs}, made.kind)
        [[example]] = made.encode([record])
        assert made.tokenizer.decode(example.columns["input_ids"]).endswith("assistant\n<think></think>")
        assert made.unread(record) == ("chat_template_kwargs.tone",)
    [[error]] = made.encode(
        [parse_row({"prompt": [USER], "chat_template_kwargs": {"messages": []}}, made.kind)]
    )
    assert error.kind == "template" and "multiple values for keyword argument 'messages'" in error.expected
    row = {"prompt": "hi", "completion": " yo", "chat_template_kwargs": {"enable_thinking": False}}
    made = encoder("sft", template=THINKING)
    assert made.unread(parse_row(row, made.kind)) == ("chat_template_kwargs.enable_thinking",), "plain text"


def test_a_template_whose_prompt_differs_from_its_completion():
    """As in DeepSeek R1's template, the generation prompt ends with <think>, but completions do not start with <think>."""
    asks = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    for stage, row in (("sft", CONVERSATION), ("dpo", {"prompt": [USER], "chosen": "a", "rejected": "b"})):
        _, (error,) = encoded(stage, row, template=asks)
        assert isinstance(error, RowError) and error.kind == "template" and "<think>" in error.found


def test_a_template_that_refuses_a_row():
    picky = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    row = {"messages": [{"role": "system", "content": "s"}, USER, BOT]}
    _, (error,) = encoded("sft", row, template=picky + CHATML)
    assert isinstance(error, RowError) and "no system turns" in str(error)
    recursion = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"
    for wrong in ("{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ range(10 ** 9) }}", recursion):
        _, (error,) = encoded("ppo", {"prompt": [USER]}, template=wrong)
        assert isinstance(error, RowError) and error.kind == "template", wrong


def test_prompts_do_not_contain_todays_date():
    dated = "{% if not date_string is defined %}{% set date_string = strftime_now('%Y') %}{% endif %}{{ date_string }}"
    assert encoder("ppo", template=dated).chat.render([USER], True) == "26 Jul 2024"


HEAD, TAIL = CHATML.split("{{ m.content | trim }}")
DROPS = HEAD + "{{ m.content if m.role == 'user' }}" + TAIL
SAYS_THE_SAME = HEAD + "{{ m.content if m.role == 'user' else 'Sure.' }}" + TAIL
FORGETS_THE_PROMPT = HEAD + "{{ m.content if m.role != 'user' }}" + TAIL
LOWERS = HEAD + "{{ m.content | lower }}" + TAIL


PAIR = {"prompt": [USER], "chosen": "yo", "rejected": "no"}
A_ROW_OF = {
    "sft": {"messages": [USER, BOT]},
    **dict.fromkeys(("rm", "dpo", "pairs"), PAIR),
    "score": {"prompt": [USER], "completion": "yo"},
    "ppo": {"prompt": [USER]},
}


@pytest.mark.parametrize(
    ("stage", "template"),
    [(stage, template) for stage in A_ROW_OF if stage != "ppo" for template in (DROPS, SAYS_THE_SAME)]
    + [(stage, FORGETS_THE_PROMPT) for stage in A_ROW_OF],
)
def test_a_template_that_drops_a_turn_is_rejected(stage, template):
    _, (outcome,) = encoded(stage, A_ROW_OF[stage], template=template, ends=ENDS)
    kind = "empty_prompt" if template is FORGETS_THE_PROMPT else "empty_completion"
    assert isinstance(outcome, RowError) and outcome.kind == kind, outcome


CUTS = HEAD + "{{ m.content[:20] if m.role == 'assistant' else m.content }}" + TAIL
CUTS_EARLIER = HEAD + "{{ m.content if loop.last or m.role == 'user' else m.content[:20] }}" + TAIL
CUTS_QUESTIONS = HEAD + "{{ m.content[:20] if m.role == 'user' else m.content }}" + TAIL
BLOCKS = HEAD + "{% generation %}{{ m.content[:20] }}{% endgeneration %}" + TAIL
STRIPS = HEAD + "{{ m.content.split() | join(' ') }}" + TAIL


LONG = {"role": "assistant", "content": "Yes, but  not before\n the evening of the day after."}
ASKED = {"role": "user", "content": "Could you say that again, at greater length?"}


@pytest.mark.parametrize("template", [CUTS, LOWERS, CUTS_EARLIER, CUTS_QUESTIONS, BLOCKS, STRIPS])
@pytest.mark.parametrize("stage", ["sft", "dpo", "ppo"])
def test_a_template_that_changes_words_is_rejected(stage, template):
    turns = [USER, LONG, ASKED] if template is CUTS_EARLIER else [ASKED]
    pair = {"prompt": turns, "chosen": [LONG], "rejected": [{**LONG, "content": LONG["content"] + " No."}]}
    row = {"sft": {"messages": [*turns, LONG]}, "ppo": {"prompt": turns}}.get(stage, pair)
    _, (outcome,) = encoded(stage, row, template=template)
    # The prompt has no assistant turn that the template could cut.
    unread = stage == "ppo" and template is CUTS
    unlearned = stage != "sft" and template is CUTS_EARLIER
    if template is STRIPS or unread or unlearned:
        assert isinstance(outcome, Example), outcome
    else:
        assert isinstance(outcome, RowError) and outcome.kind == "template", outcome
        assert outcome.field.startswith("messages[") and "changes the text" in outcome.found
