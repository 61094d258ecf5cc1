"""JSON rows of every accepted shape -> one canonical `Record`, or a `RowError` that says what is wrong with the row.

Pure Python: no tokenizer, no Ray. What a row may look like, by stage:

    sft            prompt+completion | prompt+answer | messages | conversations | instruction[+input]+output
                   (messages may say `weight: 0` or `train: false`: this assistant turn is not trained)
    rm, dpo        prompt+chosen+rejected | chosen+rejected | conversations+chosen+rejected
                   | prompt+pos_answers+neg_answers        (all with an optional `margin`)
    ppo, evaluate, generate
                   prompt | messages | conversations | instruction[+input] | chosen+rejected (their shared prompt)
    score          every shape of rm and sft: two completions to be compared, or one

A text of the form "\\n\\nHuman: ...\\n\\nAssistant: ..." becomes a list of messages, so that the chat template of
the tokenizer applies to it.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.values import RowError as RowError
from pipeline.data.values import check_values, fields_of, nearest, show, some, type_name

Message = dict[str, str]
Turns = list[Message]
Text = str | Turns  # raw text, or messages for the chat template

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "ipython": "tool",
}
# name of the shape -> the fields that it needs; the first one that a row has in full is taken
DEMONSTRATIONS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt+completion": ("prompt", "completion"),
    "prompt+answer": ("prompt", "answer"),
    "instruction+output": ("instruction", "output"),
}
PREFERENCES = {
    "prompt+pos_answers+neg_answers": ("prompt", "pos_answers", "neg_answers"),
    "prompt+chosen+rejected": ("prompt", "chosen", "rejected"),
    "conversations+chosen+rejected": ("conversations", "chosen", "rejected"),
    "messages+chosen+rejected": ("messages", "chosen", "rejected"),
    "chosen+rejected": ("chosen", "rejected"),
}
PROMPTS = {
    "prompt": ("prompt",),
    "conversations": ("conversations",),
    "messages": ("messages",),
    "instruction": ("instruction",),
    "chosen+rejected": ("chosen", "rejected"),
}
SHAPES = {
    "sft": DEMONSTRATIONS,
    "rm": PREFERENCES,
    "dpo": PREFERENCES,
    **dict.fromkeys(("ppo", "evaluate", "generate"), PROMPTS),
    "score": {**PREFERENCES, **DEMONSTRATIONS},
    "pairs": PREFERENCES,  # held-out ones, as `score` reads them
}
WEIGHTS = {"weight", "train"}  # of a message: whether it is trained
OPTIONAL = {"input", "margin", "system"}
# Of a pair. TRL's RewardTrainer minimises -logsigmoid(score_chosen - score_rejected - margin): beyond some tens the gradient
# no longer depends on the pair, and the scores are driven apart without end. Llama 2's margins are 1/3 to 3.
LARGEST_MARGIN = 100.0

_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")  # only at the start of a paragraph


@dataclass
class Record:
    """A row in canonical form.

    `pairs` holds the completions: one 1-tuple for a demonstration, (chosen, rejected) for each pair of preferences,
    nothing for a prompt. Completions are text where `prompt` is text, else messages that begin with an assistant's.
    """

    prompt: Text
    pairs: list[tuple[Text, ...]] = field(default_factory=list)
    all_turns: bool = False  # train on the assistant turns inside `prompt` too
    untrained: frozenset[int] = frozenset()  # but not on these, counted through prompt and completion
    margin: float | None = None
    row: str = ""  # JSON text: of a prompt and all further columns; of a row to be scored, as it is

    def prompt_key(self) -> str:
        """The same for two rows with the same prompt, whatever their completions; a hold-out goes by it."""
        if isinstance(self.prompt, str):
            return self.prompt
        return json.dumps([[m["role"], m["content"]] for m in self.prompt], ensure_ascii=False)

    def asked(self) -> str:
        """The same for a prompt of text and for the one message of the same content."""
        if isinstance(self.prompt, str):
            return self.prompt.strip()
        return self.prompt[0]["content"].strip() if len(self.prompt) == 1 else self.prompt_key()

    def digests(self) -> bytes:
        """8 bytes of the prompt and 8 of prompt and completions: the same for a text and for messages of the same content."""
        prompt = self.asked()
        completions = json.dumps([[plain(side) for side in pair] for pair in self.pairs], ensure_ascii=False)
        return digest(prompt).to_bytes(8) + digest(f"{prompt}\0{completions}").to_bytes(8)

    def preferences(self) -> list[int]:
        """A number for each pair of completions: the same but for its lowest bit where another row prefers the other one."""
        found = []
        for pair in self.pairs:
            if len(pair) == 2:
                sides = [plain(side) for side in pair]
                both = json.dumps([self.asked(), *sorted(sides)], ensure_ascii=False)
                found.append(digest(both) & ~1 | (sides[0] < sides[1]))
        return found


def digest(text: str) -> int:
    """64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def shape_of(row: dict[str, Any], stage: str) -> str | None:
    """Name of the shape of a row, or None."""
    shapes = SHAPES[stage]
    return next((name for name, needs in shapes.items() if all(key in row for key in needs)), None)


