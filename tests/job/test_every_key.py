"""Tests that no key of a job is silently ignored: each key has an effect, or load_job rejects it.

- our sections, and `trainer` of evaluate, generate, collect, score, serve and export: the source outside of job/ reads each key.
- `trainer` of ppo: changing a key in a toy run must change weights, metrics, or the number of forwards or evaluations.
- `trainer` of sft, rm, dpo and kto: each key reaches TRL's class unchanged.
"""

import dataclasses
import re
from functools import cache
from types import SimpleNamespace

import pytest
import toy_ppo as toy
from running import ROOT

from pipeline.job import job as config
from pipeline.job import load_job, schema
from pipeline.job.schema_of import REFUSED
from pipeline.job.stages import STAGE_SPECS
from pipeline.ppo.config import PPOConfig
from pipeline.scoring.rewards import AdapterReward, FunctionReward
from pipeline.stages import trl_trainer

# {key of PPOConfig: a value that differs from the value in toy.trainer}. Also has the settings that other keys depend on.
OTHER = {
    "total_episodes": 16, "num_train_epochs": 2.0, "batch_size": 8, "num_ppo_epochs": 1, "num_mini_batches": 1,
    "critic": "head", "num_generations": 2, "per_device_train_batch_size": 4, "max_tokens_per_micro_batch": 20, "local_rollout_forward_batch_size": 4,
    "response_length": 6, "min_new_tokens": 3, "temperature": 0.7, "normalize_rewards": True, "reward_clip": 0.1,
    "missing_eos_penalty": 1.0, "bootstrap_truncated": True, "mask_truncated_completions": True, "whiten_rewards": True,
    "kl_coef": 0.5, "kl_estimator": "k3", "kl_in": "loss", "kl_controller": "adaptive", "kl_target": 1e-4, "kl_horizon": 50.0,
    "sync_ref_model": True, "ref_model_mixup_alpha": 0.1, "ref_model_sync_steps": 2, "advantage_estimator": "reinforce_plus_plus",
    "gamma": 0.5, "lam": 0.5, "whiten_advantages": False, "scale_rewards": False, "cliprange": 0.001, "cliprange_high": 10.0,
    "importance_sampling_level": "sequence", "loss_aggregation": "constant", "dual_clip": 1.01,
    "entropy_coef": 0.5, "vf_coef": 0.5, "cliprange_value": None, "normalize_values": True, "critic_warmup_steps": 1,
    "target_kl": 1e-6, "learning_rate": 1e-3, "critic_learning_rate": 1e-4, "adam_beta1": 0.5, "adam_beta2": 0.9,
    "adam_epsilon": 1e-2, "weight_decay": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 2, "max_grad_norm": 1e-3,
    "optim": "adamw_8bit", "bf16": True, "gradient_checkpointing": True, "seed": 4, "logging_steps": 2, "eval_steps": 1, "check_reference": False,
}  # fmt: skip
WHERE = {
    "num_train_epochs": {"total_episodes": None},
    "normalize_rewards": {"scorer": "adapter"},
    "kl_estimator": {"kl_coef": 0.5},
    "kl_in": {"kl_estimator": "k3", "kl_coef": 0.5},
    "kl_target": {"kl_controller": "adaptive", "kl_horizon": 50.0, "total_episodes": 48},
    "kl_horizon": {"kl_controller": "adaptive"},
    "ref_model_mixup_alpha": {"sync_ref_model": True, "ref_model_sync_steps": 1, "kl_coef": 0.5},
    "ref_model_sync_steps": {"sync_ref_model": True, "kl_coef": 0.5, "total_episodes": 48},
    "sync_ref_model": {"ref_model_sync_steps": 1, "kl_coef": 0.5},
    "scale_rewards": {"advantage_estimator": "grpo", "num_generations": 2},
    "cliprange_high": {"cliprange": 0.001},
    "importance_sampling_level": {"advantage_estimator": "grpo", "num_generations": 2},
    "dual_clip": {"cliprange": 0.001, "num_ppo_epochs": 6, "learning_rate": 0.1},
    "cliprange_value": {"cliprange_value": 0.001},
    "warmup_steps": {"lr_scheduler_type": "linear"},
    "check_reference": {"spread": 0.5},
}
# Keys that the ppo stage reads instead of the trainer.
OF_STAGES = {"save_steps", "reward_timeout_s", "teacher_coef", "teacher_system"}


