"""Preferences: a prompt, a chosen and a rejected completion. Rows -> Records."""

from typing import Any

from pipeline.data.messages import (
    as_turns,
    completion_text,
    instruction,
    prompt_text,
    repeats_prompt,
    split_transcripts,
    with_system,
)
from pipeline.data.record import Record, Text, Turns, plain
from pipeline.data.tools import decoded
from pipeline.data.values import RowError, show

SHAPES = {
    "prompt+pos_answers+neg_answers": ("prompt", "pos_answers", "neg_answers"),
    "prompt+chosen+rejected": ("prompt", "chosen", "rejected"),
    "conversations+chosen+rejected": ("conversations", "chosen", "rejected"),
    "messages+chosen+rejected": ("messages", "chosen", "rejected"),
    "instruction+chosen+rejected": ("instruction", "chosen", "rejected"),
    "chosen+rejected": ("chosen", "rejected"),
}
SIDES = ("chosen", "rejected")
# Of a pair. TRL's RewardTrainer minimises -logsigmoid(score_chosen - score_rejected - margin): beyond some tens the
# gradient no longer depends on the pair, and the scores are driven apart without end. Llama 2's margins are 1/3 to 3.
LARGEST_MARGIN = 100.0

# ---- row -> Record ---------------------------------------------------------------------------------------------


def parse(row: dict[str, Any], shape: str) -> Record:
    """A row of one of SHAPES: one pair, or one for each index of `pos_answers` and `neg_answers`."""
    margin = margin_of(row)
    key = shape.split("+")[0]
    if shape == "prompt+pos_answers+neg_answers":
        prompt, pairs = answers(row)
    elif shape == "chosen+rejected":
        prompt, completions = split_transcripts(row["chosen"], row["rejected"])
        prompt, completions = with_system(prompt, completions, row.get("system"))
        pairs = [completions]
    elif any(repeats_prompt(row[side]) for side in SIDES):  # UltraFeedback: both sides repeat it
        prompt, completions = split_transcripts(row["chosen"], row["rejected"])
        pairs = [completions]
        given = row[key]
        if not isinstance(given, str) or given.strip():  # an empty one says nothing else
            prompt = agreed(prompt, given_prompt(row, key), key)
    else:
        prompt = given_prompt(row, key)
        pairs = [tuple(completion_text(row[side], side, prompt) for side in SIDES)]
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


def given_prompt(row: dict[str, Any], key: str) -> Text:
    return instruction(row) if key == "instruction" else prompt_text(row[key], key, row.get("system"))


def agreed(repeated: Text, given: Text, key: str) -> Text:
    """The prompt of a row that has it in the field `key` (`given`) and again in `chosen` and `rejected` (`repeated`).

    The longer one, where one is the end of the other: the field often holds one question of a conversation, or adds
    system turns. Otherwise they must agree.
    """
    repeated_turns, given_turns = as_turns(repeated), as_turns(given)
    for longer, shorter in ((repeated_turns, given_turns), (given_turns, repeated_turns)):
        if stripped(longer[-len(shorter) :]) == stripped(shorter):
            return longer
    # the first question of several
    if isinstance(given, str) and stripped(given_turns)[0] in stripped(repeated_turns):
        return repeated
    raise RowError(
        "prompts_differ",
        key,
        f"{show(given_turns[-1]['content'])}, but `chosen` and `rejected` begin with "
        f"{show(repeated_turns[-1]['content'])}",
        f"the same prompt there as in `{key}`, or completions without a prompt",
    )


def stripped(turns: Turns) -> list[tuple[str, str]]:
    """(role, content) of each turn, without white space around the content."""
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
    """Prompt and pairs of a row with lists of good and of bad answers."""
    prompt = prompt_text(row["prompt"], system=row.get("system"))
    sides = []
    for key in ("pos_answers", "neg_answers"):
        values = decoded(row[key])  # a CSV file holds a list as its JSON text
        if not isinstance(values, list):
            raise RowError("wrong_type", key, show(values), "a list of texts")
        if not values:
            raise RowError("empty_completion", key, "an empty list", "at least one answer")
        sides.append([completion_text(value, f"{key}[{i}]", prompt) for i, value in enumerate(values)])
    if len(sides[0]) != len(sides[1]):
        raise RowError(
            "unequal_answers",
            "neg_answers",
            f"{len(sides[0])} pos_answers and {len(sides[1])} neg_answers",
            "as many neg_answers as pos_answers: one pair for each index",
        )
    return prompt, list(zip(*sides, strict=True))