def parse(row: Any, stage: str) -> Record:
    """A decoded JSON row -> `Record`; raises RowError (without file and line, which the reader adds)."""
    check_values(row)
    if not isinstance(row, dict):
        raise RowError("not_object", "", show(row), "a JSON object, such as " + example(stage))
    shape = shape_of(row, stage)
    if shape is None:
        raise wrong_fields(row, stage)
    for key in SHAPES[stage][shape]:
        if row[key] is None:
            raise RowError("null", key, "null", "a value")
    if stage == "sft":
        if row.get("label") in (False, "false", "False"):  # trl.KTOTrainer's rows; 0 is False
            raise RowError(
                "label",
                "label",
                "false: a completion that is not to be imitated",
                "good completions only; leave this row out, or make pairs (chosen, rejected) for rm or dpo of such rows",
            )
        return demonstration(row, shape)
    if stage in ("rm", "dpo"):
        return preference(row, shape)
    if stage in ("score", "pairs"):
        record = preference(row, shape) if shape in PREFERENCES else demonstration(row, shape)
        record.row = json.dumps(
            {**row, "prompt": record.prompt}, ensure_ascii=False
        )  # as PPO's rewards get it
        return record
    record = prompt_row(row, shape)
    if stage == "evaluate" and row.get("completion"):
        completion_text(row["completion"], "completion", record.prompt)  # its likelihood is measured
    return record


# ---- the three kinds of set ------------------------------------------------------------------------------------


def demonstration(row: dict[str, Any], shape: str) -> Record:
    if shape in ("messages", "conversations"):
        turns = messages(row[shape], shape, system=row.get("system"))
        ends_on(turns, "assistant", shape)
        check_prompt(turns[:-1], shape)
        return Record(
            turns[:-1], [(turns[-1:],)], all_turns=True, untrained=untrained(row[shape], turns, shape)
        )
    if shape == "instruction+output":
        prompt: Text = instruction(row)
        return Record(prompt, [(completion_text(row["output"], "output", prompt),)])
    prompt = prompt_text(row["prompt"], system=row.get("system"))
    key = shape.removeprefix("prompt+")
    completion = completion_text(row[key], key, prompt)
    ignored: frozenset[int] = frozenset()
    if isinstance(row[key], list | dict):
        items = row[key] if isinstance(row[key], list) else [row[key]]
        turns = messages(items, key)
        ignored = untrained(items, turns, key)
        if ignored and isinstance(prompt, str):
            raise RowError("wrong_type", key, "weights beside a prompt of text", "a prompt of messages")
        ignored = frozenset(len(prompt) + index for index in ignored)
    return Record(prompt, [(completion,)], untrained=ignored)


