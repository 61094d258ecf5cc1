"""Tests that a completion does not depend on the other rows of its batch, and how rows share forwards and the KV cache."""

import gc
import random
import weakref

import pytest
import torch
import toy_ppo as toy
import transformers

from pipeline.errors import InputError
from pipeline.models.adapters import SharedBase
from pipeline.writing import decoder as decoders
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.rows import Row, Sampling, draw_tokens, uniforms

ENDS = (2, 3, 4, 5, 6, 7)
# Quick tests use bases with absolute positions, with sliding windows and logit soft caps, and with convolutions.
FEW = ("gpt2", "gemma2", "convolutions")
KINDS = [pytest.param(k, marks=[pytest.mark.slow] * (k not in FEW)) for k in (*toy.KINDS, "convolutions")]
PROMPTS = [row["input_ids"] for row in toy.prompts(12)]


def with_convolutions():
    """Returns a model in which half of the layers cache the state of a convolution instead of keys and values."""
    config = transformers.Lfm2Config(
        vocab_size=toy.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    shared = SharedBase(transformers.AutoModelForCausalLM.from_config(config).eval())
    shared.add("policy", lora=toy.LORA)
    return shared


def base(kind="llama", critic=False):
    return with_convolutions() if kind == "convolutions" else toy.shared_base(kind, critic, spread=0.1)


def alone(shared, row):
    """Returns a row's tokens and log-probs. Computes each token by a forward of all earlier tokens, without a cache."""
    noise = uniforms(row)
    tokens, logprobs, how = [], [], row.sampling
    with torch.no_grad(), shared.use(row.role):
        for step in range(how.max_new_tokens):
            hidden = shared.body(input_ids=torch.tensor([[*row.prompt, *tokens]])).last_hidden_state
            logits = shared.logits(hidden[:, -1])[0]
            if step < how.min_new_tokens:
                logits[list(how.eos)] = float("-inf")
            chances = (logits / (how.temperature or 1.0)).softmax(-1)
            sums = chances.double().cumsum(-1)
            drawn = int((sums <= noise[step] * sums[-1]).sum())
            tokens.append(drawn if how.temperature else int(logits.argmax()))
            logprobs.append(chances[tokens[-1]].log().item())
            if tokens[-1] in how.eos:
                break
    return tokens, logprobs


def completions(shared, prompts, sampling, decoder=None, numbers=None):
    decoder = decoder or SlotDecoder(shared)
    return decoder.generate("policy", prompts, numbers or range(len(prompts)), sampling)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_decoded_as_if_alone_while_other_rows_join_and_leave(kind):
    """Rows with different roles and temperatures join the batch at random. Some rows share a prompt, and one row is canceled."""
    shared, dice = base(kind, critic=kind != "convolutions"), random.Random(3)
    roles = (None, "policy") if kind == "convolutions" else (None, "policy", "reference")
    rows = []
    for i in range(24):
        if i % 5 < 4:
            prompt = [dice.randrange(8, 64) for _ in range(dice.randrange(1, 20))]
        how = Sampling(4 + i % 7, ENDS, i % 3, (0.0, 1.0, 0.7)[i % 3], seed=5)
        rows.append(Row(prompt, i, how, roles[i // 3 % len(roles)]))
    decoder, waiting, most = SlotDecoder(shared, 6), list(rows), 0
    while waiting or decoder.rows:
        joining: list[Row] = []
        while waiting and len(joining) < dice.randrange(1, 4) and decoder.fits(joining, waiting[0]):
            joining.append(waiting.pop(0))
        if joining:
            decoder.join(joining)
        most = max(most, len(decoder.rows))
        if len(waiting) == 10 and decoder.rows:
            decoder.rows[0].cancelled = True
        decoder.step()
    assert decoder.cache is None and 1 < most <= 6
    for row in rows:
        tokens, logprobs = alone(shared, row)
        count = len(row.tokens) if row.cancelled else len(tokens)
        assert row.tokens == tokens[:count]
        assert row.logprobs == pytest.approx(logprobs[:count], abs=2e-5)
        assert row.cancelled or row.ended == (tokens[-1] in ENDS)
    assert sum(row.ended for row in rows) > 3


def test_a_batch_is_bit_identical_after_other_batches():
    shared, sampling = base(), Sampling(12, ENDS, seed=7)
    decoder = SlotDecoder(shared)
    first = completions(shared, PROMPTS[:7], sampling, decoder)
    completions(shared, [[9] * 30] * 20, Sampling(40, ()), decoder)
    assert completions(shared, PROMPTS[:7], sampling, decoder) == first


def test_top_p_keeps_the_most_likely_tokens():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(1000, -1)
    noise, ones = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1], torch.ones(1000)

    def shares(top_p):
        tokens, logprobs = draw_tokens(logits, noise, ones, ones * top_p, [False] * 1000)
        assert torch.allclose(logprobs, logits[0][tokens])
        return [(tokens == i).sum().item() / 1000 for i in range(4)]

    assert shares(1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.002)
    assert shares(0.7) == pytest.approx([0.625, 0.375, 0, 0], abs=0.002)
    assert shares(0.1) == [1, 0, 0, 0]


def test_alternatives_have_the_log_probs_of_the_model_at_temperature_1():
    shared, decoder = base(), SlotDecoder(base())
    how = Sampling(6, ENDS, temperature=0.5, seed=1)
    asks, plain = Row([8, 9, 10], 0, how, top=3), Row([8, 9, 10, 11], 1, how)
    decoder.join([asks, plain])
    while decoder.rows:
        decoder.step()
    ids = torch.tensor([[*asks.prompt, *asks.tokens]])
    with torch.no_grad():
        model = shared.logits(shared.hidden(None, ids))[0, 2:-1].log_softmax(-1)
    for token, logprob, top, own in zip(asks.tokens, asks.logprobs, asks.tops, model, strict=True):
        assert [one for one, _ in top] == own.topk(3).indices.tolist()
        assert logprob == pytest.approx(own[token].item(), abs=1e-5)
    assert plain.tops == [] and plain.logprobs == pytest.approx(alone(shared, plain)[1], abs=1e-5)


# ---------------------------------------------------------------------------------------------------- the cache


def seen_by(shared, monkeypatch):
    """Returns a list that receives the inputs of each forward pass of the model's body."""
    seen, body = [], shared.body

    def noted(**inputs):
        seen.append(inputs)
        return body(**inputs)

    monkeypatch.setattr(shared, "body", noted)
    return seen


def test_rows_join_only_while_the_cache_stays_within_its_limit():
    decoder = SlotDecoder(base(), 8, max_positions=4 * 64)
    rows = [Row([5 + i] * (3 + i), i, Sampling(20, ())) for i in range(20)]
    # A single row that exceeds the token limit is decoded alone.
    rows.append(Row([9] * 90, 20, Sampling(400, ())))
    waiting, largest = list(rows), 0
    while waiting or decoder.rows:
        joining: list[Row] = []
        while waiting and decoder.fits(joining, waiting[0]):
            joining.append(waiting.pop(0))
        if joining:
            decoder.join(joining)
        if decoder.cache and rows[-1] not in decoder.rows:
            largest = max(largest, decoder.cache.slots * decoder.cache.positions)
        decoder.step()
    assert 64 < largest <= 4 * 64 and [len(row.tokens) for row in rows] == [20] * 20 + [400]


def test_the_cache_is_freed_when_the_last_row_leaves(monkeypatch):
    """The KV cache may take half of a GPU's memory, so it must be freed without Python's garbage collector."""
    decoder, caches, of_rows = SlotDecoder(base()), [], decoders.SlotCache

    def made(*args):
        cache = of_rows(*args)
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(decoders, "SlotCache", made)
    gc.disable()
    try:
        completions(decoder.shared, PROMPTS, Sampling(4, ()), decoder)
        assert len(caches) == 1 and caches[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_goes_through_the_model_once_for_all_its_completions(kind, monkeypatch):
    shared = base(kind)
    prompts = [prompt for prompt in PROMPTS[:5] for _ in range(4)]
    prompts.append(prompts[0])
    if kind == "convolutions":  # only rows of equal length are decoded together
        prompts = [prompt for prompt in prompts if len(prompt) == len(prompts[0])]
    sampling = Sampling(12, ENDS, min_new_tokens=1, seed=7)
    alone = completions(shared, prompts, sampling, SlotDecoder(shared, 1))
    seen = seen_by(shared, monkeypatch)
    together = completions(shared, prompts, sampling)
    distinct = len({tuple(prompt) for prompt in prompts})
    assert [len(inputs["input_ids"]) for inputs in seen[:2]] == [distinct, len(prompts)]
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=5e-6)


def test_prompts_of_similar_length_go_through_the_model_together(monkeypatch):
    shared, sampling = base("gemma2"), Sampling(8, (2, 3), seed=7)
    at_once = completions(shared, PROMPTS, sampling)
    monkeypatch.setitem(decoders.PREFILL_TOKENS, "cpu", 15)
    seen = seen_by(shared, monkeypatch)
    in_parts = completions(shared, PROMPTS, sampling)
    assert [one.tokens for one in in_parts] == [one.tokens for one in at_once]
    shapes = [tuple(inputs["input_ids"].shape) for inputs in seen]
    assert [shape for shape in shapes if shape[1] > 1] == [(3, 3), (3, 4), (2, 5), (2, 6), (2, 7)]


# --------------------------------------------------------------------------------------------------- other bases


def test_a_base_that_takes_no_mask_decodes_only_rows_of_one_length_together(monkeypatch):
    shared = base()
    expected = completions(shared, PROMPTS, Sampling(8, ENDS, seed=7))
    monkeypatch.setattr(shared.base.config, "alibi", True, raising=False)
    seen = seen_by(shared, monkeypatch)
    found = completions(shared, PROMPTS, Sampling(8, ENDS, seed=7))
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert all(inputs["attention_mask"] is None for inputs in seen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_whose_rows_can_be_decoded_together_passes_the_check(kind):
    SlotDecoder(base(kind), 4).check()


def test_wrong_positions_fail_the_check(monkeypatch):
    body = SlotDecoder._body

    def shifted(self, ids, mask, positions):
        return body(self, ids, mask, positions + (ids.shape[1] == 1))

    monkeypatch.setattr(SlotDecoder, "_body", shifted)
    with pytest.raises(InputError, match="differ from those of a forward without a cache"):
        SlotDecoder(base(), 4).check()
