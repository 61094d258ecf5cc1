"""The `rollout` section: what it means, and what it may not be."""

import pytest

from pipeline.config import load_job
from pipeline.config.rules import warnings
from pipeline.ppo.rollout_config import RolloutConfig
from pipeline.ppo.settings import SettingError


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("engine", "sglang", "'transformers' or 'vllm'"),
        ("num_workers", -1, "0 to 10000, or [min, max]"),
        ("num_workers", [1], "0 to 10000, or [min, max]"),
        ("num_workers", [1, 2.5], "0 to 10000, or [min, max]"),
        ("staleness", 1, "0 without rollout workers"),
        ("correction_cap", 1.0, "above 1"),
        ("vllm_kwargs", {"model": "x", "seed": 1}, "none of what the sampler sets itself: ['model']"),
        ("vllm_kwargs", {"seed": 1}, "null without rollout.engine=vllm"),
        ("gpu_memory_utilization", 0.5, "null without rollout.engine=vllm"),
        ("tensor_parallel_size", 2, "1 unless rollout workers"),
    ],
)
def test_a_wrong_value_is_named(key, value, expected):
    with pytest.raises(SettingError) as caught:
        RolloutConfig(**{key: value})
    assert caught.value.key == key and expected in caught.value.message


def test_what_is_corrected_by_default():
    assert RolloutConfig().corrects is None and RolloutConfig(num_workers=2).corrects is None
    assert RolloutConfig(num_workers=1, staleness=1).corrects is None
    assert RolloutConfig(engine="vllm").corrects == "token"
    assert RolloutConfig(engine="vllm", correction="none").corrects is None
    assert RolloutConfig(correction="sequence").corrects == "sequence"
    assert RolloutConfig(num_workers=[0, 3]).workers == (0, 3)


@pytest.mark.parametrize(
    ("overrides", "idle"),
    [
        (["rollout.num_workers=1"], None),
        (
            ["rollout.num_workers=3"],
            "2 of 3 workers will be idle, because completions are sampled in chunks of 64",
        ),
        (["rollout.num_workers=2", "rollout.staleness=2"], None),
        (["rollout.num_workers=3", "trainer.local_rollout_forward_batch_size=21"], None),
    ],
)
def test_rollout_workers_that_would_idle_are_warned_of(overrides, idle, in_root):
    said = [
        line for line in warnings(load_job("jobs/demo/ppo.yaml", overrides, "ppo")) if "will be idle" in line
    ]
    assert not said if idle is None else idle in said[0] and "local_rollout_forward_batch_size=21" in said[0]


@pytest.mark.parametrize(
    ("overrides", "crowded"),
    [
        (["scaling.resources_per_worker={CPU: 4}"], True),
        (["scaling.resources_per_worker={CPU: 4}", "rollout.resources_per_worker={CPU: 4}"], False),
        (["scaling.resources_per_worker={CPU: 4}", "rollout.use_gpu=true"], False),
        ([], False),
    ],
)
def test_rollout_workers_with_more_threads_than_cpus_are_warned_of(overrides, crowded, in_root):
    job = load_job("jobs/demo/ppo.yaml", ["rollout.num_workers=1", *overrides], "ppo")
    said = [
        line
        for line in warnings(job)
        if "computes with 4 threads, as a trainer does, and reserves 1 CPUs" in line
    ]
    assert len(said) == crowded
