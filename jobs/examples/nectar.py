"""Nectar's rows, {prompt, answers: [{answer, rank}]}, as preference pairs: each against the next; rank 1 is best."""

from itertools import pairwise


def pairs(row):
    ranked = sorted(row["answers"], key=lambda one: one["rank"])
    return [
        {"prompt": row["prompt"], "chosen": better["answer"], "rejected": worse["answer"]}
        for better, worse in pairwise(ranked)
        if better["rank"] < worse["rank"]
    ]
