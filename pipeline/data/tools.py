"""Tools: the functions that a row offers, and the calls in its messages, as chat templates expect them (OpenAI's format)."""

from typing import Any

from pipeline.data.values import RowError, read_value, show


def tool_calls(value: Any, key: str) -> list[dict[str, Any]]:
    """OpenAI's tool calls as chat templates expect them: [{type, function: {name, arguments}}], the arguments an object.

    Raises:
        RowError: for what is not a list of calls with a name, and for arguments that are not (JSON text of) an object.
    """
    calls = []
    for index, item in enumerate(value if isinstance(value, list) else [value] if value else []):
        place = f"{key}[{index}]"
        function = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError("wrong_type", place, show(item), "{function: {name, arguments}}")
        arguments = decoded(function.get("arguments") or {})
        if not isinstance(arguments, dict):
            raise RowError("wrong_type", f"{place}.arguments", show(arguments), "a JSON object")
        identity = {"id": item["id"]} if item.get("id") else {}
        function = {"name": function["name"], "arguments": arguments}
        calls.append({**identity, "type": "function", "function": function})
    return calls


def offered(value: Any) -> list[dict[str, Any]] | None:
    """The functions that a row offers, from a list of JSON schemas or its JSON text; None: the column is something else.

    A schema that stands there by itself, {name, description, parameters}, is put into OpenAI's {type, function}.
    """
    value = decoded(value)
    if not value or not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return None
    return [
        {"type": "function", "function": item} if "name" in item and "function" not in item else item
        for item in value
    ]


def decoded(value: Any) -> Any:
    """A value, or the one that its JSON text stands for."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    try:
        content, end = read_value(text)
    except (ValueError, RecursionError):
        return value
    return content if end == len(text) else value
