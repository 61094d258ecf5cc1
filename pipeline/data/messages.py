"""Parses the contents of rows: texts, lists of messages, and transcripts.

A text of the form "\\n\\nHuman: ...\\n\\nAssistant: ..." is a transcript. A transcript is converted to a list of messages, so
that the tokenizer can apply its chat template. The functions raise RowError for values that they cannot read.
"""

import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from pipeline.data.values import RowError, fields_of, parse_json, show_json, suggest_key

Message = dict[str, Any]  # {role, content}, perhaps with tool_calls and other keys for the chat template
Turns = list[Message]
Text = str | Turns  # raw text, or messages for the chat template
_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")  # a turn begins only at the start of a paragraph
# {role in lower case: name of the role in chat templates}
ROLES = {
    name: role
    for role, names in {
        "system": "system developer",
        "user": "user human prompter",
        "assistant": "assistant gpt chatgpt model bot ai function_call tool_call",
        "tool": "tool ipython observation function tool_response",
    }.items()
    for name in names.split()
}

SIDES = ("chosen", "rejected")
TEXT_PARTS = ("text", "input_text", "output_text")  # types of message parts with text
# Keys for the thoughts of a reasoning model. transformers passes the first key to templates as `reasoning_content` and
# `thinking`.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# In all turns except the last one, templates keep only the text after the marker that ends the thoughts.
END_OF_THOUGHTS = re.compile(r"</(?:think|thinking|thought|thoughts|reasoning)>|\[/THINK\]")
UNSEEN = ("Zs", "Zl", "Zp", "Cc", "Cf")  # Unicode categories: white space, control and format characters
WEIGHTS = ("weight", "train", "loss")  # message keys that can exclude a message from training
ABOUT_TOOLS = ("tool_call_id", "name")
READ = frozenset({"role", "content", "from", "value", "tool_calls", "function_call", *WEIGHTS})


def comparable_text(value: Text) -> str:
    """Returns a completion (text or messages) as one text, for comparisons."""
    return value.strip() if isinstance(value, str) else "\n\n".join(turn_text(turn).strip() for turn in value)


def turn_text(turn: Message) -> str:
    """Returns the content of a turn, followed by JSON of its tool calls and other keys, such as thoughts."""
    extras = {key: value for key, value in turn.items() if key not in (*READ, *ABOUT_TOOLS)}
    parts = [part for part in (turn.get("tool_calls"), extras) if part]
    return turn["content"] + "".join(json.dumps(part, ensure_ascii=False) for part in parts)


def thoughts_of_turn(turn: Message) -> str:
    """Returns the thoughts of a turn, or "" if the turn has no thoughts."""
    return next((turn[key].strip() for key in THOUGHTS if isinstance(turn.get(key), str)), "")


def text_after_thoughts(content: str) -> str:
    """Returns the text after the thoughts of a turn, or "" if this text has only invisible characters."""
    text = END_OF_THOUGHTS.split(content)[-1]
    return text.strip() if any(unicodedata.category(char) not in UNSEEN for char in text) else ""


def without_unread(value: Any, key: str, keys: frozenset[str], unread: list[str]) -> Any:
    """Removes message keys that neither this module nor the chat template reads. `keys` lists the keys of the template.

    Adds each removed key to `unread`, for example as `messages[].id`, unless its value is null or empty.
    """
    if isinstance(value, list):
        return [without_unread(item, f"{key.removesuffix('[]')}[]", keys, unread) for item in value]
    if not isinstance(value, dict) or not value.keys() & {"role", "from"}:
        return value
    removed = value.keys() - READ - keys
    unread += [f"{key}.{name}" for name in sorted(removed) if value[name] not in (None, "", [], {})]
    return {name: item for name, item in value.items() if name not in removed}


