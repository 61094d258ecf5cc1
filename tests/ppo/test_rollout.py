"""Rollouts: what a completion depends on, where it ends, and that the sampler and the trainer agree on it."""

import pytest
import torch
import toy_ppo as toy

from pipeline.ppo.rollout import Sampling, TransformersEngine


def some_prompts():
    return [row["input_ids"] for row in toy.prompts(12)]


def test_sampling_is_pure_with_one_temperature():
    shared = toy.shared_base(critic=False, spread=0.3)
    prompt, count = [5, 6, 7], 20_000
    sampling = Sampling(max_new_tokens=1, eos=(2, 3), temperature=0.7, seed=1)
    completions = TransformersEngine(shared, rows=count).generate([prompt] * count, range(count), sampling)
    seen = torch.bincount(torch.tensor([r.tokens[0] for r in completions]), minlength=toy.VOCAB) / count
    with torch.no_grad(), shared.use("policy"):
        true = (shared.base(input_ids=torch.tensor([prompt])).logits[0, -1] / 0.7).softmax(-1)
    assert (seen - true).abs().sum() / 2 < 0.03  # top-k, top-p or another temperature: more than 0.1
    assert (seen > 0).sum() > 30


@pytest.mark.parametrize(
    "changes", [dict(temperature=0.6), dict(min_new_tokens=4), dict(kl_estimator="k3", temperature=1.5)]
)
def test_temperature_and_barred_ends_are_alike_in_sampler_and_log_probs(changes):
    trainer = toy.trainer(**changes)
    kept = toy.recorded(trainer)
    metrics = trainer.run_update()
    assert metrics["val/sampler_drift"] < 1e-5
    assert abs(metrics["objective/kl"]) < 1e-4
    assert min(map(len, kept[0].completion_ids)) >= changes.get("min_new_tokens", 1)


@pytest.mark.parametrize("kind", toy.KINDS)
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


@pytest.mark.parametrize("kind", toy.KINDS)
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


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_the_cache_stays_where_it_was_allocated_while_rows_leave_and_tokens_come(kind, monkeypatch):
    """On a GPU each other place would be a block of another size, and the last one a hole."""
    shared, seen = toy.shared_base(kind, critic=False, spread=0.1), []
    body = shared.body

    def noted(**inputs):
        out = body(**inputs)
        layers = inputs["past_key_values"].layers
        seen.append([tensor for layer in layers for tensor in (layer.keys, layer.values)])
        return out

    monkeypatch.setattr(shared, "body", noted)
    TransformersEngine(shared).generate(some_prompts(), range(12), Sampling(100, (2, 3, 4), seed=7))
    assert len({len(tensors[0]) for tensors in seen}) > 2, "no row left"
    places = {tuple(tensor.untyped_storage().data_ptr() for tensor in tensors) for tensors in seen}
    assert len(places) == 1
    longest = max(map(len, some_prompts())) + 100
    assert {tensor.untyped_storage().nbytes() for tensor in seen[0]} == {
        12 * longest * tensor.shape[1] * tensor.shape[3] * 4 for tensor in seen[0]
    }
