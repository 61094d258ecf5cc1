"""Tests that an invalid chat template causes an error before any row is rendered."""

import shutil
from pathlib import Path

import pytest
from toy_models import DEMO

from pipeline.errors import InputError
from pipeline.models.tokenizer import load_tokenizer

BROKEN = {
    "a syntax error": (b"one\n{% if %}", r"cannot be rendered \(TemplateSyntaxError: Expected an expression.*line 2"),
    "a long loop": (b"{% for i in range(10**9) %}{% endfor %}", r"cannot be rendered \(OverflowError: Range too big"),
    "a forbidden attribute": (b"{{ ''.__class__.__mro__ }}", r"cannot be rendered \(SecurityError"),
    "not UTF-8": (b"\xff\xfe{{ 1 }}", r"' cannot be read \(UnicodeDecodeError"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_template_that_cannot_be_rendered_is_an_error_of_its_key(kind, tmp_path):
    text, says = BROKEN[kind]
    (tmp_path / "chat.jinja").write_bytes(text)
    with pytest.raises(InputError, match=rf"^model\.chat_template: .*chat\.jinja ?{says}"):
        load_tokenizer(str(DEMO), chat_template=str(tmp_path / "chat.jinja"))


@pytest.mark.parametrize("text", ["{{ messages[1].content }}", "{{ raise_exception('after a tool only') }}"])
def test_a_template_that_fails_on_some_conversations_only_is_accepted(text, tmp_path):
    (tmp_path / "chat.jinja").write_text(text)
    assert load_tokenizer(str(DEMO), chat_template=str(tmp_path / "chat.jinja")).chat_template == text


def test_the_template_of_the_base_is_checked_and_can_be_replaced(tmp_path):
    base = Path(shutil.copytree(DEMO, tmp_path / "base"))
    (base / "chat_template.jinja").write_text("{{ nope() }}")
    with pytest.raises(InputError, match=r"^model\.name_or_path: the chat template of .* cannot be rendered"):
        load_tokenizer(str(base))
    load_tokenizer(str(base), chat_template="plain")