def untrained(items: list[dict[str, Any]], turns: Turns, key: str) -> frozenset[int]:
    """The assistant turns that a row takes out of training: `weight: 0` (OpenAI's format) or `train: false`.

    Raises:
        RowError: for a weight in between, for a turn to be trained that is not the assistant's, and where none is left.
    """
    added = len(turns) - len(items)  # a system turn from a field of its own
    found = set()
    for index, item in enumerate(items):
        role = turns[index + added]["role"]
        for name in WEIGHTS & item.keys():
            if item[name] is None:
                continue
            if item[name] not in (0, 1):
                raise RowError(
                    "weight", f"{key}[{index}].{name}", show(item[name]), "1 (train this turn) or 0 (do not)"
                )
            if item[name] and role != "assistant":
                raise RowError(
                    "weight",
                    f"{key}[{index}].{name}",
                    f"{show(item[name])} on a turn by `{role}`",
                    "it on `assistant` turns only: no others are trained",
                )
            if not item[name]:
                found.add(index + added)
    completions = {index for index, turn in enumerate(turns) if turn["role"] == "assistant"}
    if found and completions <= found:
        raise RowError("weight", key, "no assistant turn that is to be trained", "one without `weight: 0`")
    return frozenset(found & completions)


def preference(row: dict[str, Any], shape: str) -> Record:
    margin = margin_of(row)
    key = shape.split("+")[0]
    if shape == "prompt+pos_answers+neg_answers":
        prompt, pairs = answers(row)
    elif shape == "chosen+rejected":
        prompt, one = split_transcripts(row["chosen"], row["rejected"])
        prompt, one = with_system(prompt, one, row)
        pairs = [one]
    elif any(is_whole(row[side]) for side in ("chosen", "rejected")):  # UltraFeedback: both sides repeat it
        prompt, one = split_transcripts(row["chosen"], row["rejected"])
        pairs = [one]
        prompt = agreed(prompt, prompt_text(row[key], key, row.get("system")), key)
    else:
        prompt = prompt_text(row[key], key, row.get("system"))
        pairs = [
            (
                completion_text(row["chosen"], "chosen", prompt),
                completion_text(row["rejected"], "rejected", prompt),
            )
        ]
    for index, (chosen, rejected) in enumerate(pairs):
        if plain(chosen) == plain(rejected):
            name = f"pos_answers[{index}]" if shape.endswith("neg_answers") else "chosen"
            raise RowError(
                "equal_pair",
                name,
                f"the same text on both sides: {show(plain(chosen))}",
                "two different completions",
            )
    return Record(prompt, pairs, margin=margin)


def agreed(repeated: Text, given: Text, key: str) -> Text:
    """The prompt of a row that states it in a field of its own and again in `chosen` and `rejected`.

    Of two that agree it is the longer one: a field often holds one question of a conversation, or adds system turns.
    """
    turns = [{"role": "user", "content": repeated}] if isinstance(repeated, str) else repeated
    stated = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for one, other in ((turns, stated), (stated, turns)):
        if said(one[-len(other) :]) == said(other):
            return one
    if isinstance(given, str) and said(stated)[0] in said(turns):  # the first question of several
        return repeated
    raise RowError(
        "prompts_differ",
        key,
        f"{show(stated[-1]['content'])}, but `chosen` and `rejected` begin with {show(turns[-1]['content'])}",
        f"the same prompt there as in `{key}`, or completions without a prompt",
    )


def said(turns: Turns) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"].strip()) for turn in turns]


