"""Records -> token ids and labels: the chat template, the mask of trained tokens, begin and end tokens, lengths.

Which tokens are trained is found in the rendered *text* (a reply spans from the end of `messages[:i]` with generation
prompt to the end of `messages[:i+1]`; or the template's own `{% generation %}` block) and carried over to tokens by
their character offsets, so that each text is tokenised once, whole, as the model sees it. No torch import.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.data.formats import Record, RowError, Text, Turns, shared_length

DATE = (
    "26 Jul 2024"  # Llama 3.1+ templates write today's date into the prompt: a digest would change every day
)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]


@dataclass
class Example:
    """One training row: its columns, and the lengths that the report counts."""

    columns: dict[str, Any]
    prompt_tokens: int
    reply_tokens: int
    truncated: bool = False


@dataclass(frozen=True)
class Dropped:
    """A row left out without being wrong: `too_long`, or `equal_after_truncation`."""

    reason: str


Outcome = Example | Dropped | RowError


class Encoder:
    """Turns the records of one stage into token rows, a batch at a time.

    `max_length` is in tokens; `too_long` is error | drop | truncate; `apply_template` says whether a text prompt becomes
    a user message; `ends` are all ids that end a reply, of which `tokenizer.eos_token_id` is added where none is there.
    """

    def __init__(
        self,
        tokenizer: Any,
        stage: str,
        max_length: int,
        too_long: str,
        apply_template: bool,
        ends: Sequence[int],
    ):
        self.tokenizer, self.stage = tokenizer, stage
        self.max_length, self.too_long, self.apply_template = max_length, too_long, apply_template
        self.eos, self.ends, self.bos = tokenizer.eos_token_id, frozenset(ends), tokenizer.bos_token_id
        self.adds_bos = self.bos is not None and tokenizer("a").input_ids[:1] == [self.bos]
        self.template = tokenizer.get_chat_template() if tokenizer.chat_template else None
        self.marks_replies = self.template is not None and GENERATION.search(self.template) is not None
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()

    def encode(self, records: Sequence[Record]) -> list[list[Outcome]]:
        """For each record its examples (one for each pair of replies), or what is wrong with it."""
        parts = {
            "sft": self._demonstrations,
            "rm": self._pairs,
            "dpo": self._pairs,
            "score": self._judged,
            "pairs": self._judged,
        }.get(self.stage, self._prompts)
        return parts(records)

    # ---- text -> ids -------------------------------------------------------------------------------------------

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return [
            self._one_bos(encoding.ids)
            for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)
        ]

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

    # ---- templates ---------------------------------------------------------------------------------------------

    def _turns(self, record: Record, replies: tuple[Text, ...]) -> tuple[Text, tuple[Text, ...]]:
        """A text row as messages where the template is to be applied to it."""
        if not isinstance(record.prompt, str) or not self.apply_template:
            return record.prompt, replies
        return [{"role": "user", "content": record.prompt}], tuple(
            [{"role": "assistant", "content": reply}] if isinstance(reply, str) else reply
            for reply in replies
        )

    def render(self, turns: Turns, generation_prompt: bool) -> str:
        """The chat template's text; raises RowError where the template refuses the messages."""
        from jinja2 import TemplateError

        if self.template is None:
            raise RowError(
                "template",
                "messages",
                "a tokenizer without a chat template",
                "model.chat_template: plain, or a file",
            )
        try:
            return self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=generation_prompt, date_string=DATE
            )
        except TemplateError as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise RowError(
                "template", "messages", f"roles {roles}", f"what the chat template accepts: {error}"
            ) from None

    def _whole(self, prompt: Text, reply: Text) -> tuple[str, str]:
        """(text of the prompt, text of prompt and reply); the second begins with the first."""
        if isinstance(prompt, str):
            return prompt, prompt + str(reply)
        head, whole = self.render(prompt, True), self.render([*prompt, *reply], False)
        if not whole.startswith(head):
            raise inconsistent(len(prompt))
        return head, whole

    def _spans(self, turns: Turns, first: int) -> tuple[str, list[Span]]:
        """The rendered conversation, and the character span of each assistant turn from message `first` on."""
        if self.marks_replies and first == 0:
            from transformers.utils.chat_template_utils import render_jinja_template

            whole = self.render(turns, False)  # refuses what the template refuses
            options = {**self.tokenizer.special_tokens_map, "date_string": DATE}
            _, spans = render_jinja_template(
                conversations=[turns],
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **options,
            )
            return whole, [tuple(span) for span in spans[0]]
        whole = self.render(turns, False)
        replies = [i for i in range(first, len(turns)) if turns[i]["role"] == "assistant"]
        return whole, [self._span(whole, turns, i) for i in replies]

    def _span(self, whole: str, turns: Turns, i: int) -> Span:
        content = turns[i]["content"].strip()
        head = self.render(turns[:i], True) if i else whole[: whole.find(content)]
        if not whole.startswith(head):
            raise inconsistent(i)
        upto = whole if i + 1 == len(turns) else self.render(turns[: i + 1], False)
        if whole.startswith(upto):
            return len(head), len(upto)
        # Templates that write the last turn in another way than earlier ones (Qwen3's empty thoughts): by its words.
        at = whole.find(content, len(head))
        if at < 0 or whole[len(head) : at].strip():
            raise inconsistent(i)
        return len(head), at + len(content)

    # ---- the stages --------------------------------------------------------------------------------------------

    def _demonstrations(self, records: Sequence[Record]) -> list[list[Outcome]]:
        rendered: list[tuple[str, list[Span]] | RowError] = []
        for record in records:
            try:
                rendered.append(self._demonstration(record))
            except RowError as error:
                rendered.append(error)
        texts = [item[0] for item in rendered if not isinstance(item, RowError)]
        encodings = iter(self.backend.encode_batch(texts, add_special_tokens=False))
        return [
            [item if isinstance(item, RowError) else self._labelled(next(encodings), *item)]
            for item in rendered
        ]

    def _demonstration(self, record: Record) -> tuple[str, list[Span]]:
        prompt, (reply,) = self._turns(record, record.pairs[0])
        if isinstance(prompt, str):
            whole = prompt + str(reply)
            return whole, [(len(prompt), len(whole))]
        return self._spans([*prompt, *reply], 0 if record.all_turns else len(prompt))

    def _labelled(self, encoding: Any, whole: str, spans: list[Span]) -> Outcome:
        ids, offsets = encoding.ids, encoding.offsets
        starts, trained = [start for start, _ in offsets], [False] * len(ids)
        for begin, stop in spans:  # a token that spans the border of prompt and reply is not trained
            first, last = bisect_left(starts, begin), bisect_left(starts, stop)
            trained[first:last] = [True] * (last - first)
        self._mend_ends(ids, trained, whole, offsets)
        kept = len(self._ended(ids)) if ids and ids[-1] not in self.ends else len(ids)
        if kept > len(ids):
            ids, trained = [*ids, self.eos], [*trained, True]
        else:
            ids, trained = ids[:kept], trained[:kept]
        fixed = self._one_bos(ids)
        trained = [False] * (len(fixed) - len(ids)) + trained[max(len(ids) - len(fixed), 0) :]
        return self._fit_demonstration(fixed, trained)

    def _mend_ends(self, ids: list[int], trained: list[bool], whole: str, offsets: list[Span]) -> None:
        """The end token of each reply is trained; the white space that the template writes behind it is not."""
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
                return self._too_long(length)
            ids, trained = ids[: self.max_length], trained[: self.max_length]
        if not any(trained[1:]):  # the first token is never predicted
            return Dropped("too_long") if length > self.max_length else no_reply()
        labels = [token if on else -100 for token, on in zip(ids, trained, strict=True)]
        replies = sum(trained)
        return Example(
            {"input_ids": ids, "labels": labels}, len(ids) - replies, replies, length > self.max_length
        )

    def _pairs(self, records: Sequence[Record]) -> list[list[Outcome]]:
        results: list[list[Outcome]] = []
        texts: list[str] = []
        rendered: list[
            list[tuple[str, str, str]] | RowError
        ] = []  # (prompt, prompt + chosen, prompt + rejected)
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
                results.append([self._scored(next(ids), next(ids), record.margin) for _ in item])
            else:
                results.append([self._preferred(triple, next(ids), next(ids), next(ids)) for triple in item])
        return results

    def _rendered_pair(self, record: Record, pair: tuple[Text, ...]) -> tuple[str, str, str]:
        prompt, (chosen, rejected) = self._turns(record, pair)
        head, left = self._whole(prompt, chosen)
        return head, left, self._whole(prompt, rejected)[1]

    def _scored(self, chosen: list[int], rejected: list[int], margin: float | None) -> Outcome:
        chosen, rejected = self._ended(chosen), self._ended(rejected)
        length, prompt = max(len(chosen), len(rejected)), shared_length(chosen, rejected)
        if length > self.max_length:
            if self.too_long != "truncate":
                return self._too_long(length)
            chosen, rejected = chosen[: self.max_length], rejected[: self.max_length]
            if chosen == rejected:
                return Dropped("equal_after_truncation")
        columns = {"chosen_ids": chosen, "rejected_ids": rejected, "margin": margin}
        return Example(columns, prompt, len(chosen) - prompt, length > self.max_length)

    def _preferred(self, texts: tuple[str, str, str], prompt: list[int], *sides: list[int]) -> Outcome:
        replies = [
            # A token that spans the border would be lost in a cut: then the reply is tokenised by itself.
            self._ended(
                side[len(prompt) :] if side[: len(prompt)] == prompt else self._alone(whole[len(texts[0]) :])
            )
            for side, whole in zip(sides, texts[1:], strict=True)
        ]
        room = self.max_length - len(prompt)
        length = max(map(len, replies))
        if length > room:
            if self.too_long != "truncate":
                return self._too_long(len(prompt) + length)
            if room < 1:
                return Dropped("too_long")
            replies = [reply[:room] for reply in replies]
            if replies[0] == replies[1]:
                return Dropped("equal_after_truncation")
        columns = {"prompt_ids": prompt, "chosen_ids": replies[0], "rejected_ids": replies[1]}
        return Example(columns, len(prompt), len(replies[0]), length > room)

    def _judged(self, records: Sequence[Record]) -> list[list[Outcome]]:
        """Rows of `score`: prompt and replies together are the ids that `rm` trains on, to the last one."""
        return [self._replies(record) for record in records]

    def _replies(self, record: Record) -> list[Outcome]:
        try:
            turns = [self._turns(record, replies) for replies in record.pairs]
            texts = [[self._whole(prompt, reply) for reply in replies] for prompt, replies in turns]
        except RowError as error:
            return [error]
        return [self._compared(record, index, pair) for index, pair in enumerate(texts)]

    def _compared(self, record: Record, index: int, texts: list[tuple[str, str]]) -> Outcome:
        head, *sides = self._ids([texts[0][0], *(whole for _, whole in texts)])
        sides = [self._ended(side) for side in sides]
        length = max(map(len, sides))
        if length > self.max_length:
            if self.too_long != "truncate":
                return self._too_long(length)
            sides = [side[: self.max_length] for side in sides]
            if len(sides) > 1 and sides[0] == sides[1]:
                return Dropped("equal_after_truncation")
        # A token that spans the border belongs to the reply; and the reply is never empty.
        prompt = min(min(shared_length(head, side), len(side) - 1) for side in sides)
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

    def _alone(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def _prompts(self, records: Sequence[Record]) -> list[list[Outcome]]:
        rendered: list[str | RowError] = []
        for record in records:
            try:
                prompt, _ = self._turns(record, ())
                rendered.append(prompt if isinstance(prompt, str) else self.render(prompt, True))
            except RowError as error:
                rendered.append(error)
        ids = iter(self._ids([item for item in rendered if isinstance(item, str)]))
        return [
            [item if isinstance(item, RowError) else self._asked(next(ids), record)]
            for record, item in zip(records, rendered, strict=True)
        ]

    def _asked(self, ids: list[int], record: Record) -> Outcome:
        length = len(ids)
        if length > self.max_length:
            if self.too_long != "truncate":
                return self._too_long(length)
            begin = ids[:1] if ids[0] == self.bos else []  # a prompt keeps its end: the question stands there
            ids = begin + ids[length - self.max_length + len(begin) :]
        return Example({"input_ids": ids, "row": record.row}, len(ids), 0, length > self.max_length)

    def _too_long(self, length: int) -> Outcome:
        if self.too_long == "drop":
            return Dropped("too_long")
        return RowError(
            "too_long", "", f"{length} tokens", f"at most {self.max_length} (data.max_length or the context)"
        )


def inconsistent(index: int) -> RowError:
    return RowError(
        "template",
        f"messages[{index}]",
        "a chat template that writes earlier turns in another way once this one follows",
        "a prefix-consistent template, or one with {% generation %} around the replies (model.chat_template)",
    )


def no_reply() -> RowError:
    return RowError(
        "empty_reply", "", "no token of a reply after the chat template", "a reply that the template renders"
    )
