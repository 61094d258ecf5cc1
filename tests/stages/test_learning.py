"""Tests the demo's shipped jobs from the data to the final evaluation. For every seed, the models learn and pass their gates."""

import pytest
from running import stage

pytestmark = pytest.mark.slow
GOLD = "judge=python:pipeline.demo:gold"  # an oracle score from 0 to 1, which is not used for training


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_the_reward_model_learns_and_ppo_dpo_and_kto_lift_the_gold_reward(seed, tmp_path_factory):
    storage = tmp_path_factory.mktemp(f"seed-{seed}")

    def run(verb, *overrides):
        return stage(verb, storage, f"{verb}-{len(overrides)}", f"trainer.seed={seed}", *overrides)

    run("sft")
    rm = run("rm")
    ppo = run("ppo", GOLD)
    run("dpo")
    dpo = run("evaluate", "policy=models:/rlhf-dpo@champion")
    run("kto")
    kto = run("evaluate", "policy=models:/rlhf-kto@champion", "baseline=models:/rlhf-sft@champion")
    figures = {name: one["metrics"] for name, one in (("rm", rm), ("ppo", ppo), ("dpo", dpo), ("kto", kto))}
    for name, metrics in figures.items():
        held_out = {k: round(v, 3) for k, v in sorted(metrics.items()) if k.startswith(("eval_", "initial_"))}
        print(f"seed {seed} {name}: {held_out}")
    assert rm["metrics"]["eval_accuracy"] >= 0.95
    assert ppo["metrics"]["eval_judge"] - ppo["metrics"]["initial_judge"] >= 0.4
    assert ppo["metrics"]["eval_kl"] < 10
    assert ppo["metrics"]["eval_eos_rate"] >= 0.95
    assert dpo["metrics"]["eval_judge"] > dpo["metrics"]["initial_judge"] + 0.05
    assert kto["metrics"]["eval_judge"] > kto["metrics"]["initial_judge"] + 0.05
