"""Makes batches for TRL's trainers. Each row is in exactly one batch per epoch, for any number of workers.

The stock data loader of transformers and accelerate repeats or drops rows if the number of rows is not divisible by the number of
workers. With the mixin `ExactBatches`, a trainer instead splits each *global* batch over the ranks. The rows of a step, and so
its loss, are the same for any number of workers with the same global batch. The batches of eval rows are also the same for any
number of workers.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.data.mixture import Mixture

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # at run time, ExactBatches is a plain mixin, because importing Trainer imports torch


class EvaluationSampler:
    """Yields the batches of one rank. A batch has consecutive rows, and the ranks get batches in turn.

    The batches are the same for any number of workers. All ranks make the same number of steps. If no batch is left for a rank,
    its last batch is an empty list.
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
    """Yields the batches of one rank, as lists of row numbers. Over all ranks, each row occurs once per epoch.

    With a mixture, an epoch has the rows that the mixture draws for this epoch. The order of the rows is the permutation that
    accelerate's SeedableRandomSampler makes from seed + epoch.

    Each step consists of the next `batch_size * world` rows of the order, split into `world` parts as evenly as possible. The
    last step consists of the remaining rows, so some ranks may get an empty list. If the second-to-last step also contained the
    remaining rows, the number of steps would depend on the number of workers. A run could then not resume with a different number
    of workers.
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
        for span in self.places():
            yield order[span].tolist()

    def places(self) -> Iterator[slice]:
        """Yields the position of each of this rank's batches in the epoch's order."""
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
    """Collates rows, and adds the number of `rows` to the batch.

    A rank without a row in the last global batch gets a dummy batch with the row `filler`. All ranks therefore make the same
    number of steps. A dummy batch has `rows` 0, and the loss ignores its labels.
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
    """Makes a transformers or TRL trainer use exact batches. List this class before the trainer among the base classes.

    Losses equal the losses of a single worker whose per-device batch is `world` times as large. For losses per token (sft),
    `num_items_in_batch` makes the losses equal. For losses per row (rm, dpo, kto), each rank's mean is weighted by the rank's
    share of the rows.

    Eval metrics are means over tokens (sft) or rows (rm, dpo, kto). Only min_reward, max_reward, kto's KL, and dpo's losses
    sft, aot and aot_unpaired depend on per_device_eval_batch_size, because TRL computes them for each batch.
    """

    mixture: Mixture | None = None  # mixture of the sources in train_dataset; set before training
    # For each fetched micro-batch: (weight, number of rows, whether ranks have different numbers of rows)
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
        """Returns the number of rows in an epoch. With a mixture, an epoch can have more or fewer rows than the dataset."""
        sampler = dataloader.batch_sampler
        return sampler.rows if isinstance(sampler, ExactBatchSampler) else super().num_examples(dataloader)

    def _loader(self, dataset: Any, description: str, sampler: Any, batch_size: int, **options: Any) -> Any:
        from accelerate.data_loader import prepare_data_loader
        from torch.utils.data import DataLoader
        from transformers.trainer_utils import seed_worker

        args, dataset = self.args, self._remove_unused_columns(dataset, description=description)
        workers, rank = args.dataloader_num_workers, args.process_index
        loader = DataLoader(
            dataset,
            batch_sampler=sampler(len(dataset), batch_size, rank, args.world_size, **options),
            collate_fn=self._parts()[2](self.data_collator, dataset[0]),
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            worker_init_fn=partial(seed_worker, num_workers=workers, rank=rank),
        )
        # With num_processes=1, accelerate moves batches to the device, but does not shard them again. If memory is pinned, the
        # copy of a batch overlaps with the previous step.
        prepared = prepare_data_loader(
            loader, self.accelerator.device, num_processes=1, process_index=0, put_on_device=True,
            non_blocking=args.dataloader_pin_memory,
        )  # fmt: skip
        # Keeps gather_for_metrics from truncating the last batch. The attribute is private in accelerate 1.15.
        prepared._drop_last = True
        return prepared

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Returns the micro-batches of an optimizer step, and stores their weights.

        DDP averages losses over ranks, and transformers averages losses over micro-batches. Neither DDP nor transformers uses the
        numbers of rows. The weight of a micro-batch is therefore its number of rows, divided by the average number of rows.
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
            self._share = 1.0  # compute_loss in an evaluation uses weight 1

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
        """Returns the weight of a batch in the mean of a metric: its number of tokens (sft) or rows."""
        return weight

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **options: Any) -> Any:
        """Runs TRL's loop separately on each rank, then computes weighted means over the batches of all ranks, in order."""
        from accelerate.utils import gather_object

        self._evaluated = []
        with each_rank_alone(self):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **options)
        batches = [metrics for _, metrics in sorted(gather_object(self._evaluated), key=lambda x: x[0])]
        means = {}
        for name in dict.fromkeys(name for metrics in batches for name in metrics):
            pairs = [metrics[name] for metrics in batches if name in metrics]
            means[name] = sum(weight * value for weight, value in pairs) / max(1, sum(w for w, _ in pairs))
        output.metrics[f"{metric_key_prefix}_loss"] = means.pop("loss", 0.0)
        self._metrics["eval"].clear()  # otherwise, TRL's `log` would add the batches' metrics
        self._metrics["eval"].update({name: [mean] for name, mean in means.items()})
        return output


@contextmanager
def each_rank_alone(trainer: Any) -> Iterator[None]:
    """Makes a trainer's gather functions return the rank's own values, so that each rank's metrics cover only its own batches."""
    accelerator = trainer.accelerator
    accelerator.gather = accelerator.gather_for_metrics = trainer.gather_function = lambda value, *_: value
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics  # restores the class's methods
        trainer.gather_function = accelerator.gather_for_metrics


@contextmanager
def uneven_gather(accelerator: Any, count: int) -> Iterator[None]:
    """Makes `accelerator.gather` work if ranks have different numbers of rows. This rank has `count` rows.

    TRL gathers tensors with one value per row for its metrics. torch.distributed would hang or fail on unequal shapes. Remove
    this function when TRL pads across processes before it gathers.
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
        del accelerator.gather  # restores the class's method
