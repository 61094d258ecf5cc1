"""Messages -> the text of a chat template, and where in it the replies stand.

A reply spans from the end of `messages[:i]` with generation prompt to the end of `messages[:i+1]`; or it is the template's
own `{% generation %}` block. A template that leaves out a reply, or rewrites what it has written, is refused row by row.
"""

import re
from typing import Any

from pipeline.data.formats import RowError, Turns
from pipeline.errors import visible

DATE = (
    "26 Jul 2024"  # Llama 3.1+ templates write today's date into the prompt: a digest would change every day
)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.text = tokenizer.get_chat_template() if tokenizer.chat_template else None
        self.marks_replies = self.text is not None and GENERATION.search(self.text) is not None

    def render(self, turns: Turns, generation_prompt: bool) -> str:
        """The chat template's text; raises RowError where the template refuses the messages."""
        if self.text is None:
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
        except Exception as error:  # a template is a program: it raises what it likes, about this row
            roles = ", ".join(dict.fromkeys(turn["role"] for turn in turns))
            said = visible(f"{type(error).__name__}: {error}", lines=False)[:300]
            raise RowError(
                "template", "messages", f"roles {roles}", f"what the chat template accepts: {said}"
            ) from None

    def whole(self, prompt: Turns, reply: Turns) -> tuple[str, str]:
        """(text of the prompt, text of prompt and reply); the second begins with the first."""
        turns = [*prompt, *reply]
        head, whole = self.asking(prompt), self.render(turns, False)
        if not whole.startswith(head):
            raise inconsistent(len(prompt))
        self.check_written(turns, whole, len(head))
        return head, whole

    def asking(self, prompt: Turns) -> str:
        """The text of a prompt, up to where the reply begins."""
        head = self.render(prompt, True)
        self.check_written(prompt, head)
        return head

    def check_written(self, turns: Turns, text: str, start: int = 0) -> None:
        """Raises RowError where the template leaves out the last turn: its `text` is the same with another one."""
        content, role = turns[-1]["content"].strip(), turns[-1]["role"]
        if text.find(content, start) >= 0:
            return
        other = [*turns[:-1], {"role": role, "content": f"not {content} at all"}]
        if self.render(other, role != "assistant") == text:
            raise no_reply() if role == "assistant" else no_prompt()

    def spans(self, turns: Turns, first: int) -> tuple[str, list[Span]]:
        """The rendered conversation, and the character span of each assistant turn from message `first` on."""
        if self.marks_replies and first == 0:
            from transformers.utils.chat_template_utils import render_jinja_template

            whole = self.render(turns, False)  # refuses what the template refuses
            options = {**self.tokenizer.special_tokens_map, "date_string": DATE}
            _, spans = render_jinja_template(
                conversations=[turns],
                chat_template=self.text,
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


def inconsistent(index: int) -> RowError:
    return RowError(
        "template",
        f"messages[{index}]",
        "a chat template that writes earlier turns in another way once this one follows",
        "a prefix-consistent template, or one with {% generation %} around the replies (model.chat_template)",
    )


def no_reply(name: str = "") -> RowError:
    return RowError(
        "empty_reply",
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
