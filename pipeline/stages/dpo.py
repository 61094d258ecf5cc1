"""Direct preference optimization: trains the sft adapter on preference pairs, without a reward model.

    make dpo    or    python -m pipeline dpo jobs/demo/dpo.yaml [section.key=value ...]

TRL's DPOTrainer continues a copy of the `policy` adapter. The reference is the frozen `policy` adapter, or the adapter that
the job names as `reference`, on the same base.
"""

from typing import Any

from pipeline.run.launch import Recipe
from pipeline.run.worker import Worker


def train(worker: Worker) -> dict[str, Any]:
    from trl import DPOConfig, DPOTrainer

    from pipeline.stages import trl_trainer
    from pipeline.stages.exact_batches import ExactBatches

    class Trainer(trl_trainer.TokenizedRows, ExactBatches, DPOTrainer):
        """TRL's trainer, whose workers together read each pair exactly once per epoch."""

    args = trl_trainer.make_arguments(worker, DPOConfig, max_length=None)
    trainer = trl_trainer.continue_policy(worker, Trainer, args)
    return trl_trainer.finish_trl(worker, trainer, trl_trainer.train_trl(worker, trainer))


RECIPE = Recipe(train)
