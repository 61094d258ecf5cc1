"""Messages -> the text of a chat template, and where in it the completions stand.

A completion spans from the end of `messages[:i]` with generation prompt to the end of `messages[:i+1]`; or it is the template's
own `{% generation %}` block. Some templates write an earlier completion in another way than the last one (Qwen3 takes its thoughts
out): then it is what changes in the text when that completion says something else. A template that leaves out a completion, changes
its words, or does not write the last one where it asks for one is refused row by row.
"""

import re
from collections.abc import Collection
from typing import Any

from pipeline.data.formats import RowError, Turns, show
from pipeline.errors import visible
from pipeline.system import deadline

DATE = (
    "26 Jul 2024"  # Llama 3.1+ templates write today's date into the prompt: a digest would change every day
)
BEGUN = 200  # characters of a completion, at most, that the text which asks for it may end on
SECONDS, LONGEST = (
    10.0,
    1 << 26,
)  # that a template may take for one row, and characters that it may make of it
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

# Behind it stands the part of a completion that templates keep once the conversation goes on.
END_OF_THOUGHTS = re.compile(r"</(?:think|thinking|thought|thoughts|reasoning)>|\[/THINK\]")

Span = tuple[int, int]


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.text = tokenizer.get_chat_template() if tokenizer.chat_template else None
        self.marks_completions = self.text is not None and GENERATION.search(self.text) is not None

    def render(self, turns: Turns, generation_prompt: bool) -> str:
        """The chat template's text; raises RowError where the template refuses the messages."""
        if self.text is None:
            raise RowError(
                "template",
                "messages",
                "a tokenizer without a chat template",
                "model.chat_template: plain, or a file",
            )
        late = RowError(
            "template", "messages", f"a row that renders for {SECONDS:g} seconds", "a chat template that ends"
        )
        try:
            with deadline.limited(SECONDS, late):
                text = self.tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=generation_prompt, date_string=DATE
                )
            if len(text) > LONGEST:
                found = f"{len(text):,} characters for one row"
                raise RowError("template", "messages", found, f"a template that writes at most {LONGEST:,}")
            return text
        except RowError:
            raise
        except Exception as error:  # a template is a program: it raises what it likes, about this row
            roles = ", ".join(dict.fromkeys(turn["role"] for turn in turns))
            said = visible(f"{type(error).__name__}: {error}", lines=False)[:300]
            raise RowError(
                "template", "messages", f"roles {roles}", f"what the chat template accepts: {said}"
            ) from None

    def whole(self, prompt: Turns, completion: Turns) -> tuple[str, str]:
        """(text of the prompt, text of prompt and completion); the second begins with the first."""
        turns = [*prompt, *completion]
        head, whole = self.asking(prompt), self.render(turns, False)
        if not whole.startswith(head):
            raise unlike_asked(len(prompt), head)
        self.check_written(turns, whole, len(head))
        return head, whole

    def asking(self, prompt: Turns) -> str:
        """The text of a prompt, up to where the completion begins."""
        head = self.render(prompt, True)
        self.check_written(prompt, head)
        return head

    def check_written(self, turns: Turns, text: str, start: int = 0) -> None:
        """Raises RowError where the last turn does not stand in `text` from `start` on: it is left out, or other words are."""
        content, role = turns[-1]["content"].strip(), turns[-1]["role"]
        if holds(text, content, start):
            return
        other = [*turns[:-1], {"role": role, "content": f"not {content} at all"}]
        if self.render(other, role != "assistant") == text:
            raise no_completion() if role == "assistant" else no_prompt()
        if role in ("user", "assistant"):  # what tools say may be written in another form
            raise distorted(len(turns) - 1, content)

    def spans(self, turns: Turns, first: int, untrained: Collection[int] = ()) -> tuple[str, list[Span]]:
        """The rendered conversation, and where the assistant turns from message `first` on that are trained stand in it."""
        whole = self.render(turns, False)  # refuses what the template refuses
        completions = [i for i, turn in enumerate(turns) if turn["role"] == "assistant" and i >= first]
        trained = [i for i in completions if i not in untrained]
        spans = self._marked(turns) if self.marks_completions and first == 0 else []
        if len(spans) == len(completions):
            spans = [span for i, span in zip(completions, spans, strict=True) if i not in untrained]
        elif not spans or len(trained) < len(completions):
            spans = [self._span(whole, turns, i) for i in trained]
        apart = len(spans) == len(trained)  # else the blocks are not one for each completion
        for at, i in enumerate(trained):
            if i + 1 < len(turns):
                check_kept(whole[slice(*spans[at])] if apart else whole, turns, i)
        last = apart and trained[-1] + 1 == len(turns)
        self.check_written(turns, whole, spans[-1][0] if last else 0)
        return whole, spans

    def _marked(self, turns: Turns) -> list[Span]:
        from transformers.utils.chat_template_utils import render_jinja_template

        _, spans = render_jinja_template(
            conversations=[turns],
            chat_template=self.text,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
            date_string=DATE,
        )
        return [tuple(span) for span in spans[0]]

    def _span(self, whole: str, turns: Turns, i: int) -> Span:
        head = self.render(turns[:i], True) if i else ""
        if i + 1 == len(turns):
            if not whole.startswith(head):
                raise unlike_asked(i, head)
            return len(head), len(whole)
        upto = self.render(turns[: i + 1], False)
        if i and whole.startswith(head) and whole.startswith(upto):
            return len(head), len(upto)
        begin, stop = self._changing(whole, turns, i)
        if i and whole.startswith(head):  # what the template itself writes before the words is learned, too
            begin = min(begin, len(head))
        return begin, len(upto) if whole.startswith(upto) else stop

    def _changing(self, whole: str, turns: Turns, i: int) -> Span:
        """The part of the text that is another one when turn `i` says something else."""
        mark = next(char for char in map(chr, range(0xE000, 0xF900)) if char not in whole)
        other = self.render([*turns[:i], {**turns[i], "content": mark}, *turns[i + 1 :]], False)
        before, _, behind = other.partition(mark)
        stop = len(whole) - len(behind)
        if mark in behind or stop < len(before) or not (whole.startswith(before) and whole.endswith(behind)):
            raise inconsistent(i)
        return len(before), stop


