"""How fast one of TRL's trainers learns: tokens a second, on a GPU the share of its peak, and the most memory held so far."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import TrainerCallback

from pipeline.config.stages import STAGE
from pipeline.models.gpus import peak_flops
from pipeline.runtime.worker import Worker, peak_memory


class Speed(TrainerCallback):
    """Adds up the seconds of optimizer steps, without what lies between them: evaluations, checkpoints, the wait for rows."""

    def __init__(self, worker: Worker, trainer: Any) -> None:
        self.worker, self.trainer = worker, trainer
        facts = STAGE[worker.job.stage]
        # A forward takes 2 FLOPs per token and parameter; a backward through frozen weights as many, since only activations
        # have gradients. What is recomputed does not count: model FLOPs (Chowdhery et al. 2022, PaLM, section 4.1).
        self.passes = 2 + facts.keeps_reference + facts.further_forwards
        self.device = torch.device(worker.device)
        self.begun: float | None = None
        self.seconds, self.tokens = 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tokens = self._trained()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begun = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.device.type == "cuda":  # kernels are only launched when Python has come here
            torch.cuda.synchronize(self.device)
        assert self.begun is not None
        self.seconds += time.monotonic() - self.begun

    def take(self) -> dict[str, float]:
        """The figures since the last call, of all workers together; {} where no step was made."""
        tokens, seconds = self._trained() - self.tokens, self.seconds
        if not tokens or not seconds:
            return {}
        self.tokens, self.seconds = self.tokens + tokens, 0.0
        found = {"train_tokens_per_second": tokens / seconds, "memory/peak": peak_memory() / 2**30}
        if peak := peak_flops(self.device):
            base = self.trainer.accelerator.unwrap_model(self.trainer.model).get_base_model()
            found["mfu"] = (
                2 * base.num_parameters() * tokens * self.passes / (seconds * peak * self.worker.world)
            )
        return found

    def _trained(self) -> int:
        """Tokens that all workers have trained on."""
        return int(self.trainer._total_train_tokens)  # private in TRL 1.16; see training.save_sums
