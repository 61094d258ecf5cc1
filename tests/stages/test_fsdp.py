"""Tests that stages have equal results with two shards (model.fsdp) and with full bases, and resume on more or fewer workers."""

import pytest
from dying import killed
from resumed import touched
from running import stage

from tools.chaos.runs import comparable

TWO = ["scaling.num_workers=2", "scaling.resources_per_worker={CPU: 0.5}"]
TRL = [
    "trainer.max_steps=4", "data.batch_size=16", "trainer.per_device_train_batch_size=4", "trainer.logging_steps=1",
]  # fmt: skip
PPO = [
    "trainer.total_episodes=32", "trainer.batch_size=16", "trainer.response_length=12", "trainer.max_tokens_per_micro_batch=200",
    "judge=null",
]  # fmt: skip
SFT, RM = "policy=models:/rlhf-sft/1", "reward=models:/rlhf-rm/1"
# The order of the stages matters, because later stages use the adapters of earlier stages.
OF_STAGE = {
    "sft": [*TRL, "trainer.packing=true", "data.max_length=64"],
    "rm": [*TRL, "trainer.gradient_checkpointing=true"],
    "dpo": [*TRL, SFT, "mlflow.registered_model=null"],
    "kto": [*TRL, SFT, "mlflow.registered_model=null"],
    "ppo": [*PPO, SFT, RM, "trainer.critic=adapter", "trainer.gradient_checkpointing=true"],
    "evaluate": [
        "policy=models:/rlhf-ppo/1", "baseline=models:/rlhf-sft/1", RM, "judge=null", "trainer.response_length=12",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, embedded_ray):
    return tmp_path_factory.mktemp("fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("verb", OF_STAGE)
def test_shards_end_like_unsharded_bases(verb, folder):
    settings = [*TWO, *OF_STAGE[verb]]
    whole = stage(verb, folder, f"{verb}-whole", *settings)
    shards = stage(verb, folder, f"{verb}-shards", *settings, "model.fsdp=true")
    assert comparable(shards["metrics"]) == comparable(whole["metrics"])
    assert len(comparable(whole["metrics"])) >= 4 and shards["samples"] == whole["samples"]


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_workers(folder, monkeypatch):
    settings = [
        *OF_STAGE["sft"], "trainer.max_steps=6", "trainer.save_strategy=steps", "trainer.save_steps=2",
        "mlflow.registered_model=null", "model.fsdp=true",
    ]  # fmt: skip
    expected = stage("sft", folder, "calm", *TWO, *settings, "model.fsdp=false")
    for step, workers in ((3, TWO), (5, ["scaling.num_workers=1"])):
        with monkeypatch.context() as patch:
            touched(patch, "sft", step, folder / f"died-{step}", killed)
            stage("sft", folder, "moved", *workers, *settings, status=1)
    result = stage("sft", folder, "moved", *TWO, *settings)
    assert (folder / "died-3").exists() and (folder / "died-5").exists()
    assert comparable(result["metrics"]) == pytest.approx(comparable(expected["metrics"]), rel=1e-4)
