"""Implements `/score`, which scores rows with reward models or reward functions."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from pipeline.data.encode import Encoder
from pipeline.data.formats import kind_of, parse_row
from pipeline.data.values import Dropped, RowError
from pipeline.input_uri import InputURI
from pipeline.models.template import text_as_chat
from pipeline.models.tokenizer import eos_ids
from pipeline.run.model_host import ModelHost
from pipeline.serving.batching import Batcher
from pipeline.serving.models import Served
from pipeline.settle.inputs import missing_parameter
from pipeline.stages.pairs import samples_of, score_columns

MAX_ROWS = 4096  # maximum number of rows in a request


class Scores:
    """Scores the rows of a request. Rows may have any format that the stage `score` accepts."""

    def __init__(self, host: ModelHost, batcher: Batcher) -> None:
        data, self.tokenizer, self.ends = host.work.data, host.tokenizer, eos_ids(host.tokenizer)
        apply = text_as_chat(host.tokenizer, data.apply_chat_template)
        settings = (host.work.context, data.overlong, apply, self.ends, data.parse_special_tokens)
        self.encoder = Encoder(host.tokenizer, kind_of("score"), *settings)
        self.batcher = batcher

    def score(self, served: Served, rows: list[Any]) -> Future[list[dict[str, float]]]:
        """Returns a future for a dict per row: `score`, or for pairs `score_chosen`, `score_rejected` and `score_margin`.

        Raises:
            RowError: if a row is invalid. The `line` of the error is the row's number in the request.
        """
        samples: list[list[tuple[list[int], list[int], dict[str, Any]]]] = []
        for number, row in enumerate(rows, 1):
            columns = self._encode(served.version, row, number)
            sides = [columns[side] for side in ("chosen_ids", "rejected_ids") if columns[side] is not None]
            samples.append([(columns["prompt_ids"], ids, row) for ids in sides])

        def scored() -> list[dict[str, float]]:
            assert served.reward is not None
            if not samples:
                return []
            prompts, completions, data = zip(*(sample for row in samples for sample in row), strict=True)
            batch = samples_of(prompts, completions, data, self.tokenizer, self.ends)
            scores = iter(served.reward.checked(batch))
            return [score_columns([next(scores) for _ in row]) for row in samples]

        return self.batcher.run(scored)

    def _encode(self, source: str, row: Any, number: int) -> dict[str, Any]:
        """Returns the columns of a tokenized row. Raises RowError if the row is invalid or lacks a column for the reward."""
        outcome: Any
        try:
            [[outcome, *others]] = self.encoder.encode([parse_row(row, self.encoder.kind)])
            if InputURI.parse(source).is_function and (
                parameter := missing_parameter(source, {*row, "messages"})
            ):
                raise RowError("missing", parameter, "no such field", f"one, because {source} needs it")
            if isinstance(outcome, Dropped):
                expected = "a shorter prompt"
                raise RowError(outcome.reason, "", "a pair that is equal once it is truncated", expected)
            if others:
                raise RowError("wrong_type", "pos_answers", "several pairs in a row", "one pair per row")
            if isinstance(outcome, RowError):
                raise outcome
            return outcome.columns
        except RowError as error:
            error.file, error.line, error.unit = "request", number, "element"
            raise