def margin_of(row: dict[str, Any]) -> float | None:
    """By how much the score of `chosen` should exceed that of `rejected`; None: the row does not say."""
    margin = row.get("margin")
    if margin is None:
        return None
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise RowError("wrong_type", "margin", show(margin), "a number")
    if margin < 0:
        raise RowError(
            "margin",
            "margin",
            f"{show(margin)}, which says that `rejected` is the better one",
            f"a number from 0 to {LARGEST_MARGIN:g}; swap `chosen` and `rejected`",
        )
    if margin > LARGEST_MARGIN:
        raise RowError(
            "margin",
            "margin",
            show(margin),
            f"a number from 0 to {LARGEST_MARGIN:g}, in units of the reward (usually at most 3)",
        )
    return float(margin)


def answers(row: dict[str, Any]) -> tuple[Text, list[tuple[Text, ...]]]:
    prompt = prompt_text(row["prompt"], system=row.get("system"))
    sides = []
    for key in ("pos_answers", "neg_answers"):
        if not isinstance(row[key], list):
            raise RowError("wrong_type", key, show(row[key]), "a list of texts")
        if not row[key]:
            raise RowError("empty_completion", key, "an empty list", "at least one answer")
        sides.append([completion_text(value, f"{key}[{i}]", prompt) for i, value in enumerate(row[key])])
    if len(sides[0]) != len(sides[1]):
        found = f"{len(sides[0])} pos_answers and {len(sides[1])} neg_answers"
        raise RowError(
            "unequal_answers",
            "neg_answers",
            found,
            "as many neg_answers as pos_answers: one pair for each index",
        )
    return prompt, list(zip(*sides, strict=True))


def prompt_row(row: dict[str, Any], shape: str) -> Record:
    if shape == "chosen+rejected":
        prompt, completions = split_transcripts(row["chosen"], row["rejected"])
        prompt, _ = with_system(prompt, completions, row)
    elif shape == "instruction":
        prompt = instruction(row)
    else:
        prompt = prompt_text(row[shape], shape, row.get("system"))
    further = {key: value for key, value in row.items() if key != shape}
    return Record(prompt, row=json.dumps({"prompt": prompt, **further}, ensure_ascii=False))


# ---- texts, messages, transcripts ------------------------------------------------------------------------------


def instruction(row: dict[str, Any]) -> Turns:
    content = text(row["instruction"], "instruction")
    if row.get("input") is not None and text(row["input"], "input").strip():
        content = f"{content}\n\n{row['input']}"
    turns = [{"role": "user", "content": content}]
    if row.get("system"):
        turns.insert(0, {"role": "system", "content": text(row["system"], "system")})
    check_prompt(turns, "instruction")
    return turns


def prompt_text(value: Any, key: str = "prompt", system: Any = None) -> Text:
    """A prompt as text, or as messages where it is a list or a transcript; it must end on the asking side."""
    if isinstance(value, list):
        turns = messages(value, key, system)
        if turns[-1]["role"] == "assistant":
            raise RowError(
                "wrong_role", key, "a last turn by `assistant`", "a prompt that ends on a `user` turn"
            )
        check_prompt(turns, key)
        return turns
    found = text(value, key)
    if not found.strip():
        raise RowError("empty_prompt", key, show(found), "a text that is not empty")
    if not is_transcript(found):
        return found if not system else with_system(found, (), {"system": system})[0]
    turns = split_turns(found)
    if turns[-1]["role"] == "assistant" and not turns[-1]["content"].strip():
        turns.pop()  # the open "\n\nAssistant:" that asks for the completion; the template's generation prompt brings it
    if not turns or turns[-1]["role"] == "assistant":
        raise RowError(
            "wrong_role", key, "a transcript whose last turn is Assistant's", "one that ends on a Human turn"
        )
    check_prompt(turns, key)
    return turns if not system else with_system(turns, (), {"system": system})[0]


