"""Rollouts: what a completion depends on, where it ends, and that the sampler and the trainer agree on it."""

import pytest
import torch
import toy_ppo as toy
import transformers
from transformers.cache_utils import DynamicLayer

from pipeline.models.adapters import SharedBase
from pipeline.ppo import engine
from pipeline.ppo.engine import Room, Sampling, TransformersEngine, live_first


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
def test_a_completion_hangs_on_seed_episode_and_prompt_alone(kind, monkeypatch):
    shared = toy.shared_base(kind, critic=False, spread=0.1)
    prompts, sampling = some_prompts(), Sampling(12, (2, 3, 4, 5, 6, 7), seed=7)
    together = TransformersEngine(shared).generate(prompts, range(12), sampling)
    order = [3, 0, 11, 7, 5]
    apart = TransformersEngine(shared, rows=2).generate([prompts[i] for i in order], order, sampling)
    assert [together[i].tokens for i in order] == [completion.tokens for completion in apart]
    assert 1 < len({len(completion.tokens) for completion in together}), (
        "no completion ended early: no row left the batch"
    )
    for look in (3, 100):  # steps after which rows that ended leave
        monkeypatch.setitem(engine.STEPS_PER_LOOK, "cpu", look)
        later = TransformersEngine(shared).generate(prompts, range(12), sampling)
        assert [completion.tokens for completion in later] == [completion.tokens for completion in together]
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


def seen_by(shared, monkeypatch):
    """A list that fills with the inputs of each forward of the body."""
    seen, body = [], shared.body

    def noted(**inputs):
        seen.append(inputs)
        return body(**inputs)

    monkeypatch.setattr(shared, "body", noted)
    return seen


def with_convolutions():
    """A model of which half the layers keep no keys and values, but the state of a convolution."""
    config = transformers.Lfm2Config(
        vocab_size=toy.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    shared = SharedBase(transformers.AutoModelForCausalLM.from_config(config).eval())
    shared.add("policy", lora=toy.LORA)
    return shared


@pytest.mark.parametrize("kind", [*toy.KINDS, "convolutions"])
def test_a_prompt_goes_through_the_model_once_for_all_its_completions(kind, monkeypatch):
    shared = (
        with_convolutions() if kind == "convolutions" else toy.shared_base(kind, critic=False, spread=0.1)
    )
    prompts = [prompt for prompt in some_prompts()[:5] for _ in range(4)]
    prompts.append(prompts[0])  # sorting by length brings it next to the others
    sampling, episodes = Sampling(12, (2, 3, 4, 5, 6, 7), min_new_tokens=1, seed=7), range(len(prompts))
    alone = TransformersEngine(shared, rows=1).generate(prompts, episodes, sampling)
    seen = seen_by(shared, monkeypatch)
    shared_prompts = TransformersEngine(shared).generate(prompts, episodes, sampling)
    assert [len(inputs["input_ids"]) for inputs in seen[:2]] == [5, 21]
    for one, other in zip(alone, shared_prompts, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=5e-6)


@pytest.mark.parametrize("kind", toy.KINDS)
def test_prompts_go_through_the_model_in_parts_of_their_own_width(kind, monkeypatch):
    shared, sampling = toy.shared_base(kind, critic=False, spread=0.1), Sampling(8, (2, 3), seed=7)
    prompts = some_prompts()
    at_once = TransformersEngine(shared).generate(prompts, range(12), sampling)
    monkeypatch.setitem(engine.PREFILL_TOKENS, "cpu", 15)
    seen = seen_by(shared, monkeypatch)
    in_parts = TransformersEngine(shared).generate(prompts, range(12), sampling)
    assert [completion.tokens for completion in in_parts] == [completion.tokens for completion in at_once]
    shapes = [tuple(inputs["input_ids"].shape) for inputs in seen]
    if kind in ("mistral", "gemma2"):  # layers with a sliding window take all rows at once
        assert [shape for shape in shapes if shape[1] > 1] == [(12, 7)]
    else:
        assert [shape for shape in shapes if shape[1] > 1] == [(3, 3), (3, 4), (2, 5), (2, 6), (2, 7)]


def test_the_mask_of_padded_rows_is_made_once(monkeypatch):
    """Else transformers looks at it in every step, for which a GPU stops, and converts it in every layer."""
    shared = toy.shared_base("llama", critic=False)
    seen = seen_by(shared, monkeypatch)
    TransformersEngine(shared).generate(some_prompts(), range(12), Sampling(8, (), seed=7))
    masks = [inputs["attention_mask"] for inputs in seen[1:]]
    assert len({mask.untyped_storage().data_ptr() for mask in masks}) == 1
    assert [mask.shape for mask in masks] == [(12, 1, 1, 7 + step) for step in range(1, 8)]


def test_rows_that_stay_keep_their_place():
    live = [False, True, True, False, True, False, True]
    assert live_first(live).tolist() == [6, 1, 2, 4]
    assert live_first([True] * 3).tolist() == [0, 1, 2]
    layer, own = Room(7, 5), DynamicLayer()
    keys, values = torch.randn(2, 7, 2, 4, 3)
    for each in (layer, own):
        each.update(keys, values)
        each.reorder_cache(live_first(live))
        each.update(keys[:4, :, :1], values[:4, :, :1])
    assert torch.equal(layer.keys, own.keys) and torch.equal(layer.values, own.values)
    with pytest.raises(RuntimeError):
        layer.update(keys[:4, :, :1], values[:4, :, :1])
