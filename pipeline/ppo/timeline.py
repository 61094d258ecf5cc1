"""Who did what when in an update: the trainer's phases, and the chunks that rollout workers had meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

TRAINER = "trainer"
SHORTEST = 1e-4  # seconds: what is shorter gets no bar


@dataclass(frozen=True)
class Span:
    """Something that lasted from `begin` to `end`, in seconds of the trainer's time.perf_counter()."""

    who: str  # "trainer", "worker 0", ...
    what: str  # a phase, or "update 7": a chunk of that update's completions
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One update: all that was going on between the beginning of the trainer's first phase and the end of its last."""

    update: int  # from 1
    spans: Sequence[Span]

    @property
    def window(self) -> tuple[float, float]:
        own = [span for span in self.spans if span.who == TRAINER]
        return min(span.begin for span in own), max(span.end for span in own)

    @property
    def seconds(self) -> float:
        begin, end = self.window
        return end - begin

    def to_dict(self) -> dict[str, Any]:
        """For result.json: times in seconds since the update began.

        Of what began before it or went on after it, the part within; of the trainer's phases, what it spent on nothing else.
        """
        begin, end = self.window
        inside = [span for span in _apart(self.spans) if span.begin < end and span.end > begin]
        spans = [
            {
                "who": span.who,
                "what": span.what,
                "begin": round(max(span.begin, begin) - begin, 4),
                "end": round(min(span.end, end) - begin, 4),
            }
            for span in sorted(inside, key=lambda span: (span.begin, -span.end))
        ]
        return {"update": self.update, "seconds": round(end - begin, 4), "spans": spans}


def _apart(spans: Sequence[Span]) -> list[Span]:
    """The spans, and in place of one of the trainer's that others of the trainer's lie in, its pieces between those."""
    apart = []
    for span in spans:
        within = [
            one
            for one in spans
            if one is not span
            and one.who == span.who == TRAINER
            and span.begin <= one.begin <= one.end <= span.end
        ]
        at = span.begin
        for one in sorted(within, key=lambda one: one.begin):
            apart.append(replace(span, begin=at, end=one.begin))
            at = one.end
        apart.append(replace(span, begin=at))
    return [span for span in apart if span.end - span.begin >= SHORTEST]


def typical(timelines: Sequence[Timeline]) -> dict[str, Any] | None:
    """The update of median length, for result.json; None where there is none."""
    if not timelines:
        return None
    return sorted(timelines, key=lambda one: one.seconds)[len(timelines) // 2].to_dict()
