"""Control tokens: special tokens take effect where the chat template writes them, and are plain text in a row's content.

    control = ControlTokens(tokenizer)
    escaping = control.escaping([content])            # None: nothing in the contents could be read as a control token
    rendered = template(escaping.escape(content))     # the template sees ordinary characters
    ids = escaping.encode(rendered).ids

If the rendered text contains no control tokens but the template's, the tokenizer encodes it as usual. Otherwise a copy of
the tokenizer does, whose control tokens are renamed to private-use characters that the row does not contain; those that
the template wrote are renamed in the text, those in the row's content are not. Lengths stay the same, and so do offsets.
(`encode_special_tokens` of the tokenizers library applies to a whole text, and encoding the text in pieces would change
what happens at their edges: prefix spaces, stripped white space, merges.)
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
PRIVATE = range(0xF0000, 0x10FFFE)  # Unicode's supplementary private-use areas


class ControlTokens:
    """The control tokens of a tokenizer as strings: where they occur in a text, and how to escape them.

    Args:
        as_text: whether control tokens in content are text. False: they take effect wherever they occur.
    """

    def __init__(self, tokenizer: Any, as_text: bool = True):
        self.tokenizer, self.as_text = tokenizer, as_text and getattr(tokenizer, "is_fast", False)
        if not getattr(tokenizer, "is_fast", False):
            return  # a reward model's own, in Python: it has no backend whose tokens could be renamed
        self.backend = tokenizer.backend_tokenizer
        added = [token for _, token in sorted(self.backend.get_added_tokens_decoder().items())]
        ends = [] if tokenizer.eos_token is None else tokenizer.convert_ids_to_tokens(eos_ids(tokenizer))
        template = str(tokenizer.chat_template)
        self.names = [token.content for token in added if _controls(token, ends, template)]
        self.known = frozenset(self.names)
        # The other added tokens are in the pattern because the longest match wins.
        self.pattern = _alternation(
            token for token in added if token.content in self.known or not token.normalized
        )
        self.normalised = self._normalised([token for token in added if token.content in self.known])
        self.longest = max(map(len, self.names), default=0)
        self.firsts, self.lasts = {name[0] for name in self.names}, {name[-1] for name in self.names}
        self.heads = {name[:size] for name in self.names for size in range(1, len(name))}
        self.tails = {name[size:] for name in self.names for size in range(1, len(name))}

    def _normalised(self, tokens: list[Any]) -> list[tuple[str, str]]:
        """(string to look for, name) of the tokens that text can also contain after normalisation."""
        normalizer, model = self.backend.normalizer, self.backend.model
        if normalizer is None:
            return []
        names = [
            token.content for token in tokens if token.normalized or _in_vocabulary(model, token.content)
        ]
        normals = [(name, normalizer.normalize_str(name).strip("▁ ")) for name in names]
        return [(text, name) for name, normal in normals for text in {name, normal} if text]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """(start, stop) of the control tokens in a text."""
        return [match.span() for match in self.pattern.finditer(text) if match.group() in self.known]

    def tokens_in(self, text: str) -> list[str]:
        """The names of the control tokens in a text, each once."""
        names = [text[slice(*span)] for span in self.spans(text)]
        if self.normalised:
            normal = self.backend.normalizer.normalize_str(text)
            names += [name for string, name in self.normalised if string in normal]
        return list(dict.fromkeys(names))

    def positions(self, content: str) -> list[int]:
        """Indices of the characters to escape so that no control token can begin, continue or end in this content.

        They are the first character of each occurrence; of a fragment at the end that the following text could complete;
        and of the content itself if it could complete the text before it.
        """
        text = content.strip()
        starts, at = [], 0
        while match := self.pattern.search(text, at):
            starts += [match.start()] * (match.group() in self.known)
            at = match.start() + 1
        sizes = range(1, min(self.longest, len(text) + 1))
        if not self.firsts.isdisjoint(text[-self.longest :]):
            starts += [len(text) - size for size in sizes if text[-size:] in self.heads]
        if not self.lasts.isdisjoint(text[: self.longest]):
            starts += [0 for size in sizes if text[:size] in self.tails]
        if text and len(text) <= self.longest and any(text in name for name in self.names):
            starts.append(0)
        indent = len(content) - len(content.lstrip())
        return sorted({indent + _skip_space(text, start) for start in starts})

    def escaping(self, contents: Sequence[str]) -> Escaping | None:
        """The escaping of one row's contents; None if there is nothing to escape.

        Raises:
            ValueError: when the contents contain private-use characters of every range that could be used.
        """
        if not self.as_text:
            return None
        if not any(self.positions(text) or (self.normalised and self.tokens_in(text)) for text in contents):
            return None
        used = {ord(char) for text in contents for char in re.findall("[\U000f0000-\U0010ffff]", text)}
        alphabet = sorted({char for name in self.names for char in name})
        size = len(self.names) + len(alphabet)
        for base in range(PRIVATE.start, PRIVATE.stop - size, size):
            if used.isdisjoint(range(base, base + size)):
                return Escaping(self, base, alphabet)
        raise ValueError("special tokens, and private-use characters (U+F0000 to U+10FFFD) of all ranges")


class Escaping:
    """A choice of private-use characters, from `base` on: one for each control token, then one for each letter in them."""

    def __init__(self, control: ControlTokens, base: int, alphabet: list[str]):
        self.control, self.base = control, base
        first = base + len(control.names)
        self.escapes = {char: chr(first + at) for at, char in enumerate(alphabet)}
        self.originals = {first + at: char for at, char in enumerate(alphabet)}

    def escape(self, content: str) -> str:
        """The content with the characters at `ControlTokens.positions` replaced; its length stays the same."""
        pieces, at = [], 0
        for position in self.control.positions(content):
            pieces += [content[at:position], self.escapes[content[position]]]
            at = position + 1
        return "".join([*pieces, content[at:]])

    def unescape(self, rendered: str) -> str:
        """The text with its original characters."""
        return rendered.translate(self.originals)

    def encode(self, rendered: str, add_special_tokens: bool = False) -> Any:
        """The tokenizer's Encoding of a text rendered from escaped contents, with offsets in the unescaped text."""
        control, text = self.control, self.unescape(rendered)
        if not control.normalised and control.spans(text) == control.spans(rendered):
            return control.backend.encode(text, add_special_tokens=add_special_tokens)
        aliases, literal = _aliases(control.names, self.base), set[int]()

        def alias(match: re.Match[str]) -> str:
            name = match.group()
            return name if match.start() in literal else aliases.get(name, name)

        def encoded() -> Any:
            renamed = self.unescape(control.pattern.sub(alias, rendered))
            copy = _renamed(control.tokenizer, tuple(control.names), self.base)
            return copy.encode(renamed, add_special_tokens=add_special_tokens)

        encoding = encoded()
        literal |= self._unmatched(rendered, encoding)
        return encoded() if literal else encoding

    def _unmatched(self, rendered: str, encoding: Any) -> set[int]:
        """Positions of the template's control tokens that the tokenizer encodes as text, as some do inside a text."""
        ids: list[int | None] = [None] * len(rendered)
        for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            ids[start:stop] = [token] * (stop - start)
        id_of = self.control.backend.token_to_id
        spans = self.control.spans(rendered)
        return {start for start, stop in spans if ids[start] != id_of(rendered[start:stop])}


