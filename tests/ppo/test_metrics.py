"""Metrics of an update are what their names say."""

import pytest
import toy_ppo as toy

from pipeline.ppo.rewards import FunctionReward


def length(completion_ids):
    return [float(len(ids)) for ids in completion_ids]


def test_metrics_are_what_they_say():
    trainer = toy.trainer(
        reward=[FunctionReward(toy.low, weight=2.0, name="a"), FunctionReward(length, weight=-0.5, name="b")]
    )
    kept = toy.recorded(trainer)
    metrics = trainer.run_update()
    samples = kept[0]
    lengths = [len(ids) for ids in samples.completion_ids]
    assert metrics["completions/mean_length"] == pytest.approx(sum(lengths) / 16)
    assert metrics["val/num_eos_tokens"] == sum(ids[-1] in toy.EOS for ids in samples.completion_ids)
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 - sum(samples.ended) / 16)
    assert metrics["rewards/b/mean"] == pytest.approx(sum(lengths) / 16)
    assert metrics["objective/scores"] == pytest.approx(
        2 * metrics["rewards/a/mean"] - 0.5 * metrics["rewards/b/mean"], rel=1e-5
    )
    for phase in ("rollout", "score", "values", "update"):
        assert metrics[f"time/{phase}"] > 0 and metrics[f"memory/{phase}"] > 0
    seconds = sum(value for key, value in metrics.items() if key.startswith("time/"))
    assert metrics["train_samples_per_second"] == pytest.approx(16 / seconds)
    assert metrics["train_tokens_per_second"] == pytest.approx(sum(lengths) / seconds)
    names = {
        "objective/rlhf_reward",
        "policy/approxkl_avg",
        "policy/clipfrac_avg",
        "loss/policy_avg",
        "loss/value_avg",
    }
    names |= {
        "val/ratio",
        "val/clipfrac_avg",
        "val/explained_variance",
        "grad_norm/policy",
        "grad_norm/critic",
        "lr",
        "episode",
    }
    assert names <= set(metrics)
