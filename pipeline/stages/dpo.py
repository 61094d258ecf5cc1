"""Direct preference optimization: the sft adapter moved towards the chosen completions, without a reward model.

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
    from trl import DPOConfig, DPOTrainer

    from pipeline.data.feed import ExactBatches
    from pipeline.planning import plan
    from pipeline.runtime import training

    class Trainer(training.TokenizedRows, ExactBatches, DPOTrainer):
        """TRL's trainer, each pair exactly once an epoch over all workers."""

    args = training.arguments(worker, DPOConfig, plan.recomputes(worker), max_length=None)
    trainer = training.continue_policy(worker, Trainer, args)
    return training.finish(worker, trainer, training.run(worker, trainer))
