"""Decodes a completion while it is sampled. Holds text back that may belong to a stop text."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream


class Text:
    """Text of a growing list of tokens.

    Holds back incomplete characters, and text that may be the beginning of a stop text.

    Args:
        stops: texts that end the completion, which then lacks them and all that follows.
    """

    def __init__(self, tokenizer: Any, stops: list[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.stream = DecodeStream(skip_special_tokens=True)
        self.ids: list[int] = []
        self.written = ""  # the decoded text
        self.shown = 0  # number of returned characters
        self.stopped = False

    def add(self, token: int) -> str:
        """Returns what can be shown because of one more token."""
        self.ids.append(token)
        self.written += self.stream.step(self.tokenizer.backend_tokenizer, token) or ""
        # The longest end of the text with which a stop text begins
        longest = min(max(map(len, self.stops), default=1) - 1, len(self.written))
        ends = (self.written[-size:] for size in range(longest, 0, -1))
        waits = (len(end) for end in ends if any(stop.startswith(end) for stop in self.stops))
        return self._show(next(waits, 0))

    def close(self) -> str:
        """Returns what is still to be shown when the last token has come."""
        if self.stopped:
            return ""
        whole = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        # A decoder may change earlier text
        if whole.startswith(self.written[: self.shown]):
            self.written = whole
        return self._show(0)

    @property
    def text(self) -> str:
        return self.written[: self.shown]

    def _show(self, waiting: int) -> str:
        """Returns the text up to the first stop text, or else without its last `waiting` characters."""
        found = [
            at for stop in self.stops if (at := self.written.find(stop, max(0, self.shown - len(stop)))) >= 0
        ]
        end = min(found) if found else len(self.written) - waiting
        self.stopped = bool(found)
        more, self.shown = self.written[self.shown : end], max(self.shown, end)
        return more