def with_system(
    prompt: Text, completions: tuple[Text, ...], row: dict[str, Any]
) -> tuple[Text, tuple[Text, ...]]:
    """Prompt and completions of a row with its `system` prompt, if it has one: then they are messages."""
    if not row.get("system"):
        return prompt, completions
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if turns[0]["role"] != "system":
        turns = [{"role": "system", "content": text(row["system"], "system")}, *turns]
    return turns, tuple(
        [{"role": "assistant", "content": one.removeprefix(" ")}] if isinstance(one, str) else one
        for one in completions
    )


def completion_text(value: Any, key: str, prompt: Text) -> Text:
    """A completion in the form of its prompt: text beside text, assistant messages beside messages."""
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list):
        turns = messages(value, key)
        if turns[0]["role"] != "assistant":
            raise RowError(
                "wrong_role", key, f"a completion by `{turns[0]['role']}`", "a completion by `assistant`"
            )
        ends_on(turns, "assistant", key)
        return plain(turns) if isinstance(prompt, str) else turns
    found = text(value, key)
    if not found.strip():
        raise RowError("empty_completion", key, show(found), "a text that is not empty")
    if isinstance(prompt, str):
        return found
    return [{"role": "assistant", "content": found.removeprefix(" ")}]


def split_transcripts(chosen: Any, rejected: Any) -> tuple[Text, tuple[Text, ...]]:
    """Two whole conversations -> their shared prompt and the two completions."""
    if isinstance(chosen, list) or isinstance(rejected, list):
        sides = messages(chosen, "chosen"), messages(rejected, "rejected")
    else:
        texts = text(chosen, "chosen"), text(rejected, "rejected")
        for side, key in zip(texts, ("chosen", "rejected"), strict=True):
            if not side.strip():
                raise RowError("empty_completion", key, show(side), "a text that is not empty")
        if not all(is_transcript(side) for side in texts):
            return split_texts(*texts)
        sides = split_turns(texts[0]), split_turns(texts[1])
    for turns, key in zip(sides, ("chosen", "rejected"), strict=True):
        ends_on(turns, "assistant", key)
    if sides[0][:-1] != sides[1][:-1]:
        at = shared_length(sides[0][:-1], sides[1][:-1])
        raise RowError(
            "prompts_differ",
            "rejected",
            f"another prompt than in `chosen` (from turn {at + 1} on)",
            "the same turns on both sides up to the last completion",
        )
    check_prompt(sides[0][:-1], "chosen")
    return sides[0][:-1], (sides[0][-1:], sides[1][-1:])


def split_texts(chosen: str, rejected: str) -> tuple[str, tuple[str, str]]:
    """No turn markers: the prompt is the longest common prefix, cut back to a white-space boundary."""
    if chosen == rejected:
        raise RowError(
            "equal_pair", "chosen", f"the same text on both sides: {show(chosen)}", "two different texts"
        )
    at = shared_length(chosen, rejected)
    while at and not (chosen[at : at + 1] or " ").isspace() and not (rejected[at : at + 1] or " ").isspace():
        at -= 1
    head = chosen[:at]
    while (
        head
        and not chosen[len(head) : len(head) + 1].isspace()
        and not rejected[len(head) : len(head) + 1].isspace()
    ):
        head = head[:-1]
    if not head.strip():
        raise RowError(
            "empty_prompt",
            "chosen",
            "no text that both sides begin with",
            "a shared prompt, or a `prompt` field",
        )
    completions = chosen[len(head) :], rejected[len(head) :]
    for value, key in zip(completions, ("chosen", "rejected"), strict=True):
        if not value.strip():
            raise RowError("empty_completion", key, "nothing after the shared prompt", "a completion")
    return head, completions


def shared_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many items two sequences begin with in common."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def is_transcript(value: str) -> bool:
    return value.startswith("\n\nHuman:") or (
        _TURN.match(value) is not None and len(_TURN.findall(value)) > 1
    )


def is_whole(value: Any) -> bool:
    """Whether a side repeats the prompt: a transcript, or messages that do not begin with the assistant's."""
    if isinstance(value, str):
        return is_transcript(value)
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and ROLES.get(str(first.get("role", first.get("from")))) in (
        "user",
        "system",
    )


