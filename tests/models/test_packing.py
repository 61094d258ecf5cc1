"""Tests that completions packed into one row with their shared prompt have the same hidden states as in separate rows."""

import pytest
import torch
import toy_ppo as toy

from pipeline.models.packing import pack_alone, pack_together, packs_that_pay

PROMPTS = [[5, 6, 7], [8, 9]]
ROWS = [(0, [10, 11]), (1, [12]), (0, [13, 14, 15]), (0, [16]), (1, [17, 18, 19, 20])]
PACKS = [[0, 2, 3], [4, 1]]


def rows():
    whole = [PROMPTS[prompt] + completion for prompt, completion in ROWS]
    ids = torch.tensor([row + [0] * (7 - len(row)) for row in whole])
    starts = torch.tensor([len(PROMPTS[prompt]) for prompt, _ in ROWS])
    return ids, starts, torch.tensor([len(completion) for _, completion in ROWS]), 4


@pytest.mark.parametrize(("kind", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("gpt2", "sdpa")])
def test_packed_completions_have_the_same_states_as_in_separate_rows(kind, attention):
    shared = toy.shared_base(kind, critic=False, spread=0.3, attn_implementation=attention)
    assert shared.can_pack
    batch, single = pack_together(*rows(), PACKS), pack_alone(*rows())
    assert batch.input_ids.numel() < single.input_ids.numel()
    for role in ("policy", None):
        with torch.no_grad():
            states = shared.states(role, batch)
            torch.testing.assert_close(states, shared.states(role, single), rtol=1e-4, atol=1e-5)
    # Row 1 has the states before each action and after the last action. The last state is repeated to the end of the row.
    hidden = shared.hidden(None, single.input_ids)
    torch.testing.assert_close(states[1], hidden[1, [1, 2, 2, 2, 2]], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(shared.states(None, batch.ends())[:, 0], states[:, -1])


def test_bases_with_sliding_windows_or_without_masks_cannot_pack(monkeypatch):
    assert not toy.shared_base("gemma2", critic=False).can_pack
    shared = toy.shared_base(critic=False)
    forward = shared.base.base_model.forward
    monkeypatch.setattr(
        shared.base.base_model, "forward", lambda **inputs: forward(**{**inputs, "attention_mask": None})
    )
    assert not shared.can_pack


def test_a_pack_ends_where_attention_costs_more_than_the_prompt():
    of = lambda prompt, completion, width, **limits: [  # noqa: E731
        len(pack) for pack in packs_that_pay([0] * 64, [prompt] * 64, [completion] * 64, width, **limits)
    ]
    assert of(512, 512, 4096) == [25, 25, 14]
    assert of(1, 512, 64) == [1] * 64  # sharing a prompt of one token saves nothing
    assert of(512, 512, 4096, completions=8) == [8] * 8
    assert of(512, 512, 4096, tokens=1600) == [2] * 32
    assert packs_that_pay([3, 4, 3, 4], [9, 9, 9, 9], [2, 2, 2, 2], 64) == [[0, 2], [1, 3]]
