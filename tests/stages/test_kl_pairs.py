"""Tests that KTO's KL term pairs different rows of the same step, and the same rows for any number of workers."""

import pytest
import torch

from pipeline.stages.kl_pairs import (
    PairedBatchSampler,
    PairedCollator,
    PairedEvaluationSampler,
    mismatched_rows,
)


def pairs(rows, size, world, step, epoch=0):
    """Returns [(row, row with the completion for its KL term)] in the order of an epoch."""
    samplers = [PairedBatchSampler(rows, size, rank, world, 7, step=step) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    found = []
    for batches in zip(*samplers, strict=True):
        for batch in batches:
            half = len(batch) // 2
            found += zip(batch[:half], batch[half:], strict=True)
    return found


@pytest.mark.parametrize(("size", "world"), [(8, 1), (4, 1), (4, 2), (2, 2), (1, 4)])
def test_each_row_gets_the_completion_of_another_row_in_its_step(size, world):
    found = pairs(21, size, world, step=8)
    # a single worker with one micro-batch per step makes the same pairs
    assert found == pairs(21, 16, 1, step=8)
    for start in range(0, 21, 8):
        rows, others = zip(*found[start : start + 8], strict=True)
        assert set(rows) == set(others) and not any(map(int.__eq__, rows, others))
        # each row is paired with the row before it, as in TRL's KTOTrainer
        assert others == (rows[-1], *rows[:-1])
    assert sorted(row for row, _ in found) == list(range(21))
    assert found != pairs(21, size, world, step=8, epoch=1)


@pytest.mark.parametrize(
    ("rows", "before"),
    [([3, 3, 4, 3], None), ([5, 5, 5, 6], [1]), ([7], [7, 2]), ([8, 8], [1, 8])],
)
def test_a_repeated_row_does_not_get_its_own_completion(rows, before):
    rows, before = torch.tensor(rows), None if before is None else torch.tensor(before)
    assert not (mismatched_rows(rows, before) == rows).any()


@pytest.mark.parametrize("world", [1, 3])
def test_eval_rows_get_completions_from_half_the_dataset_away(world):
    found = {}
    for rank in range(world):
        for batch in PairedEvaluationSampler(11, 2, rank, world):
            half = len(batch) // 2
            found |= dict(zip(batch[:half], batch[half:], strict=True))
    assert found == {row: (row + 5) % 11 for row in range(11)}


def test_the_collator_hands_on_the_completions_and_counts_the_rows():
    collator = PairedCollator(
        lambda rows: {"rows of TRL": rows}, {"completion_ids": [0], "KL_completion_ids": [0]}
    )
    rows = [{"prompt_ids": [i], "completion_ids": [10 + i]} for i in range(4)]
    batch = collator(rows)
    assert [row["KL_completion_ids"] for row in batch["rows of TRL"]] == [[12], [13]]
    assert [row["prompt_ids"] for row in batch["rows of TRL"]] == [[0], [1]] and batch["rows"] == 2
    assert collator([])["rows"] == 0
