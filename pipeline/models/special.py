"""Special tokens are control tokens where the chat template writes them, and words where a row's text has them.

    control = ControlTokens(tokenizer)
    disguise = control.disguise([content])        # None: no content has anything to do with a special token
    rendered = template(disguise.hide(content))   # the template and all that looks at its text see no forged token
    ids = disguise.encode(rendered).ids

A text that is free of forged tokens is encoded by the tokenizer itself. Any other is encoded by its twin: the same
tokenizer, whose special tokens are spelled in private-use characters that the text does not have. What the template
wrote is respelled, what the row says is not; each spelling keeps its length, so offsets are those of the text. (The
library's own `encode_special_tokens` knows only all or nothing, and cutting the text into pieces changes what stands at
their edges: prefix spaces, stripped white space, merges.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from pipeline.errors import InputError
from pipeline.models.tokenizer import eos_ids

TURN = re.compile("user|assistant|system|turn|role|header", re.IGNORECASE)
PRIVATE = range(0xF0000, 0x10FFFE)  # planes of code points that no standard gives a meaning


class ControlTokens:
    """The special tokens of a tokenizer as strings: which of them a text contains, and how to keep them words.

    Without `hide` they are control tokens wherever they stand, and there is no disguise.
    """

    def __init__(self, tokenizer: Any, hide: bool = True):
        self.tokenizer, self.hide = tokenizer, hide and getattr(tokenizer, "is_fast", False)
        if not getattr(tokenizer, "is_fast", False):
            return  # one in Python, of somebody's own reward model: it has no twin
        self.backend = tokenizer.backend_tokenizer
        added = [token for _, token in sorted(self.backend.get_added_tokens_decoder().items())]
        ends = [] if tokenizer.eos_token is None else tokenizer.convert_ids_to_tokens(eos_ids(tokenizer))
        template = str(tokenizer.chat_template)
        self.names = [token.content for token in added if _controls(token, ends, template)]
        self.known = frozenset(self.names)
        # Others are in the pattern because the longest match wins.
        self.pattern = _alternation(
            token for token in added if token.content in self.known or not token.normalized
        )
        self.normalised = self._normalised([token for token in added if token.content in self.known])
        self.longest = max(map(len, self.names), default=0)
        self.firsts, self.lasts = {name[0] for name in self.names}, {name[-1] for name in self.names}
        self.heads = {name[:size] for name in self.names for size in range(1, len(name))}
        self.tails = {name[size:] for name in self.names for size in range(1, len(name))}

    def _normalised(self, tokens: list[Any]) -> list[tuple[str, str]]:
        """(as it is looked for, name) of the tokens that may also come from a text which only normalises to them."""
        normalizer, model = self.backend.normalizer, self.backend.model
        if normalizer is None:
            return []
        names = [
            token.content
            for token in tokens
            if token.normalized
            or (model.token_to_id(token.content) is not None and _made(model, token.content))
        ]
        spellings = [(name, normalizer.normalize_str(name).strip("▁ ")) for name in names]
        return [(spelling, name) for name, normal in spellings for spelling in {name, normal} if spelling]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where special tokens stand in a text."""
        return [match.span() for match in self.pattern.finditer(text) if match.group() in self.known]

    def found(self, text: str) -> list[str]:
        """The special tokens that a text contains, each once."""
        names = [text[slice(*span)] for span in self.spans(text)]
        if self.normalised:
            normal = self.backend.normalizer.normalize_str(text)
            names += [name for spelling, name in self.normalised if spelling in normal]
        return list(dict.fromkeys(names))

    def places(self, content: str) -> list[int]:
        """Characters without which no special token can begin, continue or end in this content.

        The first one of each token in it; of a piece at its end that what follows could complete; and the first one of
        all where a piece at its beginning could complete what stands before.
        """
        text = content.strip()
        found, at = [], 0
        while match := self.pattern.search(text, at):
            found += [match.start()] * (match.group() in self.known)
            at = match.start() + 1
        sizes = range(1, min(self.longest, len(text) + 1))
        if not self.firsts.isdisjoint(text[-self.longest :]):
            found += [len(text) - size for size in sizes if text[-size:] in self.heads]
        if not self.lasts.isdisjoint(text[: self.longest]):
            found += [0 for size in sizes if text[:size] in self.tails]
        if text and len(text) <= self.longest and any(text in name for name in self.names):
            found.append(0)
        before = len(content) - len(content.lstrip())
        return sorted({before + _behind_space(text, at) for at in found})

    def disguise(self, contents: Sequence[str]) -> Disguise | None:
        """How to encode a row with these contents; None: as always.

        Raises:
            ValueError: when the contents use up the private-use characters.
        """
        if not self.hide or not any(
            self.places(text) or (self.normalised and self.found(text)) for text in contents
        ):
            return None
        used = {ord(char) for text in contents for char in re.findall("[\U000f0000-\U0010ffff]", text)}
        alphabet = sorted({char for name in self.names for char in name})
        size = len(self.names) + len(alphabet)
        for base in range(PRIVATE.start, PRIVATE.stop - size, size):
            if used.isdisjoint(range(base, base + size)):
                return Disguise(self, base, alphabet)
        raise ValueError("special tokens among private-use characters (U+F0000 to U+10FFFD) of all ranges")


