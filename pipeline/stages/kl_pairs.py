"""Pairs rows for KTO's KL term: each prompt gets the completion of another row in the same optimizer step.

KTO compares the log-ratio of a completion with z0, the KL divergence from the reference. z0 is estimated on prompts with the
completions of other prompts (https://arxiv.org/abs/2402.01306, section 4.1). TRL's KTOTrainer pairs rows once, in file order, so
its rows cannot be shuffled, and KTOTrainer computes z0 for each micro-batch. Here, rows are paired in the order of the epoch, and
z0 is the mean over the optimizer step. z0 is therefore the same for any number of workers and micro-batches. With one worker and
one micro-batch per step, z0 equals TRL's.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from pipeline.stages.exact_batches import CountedCollator, EvaluationSampler, ExactBatches, ExactBatchSampler


class PairedBatchSampler(ExactBatchSampler):
    """Yields the batches of ExactBatchSampler, each followed by the rows whose completions the batch's KL term uses.

    The added rows are the rows of the optimizer step (`step` rows over all workers), shifted by one position (`mismatched_rows`).
    """

    def __init__(self, *args: Any, step: int, **options: Any):
        super().__init__(*args, **options)
        self.step = step

    def __iter__(self) -> Iterator[list[int]]:
        import torch

        order = self.order()
        steps = order.split(self.step)
        partners = torch.cat([mismatched_rows(*pair) for pair in zip(steps, [None, *steps], strict=False)])
        for span in self.places():
            yield order[span].tolist() + partners[span].tolist()


def mismatched_rows(rows: Any, previous: Any) -> Any:
    """Returns for each row of a step the previous row or, if the two are the same, the nearest earlier row that differs.

    If the step has only one distinct row, returns a row of the previous step (`previous`), if there is one.
    """
    import torch

    partners = rows.roll(1)
    for shift in range(2, len(rows)):
        if not (is_same := partners == rows).any():
            return partners
        partners = torch.where(is_same, rows.roll(shift), partners)
    if (partners == rows).any() and previous is not None and len(distinct := previous[previous != rows[0]]):
        partners = torch.where(partners == rows, distinct[-1], partners)
    return partners


class PairedEvaluationSampler(EvaluationSampler):
    """Adds a second row to each row of a batch, for the KL term: the row half a dataset away, which has another prompt."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield batch + [(row + self.rows // 2) % self.rows for row in batch]


class PairedCollator(CountedCollator):
    """Collates the batches of PairedBatchSampler and PairedEvaluationSampler."""

    def __init__(self, collator: Any, filler: dict[str, Any]):
        super().__init__(collator, pair_rows(filler, filler))

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        own, partners = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        return super().__call__([pair_rows(row, partner) for row, partner in zip(own, partners, strict=True)])


def pair_rows(row: dict[str, Any], partner: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with the completion of another row, as TRL's collator expects it."""
    return {**row, "KL_completion_ids": partner["completion_ids"]}


class PairedBatches(ExactBatches):
    """Makes TRL's KTOTrainer use exact batches, and a KL term that does not depend on the number of workers.

    The metrics `.../chosen` are means over desirable rows only, and `.../rejected` are means over undesirable rows only.
    """

    # Return values of TRL's `_compute_kl_logps` in this step: for the policy, and for the reference
    _step_logps: tuple[Any, Any]
    # The values that TRL has not yet read in this micro-batch. Empty outside of training.
    _unread_logps: Iterator[Any] = iter(())

    def _parts(self) -> tuple[Any, Any, Any]:
        if not self.calculate_KL:  # the loss has no KL term
            return super()._parts()
        step = self._train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
        return partial(PairedBatchSampler, step=step), PairedEvaluationSampler, PairedCollator

    def first_rows(self) -> list[int]:
        rows = super().first_rows()
        return rows[: len(rows) // 2] if self.calculate_KL else rows

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Returns the micro-batches of an optimizer step, and computes the KL term of the step."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches and self.calculate_KL:
            self._step_logps = self._kl_logps([self._prepare_inputs(batch) for batch in batches])
        return batches, items

    def _kl_logps(self, batches: list[dict[str, Any]]) -> tuple[Any, Any]:
        """Returns the mean log-prob of the mismatched completions under the policy and under the reference, over all workers."""
        import torch
        from trl.models.utils import disable_gradient_checkpointing
        from trl.trainer.utils import use_adapter

        self.model.train()  # turns dropout on, because an evaluation may have turned it off
        sums = torch.zeros(3, dtype=torch.float64, device=self.accelerator.device)
        reference = "ref" if "ref" in self.model.peft_config else None  # None disables all adapters
        kwargs = self.args.gradient_checkpointing_kwargs
        with (
            torch.no_grad(),
            self.compute_loss_context_manager(),
            disable_gradient_checkpointing(self.model, kwargs),
        ):
            for batch, (_, rows, _) in zip(batches, self._shares, strict=True):
                policy = super()._compute_kl_logps(self.model, batch)
                with use_adapter(self.model, adapter_name=reference):
                    frozen = super()._compute_kl_logps(self.model, batch)
                if rows:  # a dummy batch has no rows
                    sums += torch.stack([policy.sum(), frozen.sum(), policy.new_tensor(rows)])
        sums = self.accelerator.reduce(sums)
        return sums[0] / sums[2], sums[1] / sums[2]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self.calculate_KL:
            self._unread_logps = iter(self._step_logps)
        loss = super().training_step(model, inputs, num_items_in_batch)
        if next(self._unread_logps, None) is not None:
            raise RuntimeError("TRL's KTOTrainer has not read both values of the KL term (trl 1.16)")
        return loss

    def _compute_kl_logps(self, model: Any, batch: Any) -> Any:
        # TRL calls this method first for the policy, then for the reference, and averages the difference.
        logps = next(self._unread_logps, None)
        return super()._compute_kl_logps(model, batch) if logps is None else logps

    def _weight(self, metric: str, inputs: Any, weight: int) -> int:
        desirable = int(inputs["label"].sum())
        sides = {"chosen": desirable, "rejected": weight - desirable}
        return sides.get(metric.rpartition("/")[2], weight)

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        output = super().evaluation_loop(*args, **options)
        metrics = self._metrics["eval"]
        if {"rewards/chosen", "rewards/rejected"} <= metrics.keys():
            metrics["rewards/margins"] = [metrics["rewards/chosen"][0] - metrics["rewards/rejected"][0]]
        return output
