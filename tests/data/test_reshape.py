"""Tests how a job changes rows: data.transform, data.columns, and the completion that a label or two scores choose.

The pipeline never guesses the meaning of an ambiguous label. A wrong function or mapping ends the run before training.
"""

import importlib
import sys

import pytest
from toy_data import make, rows_of, tokenizer, write

from pipeline.data.files import find_files
from pipeline.data.formats import kind_of, parse_row
from pipeline.data.labels import Rule, derive_rule
from pipeline.data.preview import check_column_names, check_columns_exist, source_kinds
from pipeline.data.read import cache_key, options_of
from pipeline.data.reshape import Preprocess
from pipeline.data.values import Dropped, RowError
from pipeline.errors import InputError
from pipeline.job import Data


def made(stage, row, columns=(), **options):
    """Returns the records that a row becomes."""
    return list(kind_of(stage).with_preprocess(Preprocess(dict(columns), **options)).rows(row))


# ---- data.columns ----------------------------------------------------------------------------------------------------


def read(row, stage, **mapped):
    """Returns the record that a row becomes."""
    (one,) = made(stage, row, mapped)
    if isinstance(one, RowError):
        raise one
    return parse_row(one, kind_of(stage).with_preprocess(Preprocess(mapped)))


@pytest.mark.parametrize(
    ("stage", "row", "mapped", "prompt", "pairs"),
    [
        ("sft", {"q": "a", "r": "b", "id": 1}, {"prompt": "q", "completion": "r"}, "a", [("b",)]),
        ("sft", {"task": "a", "ctx": "b", "out": "c"}, {"instruction": "task", "input": "ctx", "output": "out"}, "a\n\nb", [("c",)]),
        ("sft", {"d": {"turns": ["a", {"x": "b"}]}}, {"prompt": "d.turns.0", "completion": "d.turns.1.x"}, "a", [("b",)]),
        ("sft", {"a.b": "a", "a": {"b": "no"}, "c": "d"}, {"prompt": "a.b", "completion": "c"}, "a", [("d",)]),
        ("sft", {"j": '{"x": ["a"]}', "c": "d"}, {"prompt": "j.x.0", "completion": "c"}, "a", [("d",)]),
        ("rm", {"prompt": "a", "chosen": "worse", "rejected": "better"}, {"chosen": "rejected", "rejected": "chosen"}, "a", [("better", "worse")]),
        ("dpo", {"q": "a", "good": ["b"], "bad": ["c"]}, {"prompt": "q", "pos_answers": "good", "neg_answers": "bad"}, "a", [("b", "c")]),
        ("dpo", {"instruction": "a", "input": "b", "x": "c", "y": "d"}, {"chosen": "x", "rejected": "y"}, "a\n\nb", [("c", "d")]),
        ("ppo", {"q": "a"}, {"prompt": "q"}, "a", []),
    ],
)  # fmt: skip
def test_fields_come_from_the_named_columns(stage, row, mapped, prompt, pairs):
    record = read(row, stage, **mapped)
    turn = record.prompt if isinstance(record.prompt, str) else record.prompt[-1]["content"]
    texts = [
        tuple(side if isinstance(side, str) else side[-1]["content"] for side in pair)
        for pair in record.pairs
    ]
    assert (turn, texts) == (prompt, pairs)


def test_a_mapped_field_takes_precedence():
    other = {"prompt": "no", "messages": [{"role": "user", "content": "no"}], "completion": "no"}
    record = read({**other, "q": "a", "r": "b"}, "sft", prompt="q", completion="r")
    assert (record.prompt, record.pairs, record.unread) == ("a", [("b",)], ("messages",))
    row = {"q": "a", "a": "b", "sys": "s", "system": "other"}
    assert read(row, "sft", prompt="q", completion="a", system="sys").prompt[0]["content"] == "s"
    assert '"answer": "42"' in read({"q": "a", "gt": "42"}, "ppo", prompt="q", answer="gt").row


