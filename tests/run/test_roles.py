"""Tests which input adapter of a job is loaded for which role."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import toy_models
from running import ROOT
from settled import work_of

from pipeline.job import load_job
from pipeline.run import roles
from pipeline.settle import inputs
from pipeline.settle.work import Input


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Returns a fake worker of a ppo job whose inputs are a policy, a Python reward and a reward adapter."""
    monkeypatch.chdir(ROOT)
    named = {"policy": str(tmp_path / "policy"), "reward.1": str(tmp_path / "rm")}
    toy_models.make(named["policy"], seed=0, head=False)
    toy_models.make(named["reward.1"], seed=1, head=True)
    rule = "python:pipeline.demo:gold"
    job = load_job("jobs/demo/ppo.yaml", [f"policy={named['policy']}", "trainer.sync_ref_model=true"], "ppo")
    job = replace(job, reward=[rule, named["reward.1"]])
    given = {name: Input(at, "adapter", at) for name, at in named.items()}
    work = work_of(job, inputs={**given, "reward.0": Input(rule, "function")})
    made = {"work": work, "args": job.args, "tokenizer": toy_models.tokenizer()}
    return SimpleNamespace(input=named.__getitem__, **made)


def weights(shared, role):
    return torch.cat([parameter.data.flatten() for parameter in shared.parameters_of(role)])


def test_a_reference_that_follows_the_policy_does_not_change_the_baseline(host):
    shared = toy_models.shared_base()
    reference = roles.add_policy(host, shared, host.args)
    start = roles.start_role(host, shared, reference)
    before = weights(shared, start)
    for parameter in shared.parameters_of("policy"):
        parameter.data += 1.0
    shared.average(reference, "policy", 0.5)
    assert torch.equal(weights(shared, start), before)
    assert torch.allclose(weights(shared, reference), before + 0.5, atol=1e-5)


def test_the_critic_starts_from_the_first_reward_that_is_an_adapter(host):
    shared = toy_models.shared_base()
    roles.add_policy(host, shared, host.args)
    roles.add_rewards(host, shared)
    with_adapter = replace(host.args, critic="adapter")
    roles.add_critic(host, shared, with_adapter)
    assert torch.equal(weights(shared, "critic"), weights(shared, "reward_1"))
    assert roles.folders_of_roles(host, shared)["critic"] == host.input("reward.1")
    stage = host.work.spec
    assert not inputs.makes_adapter(stage, with_adapter, ["policy", "reward.1"])
    assert inputs.makes_adapter(stage, with_adapter, ["policy"])


def test_a_critic_that_is_a_head_owns_no_adapter(host, tmp_path):
    shared = toy_models.shared_base()
    roles.add_policy(host, shared, host.args)
    before = weights(shared, "policy")
    assert host.args.critic == "head"
    roles.add_critic(host, shared, host.args)
    assert weights(shared, "critic").shape == (shared.hidden_size,)
    assert "critic" not in roles.folders_of_roles(host, shared)
    assert not inputs.makes_adapter(host.work.spec, host.args, ["policy"])
    shared.parameters_of("critic")[0].data += 1.0
    shared.save("critic", tmp_path / "head")
    shared.parameters_of("critic")[0].data.zero_()
    shared.load("critic", tmp_path / "head")
    assert (weights(shared, "critic") == 1.0).all() and torch.equal(weights(shared, "policy"), before)
    assert set(shared.tensors_of("policy")).isdisjoint(shared.tensors_of("critic"))
    shared.set_trainable("policy", True)  # the critic's head uses the policy's adapter, but does not train it


def vllm_options(settings):
    job = load_job("jobs/demo/ppo.yaml", settings, "ppo")
    return roles.vllm_options(job.model, job.rollout_config, 64)


def test_vllm_gets_the_batch_size_and_no_memory_of_expandable_segments(monkeypatch):
    monkeypatch.chdir(ROOT)
    engine = ["rollout.engine=vllm", "rollout.num_workers=1", "rollout.use_gpu=true"]
    options = vllm_options(engine)
    assert (options["max_num_seqs"], options["max_num_batched_tokens"]) == (64, 8192)
    assert "disable_custom_all_reduce" not in options
    more = ["rollout.tensor_parallel_size=2", "rollout.vllm_kwargs={max_num_seqs: 128}"]
    options = vllm_options([*engine, *more])
    assert options["disable_custom_all_reduce"] is True and options["max_num_seqs"] == 128
