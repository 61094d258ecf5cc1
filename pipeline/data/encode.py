"""Converts records to token ids, and applies the chat template and the maximum length. This module does not import torch.

A completion is tokenized together with its prompt, because the model reads them together. The completion begins after the longest
common prefix of the prompt's tokens and the tokens of prompt plus completion. A token that spans the border between prompt and
completion belongs to the completion, as in TRL. A demonstration may have several completions. template.py finds these completions
in the rendered text, and character offsets map their characters to tokens. Special tokens in a row's text are encoded as plain
text (models/control_tokens.py). Rows are rejected if a completion has no tokens, or if both completions of a pair have the same
tokens.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.data.formats import Kind, Record
from pipeline.data.messages import SIDES, Text, Turns, as_turns, shared_length, thoughts_of_turn
from pipeline.data.template import ChatTemplate, Span, contains_after, without_tokens
from pipeline.data.values import Dropped, RowError, show_json
from pipeline.models.control_tokens import ControlTokens, Escaping, texts_of

FEW = 8  # a text with more distinct tokens than this is assumed not to be blank

Rendered = tuple[str, Escaping | None]  # a text, and how its special tokens are escaped


@dataclass
class Example:
    """A token row, with its columns and with token counts for the report."""

    columns: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int
    truncated: bool = False
    ended: bool = True  # whether the trained tokens include an end token


Outcome = Example | Dropped | RowError


class Encoder:
    """Converts records of one kind into token rows, one batch at a time.

    Args:
        max_length: maximum tokens of a row.
        overlong: error | drop | truncate.
        apply_template: whether a plain-text prompt becomes a user message.
        ends: all ids that end a completion. `tokenizer.eos_token_id` is appended to a completion without such an id.
        parse_special_tokens: whether special tokens in the text of a row are encoded as special tokens, not as plain text.
    """

    def __init__(
        self,
        tokenizer: Any,
        kind: Kind,
        max_length: int,
        overlong: str,
        apply_template: bool,
        ends: Sequence[int],
        parse_special_tokens: bool = False,
    ):
        self.chat = ChatTemplate(tokenizer)
        self.tokenizer, self.kind = tokenizer, replace(kind, message_keys=self.chat.message_keys)
        self.max_length, self.overlong, self.apply_template = max_length, overlong, apply_template
        self.control = ControlTokens(tokenizer, as_text=not parse_special_tokens)
        self.eos, self.ends, self.bos = tokenizer.eos_token_id, frozenset(ends), tokenizer.bos_token_id
        # A completion that has only these ids counts as empty. Control tokens count as content only if rows may contain them.
        empty = self.control.names if self.control.as_text else [tokenizer.bos_token, tokenizer.pad_token]
        self.silent = self.ends | set(tokenizer.convert_tokens_to_ids([name for name in empty if name]))
        self.adds_bos = self.bos is not None and tokenizer("a").input_ids[:1] == [self.bos]
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()

    def encode(self, records: Sequence[Record]) -> list[list[Outcome]]:
        """Returns one list per record, with an example for each pair of completions, or with the error of the record."""
        marks_tokens = "labels" in self.kind.columns
        rendered: list[Any] = []
        for record in records:
            try:
                rendered.append((self._spans if marks_tokens else self._texts)(record))
            except RowError as error:
                rendered.append(error)
        valid = [item for item in rendered if not isinstance(item, RowError)]
        if marks_tokens:
            encodings = iter(self.encodings([item[0] for item in valid], self.backend.encode_batch))
        else:
            ids = iter(self.ids([text for item in valid for pair in item for text in pair]))
        outcomes: list[list[Outcome]] = []
        for record, item in zip(records, rendered, strict=True):
            if isinstance(item, RowError):
                outcomes.append([item])
            elif marks_tokens:
                outcomes.append([self._labelled(next(encodings), *item)])
            else:
                outcomes.append(
                    [self._fit(record, i, [next(ids) for _ in pair]) for i, pair in enumerate(item)]
                )
        return outcomes

    def special_in(self, record: Record) -> list[str]:
        """Returns the special tokens that occur in the text of a row."""
        texts = contents(record.prompt, *(completion for pair in record.pairs for completion in pair))
        return list(dict.fromkeys(name for text in texts for name in self.control.tokens_in(text)))

    def unread(self, record: Record) -> tuple[str, ...]:
        """Returns the columns that the model does not see, because no code reads them or the chat template omits them."""
        chat = self.apply_template or not isinstance(record.prompt, str)
        variables = self.chat.variables if chat else ()
        hidden = ["tools"] if record.tools and "tools" not in variables else []
        hidden += [f"chat_template_kwargs.{name}" for name in record.template_kwargs if name not in variables]
        return (*record.unread, *hidden)

    def unlearned_end(self) -> tuple[str, str] | None:
        """Returns (template text after a completion, stop tokens), or None if this template text has a stop token."""
        prompt = {"role": "user", "content": "Who is there?"}
        completion = {"role": "assistant", "content": "Hello."}
        try:
            text = self.chat.render([prompt, completion], False)
        except RowError:
            return None
        ids = self.ids([(text, None)])[0]
        if len(self.ended(ids)) <= len(ids):
            return None
        names = self.tokenizer.convert_ids_to_tokens(sorted(self.ends))
        stops = ", ".join(f"{name} (id {stop})" for stop, name in zip(sorted(self.ends), names, strict=True))
        return text[text.rfind(completion["content"]) + len(completion["content"]) :], stops

    # ---- text -> ids -------------------------------------------------------------------------------------------

    def encodings(self, texts: list[Rendered], batch: Any) -> list[Any]:
        """Encodes texts with `batch`, a method of the tokenizer's backend. Texts that need escaping are encoded one by one."""
        encodings = iter(
            batch([text for text, escaping in texts if escaping is None], add_special_tokens=False)
        )
        return [next(encodings) if escaping is None else escaping.encode(text) for text, escaping in texts]

    def ids(self, texts: list[Rendered]) -> list[list[int]]:
        """Returns the token ids of full texts, including the BOS token."""
        encodings = self.encodings(texts, self.backend.encode_batch_fast)
        return [self.one_bos(encoding.ids) for encoding in encodings]

    def one_bos(self, ids: list[int]) -> list[int]:
        """Removes repeated BOS tokens. Adds a missing BOS token if the tokenizer adds BOS tokens to texts."""
        if self.bos is None:
            return ids
        start = 0
        while start + 1 < len(ids) and ids[start] == self.bos and ids[start + 1] == self.bos:
            start += 1
        if self.adds_bos and ids[:1] != [self.bos]:
            return [self.bos, *ids]
        return ids[start:] if start else ids

    def ended(self, ids: list[int]) -> list[int]:
        """Removes white space after the last end token, or appends the EOS token if the ids do not end with an end token."""
        for index in range(len(ids) - 1, max(len(ids) - 4, -1), -1):
            if ids[index] in self.ends:
                if index + 1 == len(ids) or not self.tokenizer.decode(ids[index + 1 :]).strip():
                    return ids[: index + 1]
                break
        return [*ids, self.eos]

    def blank(self, ids: list[int]) -> bool:
        """Returns True if token ids contain only control tokens and white space."""
        content_ids = set(ids) - self.silent
        return len(content_ids) <= FEW and not self.tokenizer.decode(sorted(content_ids)).strip()

    # ---- prompts and completions ----------------------------------------------------------------------------------

    def _texts(self, record: Record) -> list[list[Rendered]]:
        """Returns, for each pair, the text of the prompt, and the text of the prompt followed by each completion."""
        texts = []
        for completions in record.pairs or [()]:
            prompt, completions, escaping = self.turns(record, completions)
            if isinstance(prompt, str):
                wholes = [prompt, *(prompt + str(completion) for completion in completions)]
            else:
                chat = self.chat.of_row(record.tools, record.template_kwargs)
                pairs = [chat.whole(prompt, list(completion)) for completion in completions]  # type: ignore[arg-type]
                wholes = [pairs[0][0] if pairs else chat.render_prompt(prompt), *(text for _, text in pairs)]
                self._note_unseen(record, prompt, wholes[0])
            texts.append([(whole, escaping) for whole in wholes])
        return texts

    def _fit(self, record: Record, index: int, ids: list[list[int]]) -> Outcome:
        """Returns the example for pair `index` of a record, from the ids of the prompt, with and without completions."""
        prompt, *sides = ids[0], *map(self.ended, ids[1:])
        border = min([len(prompt), *(min(shared_length(prompt, side), len(side) - 1) for side in sides)])
        prompt, sides = prompt[:border], [side[border:] for side in sides]
        for name, side in zip(SIDES, sides, strict=False):
            if self.blank(side):
                return without_tokens("completion", name if len(sides) > 1 else "")
        if len(sides) > 1 and sides[0] == sides[1]:
            found = "the same tokens in both completions, after chat template and tokenizer"
            return RowError("equal_pair", "chosen", found, "completions with different tokens")
        if not prompt or (not sides and self.control.as_text and self.blank(prompt)):
            return without_tokens("prompt")
        length = len(prompt) + max(map(len, sides), default=0)
        if length > self.max_length:
            chat = self.apply_template or not isinstance(record.prompt, str)
            # Truncating a chat on the left would remove the system prompt and the header of a turn.
            if self.overlong != "truncate" or (chat and not sides):
                return self.over_length(length)
            if not sides:
                # Truncate the prompt on the left, because the question is at the end of the prompt.
                bos = prompt[:1] if prompt[0] == self.bos else []
                prompt = bos + prompt[length - self.max_length + len(bos) :]
            elif "row" in self.kind.columns and len(prompt) >= self.max_length:  # scoring must not drop rows
                limit = self.max_length - 1
                prompt, sides = prompt[:limit], [prompt[limit:] + side for side in sides]
            if sides and len(prompt) >= self.max_length:
                return self.prompt_too_long()
            sides = [side[: self.max_length - len(prompt)] for side in sides]
            if len(sides) > 1 and sides[0] == sides[1]:
                return Dropped("equal_after_truncation")
        completion = sides[0] if sides else []
        return Example(
            self.kind.example(record, index, prompt, sides),
            len(prompt),
            len(completion),
            length > self.max_length,
            self.kind.completions != "learned" or completion[-1] in self.ends,
        )

    # ---- demonstrations ----------------------------------------------------------------------------------------

    def _spans(self, record: Record) -> tuple[Rendered, list[Span], bool]:
        """Returns the rendered text, its trained spans, and whether the last turn is trained."""
        prompt, (completion,), escaping = self.turns(record, record.pairs[0])
        if isinstance(prompt, str):
            text = prompt + str(completion)
            return (text, escaping), [(len(prompt), len(text))], True
        turns = [*prompt, *completion]
        chat = self.chat.of_row(record.tools, record.template_kwargs)
        text, spans = chat.spans(turns, 0 if record.all_turns else len(prompt), record.untrained)  # type: ignore[arg-type]
        if not contains_after(text, prompt[-1]["content"].strip()):
            # Raises RowError if the template drops or changes the last turn of the prompt.
            chat.render_prompt(prompt)
        self._note_unseen(record, turns, text)
        return (text, escaping), spans, len(turns) - 1 not in record.untrained

    @staticmethod
    def _note_unseen(record: Record, turns: Turns, text: str) -> None:
        """Adds thoughts of earlier turns to `record.unread` if the chat template omits them (as in Qwen3).

        Args:
            text: the turns, as the template renders them.
        """
        if not all(contains_after(text, thoughts_of_turn(turn)) for turn in turns):
            record.unread = tuple(dict.fromkeys([*record.unread, "thoughts before the last turn"]))

    def _labelled(self, encoding: Any, text: Rendered, spans: list[Span], trains_end: bool) -> Outcome:
        """Returns the example of a rendered text. `labels` has the ids of trained tokens, and -100 for all other tokens."""
        ids, offsets = encoding.ids, encoding.offsets
        starts, trained = [start for start, _ in offsets], [False] * len(ids)
        for begin, stop in spans:  # a token that spans the border is not trained
            first, last = bisect_left(starts, begin), bisect_left(starts, stop)
            trained[first:last] = [True] * (last - first)
        self._train_ends(ids, trained, text[0], offsets)
        length = len(self.ended(ids)) if ids and ids[-1] not in self.ends else len(ids)
        if length > len(ids):
            ids, trained = [*ids, self.eos], [*trained, trains_end]
        else:
            ids, trained = ids[:length], trained[:length]
        with_bos = self.one_bos(ids)
        trained = [False] * (len(with_bos) - len(ids)) + trained[max(len(ids) - len(with_bos), 0) :]
        return self._fit_labels(with_bos, trained)

    def _train_ends(self, ids: list[int], trained: list[bool], text: str, offsets: list[Span]) -> None:
        """Marks the end token of each completion as trained, and the template's white space after the end token as untrained."""
        start = 0
        while True in trained[start:]:
            start = trained.index(True, start)
            stop = trained.index(False, start) if False in trained[start:] else len(ids)
            if ids[stop - 1] not in self.ends and stop < len(ids) and ids[stop] in self.ends:
                # Some templates write the end token after the trained span, for example after the generation block.
                trained[stop] = True
                stop += 1
            last = stop - 1
            while last > start and ids[last] not in self.ends and not text[slice(*offsets[last])].strip():
                last -= 1
            if ids[last] in self.ends:
                trained[last + 1 : stop] = [False] * (stop - last - 1)
            start = stop

    def _fit_labels(self, ids: list[int], trained: list[bool]) -> Outcome:
        length = len(ids)
        if length > self.max_length:
            if self.overlong != "truncate":
                return self.over_length(length)
            ids, trained = ids[: self.max_length], trained[: self.max_length]
        # The first token is not trained, because no earlier token predicts it.
        if self.blank([token for token, is_trained in zip(ids[1:], trained[1:], strict=True) if is_trained]):
            return self.prompt_too_long() if length > self.max_length else without_tokens("completion")
        labels = [token if is_trained else -100 for token, is_trained in zip(ids, trained, strict=True)]
        columns, count = {"input_ids": ids, "labels": labels}, sum(trained)
        ended = not self.ends.isdisjoint(labels)
        return Example(columns, len(ids) - count, count, length > self.max_length, ended)

    # ---- templates ---------------------------------------------------------------------------------------------

    def turns(
        self, record: Record, completions: tuple[Text, ...]
    ) -> tuple[Text, tuple[Text, ...], Escaping | None]:
        """Returns prompt and completions, as messages if the template applies, and the escaping of their special tokens.

        Raises RowError if tools or tool calls contain a special token.
        """
        prompt = record.prompt
        if isinstance(prompt, str) and self.apply_template:
            prompt = as_turns(prompt)
            completions = tuple([{"role": "assistant", "content": str(text)}] for text in completions)
        turns = [turn for part in (prompt, *completions) for turn in as_turns(part)]
        objects = [value for turn in turns for value in turn.values() if not isinstance(value, str)]
        if self.control.as_text and any(objects := [record.tools, record.template_kwargs, *objects]):
            for name in self.control.tokens_in(json.dumps(objects, ensure_ascii=False)):
                expected = "tools and tool calls without special tokens, or data.parse_special_tokens=true"
                raise RowError("special_tokens", "tools", show_json(name), expected)
        escaping = self.control.escaping(contents(prompt, *completions))
        if escaping is None:
            return prompt, completions, None
        return escaped(prompt, escaping), tuple(escaped(side, escaping) for side in completions), escaping

    def over_length(self, length: int) -> RowError | Dropped:
        """Returns a RowError or Dropped for a row that is too long, depending on data.overlong."""
        expected = f"at most {self.max_length} tokens (data.max_length or the context)"
        error = RowError("overlong", "", f"{length} tokens", expected)
        return error if self.overlong == "error" else Dropped("overlong", error)

    def prompt_too_long(self) -> Dropped:
        """Returns Dropped for a row whose prompt leaves no token for the completion."""
        found = f"no token of the completion among the first {self.max_length}"
        error = RowError("prompt_too_long", "", found, "a shorter prompt, or a larger data.max_length")
        return Dropped("prompt_too_long", error)


# ---- rows of text, or of messages ------------------------------------------------------------------------------


def contents(*parts: Text) -> list[str]:
    """Returns the texts of a row's prompt and completions."""
    return texts_of([turn for part in parts for turn in as_turns(part)])


def escaped(part: Text, escaping: Escaping) -> Text:
    if isinstance(part, str):
        return escaping.escape(part)
    return [escaping.escape_message(turn) for turn in part]
