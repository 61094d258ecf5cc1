"""A row in canonical form, for any shape of the JSON: parsers make it and encoders read it."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # role, content; of a tool call also tool_calls, tool_call_id, name
Turns = list[Message]
Text = str | Turns  # raw text, or messages for the chat template


@dataclass
class Record:
    """A row in canonical form.

    `pairs` holds the completions: one 1-tuple for a demonstration, (chosen, rejected) for each pair of preferences,
    nothing for a prompt. Completions are text if `prompt` is text, else messages that begin with an assistant turn.
    """

    prompt: Text
    pairs: list[tuple[Text, ...]] = field(default_factory=list)
    # train on the assistant turns inside `prompt` too
    all_turns: bool = False
    # turns that are not trained, numbered through prompt and completion
    untrained: frozenset[int] = frozenset()
    margin: float | None = None
    # of rated completions: whether the completion is desirable, for each of `pairs`, which are 1-tuples
    labels: tuple[bool, ...] = ()
    # the registered version whose conversation the row is from, models:/NAME/NUMBER, or None if the row names none
    version: str | None = None
    # JSON schemas of the functions that may be called, for the chat template
    tools: list[dict[str, Any]] | None = None
    # columns of the row that nothing reads
    unread: tuple[str, ...] = ()
    # JSON: the prompt and all other columns, as a Python reward gets them
    row: str = ""

    def joined(self) -> str:
        """Returns the text around the border of a text prompt and completion that meet without white space, or ""."""
        if not isinstance(self.prompt, str) or self.prompt[-1:].isspace():
            return ""
        sides = [str(side) for pair in self.pairs for side in pair]
        return next((self.prompt[-20:] + side[:20] for side in sides if not side[:1].isspace()), "")

    def prompt_key(self) -> str:
        """Returns a key that is equal for two rows with the same prompt, with any completions."""
        if isinstance(self.prompt, str):
            return self.prompt
        return json.dumps([[turn["role"], words(turn)] for turn in self.prompt], ensure_ascii=False)

    def prompt_content(self) -> str:
        """Returns a key that is equal for a text prompt and a single message with the same content. It splits the hold-out."""
        if isinstance(self.prompt, str):
            return self.prompt.strip()
        return self.prompt[0]["content"].strip() if len(self.prompt) == 1 else self.prompt_key()

    def digests(self) -> bytes:
        """Returns 8 bytes of the prompt and 8 of prompt and completions, equal for text and messages with the same content."""
        prompt = self.prompt_content()
        completions = json.dumps([[plain(side) for side in pair] for pair in self.pairs], ensure_ascii=False)
        return digest(prompt).to_bytes(8) + digest(f"{prompt}\0{completions}").to_bytes(8)

    def preferences(self) -> list[int]:
        """Returns 64 bits for each pair: a digest of prompt and both completions. The lowest bit is which one is preferred.

        For each rated completion, it is a digest of prompt and completion, and the lowest bit is the label.
        """
        keys = []
        for (completion,), label in zip(self.pairs, self.labels, strict=True) if self.labels else ():
            one = json.dumps([self.prompt_content(), plain(completion)], ensure_ascii=False)
            keys.append(digest(one) & ~1 | label)
        for pair in self.pairs:
            if len(pair) == 2:
                sides = [plain(side) for side in pair]
                both = json.dumps([self.prompt_content(), *sorted(sides)], ensure_ascii=False)
                keys.append(digest(both) & ~1 | (sides[0] < sides[1]))
        return keys


def plain(value: Text) -> str:
    """Returns the words of a completion, text or messages, to compare it with another."""
    return value.strip() if isinstance(value, str) else "\n\n".join(words(turn).strip() for turn in value)


def words(turn: Message) -> str:
    """Returns the content of a turn, and its tool calls as JSON."""
    calls = turn.get("tool_calls")
    return turn["content"] + (json.dumps(calls, ensure_ascii=False) if calls else "")


def digest(text: str) -> int:
    """Returns the first 64 bits of the BLAKE2 hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())
