"""Chat templates: whether plain text goes through them, what of their text is trained, and the rows that are refused."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from running import ROOT
from toy_data import BOT, CHATML, CONVERSATION, REASONED, USER, encoded, encoder, trained, write
from toy_data import make as prepared
from toy_models import BASE, make

from pipeline.config import load_job
from pipeline.data.encode import Example
from pipeline.data.report import Report, Split
from pipeline.data.values import RowError
from pipeline.errors import InputError
from pipeline.models.base import base_identity
from pipeline.models.template import PLAIN, text_as_chat
from pipeline.models.tokenizer import load_tokenizer
from pipeline.registry import lineage
from pipeline.runtime.host import Work
from pipeline.runtime.inputs import check_row_format
from pipeline.runtime.preparation import check_models
from pipeline.runtime.worker import Worker

ROW = {"prompt": "What is it?", "completion": "A cat."}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The demo's base without its chat template."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(BASE, folder)
    (folder / "chat_template.jinja").unlink()
    return str(folder)


@pytest.mark.parametrize(
    ("base", "template", "applies", "expected"),
    [
        ("bare", None, None, False),
        ("bare", "plain", None, True),
        ("bare", str(PLAIN), None, True),
        ("bare", "plain", False, False),
        ("bare", None, True, True),
        ("demo", None, None, True),
        ("demo", "plain", None, True),
        ("demo", None, False, False),
    ],
)
def test_a_template_that_is_named_applies_to_text(base, template, applies, expected, bare):
    tokenizer = load_tokenizer(bare if base == "bare" else BASE, chat_template=template)
    assert text_as_chat(tokenizer, applies) is expected


@pytest.fixture(scope="module")
def policies(bare, tmp_path_factory):
    """{what lineage.json says of text: adapter folder}; None: one from before it said anything."""
    folder = tmp_path_factory.mktemp("policies")
    made = {}
    make(str(folder / "one"), 0, head=False)
    for applies in (True, False, None):
        made[applies] = str(folder / f"policy-{applies}")
        shutil.copytree(folder / "one", made[applies])
        facts = lineage.describe("sft", base_identity(bare), load_tokenizer(bare), {}, {})
        lineage.write(made[applies], facts if applies is None else {**facts, "text_as_chat": applies})
        load_tokenizer(bare).save_pretrained(made[applies])
    return made


@pytest.mark.parametrize("applies", [True, False, None])
@pytest.mark.parametrize("stage", ["generate", "ppo", "evaluate"])
def test_what_comes_after_training_does_as_training_did(applies, stage, policies, bare, tmp_path):
    overrides = [f"model.name_or_path={bare}", f"policy={policies[applies]}", f"run.storage_path={tmp_path}"]
    job = load_job(ROOT / f"jobs/demo/{stage}.yaml", overrides, stage)
    tokenizer = check_models(job, {"policy": policies[applies]}).tokenizer
    assert text_as_chat(tokenizer, job.data.apply_chat_template) is bool(applies)
    job = load_job(ROOT / f"jobs/demo/{stage}.yaml", [*overrides, "model.chat_template=plain"], stage)
    assert text_as_chat(check_models(job, {"policy": policies[applies]}).tokenizer, None)


def test_the_report_says_whether_text_rows_are_chats(tmp_path):
    path = write(tmp_path / "rows.jsonl", [ROW, {**ROW, "prompt": "And this?"}])
    text = prepared(tmp_path, train=path).report.render()
    assert (
        "template    no chat template is applied to 2 rows of plain text (model.chat_template=plain " in text
    )
    report = prepared(tmp_path, train=path, apply_chat_template=True).report
    assert "template    the chat template is applied to 2 rows of plain text" in report.render()
    assert json.loads(json.dumps(report.to_dict()))["splits"]["train"]["text_rows"] == 2
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write(tmp_path / "chats.jsonl", [{"messages": turns}])
    report = prepared(tmp_path, train=path).report.render()
    assert "plain text" not in report
    assert "the base has no chat template, so 1 row of messages" in report


def test_the_lineage_says_what_the_rows_were_and_later_stages_do_the_same(bare, policies, tmp_path):
    """A policy that learned from messages alone, in the built-in template, gets prompts of plain text as messages."""
    tokenizer = load_tokenizer(bare)
    for rows, chat in (("chat", True), ("text", False), ("both", False)):
        work = Work(load_job(ROOT / "jobs/demo/sft.yaml"), tokenizer, {}, {}, {}, None, row_format=rows)
        worker = SimpleNamespace(work=work, tokenizer=tokenizer, job=work.job, end={"kept": {"step": 1}})
        facts = Worker._lineage(worker, {})
        assert (facts["rows"], facts["text_as_chat"]) == (rows, chat)
        folder = str(tmp_path / rows)
        shutil.copytree(policies[None], folder)
        lineage.write(folder, facts | {"base": base_identity(bare)})
        given = [f"model.name_or_path={bare}", f"policy={folder}", f"run.storage_path={tmp_path}"]
        job = load_job(ROOT / "jobs/demo/ppo.yaml", given, "ppo")
        assert text_as_chat(check_models(job, {"policy": folder}).tokenizer, None) is chat
        check_row_format(job, folder, "text")
        if rows == "text":
            with pytest.raises(
                InputError,
                match=r"^policy: .*text was trained by sft on plain text, and this job has rows of messages",
            ):
                check_row_format(job, folder, "chat")
        else:
            check_row_format(job, folder, "chat")


@pytest.mark.parametrize(
    ("text", "chat", "applied", "expected"),
    [
        (1, 0, True, "chat"),
        (1, 0, False, "text"),
        (1, 1, False, "both"),
        (0, 1, False, "chat"),
        (0, 0, True, None),
    ],
)
def test_the_format_of_rows(text, chat, applied, expected):
    report = Report("sft", 8, {"train": Split(text_rows=text, chat_rows=chat)}, text_as_chat=applied)
    assert report.row_format() == expected


def test_several_templates_without_a_default(tmp_path):
    base = tmp_path / "base"
    shutil.copytree(BASE, base)
    template = (base / "chat_template.jinja").read_text()
    (base / "chat_template.jinja").unlink()
    config = json.loads((base / "tokenizer_config.json").read_text())
    named = [{"name": "rag", "template": template}, {"name": "tool_use", "template": template}]
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    with pytest.raises(
        InputError, match=r"has several chat templates \(rag, tool_use\) and none is called default"
    ):
        load_tokenizer(str(base))
    assert load_tokenizer(str(base), chat_template="plain").text_as_chat
    named.append({"name": "default", "template": template})
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert load_tokenizer(str(base)).chat_template == template


def test_a_template_in_the_home_folder_and_one_that_is_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copy(PLAIN, tmp_path / "mine.jinja")
    job = load_job(ROOT / "jobs/demo/sft.yaml", ["model.chat_template=~/mine.jinja"], "sft")
    assert "Human" in check_models(job, {}).tokenizer.chat_template
    os.mkfifo(tmp_path / "pipe.jinja")
    with pytest.raises(InputError, match="there is no file"):
        load_tokenizer(BASE, chat_template=str(tmp_path / "pipe.jinja"))


# ---- what of the text is trained -------------------------------------------------------------------------------


def test_a_template_that_rewrites_earlier_turns():
    """Like Qwen3's: the last completion begins with empty thoughts, earlier ones do not."""
    thoughts = CHATML.replace(
        "{{ m.content | trim }}",
        "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content | trim }}",
    )
    tok, (example,) = encoded("sft", CONVERSATION, template=thoughts, ends=ENDS)
    assert trained(tok, example) == ["yo<|im_end|>", "<think></think>bye<|im_end|>"]
    shifting = "{{ messages | length }}" + CHATML
    _, (error,) = encoded("sft", CONVERSATION, template=shifting)
    assert isinstance(error, RowError) and error.kind == "template"


