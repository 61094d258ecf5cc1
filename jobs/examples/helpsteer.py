"""Converts rows of HelpSteer about one prompt, {prompt, response, helpfulness, ...}, into pairs with adjacent scores."""

from itertools import pairwise


def pairs(rows):
    ranked = sorted(rows, key=lambda row: float(row["helpfulness"]))
    return [
        {"prompt": rows[0]["prompt"], "chosen": better["response"], "rejected": worse["response"]}
        for worse, better in pairwise(ranked)
        if float(worse["helpfulness"]) < float(better["helpfulness"])
    ]
