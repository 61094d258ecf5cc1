"""Converts the messages of one tree of OpenAssistant into preference pairs of replies whose ranks are neighbors."""

from itertools import pairwise


def pairs(messages):
    rows, upto = [], {None: list[dict]()}  # the turns up to each message; a parent comes before its replies
    for one in messages:
        role = "user" if one["role"] == "prompter" else "assistant"
        upto[one["message_id"]] = [*upto[one["parent_id"]], {"role": role, "content": one["text"]}]
    for parent, turns in upto.items():
        ranked = [one for one in messages if one["parent_id"] == parent and one["rank"] is not None]
        texts = [one["text"] for one in sorted(ranked, key=lambda one: one["rank"])]
        if turns and turns[-1]["role"] == "user":
            rows += [{"prompt": turns, "chosen": a, "rejected": b} for a, b in pairwise(texts)]
    return rows
