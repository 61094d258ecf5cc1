"""One table: what each stage takes, which rows it reads, what it trains, and which settings it has no use for.

Code that depends on the stage asks here: STAGE[job.stage].learns, not job.stage in ("sft", "rm", ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OURS = "pipeline.config"
_NOTHING_TRAINED = {
    "lora": "it trains nothing",
    "data.eval_fraction": "it holds nothing out",
    "data.seed": "it holds nothing out",
    "data.batch_size": "it trains nothing; the rows of one forward are trainer.local_rollout_forward_batch_size",
    "run.num_to_keep": "it leaves no checkpoints",
    "mlflow.registered_model": "it registers nothing",
}
_NO_SERVER = {"run.port": "only `serve` listens, with a job of `score`"}
_NO_PAIRS = {"data.pairs": "they are for `evaluate`; its held-out rows are data.eval"}
_LEARNS = {**_NO_SERVER, **_NO_PAIRS}
_ROW_BY_ROW = {
    **_NOTHING_TRAINED,
    "data.pairs": "they are for `evaluate`; all its rows are data.train",
    "gate": "it registers no version that a gate could hold back",
    "data.eval": "it holds nothing out: all its rows are data.train",
    "run.max_failures": "Ray Data does again what a lost actor did not finish",
    "run.report": "it has no report",
    "scaling.placement_strategy": "its actors are placed one by one",
    "scaling.elastic_resize_monitor_interval_s": "its actors come and go by themselves",
    "mlflow.experiment": "it makes no MLflow run",
    "mlflow.alias": "it registers nothing",
}


@dataclass(frozen=True)
class Stage:
    """The facts of one stage."""

    # the class, as package.module.Class, whose fields are the keys of its `trainer` section
    trainer: str
    # the models that it takes; True: it cannot run without
    inputs: Mapping[str, bool] = field(default_factory=dict)
    # the kind of rows that data.train and data.eval hold, a key of data.kinds.KIND; None: it reads no rows
    rows: str | None = None
    # the role whose adapter it trains: policy or reward
    learns: str | None = None
    # whether it writes completions, for which the context must have room behind a prompt
    writes: bool = False
    # whether rewards or a judge score completions; Python functions among them ask for columns of the rows
    scores: bool = False
    # train: Ray Train's workers; data: actors of Ray Data, each row by itself; here: this process
    runs_in: str = "train"
    # {section or section.key: why it has no use for it}
    unused: Mapping[str, str] = field(default_factory=dict)

    @property
    def trl(self) -> bool:
        """Whether TRL's trainer does it, whose class only a worker imports."""
        return self.trainer.startswith("trl.")


STAGE: dict[str, Stage] = {
    "sft": Stage(
        "trl.trainer.sft_config.SFTConfig",
        rows="demonstrations",
        learns="policy",
        unused=_LEARNS,
    ),
    "rm": Stage(
        "trl.trainer.reward_config.RewardConfig",
        rows="whole_preferences",
        learns="reward",
        unused=_LEARNS,
    ),
    "dpo": Stage(
        "trl.trainer.dpo_config.DPOConfig",
        {"policy": True},
        rows="preferences",
        learns="policy",
        unused=_LEARNS,
    ),
    "ppo": Stage(
        "pipeline.ppo.config.PPOConfig",
        {"policy": True, "reward": True, "judge": False},
        rows="prompts",
        learns="policy",
        writes=True,
        scores=True,
        unused={**_LEARNS, "data.batch_size": "use trainer.batch_size, the episodes of one update over all workers"},
    ),
    "evaluate": Stage(
        f"{OURS}.Inference",
        {"policy": False, "baseline": False, "reward": False, "judge": False},
        rows="answered_prompts",
        writes=True,
        scores=True,
        unused={**_NO_SERVER, **_NOTHING_TRAINED, "data.train": "it trains nothing; put the prompts under data.eval"},
    ),
    "generate": Stage(
        f"{OURS}.Inference",
        {"policy": True, "reward": False},
        rows="prompts",
        writes=True,
        scores=True,
        runs_in="data",
        unused={**_NO_SERVER, **_ROW_BY_ROW},
    ),
    "score": Stage(
        f"{OURS}.Forward",
        {"reward": True},
        rows="completions",
        scores=True,
        runs_in="data",
        unused=_ROW_BY_ROW,
    ),
    "export": Stage(
        f"{OURS}.Export",
        {"policy": False, "reward": False},
        runs_in="here",
        unused={
            **_NO_SERVER,
            **_ROW_BY_ROW,
            "data": "it reads no rows",
            "model.load_in_4bit": "an adapter is merged into the base as it is stored, in model.dtype, never into nf4 weights",
            "run.placement_timeout_s": "it runs in this process",
            **dict.fromkeys(
                (f"scaling.{key}" for key in ("num_workers", "resources_per_worker", "accelerator_type", "label_selector")),
                "it runs in this process; scaling.use_gpu says where",
            ),
        },
    ),
}  # fmt: skip
TRAINED = tuple(name for name, stage in STAGE.items() if stage.learns)
