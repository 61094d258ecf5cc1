"""Records -> token ids: what all kinds of rows share. Chat template, begin and end tokens, special tokens, lengths.

Which tokens are trained is found in the rendered *text* (template.py) and carried over to tokens by their character
offsets, so that each text is tokenised once, whole, as the model sees it. Special tokens in the text of a row stay
text (models/special.py). Completions are compared as tokens: an empty one or a pair of equal ones is refused.
No torch import.
"""

import json
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.data.record import Record, Text
from pipeline.data.template import ChatTemplate, no_completion
from pipeline.data.values import RowError, show
from pipeline.errors import InputError, in_brief
from pipeline.models.special import ControlTokens, Escaping

if TYPE_CHECKING:
    from pipeline.data.kinds import Kind

# A text of more than CHARACTERS for each token of max_length, and SLACK more, is too long without being tokenised whole.
CHARACTERS, SLACK = 64, 1 << 20
FEW = 8  # different tokens: a text of more is not white space
WORD = re.compile(r"\w")
CONTENT = operator.itemgetter("content")

Rendered = tuple[str, Escaping | None]  # a text, and the escaping of the row's special tokens in it


@dataclass
class Example:
    """One training row: its columns, and the lengths that the report counts."""

    columns: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int
    truncated: bool = False
    ended: bool = True  # whether an end token is among the trained ones


@dataclass(frozen=True)
class Dropped:
    """A row left out without being wrong: `too_long`, `prompt_too_long`, or `equal_after_truncation`."""

    reason: str


Outcome = Example | Dropped | RowError


