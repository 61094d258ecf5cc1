"""Records -> token ids and labels: the chat template, the mask of trained tokens, begin and end tokens, lengths.

Which tokens are trained is found in the rendered *text* (template.py) and carried over to tokens by their character
offsets, so that each text is tokenised once, whole, as the model sees it. Special tokens in the text of a row stay
text (models/special.py). What a row teaches is compared as tokens: an empty completion or a pair of equal ones is refused.
No torch import.
"""

import json
import operator
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.data.formats import Record, RowError, Text, shared_length
from pipeline.data.template import ChatTemplate, Span, holds, no_completion, no_prompt
from pipeline.data.values import show
from pipeline.errors import InputError, in_brief
from pipeline.models.special import ControlTokens, Escaping

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
    """A row left out without being wrong: `too_long`, or `equal_after_truncation`."""

    reason: str


Outcome = Example | Dropped | RowError


class Encoder:
    """Turns the records of one stage into token rows, a batch at a time.

    `max_length` is in tokens; `too_long` is error | drop | truncate; `apply_template` says whether a text prompt becomes
    a user message; `ends` are all ids that end a completion, of which `tokenizer.eos_token_id` is added where none is there;
    `special_tokens` in the text of a row are text | control.
    """

    def __init__(
        self,
        tokenizer: Any,
        stage: str,
        max_length: int,
        too_long: str,
        apply_template: bool,
        ends: Sequence[int],
        special_tokens: str = "text",
    ):
        self.tokenizer, self.stage = tokenizer, stage
        self.max_length, self.too_long, self.apply_template = max_length, too_long, apply_template
        self.room = CHARACTERS * max_length + SLACK  # characters
        self.control = ControlTokens(tokenizer, as_text=special_tokens == "text")
        self.eos, self.ends, self.bos = tokenizer.eos_token_id, frozenset(ends), tokenizer.bos_token_id
        # A completion of these ids alone is empty. Control tokens count as content only where rows may contain them.
        around = self.control.names if self.control.as_text else [tokenizer.bos_token, tokenizer.pad_token]
        self.silent = self.ends | set(tokenizer.convert_tokens_to_ids([name for name in around if name]))
        self.adds_bos = self.bos is not None and tokenizer("a").input_ids[:1] == [self.bos]
        self.chat = ChatTemplate(tokenizer)
        self.render = self.chat.render
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()

    def encode(self, records: Sequence[Record]) -> list[list[Outcome]]:
        """For each record its examples (one for each pair of completions), or what is wrong with it."""
        parts = {
            "sft": self._demonstrations,
            "rm": self._pairs,
            "dpo": self._pairs,
            "score": self._judged,
            "pairs": self._judged,
        }.get(self.stage, self._prompts)
        huge = [self._huge(record) for record in records]
        found = iter(parts([record for record, far in zip(records, huge, strict=True) if far is None]))
        return [next(found) if far is None else [far] for far in huge]

    def special_in(self, record: Record) -> list[str]:
        """The special tokens in the text of a row."""
        texts = contents(record.prompt, *(completion for pair in record.pairs for completion in pair))
        return list(dict.fromkeys(name for text in texts for name in self.control.tokens_in(text)))

    def unlearned_end(self) -> tuple[str, str] | None:
        """What the chat template ends a completion with and what generation stops on, where it does not stop on the first."""
        asked, completion = (
            {"role": "user", "content": "Who is there?"},
            {"role": "assistant", "content": "Hello."},
        )
        try:
            whole = self.render([asked, completion], False)
        except RowError:
            return None
        ids = self._ids([(whole, None)])[0]
        if len(self._ended(ids)) <= len(ids):
            return None
        names = self.tokenizer.convert_ids_to_tokens(sorted(self.ends))
        stops = ", ".join(
            f"{name} (id {index})" for index, name in zip(sorted(self.ends), names, strict=True)
        )
        return whole[whole.rfind(completion["content"]) + len(completion["content"]) :], stops

    def _huge(self, record: Record) -> Outcome | None:
        """What becomes of a row that is too long beyond doubt; to tokenise it would take a second for each megabyte."""
        pairs = [sum(map(size_of, pair)) for pair in record.pairs]
        size = size_of(record.prompt) + max(pairs, default=0)
        if size <= self.room or self.too_long == "truncate":
            return None
        return self._too_long(f"{size:,} characters")

    # ---- text -> ids -------------------------------------------------------------------------------------------

    def _encodings(self, texts: list[Rendered], batch: Any) -> list[Any]:
        """`batch`, a method of the backend, on all texts; escaped ones are encoded one by one."""
        plain = [text[: self.room] for text, escaping in texts if escaping is None]
        try:
            found = iter(batch(plain, add_special_tokens=False))
        except BaseException as error:  # a panic in tokenizers is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise InputError(
                f"its tokenizer fails on {show(self._culprit(plain, batch))} ({in_brief(error)}); fetch the model again, or take "
                "that row out",
                key="model.name_or_path",
            ) from None
        return [
            next(found) if escaping is None else escaping.encode(text[: self.room])
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

    def _ids(self, texts: list[Rendered]) -> list[list[int]]:
        encodings = self._encodings(texts, self.backend.encode_batch_fast)
        return [self._one_bos(encoding.ids) for encoding in encodings]

    def _alone(self, rendered: Rendered) -> list[int]:
        return self._encodings([rendered], self.backend.encode_batch_fast)[0].ids

    def _one_bos(self, ids: list[int]) -> list[int]:
        """The begin token once where the tokenizer begins texts with it, never twice."""
        if self.bos is None:
            return ids
        start = 0
        while start + 1 < len(ids) and ids[start] == self.bos and ids[start + 1] == self.bos:
            start += 1
        if self.adds_bos and ids[:1] != [self.bos]:
            return [self.bos, *ids]
        return ids[start:] if start else ids

    def _ended(self, ids: list[int]) -> list[int]:
        """Cut behind the last end token where only white space follows it, else the end token added."""
        for at in range(len(ids) - 1, max(len(ids) - 4, -1), -1):
            if ids[at] in self.ends:
                if at + 1 == len(ids) or not self.tokenizer.decode(ids[at + 1 :]).strip():
                    return ids[: at + 1]
                break
        return [*ids, self.eos]

    def _blank(self, ids: list[int]) -> bool:
        """Whether these tokens have no content: they are control tokens and white space."""
        rest = set(ids) - self.silent
        return len(rest) <= FEW and not self.tokenizer.decode(sorted(rest)).strip()

    # ---- templates ---------------------------------------------------------------------------------------------

    def _turns(
        self, record: Record, completions: tuple[Text, ...]
    ) -> tuple[Text, tuple[Text, ...], Escaping | None]:
        """Prompt and completions, as messages where the template is to be applied, and the escaping of the special tokens in them."""
        prompt = record.prompt
        if isinstance(prompt, str) and self.apply_template:
            prompt = [{"role": "user", "content": prompt}]
            completions = tuple(
                [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
                for completion in completions
            )
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

    def _whole(self, prompt: Text, completion: Text) -> tuple[str, str]:
        """(text of the prompt, text of prompt and completion); the second begins with the first."""
        if isinstance(prompt, str):
            return prompt, prompt + str(completion)
        return self.chat.whole(prompt, list(completion))  # type: ignore[arg-type]

    # ---- the stages --------------------------------------------------------------------------------------------

    def _demonstrations(self, records: Sequence[Record]) -> list[list[Outcome]]:
        rendered: list[tuple[Rendered, list[Span], bool] | RowError] = []
        for record in records:
            try:
                rendered.append(self._demonstration(record))
            except RowError as error:
                rendered.append(error)
        texts = [item[0] for item in rendered if not isinstance(item, RowError)]
        encodings = iter(self._encodings(texts, self.backend.encode_batch))
        return [
            [item if isinstance(item, RowError) else self._labelled(next(encodings), item[0][0], *item[1:])]
            for item in rendered
        ]

    def _demonstration(self, record: Record) -> tuple[Rendered, list[Span], bool]:
        """The text, the spans in it that are trained, and whether its last turn is one of them."""
        prompt, (completion,), escaping = self._turns(record, record.pairs[0])
        if isinstance(prompt, str):
            whole = prompt + str(completion)
            return (whole, escaping), [(len(prompt), len(whole))], True
        turns = [*prompt, *completion]
        whole, spans = self.chat.spans(turns, 0 if record.all_turns else len(prompt), record.untrained)
        if not holds(whole, prompt[-1]["content"].strip()):
            self.chat.asking(prompt)  # refuses what the template leaves out or changes
        return (whole, escaping), spans, len(turns) - 1 not in record.untrained

    def _labelled(self, encoding: Any, whole: str, spans: list[Span], ends: bool) -> Outcome:
        ids, offsets = encoding.ids, encoding.offsets
        starts, trained = [start for start, _ in offsets], [False] * len(ids)
        for begin, stop in spans:  # a token that spans the border of prompt and completion is not trained
            first, last = bisect_left(starts, begin), bisect_left(starts, stop)
            trained[first:last] = [True] * (last - first)
        self._mend_ends(ids, trained, whole, offsets)
        kept = len(self._ended(ids)) if ids and ids[-1] not in self.ends else len(ids)
        if kept > len(ids):
            ids, trained = [*ids, self.eos], [*trained, ends]
        else:
            ids, trained = ids[:kept], trained[:kept]
        fixed = self._one_bos(ids)
        trained = [False] * (len(fixed) - len(ids)) + trained[max(len(ids) - len(fixed), 0) :]
        return self._fit_demonstration(fixed, trained)

    def _mend_ends(self, ids: list[int], trained: list[bool], whole: str, offsets: list[Span]) -> None:
        """The end token of each completion is trained; the white space that the template writes behind it is not."""
        at = 0
        while True in trained[at:]:
            at = trained.index(True, at)
            stop = trained.index(False, at) if False in trained[at:] else len(ids)
            if ids[stop - 1] not in self.ends and stop < len(ids) and ids[stop] in self.ends:
                trained[stop] = True  # the template's generation block, or the words found, end before it
                stop += 1
            last = stop - 1
            while last > at and ids[last] not in self.ends and not whole[slice(*offsets[last])].strip():
                last -= 1
            if ids[last] in self.ends:
                trained[last + 1 : stop] = [False] * (stop - last - 1)
            at = stop

    def _fit_demonstration(self, ids: list[int], trained: list[bool]) -> Outcome:
        length = len(ids)
        if length > self.max_length:
            if self.too_long != "truncate":
                return self._too_long(f"{length} tokens")
            ids, trained = ids[: self.max_length], trained[: self.max_length]
        # The first token is never predicted.
        if self._blank([token for token, on in zip(ids[1:], trained[1:], strict=True) if on]):
            return Dropped("too_long") if length > self.max_length else no_completion()
        labels = [token if on else -100 for token, on in zip(ids, trained, strict=True)]
        completions = sum(trained)
        ended = not self.ends.isdisjoint(labels)
        columns = {"input_ids": ids, "labels": labels}
        return Example(columns, len(ids) - completions, completions, length > self.max_length, ended)

    def _pairs(self, records: Sequence[Record]) -> list[list[Outcome]]:
        results: list[list[Outcome]] = []
        texts: list[Rendered] = []
        rendered: list[
            list[tuple[Rendered, ...]] | RowError
        ] = []  # prompt, prompt + chosen, prompt + rejected
        for record in records:
            try:
                triples = [self._rendered_pair(record, pair) for pair in record.pairs]
            except RowError as error:
                rendered.append(error)
                continue
            rendered.append(triples)
            texts += [text for triple in triples for text in triple[self.stage == "rm" :]]
        ids = iter(self._ids(texts))
        for record, item in zip(records, rendered, strict=True):
            if isinstance(item, RowError):
                results.append([item])
            elif self.stage == "rm":
                results.append([self._scored(triple, next(ids), next(ids), record.margin) for triple in item])
            else:
                results.append([self._preferred(triple, next(ids), next(ids), next(ids)) for triple in item])
        return results

    def _rendered_pair(self, record: Record, pair: tuple[Text, ...]) -> tuple[Rendered, ...]:
        prompt, (chosen, rejected), escaping = self._turns(record, pair)
        head, left = self._whole(prompt, chosen)
        return (head, escaping), (left, escaping), (self._whole(prompt, rejected)[1], escaping)

    def _scored(
        self, texts: tuple[Rendered, ...], chosen: list[int], rejected: list[int], margin: float | None
    ) -> Outcome:
        chosen, rejected = self._ended(chosen), self._ended(rejected)
        if chosen == rejected:
            return equal_pair()
        for name, text in zip(("chosen", "rejected"), texts[1:], strict=True):
            completion = completion_of(texts[0], text)
            if not WORD.search(self.control.pattern.sub("", completion[0])) and self._blank(
                self._alone(completion)
            ):
                return no_completion(name)
        length, prompt = max(len(chosen), len(rejected)), shared_length(chosen, rejected)
        if length > self.max_length:
            if self.too_long != "truncate":
                return self._too_long(f"{length} tokens")
            chosen, rejected = chosen[: self.max_length], rejected[: self.max_length]
            if chosen == rejected:
                return Dropped("equal_after_truncation")
        columns = {"chosen_ids": chosen, "rejected_ids": rejected, "margin": margin}
        return Example(columns, prompt, len(chosen) - prompt, length > self.max_length)

    def _preferred(self, texts: tuple[Rendered, ...], prompt: list[int], *sides: list[int]) -> Outcome:
        completions = [
            # A token that spans the border would be lost in a cut: then the completion is tokenised by itself.
            self._ended(
                side[len(prompt) :]
                if side[: len(prompt)] == prompt
                else self._alone(completion_of(texts[0], whole))
            )
            for side, whole in zip(sides, texts[1:], strict=True)
        ]
        if wrong := self._faulty(completions):
            return wrong
        if not prompt:
            return no_prompt()
        room = self.max_length - len(prompt)
        length = max(map(len, completions))
        if length > room:
            if self.too_long != "truncate":
                return self._too_long(f"{len(prompt) + length} tokens")
            if room < 1:
                return Dropped("too_long")
            completions = [completion[:room] for completion in completions]
            if completions[0] == completions[1]:
                return Dropped("equal_after_truncation")
        columns = {"prompt_ids": prompt, "chosen_ids": completions[0], "rejected_ids": completions[1]}
        ended = completions[0][-1] in self.ends
        return Example(columns, len(prompt), len(completions[0]), length > room, ended)

    def _faulty(self, completions: Sequence[list[int]]) -> RowError | None:
        """What is wrong with the completions of one prompt, as tokens: one is empty, or both are equal."""
        for name, completion in zip(("chosen", "rejected"), completions, strict=False):
            if self._blank(completion):
                return no_completion(name if len(completions) > 1 else "")
        return equal_pair() if len(completions) > 1 and completions[0] == completions[1] else None

    def _judged(self, records: Sequence[Record]) -> list[list[Outcome]]:
        """Rows of `score`: prompt and completions together are the ids that `rm` trains on, to the last one."""
        return [self._completions(record) for record in records]

    def _completions(self, record: Record) -> list[Outcome]:
        try:
            texts = [self._prompt_and_completions(record, completions) for completions in record.pairs]
        except RowError as error:
            return [error]
        return [self._compared(record, index, pair) for index, pair in enumerate(texts)]

    def _prompt_and_completions(self, record: Record, completions: tuple[Text, ...]) -> list[Rendered]:
        prompt, completions, escaping = self._turns(record, completions)
        wholes = [self._whole(prompt, completion) for completion in completions]
        return [(wholes[0][0], escaping), *((whole, escaping) for _, whole in wholes)]

    def _compared(self, record: Record, index: int, texts: list[Rendered]) -> Outcome:
        head, *sides = self._ids(texts)
        sides = [self._ended(side) for side in sides]
        # A token that spans the border belongs to the completion; and the completion is never empty.
        prompt = min(min(shared_length(head, side), len(side) - 1) for side in sides)
        if wrong := self._faulty([side[prompt:] for side in sides]):
            return wrong
        length = max(map(len, sides))
        if length > self.max_length:
            if self.too_long != "truncate":
                return self._too_long(f"{length} tokens")
            sides = [side[: self.max_length] for side in sides]
            if len(sides) > 1 and sides[0] == sides[1]:
                return Dropped("equal_after_truncation")
            prompt = min(min(prompt, len(side) - 1) for side in sides)
        chosen, rejected = [*(side[prompt:] for side in sides), None][:2]
        row = record.row
        if len(record.pairs) > 1:  # one row of several answers is several pairs
            row = json.dumps({**json.loads(row), "pair": index}, ensure_ascii=False)
        columns = {
            "prompt_ids": sides[0][:prompt],
            "chosen_ids": chosen,
            "rejected_ids": rejected,
            "row": row,
        }
        assert chosen is not None
        return Example(columns, prompt, len(chosen), length > self.max_length)

    def _prompts(self, records: Sequence[Record]) -> list[list[Outcome]]:
        rendered: list[Rendered | RowError] = []
        for record in records:
            try:
                prompt, _, escaping = self._turns(record, ())
                text = prompt if isinstance(prompt, str) else self.chat.asking(prompt)
                rendered.append((text[-self.room :], escaping))
            except RowError as error:
                rendered.append(error)
        ids = iter(self._ids([item for item in rendered if not isinstance(item, RowError)]))
        return [
            [item if isinstance(item, RowError) else self._asked(next(ids), record)]
            for record, item in zip(records, rendered, strict=True)
        ]

    def _asked(self, ids: list[int], record: Record) -> Outcome:
        length = len(ids)
        if not ids or (self.control.as_text and self._blank(ids)):
            return no_prompt()
        if length > self.max_length:
            if self.too_long != "truncate":
                return self._too_long(f"{length} tokens")
            begin = ids[:1] if ids[0] == self.bos else []  # a prompt keeps its end: the question stands there
            ids = begin + ids[length - self.max_length + len(begin) :]
        return Example({"input_ids": ids, "row": record.row}, len(ids), 0, length > self.max_length)

    def _too_long(self, found: str) -> RowError | Dropped:
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
    return whole[0][len(head[0]) :], whole[1]


# ---- what is wrong with a row ----------------------------------------------------------------------------------


def equal_pair() -> RowError:
    return RowError(
        "equal_pair",
        "chosen",
        "the same tokens on both sides after chat template and tokenizer",
        "two completions that differ in what the model reads",
    )
