"""Whether prompts of plain text go through the chat template: decided once, for training and for all that comes after it."""

import json
import os
import shutil

import pytest
from running import ROOT
from toy_data import make as prepared
from toy_data import write
from toy_models import BASE, make

from pipeline.config import load_job
from pipeline.errors import InputError
from pipeline.models.base import base_identity
from pipeline.models.template import PLAIN, text_as_chat
from pipeline.models.tokenizer import load_tokenizer
from pipeline.registry import lineage
from pipeline.runtime.run import models

ROW = {"prompt": "What is it?", "completion": "A cat."}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The demo's base without its chat template."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(BASE, folder)
    (folder / "chat_template.jinja").unlink()
    return str(folder)


@pytest.mark.parametrize(
    ("base", "template", "said", "expected"),
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
def test_a_template_that_is_named_applies_to_text(base, template, said, expected, bare):
    tokenizer = load_tokenizer(bare if base == "bare" else BASE, chat_template=template)
    assert text_as_chat(tokenizer, said) is expected


@pytest.fixture(scope="module")
def policies(bare, tmp_path_factory):
    """{what lineage.json says of text: adapter folder}; None: one from before it said anything."""
    folder = tmp_path_factory.mktemp("policies")
    made = {}
    make(str(folder / "one"), 0, head=False)
    for said in (True, False, None):
        made[said] = str(folder / f"policy-{said}")
        shutil.copytree(folder / "one", made[said])
        facts = lineage.describe("sft", base_identity(bare), load_tokenizer(bare), {}, {})
        lineage.write(made[said], facts if said is None else {**facts, "text_as_chat": said})
        load_tokenizer(bare).save_pretrained(made[said])
    return made


@pytest.mark.parametrize("said", [True, False, None])
@pytest.mark.parametrize("stage", ["generate", "ppo", "evaluate"])
def test_what_comes_after_training_does_as_training_did(said, stage, policies, bare, tmp_path):
    overrides = [f"model.name_or_path={bare}", f"policy={policies[said]}", f"run.storage_path={tmp_path}"]
    job = load_job(ROOT / f"jobs/demo/{stage}.yaml", overrides, stage)
    tokenizer = models(job, {"policy": policies[said]}).tokenizer
    assert text_as_chat(tokenizer, job.data.apply_chat_template) is bool(said)
    job = load_job(ROOT / f"jobs/demo/{stage}.yaml", [*overrides, "model.chat_template=plain"], stage)
    assert text_as_chat(models(job, {"policy": policies[said]}).tokenizer, None)


def test_the_report_says_whether_text_rows_are_chats(tmp_path, embedded_ray):
    path = write(tmp_path / "rows.jsonl", [ROW, {**ROW, "prompt": "And this?"}])
    said = prepared(tmp_path, train=path).report.render()
    assert (
        "template    no chat template is applied to 2 rows of plain text (model.chat_template=plain " in said
    )
    report = prepared(tmp_path, train=path, apply_chat_template=True).report
    assert "template    the chat template is applied to 2 rows of plain text" in report.render()
    assert json.loads(json.dumps(report.to_dict()))["splits"]["train"]["text_rows"] == 2
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write(tmp_path / "chats.jsonl", [{"messages": turns}])
    assert "plain text" not in prepared(tmp_path, train=path).report.render()


def test_several_templates_without_a_default(tmp_path):
    base = tmp_path / "base"
    shutil.copytree(BASE, base)
    own = (base / "chat_template.jinja").read_text()
    (base / "chat_template.jinja").unlink()
    config = json.loads((base / "tokenizer_config.json").read_text())
    named = [{"name": "rag", "template": own}, {"name": "tool_use", "template": own}]
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    with pytest.raises(
        InputError, match=r"has several chat templates \(rag, tool_use\) and none is called default"
    ):
        load_tokenizer(str(base))
    assert load_tokenizer(str(base), chat_template="plain").text_as_chat
    named.append({"name": "default", "template": own})
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert load_tokenizer(str(base)).chat_template == own


def test_a_template_in_the_home_folder_and_one_that_is_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copy(PLAIN, tmp_path / "mine.jinja")
    job = load_job(ROOT / "jobs/demo/sft.yaml", ["model.chat_template=~/mine.jinja"], "sft")
    assert "Human" in models(job, {}).tokenizer.chat_template
    os.mkfifo(tmp_path / "pipe.jinja")
    with pytest.raises(InputError, match="expected an existing Jinja file"):
        load_job(ROOT / "jobs/demo/sft.yaml", ["model.chat_template=~/pipe.jinja"], "sft")
    with pytest.raises(InputError, match="there is no file"):
        load_tokenizer(BASE, chat_template=str(tmp_path / "pipe.jinja"))


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "renders for 3 seconds",
        ),
        ("{{ 'a' * 90000000 }}", "90,000,.* characters for one row"),
    ],
)
def test_a_template_that_is_endless_for_one_row_only(loop, says, monkeypatch):
    from pipeline.data import template
    from pipeline.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(ROOT / "jobs/demo/model"))
    tokenizer.chat_template += "{% if 'aaaa' in messages[0].content %}" + loop + "{% endif %}"
    monkeypatch.setattr(template, "SECONDS", 3.0)
    written = template.ChatTemplate(tokenizer)
    assert written.render([{"role": "user", "content": "Hello."}], True)
    with pytest.raises(template.RowError, match=says):
        written.render([{"role": "user", "content": "aaaa"}], True)
