"""The one table of what rows may be: by kind, the accepted shapes, the parser, the columns of token ids.

config.stages.STAGE says which kind a stage reads. A new kind is a file of its own, like prompts.py, and an entry here.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeline.config.stages import STAGE
from pipeline.data import demonstrations, preferences, prompts, scored, thumbs
from pipeline.data.columns import UNORDERED, shapes_with
from pipeline.data.preprocess import NOTHING, Preprocess
from pipeline.data.record import Record


@dataclass(frozen=True)
class Kind:
    """What the rows of one kind are, from JSON to token ids."""

    # name of a shape -> the fields that it needs; a row has the first shape whose fields are all there
    shapes: Mapping[str, tuple[str, ...]]
    parse: Callable[[dict[str, Any], str], Record]  # (row, name of its shape) -> Record; raises RowError
    # (record, number of the pair, ids of the prompt and of each completion) -> columns; None: encode.py labels the tokens
    project: Callable[..., dict[str, Any]] | None
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


Ids = list[int]


def _preference(record: Record, at: int, prompt: Ids, chosen: Ids, rejected: Ids) -> dict[str, Any]:
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


def _whole_preference(record: Record, at: int, prompt: Ids, chosen: Ids, rejected: Ids) -> dict[str, Any]:
    return {"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected, "margin": record.margin}


def _rated(record: Record, at: int, prompt: Ids, completion: Ids) -> dict[str, Any]:
    return {"prompt_ids": prompt, "completion_ids": completion, "label": record.labels[at]}


def _prompt(record: Record, at: int, prompt: Ids) -> dict[str, Any]:
    return {"input_ids": prompt, "row": record.row}


def _scored(record: Record, at: int, prompt: Ids, chosen: Ids, rejected: Ids | None = None) -> dict[str, Any]:
    row = record.row
    if len(record.pairs) > 1:  # one row of several answers is several pairs
        row = json.dumps({**json.loads(row), "pair": at}, ensure_ascii=False)
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected, "row": row}


_PAIR = dict.fromkeys(("prompt_ids", "chosen_ids", "rejected_ids"), list)
_WHOLE_PAIR = {"chosen_ids": list, "rejected_ids": list, "margin": float}
_RATED = {"prompt_ids": list, "completion_ids": list, "label": bool}
_PROMPT = {"input_ids": list, "row": str}
_SCORED = {**_PAIR, "row": str}
_MARGIN = frozenset({"margin"})

KIND = {
    "demonstrations": Kind(
        demonstrations.SHAPES,
        demonstrations.parse,
        None,
        {"input_ids": list, "labels": list},
        "learned",
        frozenset(demonstrations.LABELS),
        packs=True,
    ),
    "preferences": Kind(preferences.SHAPES, preferences.parse, _preference, _PAIR, "learned", _MARGIN),
    "whole_preferences": Kind(
        preferences.SHAPES, preferences.parse, _whole_preference, _WHOLE_PAIR, "scored", _MARGIN
    ),
    "thumbs": Kind(thumbs.SHAPES, thumbs.parse, _rated, _RATED, "learned", _MARGIN),
    "prompts": Kind(prompts.SHAPES, prompts.parse, _prompt, _PROMPT, "written"),
    "answered_prompts": Kind(prompts.SHAPES, prompts.parse_answered, _prompt, _PROMPT, "written"),
    "completions": Kind(scored.SHAPES, scored.parse, _scored, _SCORED, "scored"),
    "pairs": Kind(preferences.SHAPES, scored.parse, _scored, _SCORED, "scored"),
}


def kind_of(stage: str, preprocess: Preprocess = NOTHING) -> Kind:
    """The kind of rows that a stage reads; `pairs`, those of data.pairs, are a kind by themselves."""
    name = STAGE[stage].rows if stage in STAGE else stage
    assert name is not None, f"{stage} reads no rows"
    shapes = shapes_with(preprocess.columns, KIND[name].shapes)
    return replace(KIND[name], stage=stage, shapes=shapes, preprocess=preprocess)