@cache
def outcome(settings):
    """Returns the results of two or three updates: weights, metrics, number of base forwards, and evaluations."""
    changes = {"total_episodes": 32, **dict(settings)}
    spread, scorer = changes.pop("spread", 0.0), changes.pop("scorer", None)
    critic = changes.get("advantage_estimator", "gae") == "gae" and changes.get("critic", "adapter")
    shared = toy.shared_base(spread=spread, critic=critic)
    calls, asked = [], []
    layer = next(module for name, module in shared.base.named_modules() if name.endswith("mlp"))
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    reward = AdapterReward(shared, mean=1.0, std=3.0) if scorer else FunctionReward(toy.low)
    trainer = toy.trainer(shared, [reward], **changes)
    try:
        history = trainer.train(evaluate=lambda: asked.append(1) or {})
    except Exception as error:  # a key may enable a check that fails; the error is then the result
        return repr(error)
    timed = ("time/", "memory/", "per_second")
    figures = [{k: v for k, v in m.items() if not any(word in k for word in timed)} for m in history]
    return toy.weights(trainer).tolist(), figures, len(calls), len(asked)


@pytest.mark.slow
@pytest.mark.parametrize("key", OTHER)
def test_every_key_of_ppo_changes_something(key):
    around = {"num_train_epochs": 1.0, **WHERE.get(key, {})}
    changed = {**around, key: OTHER[key]}
    assert changed != around
    assert outcome(tuple(sorted(changed.items()))) != outcome(tuple(sorted(around.items())))


def test_every_key_of_ppo_is_tried():
    assert {field.name for field in dataclasses.fields(PPOConfig)} == {*OTHER} | OF_STAGES


@pytest.mark.parametrize(
    ("section", "name"),
    [(config.Model, "model"), (config.Data, "data|source"), (config.Run, "run"), (config.MLflow, "mlflow"), (config.Serve, "serve"),
     (config.Source, "source"), *((c, "args") for c in (config.Forward, config.Inference, config.Evaluate, config.Collect, config.Export))],
)  # fmt: skip
def test_every_key_of_our_sections_is_read_by_what_runs(section, name):
    """Searches the source outside of job/ for reads such as `run.name`, not for `name` alone. Code in job/ only checks values.

    Source.location in job/ reads the keys `path` and `revision` of a source.
    """
    files = [f for f in (ROOT / "pipeline").rglob("*.py") if "job" not in f.relative_to(ROOT).parts]
    read = set(re.findall(rf"\b(?:{name})\.(\w+)", "\n".join(file.read_text() for file in files)))
    through = {"path", "revision"} if section is config.Source else set()
    assert {field.name for field in dataclasses.fields(section)} - through <= read


@pytest.mark.parametrize("stage", [name for name, spec in STAGE_SPECS.items() if spec.trl])
def test_every_key_of_trl_reaches_its_class(stage, in_root):
    job = load_job(f"jobs/demo/{stage}.yaml", ["data.batch_size=null"], stage)
    section = {
        key: object() for key in schema.keys(STAGE_SPECS[stage].trainer) if key not in REFUSED["trainer"]
    }
    section["gradient_checkpointing"] = True
    work = SimpleNamespace(
        trainer=section, data=job.data, spec=job.spec, places=SimpleNamespace(on_gpu=False)
    )
    worker = SimpleNamespace(work=work, scratch="scratch")
    arguments = trl_trainer.make_arguments(worker, dict)
    assert section.items() <= arguments.items()
    decided = arguments.keys() - section.keys()
    assert decided <= REFUSED["trainer"].keys(), "a key that a job may give is overruled"
