"""Converts the messages of one tree of OpenAssistant into preference pairs of replies with adjacent ranks."""

from itertools import pairwise


def pairs(messages):
    rows, upto = [], {None: list[dict]()}  # upto: {message id: turns up to this message}
    for one in messages:
        role = "user" if one["role"] == "prompter" else "assistant"
        upto[one["message_id"]] = [*upto[one["parent_id"]], {"role": role, "content": one["text"]}]
    for parent, turns in upto.items():
        ranked = [one for one in messages if one["parent_id"] == parent and one["rank"] is not None]
        texts = [one["text"] for one in sorted(ranked, key=lambda one: one["rank"])]
        if turns and turns[-1]["role"] == "user":
            rows += [{"prompt": turns, "chosen": a, "rejected": b} for a, b in pairwise(texts)]
    return rows
