"""Defines the table of stages, with the inputs, rows, trained adapter, unused keys and summary metrics of each stage.

Code that depends on the stage should use this table, for example job.spec.learns instead of job.stage in ("sft", "rm", ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline import metrics

OURS = "pipeline.job.job"
# All inputs that a job can have. StageSpec.inputs lists the inputs of one stage.
INPUTS = ("policy", "reference", "baseline", "teacher", "reward", "judge")
# {section or section.key that a stage does not use: reason}, for StageSpec.unused.
_NO_SERVER = {"serve": "only `serve` answers requests"}
_NO_ROLLOUT = {"rollout": "only `ppo` trains on sampled completions"}
_LEARNS = _NO_SERVER | dict.fromkeys(
    ("data.pairs", "data.benchmarks"),
    "only `evaluate` reads this key; the held-out rows of this stage are data.eval",
)
_NOTHING_TRAINED = dict.fromkeys(
    """lora data.deduplicate data.batch_size data.eval_fraction data.seed run.load_best_model_at_end
    run.metric_for_best_model run.greater_is_better run.early_stopping_patience run.stop_if run.num_to_keep
    mlflow.registered_model""".split(),
    "this stage trains nothing",
)
# Stages that generate completions without training on them use only the keys of `rollout` about decoding.
_DECODES = dict.fromkeys(
    """rollout.num_workers rollout.staleness rollout.use_gpu rollout.resources_per_worker rollout.label_selector
    rollout.worker_wait_timeout_s rollout.chunk_timeout_s rollout.tensor_parallel_size rollout.correction
    rollout.correction_cap""".split(),
    "only `ppo` trains on its samples; this stage uses only rollout.engine and the engine's settings",
)
_NO_MLFLOW_RUN, _ACTORS = "this stage creates no MLflow run", "Ray places and restarts actors one by one"
_EVALUATES_NOTHING = "this stage evaluates nothing; all its rows are data.train"
_ROW_BY_ROW = _NOTHING_TRAINED | {
    "model.fsdp": "each process of this stage holds the full base; only sft, rm, dpo, kto, ppo and evaluate shard it",
    "data.pairs": _EVALUATES_NOTHING,
    "data.benchmarks": _EVALUATES_NOTHING,
    "data.eval": _EVALUATES_NOTHING,
    "gate": _EVALUATES_NOTHING,
    "mlflow.experiment": _NO_MLFLOW_RUN,
    "mlflow.report_to": _NO_MLFLOW_RUN,
    "mlflow.alias": _NO_MLFLOW_RUN,
    "run.report": _NO_MLFLOW_RUN,
    "run.max_failures": _ACTORS,
    "scaling.placement_strategy": _ACTORS,
    "scaling.elastic_resize_monitor_interval_s": _ACTORS,
}


@dataclass(frozen=True)
class StageSpec:
    """Describes one stage."""

    # Config class (package.module.Class) with the keys of the `trainer` section.
    trainer: str
    summary: str  # one line for --help
    inputs: Mapping[str, bool] = field(default_factory=dict)  # {input: whether it is required}
    rows: str | None = None  # kind of rows that the stage reads (a key of data.formats.KINDS), or None
    learns: str | None = None  # role of the adapter that the stage trains (policy or reward), or None
    # Whether training uses a reference model: the job's `reference`, or by default the initial policy.
    keeps_reference: bool = False
    # Number of forward passes per training step without gradients, in addition to the forward pass of the reference.
    further_forwards: int = 0
    fewest_rows: int = 1  # minimum number of rows in a micro-batch
    sequences: int = 1  # number of sequences in a training row; a pair has two
    # Whether the stage generates completions. Generation needs space in the context after the prompt.
    writes: bool = False
    # Whether the stage scores completions with rewards or a judge. Python rewards may also read columns of the rows.
    scores: bool = False
    # Where the stage runs: train (workers of Ray Train), data (actors of Ray Data), serve (replicas of Ray Serve), or here
    # (the process of the command).
    runs_in: str = "train"
    # {section or section.key that the stage does not use: reason}
    unused: Mapping[str, str] = field(default_factory=dict)
    title: str = ""  # name of the stage in reports
    # Metrics in the stage's summary, most important first. The table that `run` prints shows only the first metric.
    headline: tuple[str, ...] = ()

    @property
    def trl(self) -> bool:
        """Returns True if the stage uses a trainer of TRL. Only workers import the config class of a TRL trainer."""
        return self.trainer.startswith("trl.")

    @property
    def online(self) -> bool:
        """Returns True if the stage trains on completions that it samples itself."""
        return bool(self.learns and self.writes)

    @property
    def reads_train(self) -> bool:
        """Returns True if the stage reads data.train."""
        return not {"data", "data.train"} & self.unused.keys()


STAGE_SPECS: dict[str, StageSpec] = {
    "sft": StageSpec(
        "trl.trainer.sft_config.SFTConfig",
        "fine-tune on demonstrations",
        rows="demonstrations",
        learns="policy",
        unused={**_LEARNS, **_NO_ROLLOUT},
        title="Supervised fine-tuning",
        headline=("eval_loss", "eval_mean_token_accuracy", "eval_eos_accuracy"),
    ),
    "rm": StageSpec(
        "trl.trainer.reward_config.RewardConfig",
        "train a reward model on preference pairs",
        rows="whole_preferences",
        learns="reward",
        sequences=2,
        unused={**_LEARNS, **_NO_ROLLOUT},
        title="Reward model",
        headline=("eval_accuracy", "eval_margin"),
    ),
    "dpo": StageSpec(
        "trl.trainer.dpo_config.DPOConfig",
        "train on preference pairs directly, from the sft adapter",
        {"policy": True, "reference": False},
        rows="preferences",
        learns="policy",
        keeps_reference=True,
        sequences=2,
        unused={**_LEARNS, **_NO_ROLLOUT},
        title="Direct preference optimization",
        headline=("eval_rewards/accuracies", "eval_loss", "eval_rewards/margins"),
    ),
    "kto": StageSpec(
        "trl.trainer.kto_config.KTOConfig",
        "train on completions labeled good or bad, from the sft adapter",
        {"policy": True},
        rows="labels",
        learns="policy",
        keeps_reference=True,
        fewest_rows=2,  # the KL term combines each prompt with another row's completion
        further_forwards=2,  # forward passes of policy and reference for the KL term
        unused={**_LEARNS, **_NO_ROLLOUT},
        title="Kahneman-Tversky optimization",
        headline=("eval_rewards/margins", "eval_loss", "eval_kl"),
    ),
    "ppo": StageSpec(
        "pipeline.ppo.config.PPOConfig",
        "train with PPO, GRPO or RLOO, from the sft adapter",
        {"policy": True, "teacher": False, "reward": False, "judge": False},
        rows="prompts",
        learns="policy",
        keeps_reference=True,
        writes=True,
        scores=True,
        unused={**_LEARNS, "data.batch_size": "use trainer.batch_size, the episodes of one update over all workers"},
        title="PPO",
        headline=("eval_judge", "eval_reward", "eval_win_rate", "eval_kl", "eval_length", "eval_eos_rate"),
    ),
    "evaluate": StageSpec(
        f"{OURS}.Evaluate",
        "compare a policy with a baseline, test a reward model",
        {"policy": False, "baseline": False, "reward": False, "judge": False},
        rows="answered_prompts",
        writes=True,
        scores=True,
        unused={**_NO_SERVER, **_DECODES, **_NOTHING_TRAINED, "data.train": "this stage trains on no rows; set data.eval to the prompts"},
        title="Evaluation",
        headline=(
            "eval_judge_win_rate", "eval_judge", "eval_win_rate", "eval_reward",
            "eval_kl", "eval_rm_accuracy",
        ),
    ),
    "generate": StageSpec(
        f"{OURS}.Inference",
        "generate completions for the prompts in a file",
        {"policy": True, "reward": False},
        rows="prompts",
        writes=True,
        scores=True,
        runs_in="data",
        unused={**_NO_SERVER, **_DECODES, **_ROW_BY_ROW},
    ),
    "collect": StageSpec(
        f"{OURS}.Collect",
        "turn scored completions of a policy into training rows",
        {"policy": True, "reward": True},
        rows="prompts",
        writes=True,
        scores=True,
        runs_in="data",
        unused={**_NO_SERVER, **_DECODES, **{key: why for key, why in _ROW_BY_ROW.items() if key != "data.seed"}},
    ),
    "score": StageSpec(
        f"{OURS}.Forward",
        "score a file of pairs or completions with a reward model",
        {"reward": True},
        rows="completions",
        scores=True,
        runs_in="data",
        unused={**_NO_SERVER, **_NO_ROLLOUT, **_ROW_BY_ROW},
    ),
    "serve": StageSpec(
        f"{OURS}.Inference",
        "serve policies and reward models on one base, with OpenAI's API",
        writes=True,
        scores=True,
        runs_in="serve",
        unused={
            **_DECODES,
            **_ROW_BY_ROW,
            **dict.fromkeys("""data.train data.on_error data.overlong data.columns data.label data.transform data.group_by
                data.cache_dir data.subset""".split(), "this stage reads no rows"),
            "trainer.seed": "a request may set a seed; otherwise each request has a different seed",
            "run.overwrite": "there is nothing to resume",
        },
    ),
    "export": StageSpec(
        f"{OURS}.Export",
        "write merged models or adapters, to a folder or the Hub",
        {"policy": False, "reward": False},
        runs_in="here",
        unused={
            **_NO_SERVER,
            **_NO_ROLLOUT,
            **_ROW_BY_ROW,
            "data": "this stage reads no rows",
            "model.load_in_4bit": "an adapter is merged into the unquantized base in model.dtype",
            **dict.fromkeys("""run.placement_timeout_s scaling.num_workers scaling.resources_per_worker scaling.accelerator_type
                scaling.label_selector""".split(), "this stage runs in the command's process; scaling.use_gpu chooses the device"),
        },
    ),
}  # fmt: skip
TRAINED = tuple(name for name, spec in STAGE_SPECS.items() if spec.learns)


def headline_metrics(stage: str, values: Mapping[str, float]) -> list[metrics.Metric]:
    """Returns the metrics in a stage's summary that are in `values`."""
    candidates = (metrics.find_metric(name, stage) for name in STAGE_SPECS[stage].headline if name in values)
    return [metric for metric in candidates if metric]


def row_kind_of(stage: str) -> str | None:
    """Returns the kind of rows that a stage reads, or None if `stage` reads no rows or is not a stage."""
    return STAGE_SPECS[stage].rows if stage in STAGE_SPECS else None


def title_of(stage: str) -> str:
    """Returns the title of a stage, e.g. `Reward model` for `rm`. A stage without a title has its name as title."""
    return STAGE_SPECS[stage].title or stage


def time_axis(stage: str) -> str:
    """Returns the unit of the steps in a stage's curves. ppo logs metrics once per update."""
    return "update" if STAGE_SPECS[stage].online else "step"
