"""Renders messages with a chat template, and finds the completions in the rendered text.

Completion i is the text that `messages[:i+1]` adds to `messages[:i]` with a generation prompt, or the template's own
`{% generation %}` block. Some templates render earlier completions differently from the last one. For example, Qwen3's template
removes the thoughts of earlier completions. If a template changes earlier completions, the completion is the part of the text
that changes with the content of the message. A row is rejected if the template drops a completion, changes its words, or does not
render the last completion directly after the generation prompt.
"""

import copy
from collections.abc import Collection
from typing import Any

from pipeline.data.messages import THOUGHTS, Turns, check_last, text_after_thoughts, thoughts_of_turn
from pipeline.data.values import RowError, show_json
from pipeline.errors import escape_controls
from pipeline.models.template import DATE, GENERATION

BEGUN = 200  # maximum characters of a completion that may already be in the generation prompt

Span = tuple[int, int]  # (begin, end) in characters of a text


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.text = tokenizer.get_chat_template() if tokenizer.chat_template else None
        self.marks_completions = self.text is not None and GENERATION.search(self.text) is not None
        # tools and template variables of the row that is rendered
        self.tools: list[dict[str, Any]] | None = None
        self.settings: dict[str, Any] = {"date_string": DATE}
        self.variables, self.message_keys = names_in(self.text) if self.text else (frozenset(), frozenset())

    def of_row(self, tools: list[dict[str, Any]] | None, settings: dict[str, Any]) -> "ChatTemplate":
        """Returns a copy of the template that renders a row with its tools and its chat_template_kwargs."""
        if not tools and not settings:
            return self
        template = copy.copy(self)
        template.tools = tools
        variables = {name: value for name, value in settings.items() if name in self.variables}
        template.settings = self.settings | variables
        return template

    def render(self, turns: Turns, generation_prompt: bool) -> str:
        """Renders messages, or raises RowError if the template rejects the messages."""
        try:
            return self.tokenizer.apply_chat_template(  # type: ignore[no-any-return]
                turns,
                tools=self.tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.settings,
            )
        except Exception as error:  # a template is a program, which may raise any error
            roles = ", ".join(dict.fromkeys(turn["role"] for turn in turns))
            reason = escape_controls(f"{type(error).__name__}: {error}", lines=False)[:300]
            expected = f"what the chat template accepts: {reason}"
            raise RowError("template", "messages", f"roles {roles}", expected) from None

    def whole(self, prompt: Turns, completion: Turns) -> tuple[str, str]:
        """Returns the text of the prompt, and the text of prompt and completion, which begins with the text of the prompt."""
        turns = [*prompt, *completion]
        head, text = self.render_prompt(prompt), self.render(turns, False)
        if not text.startswith(head):
            raise not_behind_prompt(len(prompt), head)
        self.check_rendered(turns, text, len(head))
        return head, text

    def render_prompt(self, prompt: Turns) -> str:
        """Returns the text of a prompt, up to the start of the completion."""
        head = self.render(prompt, True)
        self.check_rendered(prompt, head)
        return head

    def check_rendered(self, turns: Turns, text: str, start: int = 0) -> None:
        """Raises RowError if `text` lacks a tool call, a system prompt, or, after `start`, the thoughts or content of the last
        turn."""
        for index, turn in enumerate(turns):
            for call in turn.get("tool_calls", ()):
                if "tool_calls" not in self.message_keys or call["function"]["name"] not in text:
                    template = f"does not write the tool call of {show_json(call['function']['name'])}"
                    raise unusable_message(index, template, "a template that writes tool calls")
        systems = [index for index, turn in enumerate(turns) if turn["role"] == "system"]
        if omitted := [i for i in systems[1:] if not contains_after(text, turns[i]["content"].strip())]:
            raise unusable_message(omitted[0], "omits this system prompt", "one system prompt")
        content, role = turns[-1]["content"].strip(), turns[-1]["role"]
        reads_thoughts = role == "assistant" and "thinking" in self.message_keys
        if reads_thoughts and not contains_after(text, thoughts_of_turn(turns[-1]), start):
            template = "omits the thoughts of this turn, or writes them outside the completion"
            raise unusable_message(
                len(turns) - 1, template, "a template that writes thoughts in the completion"
            )
        if contains_after(text, content, start):
            return
        altered = [*turns[:-1], {**turns[-1], "content": f"not {content} at all"}]
        if self.render(altered, role != "assistant") == text:
            raise without_tokens("completion" if role == "assistant" else "prompt")
        if role in ("user", "assistant"):  # templates may reformat tool messages
            raise distorted_message(len(turns) - 1, content)

    def spans(self, turns: Turns, first: int, untrained: Collection[int] = ()) -> tuple[str, list[Span]]:
        """Renders a conversation. Returns the text, and the spans of trained assistant turns, starting at message `first`."""
        whole = self.render(turns, False)  # raises RowError if the template rejects the turns
        completions = [i for i, turn in enumerate(turns) if turn["role"] == "assistant" and i >= first]
        trained = [i for i in completions if i not in untrained]
        for i in trained:
            check_last(turns[: i + 1], f"messages[{i}]")
        spans = self._marked(turns) if self.marks_completions and first == 0 else []
        if len(spans) == len(completions):
            spans = [span for i, span in zip(completions, spans, strict=True) if i not in untrained]
        elif not spans or len(trained) < len(completions):
            spans = [self._span(whole, turns, i) for i in trained]
        matched = len(spans) == len(trained)  # if False, the template's spans do not match the completions
        for index, i in enumerate(trained):
            content, text = turns[i]["content"].strip(), whole[slice(*spans[index])] if matched else whole
            # The template may drop the thoughts of earlier completions.
            if i + 1 < len(turns) and not any(
                contains_after(text, part) for part in (content, text_after_thoughts(content))
            ):
                raise distorted_message(i, content)
        last = matched and trained[-1] + 1 == len(turns)
        self.check_rendered(turns, whole, spans[-1][0] if last else 0)
        return whole, spans

    def _marked(self, turns: Turns) -> list[Span]:
        from transformers.utils.chat_template_utils import render_jinja_template

        _, spans = render_jinja_template(
            conversations=[turns],
            tools=self.tools,
            chat_template=self.text,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map | self.settings,
        )
        return [tuple(span) for span in spans[0]]

    def _span(self, whole: str, turns: Turns, i: int) -> Span:
        head = self.render(turns[:i], True) if i else ""
        if i + 1 == len(turns):
            if not whole.startswith(head):
                raise not_behind_prompt(i, head)
            return len(head), len(whole)
        has_prefix = i > 0 and whole.startswith(head)
        bare = {key: value for key, value in turns[i].items() if key not in THOUGHTS}
        # the template of gpt-oss drops the thoughts before a final answer
        for turn in (turns[i], bare) if bare != turns[i] else (bare,):
            prefix = self.render([*turns[:i], turn], False)
            if whole.startswith(prefix):
                # The span includes the text that the template writes before the content.
                return len(head) if has_prefix else self._changing(whole, turns, i)[0], len(prefix)
        begin, stop = self._changing(whole, turns, i)
        return min(begin, len(head)) if has_prefix else begin, stop

    def _changing(self, whole: str, turns: Turns, i: int) -> Span:
        """Returns the span of the text that changes if the content of turn `i` changes."""
        mark = next(char for char in map(chr, range(0xE000, 0xF900)) if char not in whole)
        altered = self.render([*turns[:i], {**turns[i], "content": mark}, *turns[i + 1 :]], False)
        prefix, _, suffix = altered.partition(mark)
        stop = len(whole) - len(suffix)
        if (
            altered.count(mark) != 1
            or stop < len(prefix)
            or not (whole.startswith(prefix) and whole.endswith(suffix))
        ):
            template = "renders other turns differently if the text of this turn changes"
            expected = "a template with {% generation %} around the completions, or another template"
            raise unusable_message(i, template, expected)
        return len(prefix), stop


