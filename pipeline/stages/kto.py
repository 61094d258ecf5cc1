"""KTO: the sft adapter moved towards desirable completions and away from undesirable ones, which need not come in pairs.

    make kto    or    python -m pipeline kto jobs/demo/kto.yaml [section.key=value ...]

TRL's KTOTrainer continues a copy of the `policy` adapter; its reference is that adapter, frozen, on the same base.
"""

from typing import Any

from pipeline.job import Job
from pipeline.run.launch import launch
from pipeline.run.worker import Worker


def run(job: Job) -> dict[str, Any]:
    return launch(job, train)


def train(worker: Worker) -> dict[str, Any]:
    from trl import KTOConfig, KTOTrainer

    from pipeline.stages import trl_trainer
    from pipeline.stages.kl_pairs import PairedBatches

    class Trainer(trl_trainer.TokenizedRows, PairedBatches, KTOTrainer):
        """TRL's trainer with each row exactly once per epoch over all workers."""

    order = sampling(worker.work.trainer.get("loss_type"))
    args = trl_trainer.arguments(worker, KTOConfig, max_length=None, train_sampling_strategy=order)
    trainer = trl_trainer.continue_policy(worker, Trainer, args)
    return trl_trainer.finish(worker, trainer, trl_trainer.run(worker, trainer))


def sampling(loss: str | None) -> str:
    """Returns KTOConfig.train_sampling_strategy for a loss.

    TRL pairs the rows of its KL term in the order of the file and wants that order kept; `PairedBatches` pairs them at random,
    as drawn. A loss without a KL term has TRL's own batches.
    """
    return "random" if loss == "apo_zero_unpaired" else "sequential"
