"""Tests the order of prompts, padding and masks of episodes, and how episodes are split into micro-batches."""

import torch

from pipeline.models.packing import micro_batches
from pipeline.ppo.episodes import collate, prompt_order
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
