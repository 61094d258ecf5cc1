"""Converts rows of Glaive, {system, chat}, into messages. Tool calls remain text, because they are not valid JSON."""

import re

ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}


def messages(row):
    _, *parts = re.split(rf"(?:\A|\n)\s*({'|'.join(ROLES)}): ", row["chat"].replace("<|endoftext|>", ""))
    system = {"role": "system", "content": row["system"].removeprefix("SYSTEM: ")}
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {"messages": [system, *({"role": ROLES[name], "content": text.strip()} for name, text in pairs)]}