def names_in(template: str) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the variables of a chat template, and the keys of messages that the template may read."""
    from jinja2 import nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    tree = _compile_jinja_template(template).environment.parse(template)
    keys = {node.attr for node in tree.find_all(nodes.Getattr)}
    # message['thinking'], message.get('thinking'), 'thinking' in message
    keys |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    keys |= {*THOUGHTS} if keys & {*THOUGHTS[:2]} else set()
    return frozenset(node.name for node in tree.find_all(nodes.Name)), frozenset(keys)


def contains_after(text: str, content: str, start: int = 0) -> bool:
    """Returns True if `text` contains `content` (ignoring white space), and this content ends after `start`.

    The content may begin before `start`, because some generation prompts end with the "<think>" of the completion.
    """
    if text.find(content, max(0, start - len(content) + 1)) >= 0:
        return True
    words, prompt_end, remainder = (
        "".join(part.split()) for part in (content, text[max(0, start - BEGUN) : start], text[start:])
    )
    return words in prompt_end[max(0, len(prompt_end) - len(words) + 1) :] + remainder


# ---- what is wrong with a row and its template -----------------------------------------------------------------


def unusable_message(index: int, template: str, expected: str) -> RowError:
    """Returns the error for message `index`, which the chat template cannot render."""
    found, expected = f"a chat template that {template}", f"{expected} (model.chat_template)"
    return RowError("template", f"messages[{index}]", found, expected)


def not_behind_prompt(index: int, head: str) -> RowError:
    template = f"ends a prompt with {show_json(head[-30:])}, but omits this text before the completion"
    return unusable_message(index, template, "a completion that begins with this text, or another template")


def distorted_message(index: int, content: str) -> RowError:
    template = f"truncates or changes the text {show_json(content)}"
    return unusable_message(index, template, "a template that writes the text unchanged")


def without_tokens(part: str, name: str = "") -> RowError:
    """Returns the error for a `prompt` or `completion` without tokens in the field `name`."""
    found, expected = f"no tokens in a {part} after the chat template", f"a {part} that the template renders"
    return RowError(f"empty_{part}", name, found, f"{expected} and the tokenizer can encode")
