"""Tests the metrics of an update: each metric must measure what its name says."""

import pytest
import torch
import toy_ppo as toy

from pipeline.models.gpus import peak_flops
from pipeline.scoring.rewards import FunctionReward


def length(completion_ids):
    return [float(len(ids)) for ids in completion_ids]


def test_metrics_are_what_they_say():
    rewards = [FunctionReward(toy.low, weight=2.0, name="a"), FunctionReward(length, weight=-0.5, name="b")]
    trainer = toy.trainer(reward=rewards)
    kept = toy.recorded(trainer)
    metrics = trainer.run_update()
    samples = kept[0]
    lengths = [len(ids) for ids in samples.completion_ids]
    seconds = sum(value for key, value in metrics.items() if key.startswith("time/"))
    expected = {
        "completions/mean_length": sum(lengths) / 16,
        "completions/clipped_ratio": 1 - sum(samples.ended) / 16,
        "val/num_eos_tokens": sum(ids[-1] in toy.EOS for ids in samples.completion_ids),
        "rewards/b/mean": sum(lengths) / 16,
        "objective/scores": 2 * metrics["rewards/a/mean"] - 0.5 * metrics["rewards/b/mean"],
        "train_samples_per_second": 16 / seconds,
        "train_tokens_per_second": sum(lengths) / seconds,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    for phase in ("rollout", "score", "values", "update"):
        assert metrics[f"time/{phase}"] > 0 and metrics[f"memory/{phase}"] > 0


GROUP = dict(advantage_estimator="rloo", num_generations=2, kl_coef=0.0)


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        # policy: sampling, reference, old log-probs, two epochs with backward; critic: values, two epochs with backward
        ({}, 2 + 1 + 2 * 2 + 1 + 2 * 2),
        (dict(num_ppo_epochs=1, num_mini_batches=1, **GROUP), 2 + 2),
    ],
    ids=["adapter", "one forward"],
)
def test_mfu_is_the_share_of_a_gpus_peak(settings, passes, monkeypatch):
    trainer = toy.trainer(**settings)
    assert "mfu" not in trainer.run_update()  # the table of peak FLOPS has no entry for CPUs
    monkeypatch.setattr("pipeline.models.gpus.peak_flops", lambda device: 1e9)
    kept = toy.recorded(trainer)
    metrics = trainer.run_update()
    tokens = sum(map(len, kept[0].prompt_ids)) + sum(map(len, kept[0].completion_ids))
    flops = 2 * trainer.shared.base.num_parameters() * tokens * passes
    seconds = 16 / metrics["train_samples_per_second"]
    assert metrics["mfu"] == pytest.approx(flops / seconds / 1e9)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("NVIDIA H100 80GB HBM3", 989), ("Tesla T4", None)],
)
def test_the_peak_of_a_gpu_is_found_by_its_name(name, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == (tflops and tflops * 1e12)
