"""data.columns: fields from columns of other names, and what is refused before any row is read."""

import pytest

from pipeline.data.preview import check_columns, check_there, preprocessing
from pipeline.data.reshape import Preprocess
from pipeline.data.shapes import kind_of, parse
from pipeline.data.values import RowError
from pipeline.errors import InputError


def read(row, stage, **mapped):
    """The record that a row becomes."""
    kind = kind_of(stage, Preprocess(mapped))
    (made,) = kind.rows(row)
    if isinstance(made, RowError):
        raise made
    return parse(made, kind)


@pytest.mark.parametrize(
    ("stage", "row", "mapped", "prompt", "pairs"),
    [
        ("sft", {"q": "a", "r": "b", "id": 1}, {"prompt": "q", "completion": "r"}, "a", [("b",)]),
        ("sft", {"task": "a", "ctx": "b", "out": "c"}, {"instruction": "task", "input": "ctx", "output": "out"}, "a\n\nb", [("c",)]),
        ("sft", {"d": {"turns": ["a", {"x": "b"}]}}, {"prompt": "d.turns.0", "completion": "d.turns.1.x"}, "a", [("b",)]),
        ("sft", {"a.b": "a", "a": {"b": "no"}, "c": "d"}, {"prompt": "a.b", "completion": "c"}, "a", [("d",)]),
        ("sft", {"j": '{"x": ["a"]}', "c": "d"}, {"prompt": "j.x.0", "completion": "c"}, "a", [("d",)]),
        ("rm", {"question": "a", "response_j": "b", "response_k": "c"}, {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}, "a", [("b", "c")]),
        ("rm", {"prompt": "a", "chosen": "worse", "rejected": "better"}, {"chosen": "rejected", "rejected": "chosen"}, "a", [("better", "worse")]),
        ("dpo", {"q": "a", "good": ["b"], "bad": ["c"]}, {"prompt": "q", "pos_answers": "good", "neg_answers": "bad"}, "a", [("b", "c")]),
        ("dpo", {"instruction": "a", "input": "b", "x": "c", "y": "d"}, {"chosen": "x", "rejected": "y"}, "a\n\nb", [("c", "d")]),
        ("score", {"q": "a", "r": "b"}, {"prompt": "q", "completion": "r"}, "a", [("b",)]),
        ("ppo", {"q": "a"}, {"prompt": "q"}, "a", []),
    ],
)  # fmt: skip
def test_fields_come_from_the_columns_that_are_named(stage, row, mapped, prompt, pairs):
    record = read(row, stage, **mapped)
    turn = record.prompt if isinstance(record.prompt, str) else record.prompt[-1]["content"]
    texts = [
        tuple(side if isinstance(side, str) else side[-1]["content"] for side in pair)
        for pair in record.pairs
    ]
    assert (turn, texts) == (prompt, pairs)


def test_a_mapped_field_counts_whatever_else_the_row_has():
    row = {
        "prompt": "no",
        "messages": [{"role": "user", "content": "no"}],
        "q": "a",
        "completion": "no",
        "r": "b",
    }
    record = read(row, "sft", prompt="q", completion="r")
    assert (record.prompt, record.pairs) == ("a", [("b",)])
    assert record.unread == ("messages",)


def test_columns_of_a_python_reward_may_be_renamed():
    assert '"answer": "42"' in read({"q": "a", "gt": "42"}, "ppo", prompt="q", answer="gt").row


@pytest.mark.parametrize(
    ("stage", "mapped", "expected"),
    [
        ("rm", {"chosen": "a", "rejected": "a"}, r"data\.columns\.rejected: found 'a', which is data\.columns\.chosen already"),
        ("rm", {"label": ["a", "a"]}, r"data\.columns\.label: found 'a', which is data\.columns\.label already"),
        ("rm", {"better": "a"}, r"data\.columns\.better: `rm` reads no field of this name; expected one of prompt, pos_answers"),
        ("rm", {"choosen": "a"}, r"data\.columns\.choosen: .*did you mean chosen\?"),
        ("ppo", {"promt": "a"}, r"data\.columns\.promt: .*did you mean prompt\?"),
        ("sft", {"chosen": "a"}, r"`sft` reads no field of this name"),
        ("sft", {"prompt": "a", "messages": "b"}, r"no row of `sft` has prompt and messages"),
        ("sft", {"prompt": ["a", "b"]}, r"data\.columns\.prompt: found 2 columns, expected one"),
    ],
)  # fmt: skip
def test_mappings_that_mean_nothing_are_refused(stage, mapped, expected):
    with pytest.raises(InputError, match=expected):
        check_columns(mapped, kind_of(stage))


def test_a_column_that_is_not_there():
    rows = [{"instruction": "a", "output_1": "b"}, {"instruction": "a", "output_2": "c"}]
    check_there({"chosen": "output_2"}, rows, "f.jsonl")
    with pytest.raises(
        InputError,
        match=r"data\.columns\.chosen: f\.jsonl: rows 1-2 have no column 'output1'; their columns are instruction, output_1, output_2; did you mean 'output_1'\?",
    ):
        check_there({"chosen": "output1"}, rows, "f.jsonl")
    with pytest.raises(
        RowError,
        match=r"`output_1`: found fields instruction, output_2.*the column that data\.columns\.chosen names",
    ):
        read(rows[1], "rm", prompt="instruction", chosen="output_1", rejected="output_2")


def test_the_sets_of_evaluate_take_their_own_fields():
    from pipeline.config import Data

    data = Data(
        eval="p.jsonl", pairs="q.jsonl", columns={"prompt": "q", "first": "a", "second": "b", "label": "l"}
    )
    assert preprocessing("evaluate", data)["eval"][0].columns == {"prompt": "q"}
    assert preprocessing("pairs", data)["eval"][0].columns == data.columns
    data = Data(eval="p.jsonl", pairs="q.jsonl", columns={"prompt": "q", "chosen": "a", "rejected": "b"})
    assert preprocessing("evaluate", data)["eval"][0].columns == {"prompt": "q"}


def test_a_row_without_the_column_does_not_fall_back_to_its_own_field():
    """The job says that `system` is another column: which of the two was meant?"""
    row = {"q": "a", "a": "b", "sys": "s", "system": "other"}
    assert read(row, "sft", prompt="q", completion="a", system="sys").prompt[0]["content"] == "s"
    del row["sys"]
    with pytest.raises(RowError, match=r"`sys`: found fields q, a, system.*data\.columns\.system names"):
        read(row, "sft", prompt="q", completion="a", system="sys")
    del row["system"]  # it has none
    assert read(row, "sft", prompt="q", completion="a", system="sys").prompt == "a"