def split_turns(value: str) -> Turns:
    """ "\\n\\nHuman: a\\n\\nAssistant: b" -> messages. Nothing but the one blank after the colon is taken off."""
    parts = _TURN.split(value)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[name], "content": content.removeprefix(" ")}
        for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def messages(value: Any, key: str, system: Any = None) -> Turns:
    """[{role, content}] or [{from, value}] -> [{role, content}]."""
    if not isinstance(value, list):
        raise RowError("wrong_type", key, show(value), "a list of messages {role, content} or {from, value}")
    if not value:
        raise RowError("empty_prompt", key, "an empty list", "at least one message")
    turns = [message(item, f"{key}[{i}]") for i, item in enumerate(value)]
    if system and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": text(system, "system")})
    return turns


def message(item: Any, key: str) -> Message:
    if not isinstance(item, dict):
        raise RowError("wrong_type", key, show(item), "a message {role, content} or {from, value}")
    names = ("from", "value") if "from" in item else ("role", "content")
    for name in names:
        if name not in item:
            raise RowError(
                "missing_field",
                f"{key}.{name}",
                fields_of(some(item)) + nearest(name, item),
                "{role, content}",
            )
    role = text(item[names[0]], f"{key}.{names[0]}")
    if role not in ROLES:
        raise RowError("wrong_role", f"{key}.{names[0]}", show(role), "one of " + ", ".join(ROLES))
    content = item[names[1]]
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        content = "".join(text(part["text"], f"{key}.{names[1]}") for part in content)
    return {"role": ROLES[role], "content": text(content, f"{key}.{names[1]}")}


def text(value: Any, key: str) -> str:
    if value is None:
        raise RowError("null", key, "null", "a text")
    if not isinstance(value, str):
        raise RowError("wrong_type", key, f"{type_name(value)} {show(value)}", "a text")
    return value


def ends_on(turns: Turns, role: str, key: str) -> None:
    if turns[-1]["role"] != role:
        raise RowError(
            "wrong_role",
            key,
            f"a last turn by `{turns[-1]['role']}`",
            f"a conversation that ends on `{role}`",
        )
    if not turns[-1]["content"].strip():
        raise RowError("empty_completion", key, show(turns[-1]["content"]), "a last turn that is not empty")


def check_prompt(turns: Turns, key: str) -> None:
    if not any(turn["role"] == "user" and turn["content"].strip() for turn in turns):
        raise RowError(
            "empty_prompt",
            key,
            "no `user` turn with text before the completion",
            "a prompt that is not empty",
        )


def plain(value: Text) -> str:
    """The words of a completion without its form, to compare two of them."""
    return value.strip() if isinstance(value, str) else "\n\n".join(turn["content"].strip() for turn in value)


# ---- what an error says ----------------------------------------------------------------------------------------


def wrong_fields(row: dict[str, Any], stage: str) -> RowError:
    """No shape fits: name the field that is missing from the nearest shape, and a field that looks like it."""
    keys = some(row)
    known = {name for needs in SHAPES[stage].values() for name in needs}
    best = max(SHAPES[stage].values(), key=lambda needs: sum(near(need, keys) for need in needs) / len(needs))
    missing = next(need for need in best if need not in row)
    odd = [key for key in keys if key not in known | OPTIONAL]
    return RowError(
        "missing_field",
        missing,
        fields_of(keys) + nearest(missing, odd),
        "one of " + " | ".join(SHAPES[stage]) + f" (stage {stage})",
    )


def near(name: str, keys: list[str]) -> float:
    return 1.0 if name in keys else 0.5 if difflib.get_close_matches(name, keys, 1) else 0.0


def example(stage: str) -> str:
    return "{" + ", ".join(f'"{name}": ...' for name in next(iter(SHAPES[stage].values()))) + "}"
