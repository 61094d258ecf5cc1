"""xLAM's rows, {query, answers, tools}, as messages; the second message has the calls."""

import json


def messages(row):
    calls = {"role": "assistant", "tool_calls": json.loads(row["answers"])}
    return {"messages": [{"role": "user", "content": row["query"]}, calls], "tools": row["tools"]}
