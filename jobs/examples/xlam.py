"""xLAM's rows, {query, answers, tools}, as messages of which the second is the calls."""

import json


def messages(row):
    calls = {"role": "assistant", "tool_calls": json.loads(row["answers"])}
    return {"messages": [{"role": "user", "content": row["query"]}, calls], "tools": row["tools"]}
