"""Chooses the chat template of a tokenizer, and tests that it renders a conversation (no torch import).

A template is a program that comes with a model. transformers runs the template in a sandbox, without access to
files or imports.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, in_brief

PLAIN = Path(__file__).with_name("plain.jinja")
# This fixed date replaces today's date, which the templates of Llama 3.1 and later would write into the prompt.
DATE = "26 Jul 2024"
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # tag that marks the completions in a template
BOS_LINE = "{{- bos_token }}\n"
PROBES = [
    [{"role": role, "content": "Hello." if role != "user" else "Who is there?"} for role in roles]
    for roles in (("user",), ("system", "user"), ("user", "assistant"), ("system", "user", "assistant"))
]


def set_template(tokenizer: Any, chat_template: str | None, base_name: str) -> None:
    """Sets the tokenizer's `chat_template`. Raises InputError if the template cannot be read or renders none of the PROBES.

    Also sets the attribute `text_as_chat`, which specifies whether a plain-text prompt becomes a user message. `text_as_chat` is
    False if neither the tokenizer nor the job has a template.

    Args:
        chat_template: a Jinja file, "plain" (built in), or None for the tokenizer's own template ("plain" if it has none).
        base_name: the base's name in messages.
    """
    plain, own_template = _plain(tokenizer), tokenizer.chat_template
    if isinstance(own_template, dict):  # the tokenizer has several named templates
        names, own_template = ", ".join(sorted(own_template)), own_template.get("default")
        if own_template is None and chat_template is None:
            raise InputError(
                f"{base_name!r} has several chat templates ({names}) and none is called default; set model.chat_template=FILE",
                key="model.name_or_path",
            )
    tokenizer.text_as_chat = chat_template is not None or own_template not in (None, plain)
    if chat_template is None:
        tokenizer.chat_template = own_template or plain
        key, label = "model.name_or_path", f"the chat template of {base_name!r}"
    else:
        tokenizer.chat_template = plain if chat_template == "plain" else _read(chat_template)
        key, label = "model.chat_template", chat_template
    if tokenizer.chat_template != plain and (error := _error(tokenizer)):
        line = f" in line {error.lineno}" if hasattr(error, "lineno") else ""
        raise InputError(
            f"{label} cannot be rendered ({in_brief(error)}{line}); fix it, or set another model.chat_template (plain is built in)",
            key,
        ) from error


def _plain(tokenizer: Any) -> str:
    """Returns the built-in template. The template writes a bos token only if the tokenizer also adds one to every text."""
    text = PLAIN.read_text(encoding="utf-8")
    prefix = tokenizer("a").input_ids[:1]
    if tokenizer.bos_token_id is not None and prefix == [tokenizer.bos_token_id]:
        return text
    return text.replace(BOS_LINE, "")


def _read(path: str) -> str:
    file, expected = Path(os.path.expanduser(path)), "expected a Jinja file in UTF-8, 'plain', or null"
    if not file.is_file():
        raise InputError(f"there is no file {path!r}; {expected}", key="model.chat_template")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path!r} cannot be read ({in_brief(error)}); {expected}", key="model.chat_template"
        ) from error


def is_plain(tokenizer: Any) -> bool:
    """Returns whether the tokenizer's chat template is the built-in template."""
    return tokenizer.chat_template == _plain(tokenizer)


def text_as_chat(tokenizer: Any, apply_chat_template: bool | None) -> bool:
    """Returns whether a plain-text prompt becomes a user message in the chat template.

    Args:
        apply_chat_template: the job's `data.apply_chat_template`, or None for the tokenizer's attribute `text_as_chat`, which
            set_template or the policy's lineage has set.
    """
    if apply_chat_template is not None:
        return apply_chat_template
    return bool(getattr(tokenizer, "text_as_chat", True))


def _error(tokenizer: Any) -> Exception | None:
    """Returns an error if the tokenizer's template cannot render any of the PROBES, or None if it can.

    A template may reject some of the PROBES."""
    from jinja2 import TemplateError

    errors: list[Exception] = []
    for turns in PROBES:
        options = {"tokenize": False, "add_generation_prompt": turns[-1]["role"] == "user"}
        try:
            tokenizer.apply_chat_template(turns, **options)
            return None
        except Exception as error:
            if type(error) is TemplateError:  # the template called `raise_exception`
                return None
            errors.append(error)
    return errors[0]


def user_header_and_generation_prompt(tokenizer: Any) -> tuple[str, str]:
    """Returns the texts that a chat template writes before a question and before a completion, without surrounding white space.

    Returns ("", "") if there is no template, or if the template rejects a conversation that has only a user message.
    """
    question = [{"role": "user", "content": "?"}]
    try:
        plain, asking = (
            tokenizer.apply_chat_template(
                question, tokenize=False, add_generation_prompt=asks, date_string=DATE
            )
            for asks in (False, True)
        )
    except Exception:  # no template, or a template that requires a system message
        return "", ""
    header = plain.partition("?")[0].removeprefix(tokenizer.bos_token or "").strip()
    return header, asking[len(plain) :].strip() if asking.startswith(plain) else ""
