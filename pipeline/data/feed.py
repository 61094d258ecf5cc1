"""Feeds token blocks to a trainer as a zero-copy `datasets.Dataset`, in batches that hold each row exactly once per epoch.

The stock data loader of transformers and accelerate repeats or drops rows if their number is not divisible by the workers.
`ExactBatches`, mixed into a trainer, splits each *global* batch over the ranks instead. The rows of a step, and so its loss,
are the same for any number of workers with the same global batch. The batches of eval rows are also the same.

An epoch draws from each weighted source in proportion to its weight, exact to one row. data.stopping_strategy, with the values
of datasets.interleave_datasets, decides when the epoch ends:

- `first_exhausted`: when one source is used up. No row occurs twice in an epoch; some rows of other sources do not occur.
- `all_exhausted`: when every source is used up. Every row occurs. Rows of the smaller sources occur several times, with
  counts that differ by at most one within a source.

Each epoch drops or repeats other rows, so that over several epochs all rows of a source are drawn equally often. The draw
depends only on seed and epoch. It is the same for any number of workers and for a resumed run.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError
from pipeline.job.job import Source

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # a mixin at run time, because the trainer imports torch


def to_hf(shard: Any, fingerprint: str) -> Any:
    """Returns an Arrow table, or Ray's Arrow blocks (a dataset or its unsplit shard), as a datasets.Dataset without a copy.

    `fingerprint` names the table for the datasets library, which would otherwise hash (and so copy) all of it.
    """
    import datasets
    import pyarrow as pa

    if not isinstance(shard, pa.Table):
        shard = pa.concat_tables(list(shard.iter_batches(batch_size=None, batch_format="pyarrow")))
    table = shard.replace_schema_metadata(None)
    return datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint=fingerprint)


@dataclass(frozen=True)
class Mixture:
    """The sources of a token table, which has the rows of one source after another."""

    sizes: tuple[int, ...]  # rows of each source
    draws: tuple[int, ...]  # rows that an epoch draws from each

    def __len__(self) -> int:
        """Returns the number of rows of an epoch."""
        return sum(self.draws)

    def rows(self, epoch: int, seed: int) -> Any:
        """Returns the row numbers of an epoch in the table, source by source, as a numpy array of int64."""
        import numpy as np

        parts, start = [], 0
        for source, (size, draws) in enumerate(zip(self.sizes, self.draws, strict=True)):
            # All epochs share one order. Each epoch continues where the previous one ended, and wraps around at the end.
            order = np.random.default_rng([seed, source]).permutation(size)
            parts.append(start + order[(epoch * draws + np.arange(draws)) % size])
            start += size
        return np.concatenate(parts)


def mix(sources: Sequence[Source], sizes: Sequence[int], strategy: str) -> Mixture | None:
    """Returns the mixture of sources with these sizes, in rows, or None if they have no weights.

    `strategy` is data.stopping_strategy. Raises InputError if the weights leave a source without a row in an epoch.
    """
    weights = [Fraction(str(source.weight)) for source in sources if source.weight is not None]
    if not weights:
        return None
    shares = [weight / sum(weights) for weight in weights]
    lengths = [size / share for size, share in zip(sizes, shares, strict=True)]
    total = math.floor(min(lengths)) if strategy == "first_exhausted" else math.ceil(max(lengths))
    # Each share is rounded up or down. The largest remainders are rounded up.
    draws = [math.floor(share * total) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: draws[index] - shares[index] * total)
    for index in by_remainder[: total - sum(draws)]:
        draws[index] += 1
    for numbers in (sizes, draws):
        if empty := [one.path for one, number in zip(sources, numbers, strict=True) if not number]:
            why = f"no row of {empty[0]} is in an epoch of {total:,} rows; remove it, or change the weights"
            raise InputError(why, key="data.train")
    return Mixture(tuple(sizes), tuple(draws))


class EvaluationSampler:
    """Yields batches of consecutive rows, dealt to the ranks in turn. The batches are the same for any number of workers.

    All ranks make the same number of steps. If no batch is left for a rank, its last batch is an empty list.
    """

    def __init__(self, rows: int, batch_size: int, rank: int, world: int):
        self.rows, self.batch_size, self.rank, self.world = rows, batch_size, rank, world

    def __len__(self) -> int:
        return -(-self.rows // (self.batch_size * self.world))

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self)):
            first = (step * self.world + self.rank) * self.batch_size
            yield list(range(first, min(first + self.batch_size, self.rows)))


class ExactBatchSampler(EvaluationSampler):
    """Lists of row numbers for one rank. Over all ranks each row occurs once per epoch, in the same number of steps.

    With a mixture, an epoch has the rows that are drawn for it, in an order that mixes the sources.

    Step i takes rows [i * batch_size * world, ...) of the epoch's order, cut into `world` runs as evenly as possible. The
    last step has the rest: with fewer rows than workers some ranks get an empty list. (Merging those rows into the previous
    step would make the number of steps depend on the number of workers. A run resumed with another number could then not
    find its position.) The order is the same as in accelerate's SeedableRandomSampler: a permutation by seed + epoch.
    """

    def __init__(
        self, rows: int, batch_size: int, rank: int, world: int, seed: int, mixture: Mixture | None = None
    ):
        super().__init__(len(mixture) if mixture else rows, batch_size, rank, world)
        self.seed, self.epoch, self.mixture = seed, 0, mixture

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for places in self.places():
            yield order[places].tolist()

    def places(self) -> Iterator[slice]:
        """Yields the places of the rows of each of this rank's batches in the epoch's order."""
        step = self.batch_size * self.world
        for start in range(0, len(self) * step, step):
            size = min(step, self.rows - start)
            first, last = size * self.rank // self.world, size * (self.rank + 1) // self.world
            yield slice(start + first, start + last)

    def order(self) -> Any:
        import torch

        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        return torch.from_numpy(self.mixture.rows(self.epoch, self.seed))[order] if self.mixture else order


class CountedCollator:
    """A collator that adds how many `rows` the batch has.

    A rank without a row in the last global batch gets a dummy batch of the row `filler`, to keep in step with the others.
    Its `rows` is 0, and no label counts.
    """

    def __init__(self, collator: Callable[[list[Any]], dict[str, Any]], filler: dict[str, Any]):
        self.collator, self.filler = collator, filler

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        batch = self.collator(rows or [self.filler])
        if not rows and "labels" in batch:
            batch["labels"].fill_(-100)
        batch["rows"] = len(rows)
        return batch


class ExactBatches(Trainer):
    """Mixin for a transformers or TRL trainer (before it in the bases): exact batches over several ranks.

    Losses equal the losses of one worker with `world` times the per-device batch. For token-normalized losses (sft),
    `num_items_in_batch` ensures this. Row means (rm, dpo, kto) are weighted by their share of the rows of the global batch.

    Eval metrics are means over tokens (sft) or rows (rm, dpo, kto). Only min_reward and max_reward depend on
    per_device_eval_batch_size: TRL takes them per batch.
    """

    mixture: Mixture | None = None  # sources of train_dataset; set before training
    # for each fetched micro-batch: (weight, rows, uneven over the ranks)
    _shares: deque[tuple[float, int, bool]]
    _share = 1.0
    # for each batch evaluated by this rank: (number, {metric: (weight, value)})
    _evaluated: list[tuple[int, dict[str, tuple[int, float]]]]

    def get_train_dataloader(self) -> Any:
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        sampler, size = self._parts()[0], self._train_batch_size
        return self._loader(self.train_dataset, "Training", sampler, size, seed=seed, mixture=self.mixture)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return self._loader(dataset, "Evaluation", self._parts()[1], self.args.eval_batch_size)

    def _parts(self) -> tuple[Any, Any, Any]:
        """Returns the classes of the training sampler, the evaluation sampler and the collator."""
        return ExactBatchSampler, EvaluationSampler, CountedCollator

    def first_rows(self) -> list[int]:
        """Returns the numbers of the rows of this rank's first micro-batch."""
        return list(next(iter(self.get_train_dataloader().batch_sampler)))

    def num_examples(self, dataloader: Any) -> int:
        """Returns the number of rows of an epoch, which may differ from the rows of the table that transformers counts."""
        sampler = dataloader.batch_sampler
        return sampler.rows if isinstance(sampler, ExactBatchSampler) else super().num_examples(dataloader)

    def _loader(self, dataset: Any, description: str, sampler: Any, batch_size: int, **more: Any) -> Any:
        from accelerate.data_loader import prepare_data_loader
        from torch.utils.data import DataLoader
        from transformers.trainer_utils import seed_worker

        args, dataset = self.args, self._remove_unused_columns(dataset, description=description)
        workers, rank = args.dataloader_num_workers, args.process_index
        loader = DataLoader(
            dataset,
            batch_sampler=sampler(len(dataset), batch_size, rank, args.world_size, **more),
            collate_fn=self._parts()[2](self.data_collator, dataset[0]),
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            worker_init_fn=partial(seed_worker, num_workers=workers, rank=rank),
        )
        # The loader acts as if there were one process, so that accelerate moves batches to the device, but does not shard them
        # again. From pinned memory, the copy runs during the previous step.
        prepared = prepare_data_loader(
            loader, self.accelerator.device, num_processes=1, process_index=0, put_on_device=True,
            non_blocking=args.dataloader_pin_memory,
        )  # fmt: skip
        # Without a remainder, gather_for_metrics does not cut the last batch. This attribute is private in accelerate 1.15.
        prepared._drop_last = True
        return prepared

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Returns the micro-batches of an optimizer step, and stores the weight of this rank's rows in each.

        DDP averages means over ranks, and transformers over micro-batches, both regardless of their sizes. So each
        micro-batch is weighted by its rows, relative to the average number of rows.
        """
        import torch

        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:
            rows = [batch.pop("rows") for batch in batches]
            by_rank = [rows]
            if self.args.world_size > 1:
                by_rank = self.accelerator.gather(torch.tensor([rows], device=device)).tolist()
            average = sum(map(sum, by_rank)) / (len(by_rank) * len(batches))
            self._shares = deque(
                (count / average, count, len(set(counts)) > 1)
                for count, counts in zip(rows, zip(*by_rank, strict=True), strict=True)
            )
        return batches, items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self._share, count, uneven = self._shares.popleft()
        try:
            with uneven_gather(self.accelerator, count) if uneven else nullcontext():
                return super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._share = 1.0  # evaluation also calls compute_loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._share == 1.0 or num_items_in_batch is not None:
            return result
        return (result[0] * self._share, *result[1:]) if return_outputs else result * self._share

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        rows, labels = inputs.pop("rows"), inputs.get("labels")
        weight = rows if labels is None else int((labels[:, 1:] != -100).sum())
        loss, *rest = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        metrics = {name: values[-1] for name, values in self._metrics["eval"].items() if values}
        metrics["loss"] = loss.item()
        number = len(self._evaluated) * self.args.world_size + self.args.process_index
        weighted = {name: (self._weight(name, inputs, weight), value) for name, value in metrics.items()}
        self._evaluated.append((number, weighted if weight else {}))
        return loss, *rest

    def _weight(self, metric: str, inputs: Any, weight: int) -> int:
        """Returns the weight of a batch in the mean of a metric: by default its number of tokens (sft) or rows."""
        return weight

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **options: Any) -> Any:
        """Runs TRL's loop on each rank alone, then averages the metrics of all batches by weight, in their order."""
        from accelerate.utils import gather_object

        self._evaluated = []
        with each_rank_alone(self):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **options)
        batches = [metrics for _, metrics in sorted(gather_object(self._evaluated), key=lambda one: one[0])]
        means = {}
        for name in dict.fromkeys(name for metrics in batches for name in metrics):
            pairs = [metrics[name] for metrics in batches if name in metrics]
            means[name] = sum(weight * value for weight, value in pairs) / max(1, sum(w for w, _ in pairs))
        output.metrics[f"{metric_key_prefix}_loss"] = means.pop("loss", 0.0)
        self._metrics["eval"].clear()  # otherwise TRL's `log` would add these metrics
        self._metrics["eval"].update({name: [mean] for name, mean in means.items()})
        return output


