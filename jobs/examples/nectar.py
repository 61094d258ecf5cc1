"""Converts rows of Nectar, {prompt, answers: [{answer, rank}]}, into pairs with adjacent ranks. Rank 1 is the best."""

from itertools import pairwise


def pairs(row):
    ranked = sorted(row["answers"], key=lambda one: one["rank"])
    return [
        {"prompt": row["prompt"], "chosen": better["answer"], "rejected": worse["answer"]}
        for better, worse in pairwise(ranked)
        if better["rank"] < worse["rank"]
    ]