def require_text(value: Any, key: str) -> str:
    if value is None:
        raise RowError("null", key, "null", "a text")
    if not isinstance(value, str):
        raise RowError("wrong_type", key, f"{type(value).__name__} {show_json(value)}", "a text")
    return value


def nonempty_text(value: Any, key: str, kind: str) -> str:
    """Returns a text. Raises RowError with the given `kind` if the text is empty."""
    if not require_text(value, key).strip():
        raise RowError(kind, key, show_json(value), "non-empty text")
    return str(value)


def parse_messages(value: Any, key: str, system: Any = None) -> Turns:
    """Converts [{role, content}] or [{from, value}] to [{role, content}]. Prepends the `system` prompt of the row, if any."""
    if not isinstance(value, list):
        raise RowError(
            "wrong_type", key, show_json(value), "a list of messages {role, content} or {from, value}"
        )
    if not value:
        raise RowError("empty_prompt", key, "an empty list", "at least one message")
    return with_system([parse_message(item, f"{key}[{i}]") for i, item in enumerate(value)], system)


# Patterns for lists in Python's notation, which `to_csv` of pandas and datasets writes
_BEGIN = r"(?:array\()?[\[(\s]*"
# dictionaries, or objects such as ChatCompletionMessage(content='yo', role='assistant')
_DICTIONARY = r"\{\s*(?=')(?=.*'(?:role|from)'\s*:)(?=.*'(?:content|value)'\s*:)"
_OBJECT = r"\[\s*\w+\((?=.*\brole\b)(?=.*\bcontent\b)"
_MESSAGES = rf"(?:{_BEGIN}{_DICTIONARY}|{_OBJECT}).*[\]}})]\Z"
_LIST = rf"{_BEGIN}(?<=[\[(])\s*['\"{{].*[\])]\Z"


def list_in(value: Any, key: str, of_messages: bool = False) -> Any:
    """Parses a list in a JSON text. Returns any other value unchanged.

    Raises RowError for a list in Python's notation. If `of_messages` is set, raises RowError only for a list of messages.
    """
    if not isinstance(value, str):
        return value
    parsed = parse_json(value) if (stripped := value.strip())[:1] in ("[", "{") else value
    pattern = _MESSAGES if of_messages else f"{_MESSAGES}|{_LIST}"
    if parsed is value and re.match(pattern, stripped, re.DOTALL):
        expected = "a list, or a list as JSON text; to_csv writes lists in Python's notation, so save the rows with to_json or to_parquet"
        raise RowError("python_text", key, show_json(value), expected)
    return parsed if isinstance(parsed, list) else value


def is_printed_list(text: Any) -> bool:
    """Returns True for a list of texts as Python or numpy prints it, such as `['a', 'b']` and `['a' 'b']`."""
    return isinstance(text, str) and bool(re.fullmatch(_LIST, text.strip(), re.DOTALL))


def unpack_messages(field: str, value: Any) -> Any:
    """Parses messages in a JSON text, as in CSV files, and converts other forms of dialogues. Returns other values unchanged."""
    if field in ("messages", "conversations"):
        return dialogue_to_messages(list_in(value, field))
    items = list_in(value, field, of_messages=True)
    chat = isinstance(items, list) and all(
        isinstance(item, dict) and item.keys() & {"role", "from"} for item in items
    )
    return items if chat and items else value


def dialogue_to_messages(value: Any) -> Any:
    """Converts a transcript, [{input, output}] or a list of alternating texts to messages. Returns other values unchanged."""
    if isinstance(value, str):
        return split_turns(value) if is_transcript(value) else value
    if not isinstance(value, list) or not value:
        return value
    if all(isinstance(item, str) for item in value):  # as in the dataset LIMA
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(value)]
    # as in the dataset Capybara
    if all(isinstance(item, dict) and {"input", "output"} <= item.keys() for item in value):
        sides = {"input": "user", "output": "assistant"}
        return [{"role": role, "content": item[name]} for item in value for name, role in sides.items()]
    return value


