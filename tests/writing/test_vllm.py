"""Tests rollouts that are sampled by a real vLLM. The CPU build of vLLM suffices."""

import contextlib
import os
from pathlib import Path

import dying
import pytest
import torch
import toy_ppo as toy
from resumed import patched
from running import curve, stage
from toy_models import BASE, shared_base, tokenizer

from pipeline.errors import InputError
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.episodes import Prompts
from pipeline.ppo.sampler import Roles, Sampler
from pipeline.ppo.trainer import PPOTrainer
from pipeline.scoring.rewards import FunctionReward
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.rows import Sampling
from tools.chaos.runs import until

pytest.importorskip("vllm", reason="needs the extra `vllm`")
from pipeline.writing.vllm import VllmDecoder, accepted_rank, largest_lora_rank, start_llm

pytestmark = pytest.mark.slow
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
EOS = (825, 1)


@pytest.fixture(scope="module")
def shared():
    torch.manual_seed(0)
    shared = shared_base()
    shared.add("policy", lora=toy.LORA, trainable=True)
    return shared


@pytest.fixture(scope="module")
def decoder(shared, tmp_path_factory):
    options = dict(max_loras=1, max_logprobs=1, logprobs_mode="processed_logprobs", dtype="float32")
    rank = largest_lora_rank(shared, ["policy"])
    llm = start_llm(BASE, shared.device, 64, rank, **options)
    decoder = VllmDecoder(llm, rank, shared=shared, folder=tmp_path_factory.mktemp("vllm"))
    yield decoder
    decoder.close()


def prompts(count=12):
    questions = [f"What is the capital of {place}?" for place in ("Norway", "Peru", "Chile", "Ghana")]
    chats = [[{"role": "user", "content": questions[i % 4]}] for i in range(count)]
    return [tokenizer().apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]


def disturb(shared, seed):
    torch.manual_seed(seed)
    for parameter in shared.parameters_of("policy"):
        parameter.data += 0.1 * torch.randn_like(parameter)


def test_greedy_completions_come_from_the_current_weights_of_the_adapter(shared, decoder):
    greedy, seen = Sampling(16, EOS, temperature=0.0), []
    for seed in range(3):
        disturb(shared, seed)
        decoder.changed("policy")
        completions = decoder.generate("policy", prompts(4), range(4), greedy)
        expected = SlotDecoder(shared).generate("policy", prompts(4), range(4), greedy)
        assert [(r.tokens, r.ended) for r in completions] == [(r.tokens, r.ended) for r in expected]
        seen.append([r.tokens for r in completions])
    assert seen[0] != seen[1] != seen[2]


def test_samples_depend_on_seed_and_number(decoder):
    def sampled(seed, prompts):
        how = Sampling(12, EOS, seed=seed)
        return [r.tokens for r in decoder.generate("policy", prompts, range(12), how)]

    decoder.changed("policy")
    first = sampled(1, prompts())
    assert sampled(1, prompts()) == first != sampled(2, prompts())
    assert len(set(map(tuple, sampled(1, prompts(1) * 12)))) > 3


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "min_new_tokens": 4}])
def test_the_log_probs_of_vllm_equal_those_of_the_trainer(shared, decoder, settings):
    """Samples with a temperature, a minimum length and several end tokens, and trains on the samples."""
    rows = [{"input_ids": ids, "row": '{"prompt": ""}'} for ids in prompts()]
    args = PPOConfig(
        total_episodes=24, batch_size=12, response_length=12, advantage_estimator="reinforce_plus_plus",
        learning_rate=1e-3, num_ppo_epochs=1, **settings,
        check_reference=False,  # disturb() changed the policy
    )  # fmt: skip
    reward = FunctionReward(lambda completions, **_: [float(len(text)) for text in completions])
    before = toy.weights(shared).clone()
    trainer = PPOTrainer(Sampler(Roles(shared, [reward]), tokenizer(), args, decoder), Prompts(rows))
    for metrics in trainer.train():
        assert metrics["val/sampler_drift"] < 1e-5
        assert metrics["completions/mean_length"] >= settings.get("min_new_tokens", 1)
    assert not torch.equal(before, toy.weights(shared))


def test_vllm_ends_with_a_killed_worker_and_the_run_continues(embedded_ray, storage, monkeypatch):
    options = [
        "rollout.engine=vllm", "trainer.total_episodes=48", "trainer.batch_size=8", "trainer.response_length=16",
        "trainer.save_steps=2", "data.eval=null", "judge=null", "policy=base", "reward=python:bad_rewards:length",
        "mlflow.registered_model=null",
    ]  # fmt: skip
    before = of_vllm()
    expected = stage("ppo", storage, "vllm", *options)
    killed = dying.at_step("ppo", 3, str(storage / "vllm-died"), dying.killed)
    patched(monkeypatch, "ppo", killed)
    result = stage("ppo", storage, "vllm-killed", *options, "run.max_failures=1", "scaling.num_workers=1")
    assert (storage / "vllm-died").exists()
    until(lambda: of_vllm() <= before, "vLLM's processes to end", patience=30)
    for name in ("objective/scores", "objective/entropy", "loss/policy_avg"):
        assert curve(storage, result, name) == pytest.approx(curve(storage, expected, name), rel=1e-3)
    assert len(curve(storage, result, "objective/scores")) == 6


def test_a_policy_learns_from_a_rollout_worker_with_vllm_and_staleness(embedded_ray, storage):
    """A self-check compares each chunk's log-probs with the trainer's log-probs for the same policy version."""
    options = [
        "rollout.engine=vllm", "rollout.num_workers=1", "rollout.staleness=2", "trainer.total_episodes=640",
        "trainer.batch_size=32", "trainer.response_length=16", "trainer.save_steps=0", "data.eval=null", "judge=null",
        "policy=base", "reward=python:bad_rewards:of_e", "mlflow.registered_model=null", "trainer.kl_coef=0.0",
        "trainer.local_rollout_forward_batch_size=16", "trainer.normalize_rewards=false",
    ]  # fmt: skip
    result = stage("ppo", storage, "vllm-ahead", *options)
    scores = curve(storage, result, "objective/scores")
    print(
        "scores", scores, {k: v for k, v in result["metrics"].items() if k.startswith(("rollout/", "val/"))}
    )
    assert sum(scores[-5:]) > sum(scores[:5])
    assert result["metrics"]["rollout/workers"] == 1


def of_vllm():
    """Returns the PIDs of all processes of vLLM on this machine."""
    processes = set()
    for one in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has ended in the meantime
            if Path(f"/proc/{one}/comm").read_text().startswith("VLLM"):
                processes.add(one)
    return processes


def test_a_rank_above_the_maximum_of_vllm_is_an_error():
    with pytest.raises(ValueError, match=r"lora\.r is 513; vLLM supports up to 512"):
        accepted_rank(513)


def test_an_adapter_with_a_setting_that_vllm_ignores_is_rejected():
    shared = shared_base()
    shared.add("policy", lora={**toy.LORA, "use_dora": True}, trainable=True)
    with pytest.raises(InputError, match=r"rollout\.engine: vLLM ignores use_dora"):
        largest_lora_rank(shared, ["policy"])
