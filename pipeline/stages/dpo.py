"""Direct preference optimisation: the sft adapter moved towards the chosen completions, without a reward model.

    make dpo    or    python -m pipeline dpo jobs/demo/dpo.yaml [section.key=value ...]

TRL's DPOTrainer continues a copy of the `policy` adapter; its reference is that adapter, frozen, on the same base, or the one
that the job names as `reference`.
"""

from typing import Any

from pipeline.config import Job
from pipeline.runtime.run import launch
from pipeline.runtime.worker import Worker


def run(job: Job) -> dict[str, Any]:
    return launch(job, train)


def train(worker: Worker) -> dict[str, Any]:
    from peft import LoraConfig, PeftModel
    from trl import DPOConfig, DPOTrainer

    from pipeline.data.feed import ExactBatches
    from pipeline.planning import recompute
    from pipeline.runtime import training

    class Trainer(ExactBatches, DPOTrainer):
        """TRL's trainer on rows that are tokenised already, each exactly once an epoch over all workers."""

        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            # TRL 1.16 has no switch for this; it would look for the text columns. Remove when it leaves rows with
            # `prompt_ids` as they are, as its RewardTrainer leaves those with `chosen_ids`.
            return dataset

    rows, held_out = worker.rows("train"), worker.rows("eval")
    args = training.arguments(worker, DPOConfig, recompute.settled(worker), max_length=None)
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
    if worker.job.reference:
        training.replace_reference(worker, trainer)
    metrics = training.run(worker, trainer)
    probe = [row["prompt_ids"] + row["chosen_ids"] for row in rows.select(range(min(4, len(rows))))]
    return worker.finish(
        metrics,
        save=lambda folder: training.save(trainer, folder),
        verify=lambda folder: training.verify_reload(trainer, folder, probe),
    )
