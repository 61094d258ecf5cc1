"""The chat template: which one it is, and whether it renders a conversation, in time and in memory (no torch import).

A template is a program that came with a model. transformers runs it in a sandbox without files, imports or attributes
that lead out, but for as long as it likes: it is tried once in a process that may be killed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, in_brief
from pipeline.models.trial import in_child

PLAIN = Path(__file__).with_name("plain.jinja")
BOS_LINE = "{{- bos_token }}\n"
CHARACTERS = 1 << 20  # what a template may write of all PROBES
PROBES = [
    [{"role": role, "content": "Hello." if role != "user" else "Who is there?"} for role in roles]
    for roles in (("user",), ("system", "user"), ("user", "assistant"), ("system", "user", "assistant"))
]


def set_template(tokenizer: Any, chat_template: str | None, where: str) -> None:
    """Gives the tokenizer its template: of a Jinja file, "plain", or None: its own, else "plain".

    `text_as_chat` on the tokenizer says whether prompts of plain text are put into it: unless it is the fallback.

    Raises:
        InputError: when the template cannot be read, or renders none of the PROBES.
    """
    plain, own = _plain(tokenizer), tokenizer.chat_template
    if isinstance(own, dict):  # several named templates, of which "default" is the one for chats
        names, own = ", ".join(sorted(own)), own.get("default")
        if own is None and chat_template is None:
            raise InputError(
                f"{where!r} has several chat templates ({names}) and none is called default; save the one "
                "that is meant as a Jinja file and name it: model.chat_template=FILE",
                key="model.name_or_path",
            )
    tokenizer.text_as_chat = chat_template is not None or (own is not None and own != plain)
    key, named = "model.chat_template", str(chat_template)
    if chat_template is None:
        tokenizer.chat_template = own or plain
        key, named = "model.name_or_path", f"the chat template of {where!r}"
    elif chat_template == "plain":
        tokenizer.chat_template = plain
    else:
        tokenizer.chat_template = _of_file(chat_template)
    if not isinstance(tokenizer.chat_template, str):
        raise InputError(
            f"{named} is no text ({type(own).__name__}); fix it, or name another as model.chat_template", key
        )
    if tokenizer.chat_template != plain and (problem := try_out(tokenizer)):
        raise InputError(
            f"{named}{problem}; fix it, or name another as model.chat_template (plain is built in)", key
        )


def _plain(tokenizer: Any) -> str:
    """The built-in template; its text begins with the bos token only where the tokenizer begins every text with it."""
    text = PLAIN.read_text(encoding="utf-8")
    begins = tokenizer("a").input_ids[:1]
    if tokenizer.bos_token_id is not None and begins == [tokenizer.bos_token_id]:
        return text
    return text.replace(BOS_LINE, "")


def _of_file(path: str) -> str:
    file = os.path.expanduser(path)
    if not os.path.isfile(file):
        raise InputError(
            f"there is no file {path!r}; expected a Jinja file, 'plain', or null", key="model.chat_template"
        )
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read as UTF-8 text ({in_brief(error)}); save it as UTF-8",
            key="model.chat_template",
        ) from error
    if not text.strip():
        raise InputError(
            f"{path} is empty; expected a Jinja template, 'plain', or null", key="model.chat_template"
        )
    return text


def is_plain(tokenizer: Any) -> bool:
    """Whether the template is the built-in one."""
    return tokenizer.chat_template == _plain(tokenizer)


def text_as_chat(tokenizer: Any, said: bool | None) -> bool:
    """Whether a prompt of plain text becomes a user message of the chat template.

    `said` is `data.apply_chat_template`. Without it: if the template came with the base, is named by the job, or was
    applied when the policy was trained; not if it is only the fallback for a base that has none.
    """
    return bool(getattr(tokenizer, "text_as_chat", True) if said is None else said)


# ---------------------------------------------------------------------------------------------------- trying it


def try_out(tokenizer: Any) -> str | None:
    """What is wrong with the tokenizer's template, in words; None: it renders one of the PROBES, or refuses them itself."""
    problem = in_child(lambda: _problem(tokenizer))
    if problem is None or problem[0] == ":":
        return problem
    return f": rendering a conversation of three turns {problem}"


def _problem(tokenizer: Any) -> str | None:
    from jinja2 import TemplateError, TemplateSyntaxError

    problems: list[str | None] = []
    for turns in PROBES:
        asks = turns[-1]["role"] == "user"
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=asks)
        except TemplateSyntaxError as error:
            problems.append(f":{error.lineno}: {error.message}")
        except Exception as error:
            # What `raise_exception` raises is the template's own word: other rows it may accept.
            refused = type(error) is TemplateError
            problems.append(None if refused else f": cannot be rendered ({in_brief(error)})")
        else:
            long = len(text) > CHARACTERS
            problems.append(f": writes {len(text)} characters for {len(turns)} short turns" if long else None)
    return problems[0] if all(problems) else None