def test_a_path_into_null_is_null():
    (one,) = made("kto", {"prompt": "a", "completion": "b", "user": None}, {"label": "user.rating"})
    assert one == Dropped("unlabeled")


@pytest.mark.parametrize(
    ("stage", "mapped", "expected"),
    [
        ("rm", {"better": "a"}, r"data\.columns\.better: `rm` reads no field of this name; expected one of prompt, pos_answers"),
        ("rm", {"choosen": "a"}, r"data\.columns\.choosen: .*did you mean chosen\?"),
        ("ppo", {"promt": "a"}, r"data\.columns\.promt: .*did you mean prompt\?"),
        ("sft", {"prompt": "a", "messages": "b"}, r"no row of `sft` has prompt and messages"),
    ],
)  # fmt: skip
def test_meaningless_mappings_are_rejected(stage, mapped, expected):
    with pytest.raises(InputError, match=expected):
        check_column_names(mapped, kind_of(stage))


def test_a_missing_column():
    rows = [{"instruction": "a", "output_1": "b"}, {"instruction": "a", "output_2": "c"}]
    check_columns_exist({"chosen": "output_2"}, rows, "f.jsonl")
    missing = "rows 1-2 have no column 'output1'; the columns are instruction, output_1, output_2"
    with pytest.raises(InputError, match=rf"data\.columns\.chosen: f\.jsonl: {missing}"):
        check_columns_exist({"chosen": "output1"}, rows, "f.jsonl")
    found = r"`output_1`: found fields instruction, output_2.* in data\.columns\.chosen"
    with pytest.raises(RowError, match=found):
        read(rows[1], "rm", prompt="instruction", chosen="output_1", rejected="output_2")
    # The job maps `system` to a missing column, and the row has a column named `system`, so the row is ambiguous.
    with pytest.raises(RowError, match=r"`sys`: found fields q, a, system.*in data\.columns\.system"):
        read({"q": "a", "a": "b", "system": "other"}, "sft", prompt="q", completion="a", system="sys")


def test_the_datasets_of_evaluate_read_their_own_fields():
    for sides in ({"first": "a", "second": "b", "label": "l"}, {"chosen": "a", "rejected": "b"}):
        data = Data(eval="p.jsonl", pairs="q.jsonl", columns={"prompt": "q", **sides})
        assert source_kinds("evaluate", data)["eval"][0].preprocess.columns == {"prompt": "q"}
        assert source_kinds("pairs", data)["eval"][0].preprocess.columns == data.columns


# ---- data.label, and scores ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "first", "second", "tie"),
    [
        (["1", "2", "1"], "1", " 2", "1.5"), ([1.0, 2.0, 1.5, None], 1.2, 1.51, 1.5), ([1.0003, 1.98], 1, 2, 1.5),
        (["1", "2", "tie"], "1", 2, "Tie"), (["model_a", "model_b", "tie (bothbad)"], "model_a", "model_b", "tie"),
        (["A", "B"], "a", "B", "tie"), (["a"], "A", "b", "draw"), (["output_1", "output_2"], "output_1", "Output 2", "both"),
        (["first", "second", "neither"], "first", "second", "same"), ([[1, 2, 1], [2, 2, 2]], 1, 2, 1.5),
        ([*"ab" * 10, "C?"], "A", "b", "tie"),  # the label "C?" is rare and has no known meaning
    ],
)  # fmt: skip
def test_the_meaning_of_values_is_derived_if_it_is_unique(values, first, second, tie):
    rule = derive_rule(values, {})
    assert (rule.vote(first), rule.vote(second), rule.vote(tie)) == ("first", "second", "tie")
    for other in ("C?", 0):
        with pytest.raises(RowError, match=r"; data\.label defines the label values") as caught:
            rule.vote(other)
        assert caught.value.kind == "unclear_label"


