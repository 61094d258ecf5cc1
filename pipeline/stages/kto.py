"""KTO: trains the sft adapter on desirable and undesirable completions, which need not come in pairs.

    make kto    or    python -m pipeline kto jobs/demo/kto.yaml [section.key=value ...]

TRL's KTOTrainer continues a copy of the `policy` adapter. The reference is the frozen `policy` adapter on the same base.
"""

from typing import Any

from pipeline.run.launch import Recipe
from pipeline.run.worker import Worker


def train(worker: Worker) -> dict[str, Any]:
    from trl import KTOConfig, KTOTrainer

    from pipeline.stages import trl_trainer
    from pipeline.stages.kl_pairs import PairedBatches

    class Trainer(trl_trainer.TokenizedRows, PairedBatches, KTOTrainer):
        """TRL's trainer, with each row exactly once per epoch over all workers."""

    order = sampling_strategy(worker.work.trainer.get("loss_type"))
    args = trl_trainer.make_arguments(worker, KTOConfig, max_length=None, train_sampling_strategy=order)
    trainer = trl_trainer.continue_policy(worker, Trainer, args)
    return trl_trainer.finish_trl(worker, trainer, trl_trainer.train_trl(worker, trainer))


RECIPE = Recipe(train)


def sampling_strategy(loss: str | None) -> str:
    """Returns KTOConfig.train_sampling_strategy for a loss.

    For the KL term, TRL pairs rows in the order of the file, and requires that order. `PairedBatches` pairs rows at random.
    A loss without a KL term uses TRL's own batches.
    """
    return "random" if loss == "apo_zero_unpaired" else "sequential"
