"""KTO: the sft adapter moved towards desirable completions and away from undesirable ones, which need not come in pairs.

    make kto    or    python -m pipeline kto jobs/demo/kto.yaml [section.key=value ...]

TRL's KTOTrainer continues a copy of the `policy` adapter; its reference is that adapter, frozen, on the same base.
"""

from typing import Any

from pipeline.config import Job
from pipeline.runtime.run import launch
from pipeline.runtime.worker import Worker


def run(job: Job) -> dict[str, Any]:
    return launch(job, train)


def train(worker: Worker) -> dict[str, Any]:
    from peft import LoraConfig, PeftModel
    from trl import KTOConfig, KTOTrainer

    from pipeline.data.kl_pairs import PairedBatches
    from pipeline.planning import recompute
    from pipeline.runtime import training

    class Trainer(PairedBatches, KTOTrainer):
        """TRL's trainer on rows that are tokenised already, each exactly once an epoch over all workers."""

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            # TRL 1.16 has no switch for this; it would look for the text columns. Remove when it leaves rows with
            # `prompt_ids` as they are, as its RewardTrainer leaves those with `chosen_ids`.
            return dataset

    rows, held_out = worker.rows("train"), worker.rows("eval")
    order = sampling(worker.job.trainer.get("loss_type"))
    args = training.arguments(
        worker, KTOConfig, recompute.settled(worker), max_length=None, train_sampling_strategy=order
    )
    base, adapter = worker.load_base(), None
    if "policy" in worker.work.inputs:
        # TRL copies the adapter that it finds here to one called `ref` and freezes that: the reference.
        base = PeftModel.from_pretrained(base, worker.input("policy"), is_trainable=True)
    else:
        adapter = LoraConfig(task_type="CAUSAL_LM", **worker.job.lora)
    trainer = Trainer(
        model=base,
        args=args,
        peft_config=adapter,
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=worker.tokenizer,
    )
    if adapter is None:
        training.undo_rounding(trainer)
    metrics = training.run(worker, trainer)
    probe = [row["prompt_ids"] + row["completion_ids"] for row in rows.select(range(min(4, len(rows))))]
    return worker.finish(
        metrics,
        save=lambda folder: training.save(trainer, folder),
        verify=lambda folder: training.verify_reload(trainer, folder, probe),
    )


def sampling(loss: str | None) -> str:
    """KTOConfig.train_sampling_strategy for a loss.

    TRL pairs the rows of its KL term in the order of the file and wants it kept; `PairedBatches` pairs them as drawn, at
    random all the same. A loss without a KL term has TRL's own batches.
    """
    return "random" if loss == "apo_zero_unpaired" else "sequential"
