"""PPOTrainer, engine, rewards and configuration on a toy: learning, invariance, resuming, and what goes wrong."""

import asyncio
import json
import math
import re
import socket

import pytest
import torch
import torch.multiprocessing as mp
import toy_ppo as toy
import transformers

from pipeline.errors import Failure
from pipeline.models.adapters import SharedBase
from pipeline.ppo import checks
from pipeline.ppo.batch import micro_batches, prompt_order
from pipeline.ppo.config import PPOConfig, SettingError
from pipeline.ppo.rewards import AdapterReward, FunctionReward, ModelReward, Samples
from pipeline.ppo.rollout import Completion, Sampling, TransformersEngine

KINDS = ["llama", "gpt2", "qwen3", "mistral", "gemma", "gemma2"]
MEASURED = re.compile("time/|memory/|per_second")  # what a clock or the machine decides


# ------------------------------------------------------------------------------------------- learning

GROUP = dict(num_generations=4)
VARIANTS = {
    "gae": dict(),
    "rloo": dict(advantage_estimator="rloo", **GROUP),
    "grpo": dict(advantage_estimator="grpo", kl_in="loss", kl_estimator="k3", **GROUP),
    "dr_grpo": dict(advantage_estimator="grpo", scale_rewards=False, **GROUP),
    "remax": dict(advantage_estimator="remax"),
    "reinforce_plus_plus": dict(advantage_estimator="reinforce_plus_plus", whiten_rewards=True),
    "adaptive_kl": dict(kl_controller="adaptive", kl_target=2.0, kl_horizon=200, kl_coef=0.2),
    "kl_in_loss": dict(kl_in="loss", kl_estimator="k2"),
    "moving_reference": dict(
        sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.2, kl_coef=0.2
    ),
    "normalized": dict(normalize_rewards=True, normalize_values=True, reward_clip=3.0),
    "truncation_penalty": dict(missing_eos_penalty=1.0),
    "truncation_bootstrap": dict(bootstrap_truncated=True),
    "truncation_filter": dict(mask_truncated_completions=True),
    "careful": dict(
        dual_clip=3.0, entropy_coef=0.01, early_stop_kl=0.05, critic_warmup_steps=2, cliprange_value=None
    ),
    "lengths": dict(min_new_tokens=3, temperature=0.8, micro_batch_tokens=60),
    "low_precision": dict(bf16=True, gradient_checkpointing=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_learns(name):
    settings = dict(
        total_episodes=32 * 14, batch_size=32, learning_rate=1.5e-2, per_device_train_batch_size=32
    )
    trainer = toy.trainer(**{**settings, **VARIANTS[name]})
    greedy = toy.greedy_score(trainer, trainer.prompts)
    history = trainer.train()
    means = [metrics["rewards/low/mean"] for metrics in history]
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.1 and len(history) == 14
    assert toy.greedy_score(trainer, trainer.prompts) > greedy
    assert all(math.isfinite(value) for metrics in history for value in metrics.values())
    assert trainer.skipped_steps == 0


def test_kl_holds_the_policy():
    def last_kl(**changes):
        return toy.trainer(total_episodes=160, learning_rate=5e-3, **changes).train()[-1]["objective/kl"]

    far = last_kl(kl_coef=0.0)
    assert last_kl(kl_coef=2.0) < 0.7 * far
    assert last_kl(kl_coef=10.0, kl_in="loss", kl_estimator="k3") < 0.7 * far


def test_critic_free_estimators_load_no_critic():
    trainer = toy.trainer(toy.shared_base(critic=False), advantage_estimator="rloo", num_generations=2)
    metrics = trainer.run_update()
    assert trainer.shared.roles == ["reference", "policy"] and "loss/value_avg" not in metrics
    with pytest.raises(ValueError, match="critic for gae"):
        toy.trainer(toy.shared_base(critic=False))


@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_runs(kind):
    metrics = toy.trainer(toy.shared_base(kind), total_episodes=32).train()
    assert len(metrics) == 2 and metrics[0]["val/sampler_drift"] < 1e-5


def test_without_a_reference_adapter_the_bare_base_is_it():
    shared = SharedBase(toy.base())
    shared.add("policy", lora=toy.LORA, trainable=True)
    shared.add("critic", lora=toy.LORA, head=True, trainable=True)
    history = toy.trainer(shared, total_episodes=64).train()
    assert history[0]["objective/kl"] == pytest.approx(0, abs=1e-4) and history[-1]["objective/kl"] > 1e-3


def test_the_policy_is_evaluated_while_it_learns():
    """After each `eval_steps` updates but the last, whose figures are the end's; handed out whatever `logging_steps` is."""
    asked, told = [], {}

    def evaluate():
        asked.append(trainer.update)
        return {"eval_reward": 10.0 * trainer.update}

    trainer = toy.trainer(
        evaluate=evaluate,
        on_update=lambda metrics, step, total: told.update({step: metrics.get("eval_reward")}),
        total_episodes=16 * 6,
        eval_steps=2,
        logging_steps=3,
    )
    history = trainer.train()
    assert asked == [2, 4]
    assert told == {1: None, 2: 20.0, 3: None, 4: 40.0, 5: None, 6: None}
    assert [m["episode"] / 16 for m in history] == [2, 3, 4, 6]
    assert [m["eval_reward"] for m in history if "eval_reward" in m] == [20.0, 40.0]
    assert history[0]["time/evaluate"] > 0


def test_an_evaluation_changes_nothing_of_what_is_learned():
    def noisy(completion_ids):  # draws from the global generators, as a user's reward may
        return [s + 0.1 * torch.rand(1).item() for s in toy.low(completion_ids)]

    def learned(**changes):
        trainer = toy.trainer(reward=noisy, total_episodes=16 * 3, **changes)
        torch.manual_seed(9)
        trainer.train()
        return toy.weights(trainer)

    evaluated = learned(evaluate=lambda: {"eval_reward": torch.rand(1).item()}, eval_steps=1)
    assert torch.equal(evaluated, learned())


def test_early_stop_ends_the_epochs_of_an_update():
    free = toy.trainer(learning_rate=0.05, num_ppo_epochs=6).run_update()
    stopped = toy.trainer(learning_rate=0.05, num_ppo_epochs=6, early_stop_kl=1e-3).run_update()
    assert free["policy/steps"] == 12 and 1 <= stopped["policy/steps"] < 6


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


def length(completion_ids):
    return [float(len(ids)) for ids in completion_ids]


# -------------------------------------------------------------------------------------------- rollout


def some_prompts():
    return [row["input_ids"] for row in toy.prompts(12)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_hangs_on_seed_episode_and_prompt_alone(kind):
    shared = toy.shared_base(kind, critic=False, spread=0.1)
    prompts, sampling = some_prompts(), Sampling(12, (2, 3, 4, 5, 6, 7), seed=7)
    together = TransformersEngine(shared).generate(prompts, range(12), sampling)
    order = [3, 0, 11, 7, 5]
    apart = TransformersEngine(shared, rows=2).generate([prompts[i] for i in order], order, sampling)
    assert [together[i].tokens for i in order] == [completion.tokens for completion in apart]
    assert 1 < len({len(completion.tokens) for completion in together}), (
        "no completion ended early: nothing was compacted"
    )
    other = TransformersEngine(shared).generate(prompts, range(12), Sampling(12, (2, 3, 4, 5, 6, 7), seed=8))
    assert [r.tokens for r in together] != [r.tokens for r in other]
    assert (
        len(
            {
                tuple(r.tokens)
                for r in TransformersEngine(shared).generate([prompts[0]] * 5, range(5), sampling)
            }
        )
        > 1
    )


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_completions_are_transformers_own(kind):
    shared = toy.shared_base(kind, critic=False, spread=0.1)
    completions = TransformersEngine(shared).generate(
        some_prompts(), range(12), Sampling(10, (2, 3), temperature=0.0)
    )
    for prompt, completion in zip(some_prompts()[:4], completions, strict=False):
        with shared.use("policy"):
            own = shared.base.generate(
                torch.tensor([prompt]),
                max_new_tokens=10,
                do_sample=False,
                eos_token_id=[2, 3],
                pad_token_id=0,
            )
        assert completion.tokens == own[0, len(prompt) :].tolist()


def test_completions_end_at_eos_or_at_the_limit():
    shared = toy.shared_base(critic=False)
    eos = (2, 3, 10, 11, 12, 13)
    for completion in TransformersEngine(shared).generate(
        some_prompts(), range(12), Sampling(9, eos, seed=1)
    ):
        assert not set(completion.tokens[:-1]) & set(eos)
        assert completion.ended == (completion.tokens[-1] in eos) and (
            completion.ended or len(completion.tokens) == 9
        )
        assert len(completion.logprobs) == len(completion.tokens)
    late = TransformersEngine(shared).generate(
        some_prompts(), range(12), Sampling(9, eos, min_new_tokens=5, seed=1)
    )
    assert min(len(completion.tokens) for completion in late) >= 6


@pytest.fixture
def made_up_logprobs(monkeypatch):
    """For engines that do not sample at all: what they say of log-probs is not looked at."""
    monkeypatch.setattr(checks, "sampler_agrees", lambda *_: checks.Finding("", "", None))


def test_another_engine_fits_in(made_up_logprobs):
    class Canned:
        synced = 0

        def sync(self):
            self.synced += 1

        def generate(self, prompts, episodes, sampling):
            return [Completion([10, 11, 2], True, [-1.0] * 3) for _ in prompts]

    engine = Canned()
    metrics = toy.trainer(engine=engine).train()[-1]
    assert (
        engine.synced == 4 and metrics["completions/mean_length"] == 3 and metrics["val/sampler_drift"] > 0.1
    )


@pytest.mark.parametrize(("limit", "weight"), [(3.0, math.exp(0.5)), (1.2, 1.2), (None, 1.0)])
def test_what_a_sampler_of_other_precision_drew_is_weighed(limit, weight):
    class Off(TransformersEngine):
        def generate(self, *args):
            return [
                Completion(r.tokens, r.ended, [p - 0.5 for p in r.logprobs]) for r in super().generate(*args)
            ]

    def advantages(**changes):
        shared = toy.shared_base()
        trainer = toy.trainer(shared, engine=Off(shared), **changes)
        episodes, samples, _ = trainer.rollout()
        trainer.score(episodes, samples)
        trainer.logprobs_and_values(episodes)
        trainer.rewards_and_advantages(episodes, None)
        return episodes

    plain, weighed = advantages(), advantages(use_vllm=True, vllm_importance_sampling_clip_max=limit)
    assert torch.allclose(weighed.advantages, plain.advantages * weight, rtol=1e-4)
    assert torch.equal(weighed.returns, plain.returns)


def test_prompts_come_once_a_pass_in_another_order_each():
    order = prompt_order(0, 20, 10, seed=1)
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10)) and order[:10] != order[10:]
    assert prompt_order(7, 6, 10, seed=1) == order[7:13] and prompt_order(0, 10, 10, seed=2) != order[:10]


def test_a_long_row_does_not_pad_a_batch_that_is_busy_without_it():
    lengths = [100, 104, 97, 101, 190, 200, 20]
    assert micro_batches(lengths, 16, None) == [[6, 2, 0, 3], [1, 4], [5]]
    assert micro_batches([10, 90], 16, None) == [[0, 1]], (
        "few tokens: a batch more would cost more than padding"
    )
    assert micro_batches([100] * 5, 16, None) == [[0, 1, 2, 3, 4]]


def test_micro_batches_keep_to_their_budget_and_lose_nothing():
    lengths = [5, 9, 2, 7, 7, 30, 1]
    for batches in (micro_batches(lengths, 3, None), micro_batches(lengths, 3, 20)):
        assert sorted(i for batch in batches for i in batch) == list(range(7))
    assert max(map(len, micro_batches(lengths, 3, None))) == 3
    sizes = [len(b) * max(lengths[i] for i in b) for b in micro_batches(lengths, 3, 20)]
    assert max(size for size in sizes if size != 30) <= 20 and 30 in sizes  # the long row by itself


# -------------------------------------------------------------------------- workers, resuming, precision


SHARED_RUNS = [
    dict(normalize_values=True, whiten_rewards=True, critic_warmup_steps=1, bootstrap_truncated=True),
    dict(advantage_estimator="grpo", num_generations=2, mask_truncated_completions=True),
]


def shared_run(number, spread=0.0):
    changes = {"total_episodes": 14 * 3, "batch_size": 14, "num_mini_batches": 4, **SHARED_RUNS[number]}
    shared = toy.shared_base(critic="advantage_estimator" not in changes)
    for parameter in [p for r in ("policy", "critic") if r in shared.roles for p in shared.parameters_of(r)]:
        parameter.data += spread
    trainer, path = toy.trainer(shared, **changes), [toy.weights(shared)]
    trainer.on_update = lambda *_: path.append(toy.weights(shared))
    trainer.train()
    return trainer, path


def worker(rank, port, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for number in range(len(SHARED_RUNS)):
        trainer, path = shared_run(number, spread=rank * 0.5)  # rank 0's weights are the ones that count
        torch.save((path, trainer.history), f"{folder}/{number}_{rank}.pt")
        trainer.save(f"{folder}/{number}")


def test_two_workers_do_what_one_does(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, (port, str(tmp_path)), nprocs=2)
    for number in range(len(SHARED_RUNS)):
        one, path = shared_run(number)
        (mine, history), (theirs, history2) = (
            torch.load(tmp_path / f"{number}_{rank}.pt", weights_only=True) for rank in (0, 1)
        )
        assert all(torch.equal(a, b) for a, b in zip(mine[1:], theirs[1:], strict=True))
        for update, limit in ((1, 1e-5), (2, 1e-4), (3, 1e-4)):  # rounding grows from update to update
            assert (mine[update] - path[update]).norm() / (path[update] - path[0]).norm() < limit
        for a, b, c in zip(one.history, history, history2, strict=True):
            for key in a:
                if not MEASURED.search(key):
                    assert b[key] == c[key] == pytest.approx(a[key], rel=1e-3, abs=1e-4), key
        assert {p.name for p in (tmp_path / str(number)).glob("rng_*")} == {"rng_0_of_2.pt", "rng_1_of_2.pt"}


def test_a_restored_run_ends_with_the_same_numbers(tmp_path):
    changes = dict(
        total_episodes=96, kl_controller="adaptive", kl_target=0.5, kl_horizon=100, normalize_values=True,
        sync_ref_model=True, ref_model_sync_steps=1, lr_scheduler_type="cosine", warmup_steps=2, learning_rate=5e-3,
    )  # fmt: skip

    def noisy(completion_ids):  # draws from the global generators, as a user's reward may
        return [s + 0.1 * torch.rand(1).item() for s in toy.low(completion_ids)]

    class Cut(Exception):
        pass

    def cut(metrics, step, total):
        if step == 3:
            raise Cut

    torch.manual_seed(5)
    whole = toy.trainer(reward=noisy, **changes)
    torch.manual_seed(9)
    whole.train()
    first = toy.trainer(reward=noisy, on_update=cut, **changes)
    torch.manual_seed(9)
    with pytest.raises(Cut):
        first.train()
    assert first.update == 3
    first.save(tmp_path)
    second = toy.trainer(toy.shared_base(), reward=noisy, **changes)
    for parameter in second.shared.parameters_of("policy") + second.shared.parameters_of("reference"):
        parameter.data += 1.0  # all of it comes from the folder
    torch.manual_seed(1234)
    second.restore(tmp_path)
    second.train()
    roles = ["policy", "critic", "reference"]
    assert torch.equal(toy.weights(whole, roles), toy.weights(second, roles))
    timeless = [
        [{k: v for k, v in m.items() if not MEASURED.search(k)} for m in t.history] for t in (whole, second)
    ]
    assert timeless[0] == timeless[1] and len(timeless[0]) == 6
    assert (
        not list(tmp_path.rglob("*.pkl"))
        and json.loads((tmp_path / "ppo_state.json").read_text())["update"] == 3
    )


def test_gradient_checkpointing_changes_no_number():
    plain, checkpointed = toy.trainer(), toy.trainer(gradient_checkpointing=True)
    plain.train(), checkpointed.train()
    assert torch.equal(toy.weights(plain), toy.weights(checkpointed))


def test_bf16_stays_near_fp32():
    exact, rough = (
        toy.trainer(toy.shared_base(spread=0.05), check_reference=False, bf16=b) for b in (False, True)
    )
    a, b = exact.run_update(), rough.run_update()
    assert rough.shared.autocast is torch.bfloat16 and a["objective/entropy"] == pytest.approx(
        b["objective/entropy"], rel=0.2
    )


# ------------------------------------------------------------------------------------------- rewards


def test_reward_functions_get_text_and_the_datas_columns():
    seen = {}

    def reward(prompts, completions, answer, **columns):
        seen.update(prompts=prompts, completions=completions, answer=answer, columns=columns)
        return [float(a) for a in answer]

    async def slow(completions):
        await asyncio.sleep(0.01)
        return [float(len(text)) for text in completions]

    trainer = toy.trainer(reward=[FunctionReward(reward, weight=3.0), FunctionReward(slow, weight=0.5)])
    episodes, samples, _ = trainer.rollout()
    trainer.score(episodes, samples)
    assert seen["prompts"] == [f"question {a}" for a in seen["answer"]] and set(seen["columns"]) == {
        "completion_ids"
    }
    assert seen["completions"][0] == toy.Tokenizer().decode(samples.completion_ids[0])
    expected = [3.0 * a + 0.5 * len(c) for a, c in zip(seen["answer"], seen["completions"], strict=True)]
    assert episodes.scores.tolist() == pytest.approx(expected)


def test_a_reward_in_a_running_event_loop():
    async def reward(completions):
        return [1.0 for _ in completions]

    async def notebook():
        return toy.trainer(reward=reward).run_update()["objective/scores"]

    assert asyncio.run(notebook()) == 1.0


def test_a_reward_that_raises_stops_the_run_and_shows_the_row():
    def reward(prompts, completions):
        return [1 / (0 if prompt == "question 7" else 1) for prompt in prompts]

    says = r"raised ZeroDivisionError: division by zero for prompt 'question 7'.*'answer': 7.*\(sample \d+ of 32\):"
    with pytest.raises(Failure, match=says):
        toy.trainer(reward=reward, batch_size=32).train()


@pytest.mark.parametrize("bad", [math.nan, None, math.inf])
def test_a_reward_that_is_not_a_number_stops_the_run_and_shows_the_row(bad):
    def reward(prompts):
        return [bad if prompt == "question 7" else 1.0 for prompt in prompts]

    with pytest.raises(
        Failure, match=r"returned (nan|None|inf) for prompt 'question 7'.*\(sample \d+ of 32\)"
    ):
        toy.trainer(reward=reward, batch_size=32).train()


def test_a_reward_of_the_wrong_length_is_refused():
    with pytest.raises(Failure, match="returned 2 scores for 16 samples"):
        toy.trainer(reward=lambda completions: [1.0, 2.0]).run_update()
    with pytest.raises(Failure, match=r"returned 1\.0 for 16"):
        toy.trainer(reward=lambda completions: 1.0).run_update()


def test_a_reward_adapter_reads_the_last_token_whatever_the_batch():
    shared = toy.shared_base()
    trainer = toy.trainer(shared, reward=AdapterReward(shared, rows=3))
    episodes, samples, _ = trainer.rollout()
    trainer.score(episodes, samples)
    for i in (0, 7, 15):
        text = torch.tensor([samples.prompt_ids[i] + samples.completion_ids[i]])
        assert episodes.scores[i].item() == pytest.approx(
            shared.values("reward", text)[0, -1].item(), abs=1e-5
        )


def test_a_reward_model_that_is_not_on_this_base():
    torch.manual_seed(2)
    model = transformers.AutoModelForSequenceClassification.from_config(
        toy.config("gpt2", num_labels=1)
    ).eval()
    texts = Samples(
        [[5, 6], [7]],
        [[8, 2], [9, 10, 11]],
        [True, False],
        [{"prompt": "a"}, {"prompt": "bc"}],
        toy.Tokenizer(),
    )
    own = [model(input_ids=torch.tensor([ids])).logits.item() for ids in ([5, 6, 8, 2], [7, 9, 10, 11])]
    assert ModelReward(model).score(texts) == pytest.approx(own, abs=1e-5)

    class Letters:  # a tokenizer of its own: one id a character
        eos_token_id, chat_template = 3, None

        def __call__(self, text):
            return transformers.BatchEncoding({"input_ids": [ord(c) % 50 + 5 for c in text]})

    other = ModelReward(model, tokenizer=Letters()).score(texts)
    spelled = [[ord(c) % 50 + 5 for c in "a8"] + [3], [ord(c) % 50 + 5 for c in "bc9 10 11"]]
    assert other == pytest.approx(
        [model(input_ids=torch.tensor([ids])).logits.item() for ids in spelled], abs=1e-5
    )
    toy.trainer(reward=ModelReward(model)).run_update()
    assert not any(p.requires_grad for p in model.parameters())


# -------------------------------------------------------------------------------------------- corners


@pytest.mark.parametrize(
    "changes", [dict(), dict(advantage_estimator="reinforce_plus_plus"), dict(advantage_estimator="remax")]
)
def test_a_batch_of_one(changes):
    metrics = toy.trainer(batch_size=1, num_mini_batches=1, total_episodes=3, **changes).train()
    assert len(metrics) == 3 and all(math.isfinite(v) for m in metrics for v in m.values())


def test_empty_completions_are_an_end_and_nothing_else(made_up_logprobs):
    class Silent:
        def sync(self):
            pass

        def generate(self, prompts, episodes, sampling):
            return [Completion([2], True, [0.0]) for _ in prompts]

    seen = []
    trainer = toy.trainer(
        engine=Silent(), reward=lambda completions: [seen.append(c) or 0.5 for c in completions]
    )
    metrics = trainer.train()[-1]
    assert (
        set(seen) == {""}
        and metrics["completions/mean_length"] == 1
        and math.isfinite(metrics["loss/policy_avg"])
    )


@pytest.mark.parametrize(
    "key", ["missing_eos_penalty", "bootstrap_truncated", "mask_truncated_completions", None]
)
def test_all_completions_cut_off(key):
    trainer = toy.trainer(**({key: 1.0 if key == "missing_eos_penalty" else True} if key else {}))
    trainer.sampling = Sampling(4, eos=(), seed=1)
    metrics = trainer.train()
    assert all(m["completions/clipped_ratio"] == 1 and all(map(math.isfinite, m.values())) for m in metrics)


def test_a_prompt_longer_than_the_context_is_refused():
    rows = [dict(input_ids=list(range(4, 60)) * 3, row='{"prompt": "much"}')]
    with pytest.raises(ValueError, match=r"168 tokens.*128 positions.*much"):
        toy.trainer(rows=rows).run_update()
    with pytest.raises(ValueError, match="at least one token"):
        toy.trainer(rows=[dict(input_ids=[], row='{"prompt": ""}')]).run_update()


def test_what_cannot_run_is_refused_at_once():
    with pytest.raises(ValueError, match="no reward"):
        toy.trainer(reward=[])
    with pytest.raises(ValueError, match="no reference adapter"):
        shared = SharedBase(toy.base())
        shared.add("policy", lora=toy.LORA)
        toy.trainer(shared, advantage_estimator="remax", sync_ref_model=True)
    with pytest.raises(ValueError, match="same name"):
        toy.trainer(reward=[FunctionReward(toy.low), FunctionReward(toy.low)]).run_update()


# -------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("key", "value", "expected", "more"),
    [
        ("batch_size", 0, "above 0", {}),
        ("batch_size", "16", "a whole number", {}),
        ("temperature", 0.0, "above 0", {}),
        ("lam", 1.5, "between 0 and 1", {}),
        ("kl_coef", math.nan, "a number", {}),
        ("bf16", 1, "true or false", {}),
        ("kl_estimator", "k4", "'k1', 'k2', 'k3' or 'abs'", {}),
        ("advantage_estimator", "group", "'gae', 'rloo', 'grpo', 'remax' or 'reinforce_plus_plus'", {}),
        ("num_generations", 1, "2 or more", dict(advantage_estimator="rloo")),
        ("batch_size", 10, "multiple of num_generations", dict(num_generations=4)),
        ("kl_estimator", "k1", "kl_in: loss", dict(kl_in="loss")),
        ("min_new_tokens", 60, "less than response_length", {}),
        ("dual_clip", 0.5, "above 1", {}),
        ("num_mini_batches", 100, "at most batch_size", {}),
        ("critic_warmup_steps", 2, "without a critic", dict(advantage_estimator="reinforce_plus_plus")),
        ("bootstrap_truncated", True, "only one of", dict(missing_eos_penalty=1.0)),
    ],
)
def test_a_wrong_setting_names_key_value_and_what_is_expected(key, value, expected, more):
    with pytest.raises(SettingError) as caught:
        PPOConfig(**{key: value, **more})
    assert caught.value.key == key
    assert f"found {value!r}, expected" in caught.value.message and expected in caught.value.message


def test_settings_of_trl_come_through():
    trl = dict(
        num_ppo_epochs=4, num_mini_batches=1, kl_coef=0.05, kl_estimator="k3", cliprange=0.2, vf_coef=0.1, cliprange_value=0.2,
        gamma=1, lam=0.95, whiten_rewards=False, total_episodes=10000, response_length=53, temperature=0.7, missing_eos_penalty=1.0,
        local_rollout_forward_batch_size=64, learning_rate=3e-6, seed=1, bf16=False, gradient_checkpointing=True,
    )  # fmt: skip
    assert vars(PPOConfig(**trl)).items() >= trl.items()
    assert (
        PPOConfig(**trl).total_updates(5) == 157
        and PPOConfig(batch_size=8, num_train_epochs=2).total_updates(10) == 3
    )
