"""Prevents special tokens in the content of a row from being encoded as special tokens.

Only the chat template may write control tokens, such as the end of a turn. In content, the characters of control tokens are plain
text.

    control = ControlTokens(tokenizer)
    escaping = control.escaping([content])            # None if no content contains a control token
    rendered = template(escaping.escape(content))     # inserts a mark character into each control token of the content
    ids = escaping.encode(rendered).ids               # splits the text at the marks and encodes each piece

No token spans a mark. Therefore, the tokens of the text next to a mark may differ from the tokens of the original text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeline.models.tokenizer import eos_ids

TURN = re.compile("user|assistant|system|turn|role|header", re.IGNORECASE)
PRIVATE = range(0xF0000, 0x10FFFE)  # Unicode's supplementary private-use areas


class ControlTokens:
    """Finds the control tokens of a tokenizer in a text, and escapes them.

    Args:
        as_text: whether control tokens in content are encoded as plain text (True) or as control tokens (False).
    """

    def __init__(self, tokenizer: Any, as_text: bool = True):
        self.tokenizer, self.as_text = tokenizer, as_text
        added = [token for _, token in sorted(tokenizer.backend_tokenizer.get_added_tokens_decoder().items())]
        ends = [] if tokenizer.eos_token is None else tokenizer.convert_ids_to_tokens(eos_ids(tokenizer))
        template = str(tokenizer.chat_template)
        self.names = [token.content for token in added if _controls(token, ends, template)]
        longest_first = sorted(self.names, key=len, reverse=True)
        # A lookahead also finds overlapping matches.
        self.pattern = re.compile(f"(?=({'|'.join(map(re.escape, longest_first)) or '(?!)'}))")

    def tokens_in(self, text: str) -> list[str]:
        """Returns the distinct control tokens in a text."""
        return list(dict.fromkeys(match[1] for match in self.pattern.finditer(text)))

    def escaping(self, contents: Sequence[str]) -> Escaping | None:
        """Returns an Escaping for the contents of one row, or None if the contents have no control tokens."""
        if not self.as_text or not any(self.pattern.search(text) for text in contents):
            return None
        characters = set("".join(contents))
        return Escaping(self, next(mark for mark in map(chr, PRIVATE) if mark not in characters))


class Encoded(NamedTuple):
    """Token ids, with the (start, stop) of each token in the text. The attributes are named as in tokenizers' Encoding."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Escaping:
    """Escapes the control tokens in the contents of one row by inserting a private-use character, the mark."""

    def __init__(self, control: ControlTokens, mark: str):
        self.control, self.mark = control, mark

    def escape(self, content: str) -> str:
        """Returns the content with a mark after the first character of each control token."""
        pieces, position = [], 0
        for match in self.control.pattern.finditer(content):
            pieces.append(content[position : match.start() + 1])
            position = match.start() + 1
        return self.mark.join([*pieces, content[position:]])

    def escape_message(self, message: dict[str, Any]) -> dict[str, Any]:
        return {k: self.escape(v) if isinstance(v, str) else v for k, v in message.items()}

    def encode(self, rendered: str, add_special_tokens: bool = False) -> Encoded:
        """Encodes a text rendered from escaped contents. The returned offsets are positions in `rendered`."""
        backend = self.control.tokenizer.backend_tokenizer
        first_piece, *pieces = rendered.split(self.mark)
        head = backend.encode(first_piece, add_special_tokens=add_special_tokens)
        # The tokenizer may add an end token, such as BERT's [SEP], which must come after the last piece of the text.
        stop = 1 + max((i for i, added in enumerate(head.special_tokens_mask) if not added), default=-1)
        ids, offsets, start = head.ids[:stop], head.offsets[:stop], len(first_piece)
        for piece in pieces:
            # Some tokenizers add a space at the start of a text. After a line break, no tokenizer adds a space, so each piece is
            # encoded after a line break. The loop drops the line break's token.
            encoding = backend.encode(f"\n{piece}", add_special_tokens=False)
            for token, (left, right) in zip(encoding.ids, encoding.offsets, strict=True):
                if right > 1:
                    ids.append(token)
                    offsets.append((start + left, start + right))
            start += 1 + len(piece)
        return Encoded(ids + head.ids[stop:], offsets + head.offsets[stop:])


def text_ids(control: ControlTokens, text: str) -> list[int]:
    """Returns the token ids of a text. The ids equal `tokenizer(text)`, except that control tokens are plain text."""
    escaping = control.escaping([text])
    if escaping is None:
        return list(control.tokenizer(text).input_ids)
    return list(escaping.encode(escaping.escape(text), add_special_tokens=True).ids)


def texts_of(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [value for message in messages for value in message.values() if isinstance(value, str)]


def chat_ids(control: ControlTokens, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Returns the token ids of rendered messages. Control tokens in the messages are plain text."""
    escaping = control.escaping(texts_of(messages))
    if escaping is None:
        return list(control.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    escaped = [escaping.escape_message(message) for message in messages]
    return list(escaping.encode(control.tokenizer.apply_chat_template(escaped, tokenize=False)).ids)


def _controls(token: Any, ends: list[str], template: str) -> bool:
    """Returns whether an added token is a control token: a token that is marked as special, or that begins or ends a turn.

    For example, DeepSeek's `<｜User｜>` begins a turn but is not marked as special. `<think>` and `<tool_call>` are not control
    tokens, because a completion may contain them. A token of one character is not a control token either, because a mark cannot
    split it.
    """
    name = token.content
    marks_turns = TURN.search(name) is not None and name in template
    return len(name.strip()) > 1 and (token.special or name in ends or marks_turns)