class Encoder:
    """Turns records of one kind into token rows, a batch at a time.

    Args:
        max_length: in tokens.
        too_long: error | drop | truncate.
        apply_template: whether a text prompt becomes a user message.
        ends: all ids that end a completion; `tokenizer.eos_token_id` is added to a completion that has none of them.
        special_tokens: what they are in the text of a row: text | control.
    """

    def __init__(
        self,
        tokenizer: Any,
        kind: "Kind",
        max_length: int,
        too_long: str,
        apply_template: bool,
        ends: Sequence[int],
        special_tokens: str = "text",
    ):
        self.tokenizer, self.kind = tokenizer, kind
        self.max_length, self.too_long, self.apply_template = max_length, too_long, apply_template
        self.room = CHARACTERS * max_length + SLACK  # characters
        self.control = ControlTokens(tokenizer, as_text=special_tokens == "text")
        self.eos, self.ends, self.bos = tokenizer.eos_token_id, frozenset(ends), tokenizer.bos_token_id
        # A completion of these ids alone is empty. Control tokens count as content only where rows may contain them.
        empty = self.control.names if self.control.as_text else [tokenizer.bos_token, tokenizer.pad_token]
        self.silent = self.ends | set(tokenizer.convert_tokens_to_ids([name for name in empty if name]))
        self.adds_bos = self.bos is not None and tokenizer("a").input_ids[:1] == [self.bos]
        self.chat = ChatTemplate(tokenizer)
        self.render = self.chat.render
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()

    def encode(self, records: Sequence[Record]) -> list[list[Outcome]]:
        """For each record its examples (one for each pair of completions), or what is wrong with it."""
        refused = [self._huge(record) for record in records]
        fitting = [record for record, outcome in zip(records, refused, strict=True) if outcome is None]
        encoded = iter(self.kind.encode(self, fitting))
        return [next(encoded) if outcome is None else [outcome] for outcome in refused]

    def special_in(self, record: Record) -> list[str]:
        """The special tokens in the text of a row."""
        texts = contents(record.prompt, *(completion for pair in record.pairs for completion in pair))
        return list(dict.fromkeys(name for text in texts for name in self.control.tokens_in(text)))

    def unread(self, record: Record) -> tuple[str, ...]:
        """The columns of a row that the model does not see: those that nothing reads, and `tools` if no template writes it."""
        chat = self.apply_template or not isinstance(record.prompt, str)
        hidden = record.tools and not (chat and self.chat.writes("tools"))
        return (*record.unread, "tools") if hidden else record.unread

    def unlearned_end(self) -> tuple[str, str] | None:
        """What the chat template ends a completion with, and what generation stops on; None: it stops on the first."""
        prompt = {"role": "user", "content": "Who is there?"}
        completion = {"role": "assistant", "content": "Hello."}
        try:
            whole = self.render([prompt, completion], False)
        except RowError:
            return None
        ids = self.ids([(whole, None)])[0]
        if len(self.ended(ids)) <= len(ids):
            return None
        names = self.tokenizer.convert_ids_to_tokens(sorted(self.ends))
        stops = ", ".join(
            f"{name} (id {index})" for index, name in zip(sorted(self.ends), names, strict=True)
        )
        return whole[whole.rfind(completion["content"]) + len(completion["content"]) :], stops

    def _huge(self, record: Record) -> Outcome | None:
        """The outcome of a row that is certainly too long; None: it may fit. Tokenising takes a second for a megabyte."""
        pairs = [sum(map(size_of, pair)) for pair in record.pairs]
        size = size_of(record.prompt) + max(pairs, default=0)
        if size <= self.room or self.too_long == "truncate":
            return None
        return self.over_length(f"{size:,} characters")

    # ---- text -> ids -------------------------------------------------------------------------------------------

    def encodings(self, texts: list[Rendered], batch: Any) -> list[Any]:
        """Encodings of all texts by `batch`, a method of the backend; escaped ones are encoded one by one."""
        unescaped = [text[: self.room] for text, escaping in texts if escaping is None]
        try:
            encodings = iter(batch(unescaped, add_special_tokens=False))
        except BaseException as error:  # a panic in tokenizers is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise InputError(
                f"its tokenizer fails on {show(self._culprit(unescaped, batch))} ({in_brief(error)}); fetch the model again, or take "
                "that row out",
                key="model.name_or_path",
            ) from None
        return [
            next(encodings) if escaping is None else escaping.encode(text[: self.room])
            for text, escaping in texts
        ]

    def _culprit(self, texts: list[str], batch: Any) -> str:
        """The first text that the tokenizer cannot encode by itself."""
        for text in texts:
            try:
                batch([text], add_special_tokens=False)
            except BaseException:
                return text
        return texts[0]

    def ids(self, texts: list[Rendered]) -> list[list[int]]:
        """Token ids of whole texts, begin token included."""
        encodings = self.encodings(texts, self.backend.encode_batch_fast)
        return [self.one_bos(encoding.ids) for encoding in encodings]

    def alone(self, rendered: Rendered) -> list[int]:
        """Token ids of a completion tokenised by itself, without a begin token."""
        return self.encodings([rendered], self.backend.encode_batch_fast)[0].ids

    def behind(self, prompt: list[int], whole: list[int], head: Rendered, text: Rendered) -> list[int]:
        """The ids of a completion, from those of its prompt and of both, and the texts of these two."""
        if whole[: len(prompt)] == prompt:
            return whole[len(prompt) :]
        # A token that spans the border would be lost in a cut: then the completion is tokenised by itself.
        return self.alone(completion_of(head, text))

    def one_bos(self, ids: list[int]) -> list[int]:
        """The begin token once where the tokenizer begins texts with it, never twice."""
        if self.bos is None:
            return ids
        start = 0
        while start + 1 < len(ids) and ids[start] == self.bos and ids[start + 1] == self.bos:
            start += 1
        if self.adds_bos and ids[:1] != [self.bos]:
            return [self.bos, *ids]
        return ids[start:] if start else ids

    def ended(self, ids: list[int]) -> list[int]:
        """The ids up to the last end token if only white space follows it, else with the end token added."""
        for at in range(len(ids) - 1, max(len(ids) - 4, -1), -1):
            if ids[at] in self.ends:
                if at + 1 == len(ids) or not self.tokenizer.decode(ids[at + 1 :]).strip():
                    return ids[: at + 1]
                break
        return [*ids, self.eos]

    def blank(self, ids: list[int]) -> bool:
        """Whether these tokens have no content: they are control tokens and white space."""
        rest = set(ids) - self.silent
        return len(rest) <= FEW and not self.tokenizer.decode(sorted(rest)).strip()

    # ---- templates ---------------------------------------------------------------------------------------------

    def turns(
        self, record: Record, completions: tuple[Text, ...]
    ) -> tuple[Text, tuple[Text, ...], Escaping | None]:
        """Prompt and completions, as messages where the template applies, and the escaping of the special tokens in them.

        Raises:
            RowError: where special tokens cannot be told from the row's own private-use characters.
        """
        prompt = record.prompt
        if isinstance(prompt, str) and self.apply_template:
            prompt = [{"role": "user", "content": prompt}]
            completions = tuple(
                [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
                for completion in completions
            )
        turns = [turn for part in (prompt, *completions) if not isinstance(part, str) for turn in part]
        called = [record.tools, *(turn.get("tool_calls") for turn in turns)]
        if any(called) and self.control.as_text:
            for name in self.control.tokens_in(json.dumps(called, ensure_ascii=False)):
                expected = "tools and calls without it, or data.special_tokens=control"
                raise RowError("special_tokens", "tools", show(name), expected)
        try:
            escaping = self.control.escaping(contents(prompt, *completions))
        except ValueError as error:
            raise RowError("special_tokens", "", str(error), "text without one of the two") from None
        if escaping is None:
            return prompt, completions, None
        return (
            escaped(prompt, escaping),
            tuple(escaped(completion, escaping) for completion in completions),
            escaping,
        )

    def whole(self, record: Record, prompt: Text, completion: Text) -> tuple[str, str]:
        """(text of the record's prompt, text of prompt and completion); the second begins with the first."""
        if isinstance(prompt, str):
            return prompt, prompt + str(completion)
        return self.chat.offering(record.tools).whole(prompt, list(completion))  # type: ignore[arg-type]

    def faulty(self, completions: Sequence[list[int]]) -> RowError | None:
        """What is wrong with the token ids of a prompt's completions: one is empty, or both are equal."""
        for name, completion in zip(("chosen", "rejected"), completions, strict=False):
            if self.blank(completion):
                return no_completion(name if len(completions) > 1 else "")
        return equal_pair() if len(completions) > 1 and completions[0] == completions[1] else None

    def over_length(self, found: str) -> RowError | Dropped:
        """The outcome of a row that is too long and is not to be truncated."""
        if self.too_long == "drop":
            return Dropped("too_long")
        return RowError(
            "too_long", "", found, f"at most {self.max_length} tokens (data.max_length or the context)"
        )


# ---- rows of text, or of messages ------------------------------------------------------------------------------


def contents(*parts: Text) -> list[str]:
    """The texts of a row's prompt and completions."""
    return [text for part in parts for text in ([part] if isinstance(part, str) else map(CONTENT, part))]


def size_of(part: Text) -> int:
    return sum(map(len, contents(part)))


def escaped(part: Text, escaping: Escaping) -> Text:
    if isinstance(part, str):
        return escaping.escape(part)
    return [{**turn, "content": escaping.escape(turn["content"])} for turn in part]


def completion_of(head: Rendered, whole: Rendered) -> Rendered:
    """The completion of a rendered text that begins with the rendered prompt."""
    return whole[0][len(head[0]) :], whole[1]


# ---- what is wrong with a row ----------------------------------------------------------------------------------


def equal_pair() -> RowError:
    return RowError(
        "equal_pair",
        "chosen",
        "the same tokens on both sides after chat template and tokenizer",
        "two completions that differ in what the model reads",
    )