@pytest.mark.parametrize(
    ("values", "typed"),
    [
        ([0, 1], "set data.label='{first: 0, second: 1}' if 0 means that the first completion is better"),
        ([1, 1], "data.label="),  # if the only label is 1, the other label may be 0 or 2
        ([-1, 0, 1], "{first: -1, second: 1}"),
        # if the only label is model_1, the other label may be model_0 or model_2
        (["model_1"], "data.label="),
        (["gpt-4", "claude"], "{first: claude, second: gpt-4}"),
        (["right"], "data.label="),  # `right` may be a position or mean correct
        ([None, ""], "data.columns.label=COLUMN"),
    ],
)
def test_ambiguous_values_need_a_label_rule(values, typed):
    with pytest.raises(InputError) as caught:
        derive_rule(values, {"label": "verdict"})
    assert typed in str(caught.value) and "'verdict'" in str(caught.value)
    assert caught.value.key == "data.label"


ONE_TWO = {"first": 1, "second": 2, "tie": 0}
SIDES = [  # data.label, the row's label or scores, the chosen completion
    *((ONE_TWO, {"label": value}, end) for value, end in
      [(1, "first"), ("2", "second"), (0, "tie"), (None, "unlabeled"), (1.5, "tie"), (" ", "unlabeled"), (3, "unknown_label")]),
    ({"first": 1, "second": 0}, {"label": 0}, "second"),  # labels of the dataset SHP
    ({"first": 1, "second": 0}, {"label": 0.7}, "first"),
    ({"first": -3, "second": 3}, {"label": -1}, "first"),  # labels of the dataset HelpSteer3
    ({"first": -3, "second": 3}, {"label": 0}, "tie"),
    ({"first": ["gpt-4", "gpt-3"], "second": "claude"}, {"label": "GPT-3"}, "first"),
    # The majority of several votes decides.
    *((ONE_TWO, {"label": votes}, end) for votes, end in
      [([1, 1, 2], "first"), ([2, 2, 0], "second"), ([1, 2, 0], "tie"), ([0, 0, 1], "tie"), ([1, 2], "tie"),
       ([1, None, None], "first"), ([None, None, ""], "unlabeled"), ([], "unlabeled"), (["2", 2, "1"], "second")]),
    # A value between `first` and `second` has a meaning only if both are single numbers.
    ({"first": 1, "second": 4}, {"label": 1.2}, "first"),
    ({"first": [1, 2], "second": "b"}, {"label": 1.2}, "unknown_label"),
    ({"first": [1, 2], "second": [3, 4]}, {"label": 2.5}, "unknown_label"),
    # The higher score wins.
    *((None, {"first_score": one, "second_score": two}, end) for one, two, end in
      [(3, "12", "second"), (0.5, -1, "first"), (3, 3.0, "tie"), (3, None, "unlabeled"), ("", 1, "unlabeled"), (" ", 1, "unlabeled"),
       ("high", 3, "wrong_type"), (float("nan"), 1, "wrong_type"), ("nan", 1, "wrong_type"), (float("inf"), 1, "wrong_type")]),
    (None, {}, "missing_field"),
]  # fmt: skip


@pytest.mark.parametrize(("label", "row", "end"), SIDES)
def test_a_label_or_the_higher_score_chooses_the_completion(label, row, end):
    row = {"prompt": "q", "first": "A", "second": "B", **row}
    (one,) = made("rm", row, rule=Rule.from_job(label) if label else None)
    if end in ("first", "second"):
        chosen, rejected = "AB" if end == "first" else "BA"
        assert one == {"prompt": "q", "chosen": chosen, "rejected": rejected}
    else:
        assert one == Dropped(end) if end in ("tie", "unlabeled") else one.kind == end
    assert made("ppo", row) == [row]  # ppo reads only the prompt, and so ignores the label