class Disguise:
    """One choice of private-use characters: `base` on, one for each special token, then one for each of their letters."""

    def __init__(self, control: ControlTokens, base: int, alphabet: list[str]):
        self.control, self.base = control, base
        first = base + len(control.names)
        self.hidden = {char: chr(first + at) for at, char in enumerate(alphabet)}
        self.shown = {first + at: char for at, char in enumerate(alphabet)}

    def hide(self, content: str) -> str:
        """The content with a stand-in for each character that `places` names; its length stays."""
        pieces, at = [], 0
        for place in self.control.places(content):
            pieces += [content[at:place], self.hidden[content[place]]]
            at = place + 1
        return "".join([*pieces, content[at:]])

    def reveal(self, rendered: str) -> str:
        return rendered.translate(self.shown)

    def encode(self, rendered: str, add_special_tokens: bool = False) -> Any:
        """The tokenizer's Encoding of a text that was rendered from hidden contents; offsets are those of the text."""
        control, text = self.control, self.reveal(rendered)
        if not control.normalised and control.spans(text) == control.spans(rendered):
            return control.backend.encode(text, add_special_tokens=add_special_tokens)
        spelled, passed = _spelled(control.names, self.base), set[int]()

        def respell(match: re.Match[str]) -> str:
            name = match.group()
            return name if match.start() in passed else spelled.get(name, name)

        def encoded() -> Any:
            marked = self.reveal(control.pattern.sub(respell, rendered))
            twin = _twin(control.tokenizer, tuple(control.names), self.base)
            return twin.encode(marked, add_special_tokens=add_special_tokens)

        encoding = encoded()
        passed |= self._passed(rendered, encoding)
        return encoded() if passed else encoding

    def _passed(self, rendered: str, encoding: Any) -> set[int]:
        """Where the tokenizer passed over a token that the template wrote, as those do that match at a beginning only."""
        at: list[int | None] = [None] * len(rendered)
        for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            at[start:stop] = [token] * (stop - start)
        token_to_id = self.control.backend.token_to_id
        return {
            start
            for start, stop in self.control.spans(rendered)
            if at[start] != token_to_id(rendered[start:stop])
        }


def text_ids(control: ControlTokens, text: str) -> list[int]:
    """`tokenizer(text).input_ids`, the special tokens in the text being words."""
    disguise = control.disguise([text])
    if disguise is None:
        return list(control.tokenizer(text).input_ids)
    return list(disguise.encode(disguise.hide(text), add_special_tokens=True).ids)


def chat_ids(control: ControlTokens, messages: Sequence[dict[str, str]]) -> list[int]:
    """`tokenizer.apply_chat_template(messages)`, the special tokens in the contents being words."""
    disguise = control.disguise([message["content"] for message in messages])
    if disguise is None:
        return list(control.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    hidden = [{**message, "content": disguise.hide(message["content"])} for message in messages]
    return list(disguise.encode(control.tokenizer.apply_chat_template(hidden, tokenize=False)).ids)


# ------------------------------------------------------------------------------------------------------- the twin


def _spelled(names: Sequence[str], base: int) -> dict[str, str]:
    return {name: chr(base + at) * len(name) for at, name in enumerate(names)}


@lru_cache(maxsize=4)  # one is enough, but for rows with private-use characters
def _twin(tokenizer: Any, names: tuple[str, ...], base: int) -> Any:
    """The tokenizer under another spelling of its special tokens; no text is ever encoded to one of them."""
    from tokenizers import Tokenizer

    spelled = _spelled(names, base)
    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in tree["added_tokens"]:
        token["content"] = spelled.get(token["content"], token["content"])
    model = tree["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {spelled.get(piece, piece): index for piece, index in model["vocab"].items()}
    else:  # Unigram
        model["vocab"] = [[spelled.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in spelled:
        model["unk_token"] = spelled[model["unk_token"]]
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if not _merged(merge) & spelled.keys()]
    twin = Tokenizer.from_str(json.dumps(tree))
    for name in names:
        before, now = tokenizer.backend_tokenizer.token_to_id(name), twin.token_to_id(spelled[name])
        if before != now:
            raise InputError(
                f"data.special_tokens: the special token {name!r} of this tokenizer ({before}) cannot be told from the same "
                "characters in a row; take such rows out, or type data.special_tokens=control"
            )
    return twin


def _merged(merge: Any) -> set[str]:
    """Both sides of a BPE merge, and what it makes."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return {left, right, left + right}


def _made(model: Any, name: str) -> bool:
    """Whether the vocabulary alone makes a special token of its characters, as Unigram models do."""
    return model.token_to_id(name) in {token.id for token in model.tokenize(name)}


def _controls(token: Any, ends: list[str], template: str) -> bool:
    """Whether an added token is one that rows must not forge: marked as special, or, unmarked, what turns begin or end with.

    DeepSeek's `<｜User｜>` is of the second kind; `<think>` and `<tool_call>`, which a reply may hold, are of neither.
    """
    name = token.content
    marks_turns = TURN.search(name) is not None and name in template
    return bool(name.strip()) and (token.special or name in ends or marks_turns)


def _behind_space(text: str, at: int) -> int:
    """The next character that is not white space, which templates strip; `text` ends in one."""
    while text[at].isspace():
        at += 1
    return at


def _alternation(tokens: Iterable[Any]) -> re.Pattern[str]:
    """A pattern that matches tokens as the library does: leftmost, then longest."""
    parts = []
    for token in sorted(tokens, key=lambda token: -len(token.content)):
        name = re.escape(token.content)
        parts.append(rf"(?<!\w){name}(?!\w)" if token.single_word else name)
    return re.compile("|".join(parts) or r"(?!)")