ENDS = ("</s>", "<|im_end|>")
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
    tok, (example,) = encoded("sft", row, template=template, ends=ENDS)
    assert isinstance(example, Example), example
    kept = name == "qwen3_instruct_2507" and row is REASONED
    first = "<think>\none\n</think>\n\nyo" if kept else "yo"
    assert trained(tok, example) == [f"{first}<|im_end|>", f"{LAST[name][row is REASONED]}<|im_end|>"]
    pair = {"prompt": row["messages"][:3], "chosen": row["messages"][3:], "rejected": "no"}
    if row is CONVERSATION:
        tok, (example,) = encoded("dpo", pair, template=template, ends=ENDS)
        assert tok.decode(example.columns["chosen_ids"]) == f"{LAST[name][0]}<|im_end|>"


def test_a_template_that_asks_in_another_way_than_it_writes():
    """DeepSeek R1's: the prompt ends on <think>, the completion is written without it."""
    asks = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    for stage, row in (("sft", CONVERSATION), ("dpo", {"prompt": [USER], "chosen": "a", "rejected": "b"})):
        _, (error,) = encoded(stage, row, template=asks)
        assert isinstance(error, RowError) and error.kind == "template" and "<think>" in error.found


def test_a_template_that_refuses_a_row():
    picky = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + CHATML
    )
    row = {"messages": [{"role": "system", "content": "s"}, USER, BOT]}
    _, (error,) = encoded("sft", row, template=picky)
    assert isinstance(error, RowError) and "no system turns" in str(error)