@pytest.mark.parametrize(
    ("label", "value", "good"),
    [
        *(({"good": 4, "bad": 2}, value, good) for value, good in
          [(5, True), ("4", True), (2, False), (-1.5, False), (3, "tie"), ("", "unlabeled")]),
        # a lower value is better if `good` is below `bad`
        ({"good": 1, "bad": 3}, 0, True), ({"good": 1, "bad": 3}, 4, False),
        ({"good": ["helpful", "great"], "bad": "harmful"}, "Great", True), ({"good": "helpful", "bad": "harmful"}, "harmful", False),
        ({"good": "helpful", "bad": 2}, "so so", "unknown_label"),
    ],
)  # fmt: skip
def test_thresholds_turn_ratings_into_labels(label, value, good):
    row = {"prompt": "q", "completion": "a", "label": value}
    (one,) = made("kto", row, rule=Rule.from_job(label))
    if good in ("tie", "unlabeled"):
        assert one == Dropped(good)
    else:
        assert one.kind == good if isinstance(good, str) else one == row | {"label": good}


# ---- data.transform --------------------------------------------------------------------------------------------------

ROW = {"q": "a", "a": "b", "id": 1}
ROWS = [{"q": f"question {i}", "a": f"answer {i}", "id": i} for i in range(40)]


def through(name, row=ROW, stage="sft", columns=()):
    return made(stage, row, columns, transform=f"python:transforms:{name}")


def test_a_transform_returns_one_row_several_or_none():
    twice = [{"prompt": "a", "completion": end} for end in ("b!", "b?")]
    assert through("twice") == through("yields") == twice
    assert through("some") == [{"prompt": "a", "completion": "b"}]
    assert through("some", {**ROW, "id": 2}) == [Dropped("left_out")]
    bad = RowError("not_json", "", "x", "y")
    assert through("twice", bad) == [bad]
    (error,) = through("some", stage="rm", columns={"chosen": "completion", "rejected": "other"})
    # data.columns applies after data.transform
    assert error.field == "other" and "prompt, completion" in error.found


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("raises", r"KeyError: 'missing' at .*transforms\.py:\d+"),
        ("text", r'str "a" returned by python:transforms:text'),
        ("array", r"ndarray .* returned by python:transforms:array"),
        ("not_json", r"a row that is not JSON \(TypeError: Object of type set"),
    ],
)
def test_an_exception_or_a_return_value_that_is_no_row_is_a_bad_row(name, found):
    (error,) = through(name)
    assert isinstance(error, RowError) and error.kind == "transform"
    with pytest.raises(RowError, match=found):
        raise error


def test_rows_of_a_transform_keep_their_order_and_stay_together(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    prepared = make(tmp_path, train=path, transform="python:transforms:twice", eval_fraction=0.5)
    sets = [[row["input_ids"] for row in rows_of(part)] for part in (prepared.train, prepared.eval)]
    assert sum(map(len, sets)) == sum(split.kept for split in prepared.report.splits.values()) == 80
    for rows in sets:  # the transform makes two rows of each row, which stay next to each other
        assert rows and all(rows[i][:-3] == rows[i + 1][:-3] for i in range(0, len(rows), 2))
    with pytest.raises(InputError, match=rf"{path}:4: found KeyError: 'missing' at .*transforms.py"):
        make(tmp_path, train=path, transform="python:transforms:raises_sometimes")


def test_another_source_code_has_another_cache(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {"train": find_files(write(tmp_path / "rows.jsonl", ROWS), "data.train")}
    data, keys = Data(train="rows.jsonl", transform="python:mine:f"), []
    for end in ("", "", "!"):
        (tmp_path / "mine.py").write_text(f"def f(row):\n    return {{**row, 'a': row['a'] + '{end}'}}\n")
        sys.modules.pop("mine", None)
        importlib.invalidate_caches()
        keys.append(cache_key(files, tokenizer(), options_of("sft", data, tokenizer(), 400, False)))
    assert keys[0] == keys[1] != keys[2]