def parse_message(item: Any, key: str) -> Message:
    if not isinstance(item, dict):
        raise RowError("wrong_type", key, show_json(item), "a message {role, content} or {from, value}")
    role_key, text_key = ("from", "value") if "from" in item else ("role", "content")
    # function_call: OpenAI's earlier format, with one call per message
    call_key = next((name for name in ("tool_calls", "function_call") if item.get(name)), None)
    for name in (role_key, text_key):
        if name not in item and not (name == "content" and call_key):
            found = fields_of(item) + suggest_key(name, item)
            raise RowError("missing_field", f"{key}.{name}", found, "{role, content}")
    role = require_text(item[role_key], f"{key}.{role_key}")
    if role.lower() not in ROLES:
        raise RowError("wrong_role", f"{key}.{role_key}", show_json(role), "one of " + ", ".join(ROLES))
    content = item.get(text_key)
    calls = tool_calls(item[call_key], f"{key}.{call_key}") if call_key else []
    if role.lower() in ("function_call", "tool_call"):  # in LLaMA-Factory's format, the content is the call
        calls, content = tool_calls(parse_json(content), f"{key}.{text_key}"), ""
    elif calls and content is None:
        content = ""
    if isinstance(content, list):
        content = "".join(part_text(part, f"{key}.{text_key}[{i}]") for i, part in enumerate(content))
    turn: Message = {"role": ROLES[role.lower()], "content": require_text(content, f"{key}.{text_key}")}
    if calls:
        turn["tool_calls"] = calls
    return turn | {name: v for name, v in item.items() if name not in READ and v not in (None, "")}


def part_text(part: Any, key: str) -> str:
    """Returns the text of one part of a message's content: {type: text, text}, {type: text, value}, {text}, or a text."""
    if not isinstance(part, dict):
        return require_text(part, key)
    if (kind := part.get("type") or "text") not in TEXT_PARTS:
        expected = "parts of type text, not images or audio; thoughts belong in `reasoning_content`"
        raise RowError("wrong_type", key, f"a message part of type {show_json(kind)}", expected)
    for name in ("text", "value", "content"):
        if (value := part.get(name)) is not None:
            # as in OpenAI's threads: {text: {value, annotations}}
            return require_text(value.get("value") if isinstance(value, dict) else value, f"{key}.{name}")
    raise RowError("missing_field", f"{key}.text", fields_of(part), "{type: text, text}")


def prompt_text(value: Any, key: str = "prompt", system: Any = None) -> Text:
    """Returns a prompt as text, or as messages if it is a list or a transcript. The last turn must not be an assistant turn."""
    if isinstance(value, list):
        turns = parse_messages(value, key)
    else:
        prompt = nonempty_text(value, key, "empty_prompt")
        if not is_transcript(prompt):
            return with_system(as_turns(prompt), system) if system else prompt
        turns = split_turns(prompt)
        if turns[-1]["role"] == "assistant" and not turns[-1]["content"].strip():
            turns.pop()  # the final "\n\nAssistant:", which the template's generation prompt adds
    if not turns or turns[-1]["role"] == "assistant":
        expected = "a prompt that ends with a `user` turn"
        raise RowError("wrong_role", key, "a last turn by `assistant`", expected)
    check_prompt(turns, key)
    return with_system(turns, system)


def instruction_prompt(row: dict[str, Any]) -> Turns:
    """Returns the prompt of a row with `instruction` and optionally `input`, `system` and `history`: [[question, answer]]."""
    content = require_text(row["instruction"], "instruction")
    if row.get("input") is not None and require_text(row["input"], "input").strip():
        content = f"{content}\n\n{row['input']}"
    history = list_in(row.get("history") or [], "history")
    if not isinstance(history, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in history):
        raise RowError("wrong_type", "history", show_json(history), "a list of [question, answer]")
    history = (
        parse_messages(dialogue_to_messages([text for pair in history for text in pair]), "history")
        if history
        else []
    )
    turns = with_system([*history, *as_turns(content)], row.get("system"))
    check_prompt(turns, "instruction")
    return turns