def holds(text: str, content: str, start: int = 0) -> bool:
    """Whether `content` stands in `text` and ends behind `start`, white space aside.

    It may begin before: the text that asks for a completion of some models ends on the "<think>" that the completion begins with.
    """
    if text.find(content, max(0, start - len(content) + 1)) >= 0:
        return True
    words, before = squeezed(content), squeezed(text[max(0, start - BEGUN) : start])
    return words in before[max(0, len(before) - len(words) + 1) :] + squeezed(text[start:])


def squeezed(text: str) -> str:
    return "".join(text.split())


def check_kept(text: str, turns: Turns, i: int) -> None:
    """Raises RowError where `text` lacks words of a completion that is not the last; its thoughts may be taken out."""
    content = turns[i]["content"].strip()
    if not holds(text, content) and not holds(text, END_OF_THOUGHTS.split(content)[-1]):
        raise distorted(i, content)


# ---- what is wrong with a row and its template -----------------------------------------------------------------


def inconsistent(index: int) -> RowError:
    return RowError(
        "template",
        f"messages[{index}]",
        "a chat template that writes other turns in another way depending on what this one says",
        "a template with {% generation %} around the completions, or another one (model.chat_template)",
    )


def unlike_asked(index: int, head: str) -> RowError:
    return RowError(
        "template",
        f"messages[{index}]",
        f"a chat template that asks for a completion with {show(head[-30:])} but writes this one without that",
        "a completion that begins as the template asks for it, or another template (model.chat_template)",
    )


def distorted(index: int, content: str) -> RowError:
    return RowError(
        "template",
        f"messages[{index}]",
        f"a chat template that cuts or changes the words of {show(content)}",
        "one that writes them as they are (model.chat_template)",
    )


def no_completion(name: str = "") -> RowError:
    return RowError(
        "empty_completion",
        name,
        "no token of a completion after the chat template",
        "a completion that the template renders and the tokenizer knows",
    )


def no_prompt() -> RowError:
    return RowError(
        "empty_prompt",
        "",
        "no token of a prompt after the chat template",
        "a prompt that the template renders and the tokenizer knows",
    )