@contextmanager
def each_rank_alone(trainer: Any) -> Iterator[None]:
    """Keeps a trainer from gathering from other ranks within the block, so its metrics cover only its own batches."""
    accelerator = trainer.accelerator
    accelerator.gather = accelerator.gather_for_metrics = trainer.gather_function = lambda value, *_: value
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics  # makes the class's methods apply again
        trainer.gather_function = accelerator.gather_for_metrics


@contextmanager
def uneven_gather(accelerator: Any, count: int) -> Iterator[None]:
    """Makes `accelerator.gather` work for ranks with different numbers of rows. This rank has `count` rows.

    TRL gathers per-row tensors for its metrics. torch.distributed would hang or fail on unequal shapes. Remove this when
    TRL pads across processes before it gathers.
    """
    gather = accelerator.gather

    def gather_uneven(tensor: Any) -> Any:
        import torch

        if tensor.ndim == 0:
            return gather(tensor)
        length = len(tensor) if count else 0
        lengths = gather(torch.tensor([length], device=tensor.device)).tolist()
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[:length] = tensor[:length]
        pieces = gather(padded).split(max(lengths))
        return torch.cat([piece[:length] for piece, length in zip(pieces, lengths, strict=True)])

    accelerator.gather = gather_uneven
    try:
        yield
    finally:
        del accelerator.gather  # makes the class's method apply again
