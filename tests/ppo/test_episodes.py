"""Tests the order of prompts, padding and masks of episodes, and how episodes are split into micro-batches."""

import numpy as np
import pytest
import torch

from pipeline.models.packing import micro_batches
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.episodes import collate, deal, minibatches, prompt_order
from pipeline.writing.rows import Completion


def test_each_pass_has_every_prompt_once_in_a_new_order():
    order = prompt_order(0, 20, 10, seed=1)
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10)) and order[:10] != order[10:]
    assert prompt_order(7, 6, 10, seed=1) == order[7:13] and prompt_order(0, 10, 10, seed=2) != order[:10]


def test_eos_is_an_action_and_padding_is_never_found_by_id():
    completions = [
        Completion([9, 0, 0, 2], True, [0.0] * 4),
        Completion([2], True, [0.0]),
        Completion([0, 0], False, [0.0] * 2),
    ]
    episodes = collate([[5], [5, 0], [6, 7, 8]], completions, [0, 1, 2], 0, torch.device("cpu"))
    assert episodes.mask.tolist() == [[True] * 4, [True] + [False] * 3, [True, True, False, False]]
    assert episodes.input_ids.tolist() == [[5, 9, 0, 0, 2], [5, 0, 2, 0, 0], [6, 7, 8, 0, 0]]
    assert episodes.starts.tolist() == [1, 2, 3] and episodes.ended.tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("episodes", "num_mini_batches", "workers", "by_prompt"), [(512, 4, 4, 1.16), (1024, 8, 16, 1.61)]
)
def test_workers_have_equal_shares_of_every_minibatch(episodes, num_mini_batches, workers, by_prompt):
    """Compares the largest load of a worker with the mean load, with and without redistributing samples between workers."""
    draw = np.random.default_rng(0)
    lengths = 100 + draw.integers(1, 400, episodes)
    sampled, dealt = [], []
    args = PPOConfig(batch_size=episodes, num_ppo_epochs=2, num_mini_batches=num_mini_batches, seed=1)
    for minibatch in minibatches(args, 0):
        rows = np.bincount(minibatch % workers, minlength=workers)
        sampled.append(rows.max() / rows.mean())
        shares = deal(lengths[minibatch].tolist(), workers)
        assert sorted(row for share in shares for row in share) == list(range(len(minibatch)))
        tokens = [lengths[minibatch[share]].sum() for share in shares]
        dealt.append(max(tokens) / np.mean(tokens))
    assert np.mean(sampled) == pytest.approx(by_prompt, abs=0.1)
    assert max(dealt) < 1.03


def test_a_long_row_does_not_pad_a_batch_that_is_busy_without_it():
    lengths = [100, 104, 97, 101, 190, 200, 20]
    assert micro_batches(lengths, 16, None) == [[6, 2, 0, 3], [1, 4], [5]]
    # For two short rows, a second batch would cost more than padding the shorter row.
    assert micro_batches([10, 90], 16, None) == [[0, 1]]
    # Limits: 3 rows and 20 tokens. The long row gets its own batch.
    assert micro_batches([5, 9, 2, 7, 7, 30, 1], 3, 20) == [[6, 2, 0], [3, 4], [1], [5]]
    # With few tokens, kernel launches take most of a GPU's time, so one padded forward is cheaper than several.
    assert micro_batches(lengths, 16, None, "cuda") == [[6, 2, 0, 3, 1, 4, 5]]
    assert len(micro_batches([100] * 40 + [200] * 4, 64, None, "cuda")) == 2