def completion_text(value: Any, key: str, prompt: Text) -> Text:
    """Returns a completion in the form of its prompt: text if the prompt is text, or else assistant messages."""
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list):
        turns = parse_messages(value, key)
        if turns[0]["role"] != "assistant":
            found = f"a completion by `{turns[0]['role']}`"
            raise RowError("wrong_role", key, found, "a completion by `assistant`")
        check_last(turns, key)
        others = [turn["role"] for turn in turns if turn["role"] != "assistant"]
        if isinstance(prompt, str) and others:  # text has no roles, so these turns would be trained, too
            found = f"a turn by `{others[0]}` with a text prompt"
            raise RowError("wrong_role", key, found, "a prompt of messages: [{role: user, content: TEXT}]")
        extras = [name for turn in turns for name in turn if name not in ("role", "content", *ABOUT_TOOLS)]
        if isinstance(prompt, str) and extras:
            raise RowError("wrong_type", key, f"`{extras[0]}` with a text prompt", "a prompt of messages")
        return comparable_text(turns) if isinstance(prompt, str) else turns
    completion = nonempty_text(value, key, "empty_completion")
    return completion if isinstance(prompt, str) else assistant_turn(completion)


def with_system(turns: Turns, system: Any) -> Turns:
    """Adds a row's `system` prompt, if any, to a conversation.

    Raises RowError if the conversation already has a system message with another text.
    """
    if not system:
        return turns
    message = {"role": "system", "content": require_text(system, "system")}
    if turns[0]["role"] != "system":
        return [message, *turns]
    if turns[0]["content"].strip() != system.strip():
        found = f"{show_json(system)}, but the first message is {show_json(turns[0]['content'])}"
        raise RowError("prompts_differ", "system", found, "one system prompt")
    return turns


def as_turns(prompt: Text) -> Turns:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def assistant_turn(completion: str) -> Turns:
    """Returns a completion as an assistant message, without the single space that separates it from a text prompt."""
    return [{"role": "assistant", "content": completion.removeprefix(" ")}]


def check_last(turns: Turns, key: str) -> None:
    """Raises RowError unless a conversation ends with an assistant turn that has tool calls, or text besides thoughts."""
    last = turns[-1]
    if last["role"] != "assistant":
        expected = "a conversation that ends with an `assistant` turn"
        raise RowError("wrong_role", key, f"a last turn by `{last['role']}`", expected)
    # an empty completion would train the policy to end immediately
    if not text_after_thoughts(last["content"]) and not last.get("tool_calls"):
        expected = "a turn with content; `weight: 0` can exclude earlier turns from training"
        raise RowError("empty_completion", key, show_json(last["content"]), expected)


def check_prompt(turns: Turns, key: str) -> None:
    if not any(turn["role"] == "user" and turn["content"].strip() for turn in turns):
        found = "no `user` turn with text before the completion"
        raise RowError("empty_prompt", key, found, "a prompt that is not empty")


# ---- transcripts -----------------------------------------------------------------------------------------------


def is_transcript(value: str) -> bool:
    return value.startswith("\n\nHuman:") or (
        _TURN.match(value) is not None and len(_TURN.findall(value)) > 1
    )


def repeats_prompt(value: Any) -> bool:
    """Returns True if `chosen` or `rejected` is a transcript, or begins with a user or system message."""
    if isinstance(value, str):
        return is_transcript(value)
    message = value[0] if isinstance(value, list) and value else None
    role = str(message.get("role", message.get("from"))).lower() if isinstance(message, dict) else ""
    return ROLES.get(role) in ("user", "system")


