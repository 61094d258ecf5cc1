"""The one table of what rows may be: by kind, the accepted shapes, the parser, the encoder, the columns of token ids.

config.stages.STAGE says which kind a stage reads. A new kind is a file of its own, like prompts.py, and an entry here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeline.config.stages import STAGE
from pipeline.data import demonstrations, preferences, prompts, scored, thumbs
from pipeline.data.columns import UNORDERED, shapes_with
from pipeline.data.encode import Encoder, Outcome
from pipeline.data.preprocess import NOTHING, Preprocess
from pipeline.data.record import Record


@dataclass(frozen=True)
class Kind:
    """What the rows of one kind are, from JSON to token ids."""

    # name of a shape -> the fields that it needs; a row has the first shape whose fields are all there
    shapes: Mapping[str, tuple[str, ...]]
    parse: Callable[[dict[str, Any], str], Record]  # (row, name of its shape) -> Record; raises RowError
    encode: Callable[[Encoder, Sequence[Record]], list[list[Outcome]]]
    columns: Mapping[str, type]  # of the token table: list (of token ids), float, bool or str (JSON)
    # What becomes of the completions: the policy learns to write those of the rows, or a reward model scores those of the
    # rows, or the policy writes them and the rows have prompts only.
    completions: Literal["learned", "scored", "written"]
    further: frozenset[str] = frozenset()  # fields that no shape needs, and that it reads
    packs: bool = False  # whether trainer.packing joins several rows into one
    stage: str = ""  # whose rows they are, for messages
    preprocess: Preprocess = NOTHING  # what the job makes of a raw row

    @property
    def needed(self) -> frozenset[str]:
        """The fields that a shape needs."""
        return frozenset(UNORDERED).union(*self.shapes.values())

    @property
    def has_pairs(self) -> bool:
        """Whether a row may have two completions, one preferred to the other."""
        return self.completions != "written" and "rejected" in self.needed

    @property
    def keeps_columns(self) -> bool:
        """Whether a row's further columns are kept, for Python rewards."""
        return "row" in self.columns

    def rows(self, row: Any) -> Iterator[Any]:
        """The rows that a decoded row of a file stands for: each a row, a RowError or Dropped."""
        return self.preprocess.rows(row, self)


_PAIR = dict.fromkeys(("prompt_ids", "chosen_ids", "rejected_ids"), list)
_MARGIN = frozenset({"margin"})
_PROMPT: dict[str, type] = {"input_ids": list, "row": str}

KIND = {
    "demonstrations": Kind(
        demonstrations.SHAPES,
        demonstrations.parse,
        demonstrations.encode,
        {"input_ids": list, "labels": list},
        "learned",
        frozenset(demonstrations.LABELS),
        packs=True,
    ),
    "preferences": Kind(
        preferences.SHAPES, preferences.parse, preferences.encode_apart, _PAIR, "learned", _MARGIN
    ),
    "whole_preferences": Kind(
        preferences.SHAPES,
        preferences.parse,
        preferences.encode_whole,
        {"chosen_ids": list, "rejected_ids": list, "margin": float},
        "scored",
        _MARGIN,
    ),
    "thumbs": Kind(
        thumbs.SHAPES,
        thumbs.parse,
        thumbs.encode,
        {"prompt_ids": list, "completion_ids": list, "label": bool},
        "learned",
        _MARGIN,
    ),
    "prompts": Kind(prompts.SHAPES, prompts.parse, prompts.encode, _PROMPT, "written"),
    "answered_prompts": Kind(prompts.SHAPES, prompts.parse_answered, prompts.encode, _PROMPT, "written"),
    "completions": Kind(scored.SHAPES, scored.parse, scored.encode, {**_PAIR, "row": str}, "scored"),
    "pairs": Kind(preferences.SHAPES, scored.parse, scored.encode, {**_PAIR, "row": str}, "scored"),
}


def kind_of(stage: str, preprocess: Preprocess = NOTHING) -> Kind:
    """The kind of rows that a stage reads; `pairs`, those of data.pairs, are a kind by themselves."""
    name = STAGE[stage].rows if stage in STAGE else stage
    assert name is not None, f"{stage} reads no rows"
    shapes = shapes_with(preprocess.columns, KIND[name].shapes)
    return replace(KIND[name], stage=stage, shapes=shapes, preprocess=preprocess)
