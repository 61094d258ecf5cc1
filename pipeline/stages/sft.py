"""Supervised fine-tuning: an adapter that answers as the demonstrations do.

    make sft    or    python -m pipeline sft jobs/demo/sft.yaml [section.key=value ...]

TRL's SFTTrainer on completion-only labels. Registers the adapter that dpo and ppo continue.
"""

from typing import Any

from pipeline.config import Job
from pipeline.runtime.run import launch
from pipeline.runtime.worker import Worker


def run(job: Job) -> dict[str, Any]:
    return launch(job, train)


def train(worker: Worker) -> dict[str, Any]:
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from pipeline.data.feed import ExactBatches
    from pipeline.planning import recompute
    from pipeline.runtime import training

    class Trainer(ExactBatches, SFTTrainer):
        """TRL's trainer, each row exactly once an epoch over all workers."""

    rows, held_out = worker.rows("train"), worker.rows("eval")
    # Rows come tokenised, labelled, truncated and packed: TRL has nothing left to prepare.
    prepared = {"skip_prepare_dataset": True}
    args = training.arguments(
        worker, SFTConfig, recompute.settled(worker), dataset_kwargs=prepared, max_length=None
    )
    trainer = Trainer(
        model=worker.load_base(),
        args=args,
        peft_config=LoraConfig(task_type="CAUSAL_LM", **worker.job.lora),
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=worker.tokenizer,
    )
    metrics = training.run(worker, trainer)
    probe = rows.select(range(min(4, len(rows))))["input_ids"]
    return worker.finish(
        metrics,
        save=lambda folder: training.save(trainer, folder),
        verify=lambda folder: training.verify_reload(trainer, folder, probe),
    )
