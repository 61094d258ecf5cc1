"""Implements `/score`: scores the rows of a request with the reward models that share the policies' base."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from pipeline.data.encode import Encoder
from pipeline.data.shapes import kind_of, parse
from pipeline.data.values import Dropped, RowError
from pipeline.input_uri import InputURI
from pipeline.models.template import text_as_chat
from pipeline.run.model_host import ModelHost
from pipeline.serving.batching import Batcher
from pipeline.serving.models import Served, ends
from pipeline.settle.inputs import missing_parameter
from pipeline.stages.pairs import named, samples_of

ROWS = 4096  # maximum rows of a request
Sample = tuple[list[int], list[int], dict[str, Any]]  # prompt ids, completion ids, row
# one request: one or two samples per row, and the future of the results
Waiting = tuple[list[list[Sample]], Future[list[dict[str, float]]]]


class Scores:
    """Reads rows of any format that `score` reads. Scores together all requests that wait for the same reward."""

    def __init__(self, host: ModelHost, batcher: Batcher) -> None:
        data, self.tokenizer, self.ends = host.work.data, host.tokenizer, ends(host)
        apply = text_as_chat(host.tokenizer, data.apply_chat_template)
        settings = (host.work.context, data.overlong, apply, self.ends, data.parse_special_tokens)
        self.encoder = Encoder(host.tokenizer, kind_of("score"), *settings)
        self.batcher, self.rows = batcher, host.args.local_rollout_forward_batch_size

    def ask(self, served: Served, rows: list[Any]) -> Future[list[dict[str, float]]]:
        """Returns a future with `score` of each row, or for a pair `score_chosen`, `score_rejected` and `score_margin`.

        Raises:
            RowError: for the first wrong row, with its number as the line.
        """
        samples: list[list[Sample]] = []
        for number, row in enumerate(rows, 1):
            columns = self._columns(served.version, row, number)
            sides = [columns[side] for side in ("chosen_ids", "rejected_ids") if columns[side] is not None]
            samples.append([(columns["prompt_ids"], ids, row) for ids in sides])
        future: Future[list[dict[str, float]]] = Future()
        if not rows:
            future.set_result([])
            return future
        served.scoring.append((samples, future))

        def pass_on(turn: Future[None]) -> None:  # the batcher may have ended
            if (error := turn.exception()) and not future.done():
                future.set_exception(error)

        self.batcher.run(lambda: self._answer(served)).add_done_callback(pass_on)
        return future

    def _columns(self, source: str, row: Any, number: int) -> dict[str, Any]:
        outcome: Any
        try:
            [outcomes] = self.encoder.encode([parse(row, self.encoder.kind)])
            outcome = outcomes[0]
            if InputURI.parse(source).is_function and (
                wanted := missing_parameter(source, {*row, "messages"})
            ):
                outcome = RowError("missing", wanted, "no such field", f"one, since {source} asks for it")
            elif isinstance(outcome, Dropped):
                expected = "a shorter prompt"
                outcome = RowError(outcome.reason, "", "a pair that is equal once it is truncated", expected)
            elif len(outcomes) > 1:
                outcome = RowError("wrong_type", "pos_answers", "several pairs in one row", "one pair a row")
        except RowError as error:
            outcome = error
        if isinstance(outcome, RowError):
            outcome.file, outcome.line, outcome.unit = "request", number, "element"
            raise outcome
        return outcome.columns

    def _answer(self, served: Served) -> None:
        """Scores all requests that wait for a reward, in batches of one forward. Runs in the batcher's thread."""
        waiting = served.scoring
        while waiting:
            batch: list[Waiting] = []
            while waiting and sum(len(row) for asked, _ in batch for row in asked) < self.rows:
                one = waiting.popleft()
                if one[1].set_running_or_notify_cancel():  # False if its client has disconnected
                    batch.append(one)
            if batch and not self._score(served, batch):
                for one in batch:  # find the row that cannot be scored
                    self._score(served, [one])

    def _score(self, served: Served, batch: list[Waiting]) -> bool:
        """Scores requests together. Returns False if this failed; only a single request gets the error then."""
        assert served.reward is not None
        samples = [sample for asked, _ in batch for row in asked for sample in row]
        prompts, completions, rows = zip(*samples, strict=True)
        given = samples_of(prompts, completions, rows, self.tokenizer, self.ends)
        try:
            scores = iter(served.reward.checked(given))
        except BaseException as error:  # a reward's sys.exit() too: the thread is needed for the next request
            if len(batch) == 1:
                batch[0][1].set_exception(error)
            return False
        for asked, future in batch:
            future.set_result([named([next(scores) for _ in row]) for row in asked])
        return True
