"""Converts trees of OpenAssistant into preference pairs of replies with adjacent ranks."""

from itertools import pairwise


def pairs(tree):
    rows, waiting = [], [{**tree["prompt"], "before": []}]
    for message in waiting:
        role = "user" if message["role"] == "prompter" else "assistant"
        turns = [*message["before"], {"role": role, "content": message["text"]}]
        waiting += [{**reply, "before": turns} for reply in message["replies"]]
        ranked = [reply for reply in message["replies"] if role == "user" and reply.get("rank") is not None]
        texts = [reply["text"] for reply in sorted(ranked, key=lambda reply: reply["rank"])]
        rows += [{"prompt": turns, "chosen": a, "rejected": b} for a, b in pairwise(texts)]
    return rows
