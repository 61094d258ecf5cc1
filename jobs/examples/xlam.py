"""Converts rows of xLAM, {query, answers, tools}, into messages. The second message has the tool calls."""

import json


def messages(row):
    calls = {"role": "assistant", "tool_calls": json.loads(row["answers"])}
    return {"messages": [{"role": "user", "content": row["query"]}, calls], "tools": row["tools"]}
