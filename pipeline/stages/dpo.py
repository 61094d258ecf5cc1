"""Direct preference optimization: the sft adapter moved towards the chosen completions, without a reward model.

    make dpo    or    python -m pipeline dpo jobs/demo/dpo.yaml [section.key=value ...]

TRL's DPOTrainer continues a copy of the `policy` adapter; its reference is that adapter, frozen, on the same base, or the one
that the job names as `reference`.
"""

from typing import Any

from pipeline.job import Job
from pipeline.run.launch import launch
from pipeline.run.worker import Worker


def run(job: Job) -> dict[str, Any]:
    return launch(job, train)


def train(worker: Worker) -> dict[str, Any]:
    from trl import DPOConfig, DPOTrainer

    from pipeline.stages import trl_trainer
    from pipeline.stages.exact_batches import ExactBatches

    class Trainer(trl_trainer.TokenizedRows, ExactBatches, DPOTrainer):
        """TRL's trainer with each pair exactly once per epoch over all workers."""

    args = trl_trainer.arguments(worker, DPOConfig, max_length=None)
    trainer = trl_trainer.continue_policy(worker, Trainer, args)
    return trl_trainer.finish(worker, trainer, trl_trainer.run(worker, trainer))