def test_todays_date_is_not_in_a_prompt():
    dated = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}"
    assert encoder("ppo", template=dated).render([USER], True) == "26 Jul 2024"


HEAD, TAIL = CHATML.split("{{ m.content | trim }}")
DROPS = HEAD + "{{ m.content if m.role == 'user' }}" + TAIL
SAYS_THE_SAME = HEAD + "{{ m.content if m.role == 'user' else 'Sure.' }}" + TAIL
FORGETS_THE_PROMPT = HEAD + "{{ m.content if m.role != 'user' }}" + TAIL
LOWERS = HEAD + "{{ m.content | lower }}" + TAIL


A_ROW_OF = {
    "sft": {"messages": [USER, BOT]},
    "rm": {"prompt": [USER], "chosen": "yo", "rejected": "no"},
    "dpo": {"prompt": [USER], "chosen": "yo", "rejected": "no"},
    "score": {"prompt": [USER], "completion": "yo"},
    "pairs": {"prompt": [USER], "chosen": "yo", "rejected": "no"},
    "ppo": {"prompt": [USER]},
}


@pytest.mark.parametrize(
    ("stage", "template"),
    [(stage, template) for stage in A_ROW_OF if stage != "ppo" for template in (DROPS, SAYS_THE_SAME)]
    + [(stage, FORGETS_THE_PROMPT) for stage in A_ROW_OF],
)
def test_a_template_that_leaves_a_turn_out_is_refused(stage, template):
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
@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "ppo"])
def test_a_template_that_changes_words_is_refused(stage, template):
    other = {**LONG, "content": LONG["content"] + " No."}
    turns = [USER, LONG, ASKED] if template is CUTS_EARLIER else [ASKED]
    row = {"sft": {"messages": [*turns, LONG]}, "ppo": {"prompt": turns}}.get(
        stage, {"prompt": turns, "chosen": [LONG], "rejected": [other]}
    )
    _, (outcome,) = encoded(stage, row, template=template)
    unread = stage == "ppo" and template is CUTS  # an assistant's turn there is none
    unlearned = stage != "sft" and template is CUTS_EARLIER
    if template is STRIPS or unread or unlearned:
        assert isinstance(outcome, Example), outcome
    else:
        assert isinstance(outcome, RowError) and (outcome.kind, outcome.field[:9]) == (
            "template",
            "messages[",
        ), outcome
        assert "changes the words" in outcome.found


def test_a_template_may_raise_anything():
    for wrong in (
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ range(10 ** 9) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ):
        _, (error,) = encoded("ppo", A_ROW_OF["ppo"], template=wrong)
        assert isinstance(error, RowError) and error.kind == "template", wrong