def split_turns(value: str) -> Turns:
    r"""Returns the transcript "\n\nHuman: a\n\nAssistant: b" as messages, without the space after each colon."""
    parts = _TURN.split(value)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[name], "content": content.removeprefix(" ")}
        for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def split_transcripts(row: dict[str, Any], system: Any = None) -> tuple[Text, tuple[Text, ...]]:
    """Splits two full conversations, `chosen` and `rejected`, into the prompt that they share and their completions."""
    pair = row["chosen"], row["rejected"]
    if any(isinstance(side, list) for side in pair):
        sides = [parse_messages(side, key) for side, key in zip(pair, SIDES, strict=True)]
    else:
        texts = [nonempty_text(side, key, "empty_completion") for side, key in zip(pair, SIDES, strict=True)]
        if not all(map(is_transcript, texts)):
            prompt, completions = split_texts(*texts)
            if not system:
                return prompt, completions
            return with_system(as_turns(prompt), system), tuple(map(assistant_turn, completions))
        sides = [*map(split_turns, texts)]
    for turns, key in zip(sides, SIDES, strict=True):
        check_last(turns, key)
    prompts = [turns[:-1] for turns in sides]
    if prompts[0] != prompts[1]:
        found = (
            f"a prompt that differs from the prompt in `chosen` (from turn {shared_length(*prompts) + 1} on)"
        )
        expected = "the same turns in `chosen` and `rejected` before the last completion"
        raise RowError("prompts_differ", "rejected", found, expected)
    check_prompt(prompts[0], "chosen")
    return with_system(prompts[0], system), (sides[0][-1:], sides[1][-1:])


def split_texts(chosen: str, rejected: str) -> tuple[str, tuple[str, str]]:
    """Splits two texts without turn markers into prompt and completions. The prompt is the longest common
    prefix after which one of the texts continues with white space."""
    end = shared_length(chosen, rejected)
    while end and not chosen[end : end + 1].isspace() and not rejected[end : end + 1].isspace():
        end -= 1
    if not chosen[:end].strip():
        expected = "a shared prompt, or a `prompt` field"
        raise RowError("empty_prompt", "chosen", "no common text at the start of both completions", expected)
    return chosen[:end], (chosen[end:], rejected[end:])


def shared_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Returns the length of the common prefix of two sequences."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


# ---- tools: functions that a completion may call, and the calls in messages, in OpenAI's format ---------------------


def tool_calls(value: Any, key: str) -> list[dict[str, Any]]:
    """Converts OpenAI's tool calls to the form that chat templates expect: [{type, function: {name, arguments: OBJECT}}]."""
    calls = []
    for index, item in enumerate(value if isinstance(value, list) else [value] if value else []):
        place = f"{key}[{index}]"
        function = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError("wrong_type", place, show_json(item), "{function: {name, arguments}}")
        arguments = parse_json(function.get("arguments") or {})
        if not isinstance(arguments, dict):
            raise RowError("wrong_type", f"{place}.arguments", show_json(arguments), "a JSON object")
        identity = {"id": item["id"]} if item.get("id") else {}
        function = {"name": function["name"], "arguments": arguments}
        calls.append({**identity, "type": "function", "function": function})
    return calls


def tool_schemas(value: Any) -> list[dict[str, Any]] | None:
    """Returns the functions that a completion may call, as JSON schemas, or None if the value is not a list of schemas.

    A bare schema, {name, description, parameters}, is wrapped in OpenAI's {type, function}.
    """
    value = list_in(value, "tools")
    if not value or not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return None
    return [
        {"type": "function", "function": item} if "name" in item and "function" not in item else item
        for item in value
    ]


def template_kwargs(value: Any) -> dict[str, Any]:
    """Returns the chat template's variables that a row sets, from an object or from its JSON text."""
    value = parse_json(value) or {}
    if not isinstance(value, dict):
        raise RowError("wrong_type", "chat_template_kwargs", show_json(value), "an object")
    return {name: item for name, item in value.items() if item is not None}