def text_ids(control: ControlTokens, text: str) -> list[int]:
    """Like `tokenizer(text).input_ids`, with control tokens in it as text."""
    escaping = control.escaping([text])
    if escaping is None:
        return list(control.tokenizer(text).input_ids)
    return list(escaping.encode(escaping.escape(text), add_special_tokens=True).ids)


def chat_ids(control: ControlTokens, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids like those of `tokenizer.apply_chat_template(messages)`, with control tokens in the contents as text."""
    escaping = control.escaping([message["content"] for message in messages])
    if escaping is None:
        return list(control.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    escaped = [{**message, "content": escaping.escape(message["content"])} for message in messages]
    return list(escaping.encode(control.tokenizer.apply_chat_template(escaped, tokenize=False)).ids)


# ------------------------------------------------------------------------------------------ the renamed tokenizer


def _aliases(names: Sequence[str], base: int) -> dict[str, str]:
    return {name: chr(base + at) * len(name) for at, name in enumerate(names)}


@lru_cache(maxsize=4)  # only rows with private-use characters need another `base`
def _renamed(tokenizer: Any, names: tuple[str, ...], base: int) -> Any:
    """A copy of the tokenizer with its control tokens renamed, in the vocabulary too, so that no text encodes to one."""
    from tokenizers import Tokenizer

    aliases = _aliases(names, base)
    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in tree["added_tokens"]:
        token["content"] = aliases.get(token["content"], token["content"])
    model = tree["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {aliases.get(piece, piece): index for piece, index in model["vocab"].items()}
    else:  # Unigram
        model["vocab"] = [[aliases.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if not _merged(merge) & aliases.keys()]
    copy = Tokenizer.from_str(json.dumps(tree))
    for name in names:
        index = tokenizer.backend_tokenizer.token_to_id(name)
        if copy.token_to_id(aliases[name]) != index:
            raise InputError(
                f"this tokenizer cannot encode the special token {name!r} (id {index}) as text; take "
                "the rows that contain it out, or type data.special_tokens=control",
                key="data.special_tokens",
            )
    return copy


def _merged(merge: Any) -> set[str]:
    """Both parts of a BPE merge, and its result."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return {left, right, left + right}


# ------------------------------------------------------------------------------------------------ which, and where


def _controls(token: Any, ends: list[str], template: str) -> bool:
    """Whether an added token is a control token: marked as special, or one that begins or ends a turn of the template.

    DeepSeek's `<｜User｜>` is not marked as special. `<think>` and `<tool_call>`, which a completion may contain, are not
    control tokens.
    """
    name = token.content
    marks_turns = TURN.search(name) is not None and name in template
    return bool(name.strip()) and (token.special or name in ends or marks_turns)


def _in_vocabulary(model: Any, name: str) -> bool:
    """Whether the model itself, as Unigram can, encodes the name of an added token to its id."""
    index = model.token_to_id(name)
    return index is not None and index in {token.id for token in model.tokenize(name)}


def _skip_space(text: str, start: int) -> int:
    """The index of the next character that is not white space, which templates strip; `text` ends with such a one."""
    while text[start].isspace():
        start += 1
    return start


def _alternation(tokens: Iterable[Any]) -> re.Pattern[str]:
    """A pattern that matches tokens as the library does: leftmost, then longest."""
    parts = []
    for token in sorted(tokens, key=lambda token: -len(token.content)):
        name = re.escape(token.content)
        parts.append(rf"(?<!\w){name}(?!\w)" if token.single_word else name)
    return re.compile("|".join(parts) or r"(?!)")
