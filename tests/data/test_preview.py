"""Tests the checks of each file's first rows: label rules, columns, and labels that sft would ignore."""

import csv
import json

import pytest
from toy_data import make, write

from pipeline.data import guess
from pipeline.data.files import find_files
from pipeline.data.formats import kind_of
from pipeline.data.labels import Rule
from pipeline.data.preview import resolve_labels, source_kinds
from pipeline.errors import InputError
from pipeline.job import Data

PAIR = {"q": "Why is it so?", "a": "Because of this.", "b": "No idea at all."}
COLUMNS = {"prompt": "q", "first": "a", "second": "b", "label": "better"}


def look(tmp_path, rows, stage="rm", key="train", **options):
    path = write(tmp_path / f"{key}.jsonl", rows)
    files = {key: find_files(path, f"data.{key}")}
    data = Data(**{key: path}, **options)
    return resolve_labels(source_kinds(stage, data), files)[key][0].preprocess


def test_the_rule_of_a_label_is_found_once_for_all_rows(tmp_path):
    ones, zeros = ([{**PAIR, "better": i % 2 + low} for i in range(6)] for low in (1, 0))
    assert look(tmp_path, ones, columns=COLUMNS).rule == Rule((1.0,), (2.0,), derived=True)
    with pytest.raises(
        InputError, match=r"data\.label: the meaning of 0, 1 in the column 'better' is ambiguous"
    ):
        look(tmp_path, zeros, columns=COLUMNS)
    rule = look(tmp_path, zeros, columns=COLUMNS, label={"first": 0, "second": 1}).rule
    assert rule == Rule((0.0,), (1.0,))
    words = [{**PAIR, "better": f"{'AB'[i % 2]} is {['', 'slightly '][i // 2 % 2]}better"} for i in range(8)]
    said = r'meaning of "A is better", "B is better", "A is slightly better", .* set data\.label=.\{first: VALUE, second: VALUE, tie: VALUE\}'
    with pytest.raises(InputError, match=said):
        look(tmp_path, words, columns=COLUMNS)
    # rows after the preview are checked when they are read
    by = [
        *ones,
        {**PAIR, "better": {"by": "me"}},
        {**PAIR, "better": 1, "margin": 1.0},
    ]
    assert look(tmp_path, by, columns=COLUMNS).rule == Rule((1.0,), (2.0,), derived=True)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"prompt": "text", "completion": "text"}, "found 'text', which is data.columns.prompt already"),
        ({"prompt": ["a", "b"], "completion": "text"}, "found 2 columns, expected one"),
    ],
)
def test_a_column_is_one_field_and_a_field_one_column(columns, says):
    with pytest.raises(InputError, match=says):
        source_kinds("sft", Data(train="rows.jsonl", columns=columns))


@pytest.mark.parametrize(
    "rows", [[{"prompt": "a", "completion": 7}], [7, "x"], [{"x": 1}, {"prompt": "a", "completion": "b"}], []]
)
def test_other_errors_are_left_to_the_check_of_each_row(tmp_path, rows):
    look(tmp_path, rows, "sft")


def test_the_preview_applies_the_transform(tmp_path):
    rows = [{"q": "a", "a": "b", "id": i} for i in range(4)]
    look(tmp_path, rows, "sft", transform="python:transforms:twice")
    fits = "the columns are prompt, completion; these rows can train sft and ppo as they are"
    with pytest.raises(InputError, match=fits):
        look(tmp_path, rows, "rm", transform="python:transforms:twice")


def test_ratings_are_not_labels(tmp_path):
    """Without this check, the lowest rating (1 of 5) would count as desirable. data.on_error=skip does not hide the error."""
    rows = [{"prompt": "Why?", "completion": "Because of this.", "label": i % 5 + 1} for i in range(10)]
    found = r"`label`: found 2; expected true or false, .* set data\.label=\{good: 4, bad: 2\}"
    with pytest.raises(InputError, match=found):
        make(tmp_path, "kto", train=write(tmp_path / "a.jsonl", rows), on_error="skip")
    look(tmp_path, rows, stage="kto", label={"good": 4, "bad": 2})
    with pytest.raises(InputError, match="`rm` reads no ratings"):
        look(tmp_path, [PAIR], stage="rm", label={"good": 4, "bad": 2})


def several(tmp_path, stage, **sources):
    """Returns the preprocessing for each source. `sources` is {name: (rows, keys of the source)}."""
    entries = [
        {"path": write(tmp_path / f"{name}.jsonl", rows), **said} for name, (rows, said) in sources.items()
    ]
    data, files = Data(train=entries), {"train": find_files(entries, "data.train")}
    return [kind.preprocess for kind in resolve_labels(source_kinds(stage, data), files)["train"]]


ASKED = [{"question": "Why is it so?", "response": "It just is."}] * 3
ZEROS = [{**PAIR, "better": i % 2} for i in range(6)]
TALKS = [{"prompt": "a", "completion": "b"}] * 3


def test_each_source_has_its_own_columns_and_labels(tmp_path):
    mapped = {"columns": {"prompt": "question", "completion": "response"}}
    one, other = several(tmp_path, "sft", asked=(ASKED, mapped), talks=(TALKS, {}))
    assert (one.columns, other.columns) == (mapped["columns"], {})
    ones = [{**PAIR, "better": i % 2 + 1} for i in range(6)]
    same = [{**PAIR, "better": 1}]  # without the labels of source x, the label 1 would be ambiguous
    two, one = several(tmp_path, "rm", x=(ones, {"columns": COLUMNS}), y=(same, {"columns": {**COLUMNS}}))
    assert two.rule == one.rule  # data sources with the same columns share a label rule
    said = {"columns": COLUMNS, "label": {"first": 1, "second": 0}}
    derived, given = several(tmp_path, "rm", x=(ones, {"columns": COLUMNS}), y=(ZEROS, said))
    assert (derived.rule, given.rule) == (Rule((1.0,), (2.0,), derived=True), Rule((1.0,), (0.0,)))


@pytest.mark.parametrize(
    ("stage", "rows", "said", "message"),
    [
        ("sft", ASKED, {}, r"data\.train: .*y\.jsonl: rows 1-3 match .* set `columns: \{prompt: question, completion: response\}` in the entry data\.train\.1$"),
        ("sft", ASKED, {"columns": {"prompt": "x"}}, r"data\.train\.1\.columns\.prompt: .*y\.jsonl: rows 1-3 have no column 'x'"),
        ("sft", ASKED, {"columns": {"promt": "question"}}, r"data\.train\.1\.columns\.promt: .*did you mean prompt"),
        ("rm", ZEROS, {"columns": COLUMNS}, r"data\.train\.1\.label: .*set `label: \{first: 0, second: 1\}` in the entry data\.train\.1"),
    ],
)  # fmt: skip
def test_an_error_of_a_source_names_its_entry(tmp_path, stage, rows, said, message):
    good = TALKS if stage == "sft" else [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    with pytest.raises(InputError, match=message):
        several(tmp_path, stage, x=(good, {}), y=(rows, said))


@pytest.mark.parametrize("stage", ["sft", "kto"])
@pytest.mark.parametrize("name", ["label", "rating"])
def test_a_zero_next_to_minus_one_needs_a_setting(tmp_path, stage, name):
    """A 0 may mean that a completion has no rating. Training must not treat an unrated completion as undesirable."""
    marks = (0, 0, -1, None, [1, 0], 0, 1, "0")
    rows = [{"prompt": f"Why {i}?", "completion": "So.", name: mark} for i, mark in enumerate(marks)]
    columns = {"label": name} if name == "rating" else None
    if name == "rating":
        assert not guess.is_clear(columns, rows) and guess.guess_columns(rows, kind_of(stage)) == columns
    with pytest.raises(InputError, match=r"0 and -1, .* set .*data\.label='\{good: 1, bad: -1\}'"):
        look(tmp_path, rows, stage, columns=columns)
    told = {"columns": {"label": name}, "label": {"good": 1, "bad": -1}}
    report = make(tmp_path, stage, train=write(tmp_path / "a.jsonl", rows), on_error="skip", **told).report
    assert report.splits["train"].kept == (2 if stage == "kto" else 1)
    look(tmp_path, [row for row in rows if row[name] != -1], stage, columns=columns)


BESIDE = {
    "reaction": (("👍", "👎"), r"label: reaction\}' and data\.label='\{good: VALUE, bad: VALUE\}'"),
    "thumbs_down": ((0, 1), r"label: thumbs_down\}' and data\.label='\{good: 0, bad: 1\}'"),
    "anna_score": (("1.0", "5.0", "NaN"), r"label: anna_score\}' and data\.label='\{good: VALUE"),
    "feedback": (("up", "down", "NaN"), r"label: feedback\}', or remove this column with data\.transform"),
    "stars": ((1, "5", "1,5", 4, 2, "I do not know"), r"label: stars\}' and data\.label='\{good: VALUE"),
    "nps": ((0, 7, 10), r"label: nps\}' and data\.label='\{good: VALUE"),
    "csat": ((1, 5, 4), r"label: csat\}' and data\.label='\{good: VALUE"),
    "satisfaction": ((1, 5, 4), r"label: satisfaction\}' and data\.label='\{good: VALUE"),
    "helpful": ((True, False), r"label: helpful\}', or remove this column with data\.transform"),
    "vote": ((1, 0), r"label: vote\}', or remove this column with data\.transform"),
    "upvote": ((1, 0, 0), r"label: upvote\}', or remove this column with data\.transform"),
    "verdict": (("up", "down", "neutral", "2"), r"label: verdict\}' and data\.label"),
}


@pytest.mark.parametrize(("name", "mapped"), [(name, len(name) % 2) for name in BESIDE])
def test_a_label_next_to_the_columns_that_sft_reads_needs_a_setting(tmp_path, name, mapped):
    """Without the error, sft would imitate completions that the label column marks as bad."""
    marks, says = BESIDE[name]
    fields = ("question", "answer") if mapped else ("prompt", "completion")
    rows = [{fields[0]: f"Why {i}?", fields[1]: "So it is.", name: marks[i % len(marks)]} for i in range(9)]
    columns = {"prompt": "question", "completion": "answer"} if mapped else None
    with pytest.raises(InputError, match=f"`{name}` may (label|mark) .*{says}"):
        look(tmp_path, rows, "sft", columns=columns)
    for topics in (("rain", "sun"), (3, 4), ("ann", "bob", "no")):
        rows = [{**row, name: topics[i % len(topics)]} for i, row in enumerate(rows)]
        # In columns with other names, 3 and 4 look like ratings.
        if topics != (3, 4) or name in ("reaction", "verdict"):
            look(tmp_path, rows, "sft", columns=columns)


@pytest.mark.parametrize(
    ("name", "marks"),
    [
        ("feedback", ("down", "up")),
        ("stars", ("1", 5, "five", 4)),
        ("thumbs_down", (True, False)),
        ("harmful", (0, 1)),
        ("verdict", (None, "wrong", "ok")),
    ],
)
def test_a_label_of_each_message_needs_a_transform(tmp_path, name, marks):
    """Without the error, sft would imitate messages that are marked as bad."""

    def talks(values, **keys):
        for i in range(9):
            turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": f"So {i}."}]
            labels = [{name: "up"}, {name: values[i % len(values)]}]
            yield {
                "messages": [
                    *turns,
                    *({**turn, **label, **keys} for turn, label in zip(turns, labels, strict=True)),
                ]
            }

    rows = [*talks(marks)]
    says = (
        rf"data\.transform: .*`messages\[\]\.{name}` may label messages .* `weight: 0`.* with data\.transform"
    )
    for label in ({}, {"label": True}):
        with pytest.raises(InputError, match=says):
            look(tmp_path, [{**row, **label} for row in rows], "sft")
    mapped = [{"log": {"talk": json.dumps(row["messages"])}} for row in rows]
    with pytest.raises(InputError, match=rf"`log\.talk\[\]\.{name}` may label"):
        look(tmp_path, mapped, "sft", columns={"messages": "log.talk"})
    look(tmp_path, [{**row, "label": True} for row in rows], "kto")
    look(tmp_path, [*talks(("rain", "sun"), weight=0, id=1)], "sft")


@pytest.mark.parametrize("stage", ["sft", "kto"])
@pytest.mark.parametrize("name", ["label", "reaction"])
def test_words_that_are_not_labels_need_a_setting_and_empty_cells_are_unlabeled(tmp_path, stage, name):
    rows = [
        {"prompt": f"Why {i}?", "completion": "So.", name: ("up", "down", "Up ", "neutral")[i % 4]}
        for i in range(8)
    ]
    columns = {"label": name} if name == "reaction" else None
    with pytest.raises(InputError, match=f"column '{name}' has \"neutral\", which means neither"):
        look(tmp_path, rows, stage, columns=columns)
    told = {"columns": {"label": name}, "label": {"good": "up", "bad": "down"}}
    for empty in ("NaN", "n/a", "None", "", "null", " <NA>"):
        for row in rows[3::4]:
            row[name] = empty
        look(tmp_path, rows, stage, columns=columns)
        path = write(tmp_path / f"{len(empty)}.jsonl", rows)
        for more in ({"columns": columns or {}}, told):
            split = make(tmp_path, stage, train=path, on_error="skip", **more).report.splits["train"]
            assert split.dropped["unlabeled"] == 2 and split.kept == (6 if stage == "kto" else 4)


def test_a_list_of_labels_may_be_json_text_as_in_csv(tmp_path):
    lines = ["prompt,completion,label", 'a,b,"[""up"", ""up"", ""down""]"', 'c,d,"[0, 0, 1]"', "e,f,up"]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    split = make(tmp_path, "kto", train=str(tmp_path / "a.csv")).report.splits["train"]
    assert (split.kept, split.desirable) == (3, 2)
    lines = ["prompt,first,second,label", 'a,b,c,"[""A"", ""B"", ""A""]"', 'c,d,e,"[""B""]"']
    (tmp_path / "b.csv").write_text("\n".join(lines) + "\n")
    assert make(tmp_path, "rm", train=str(tmp_path / "b.csv")).report.splits["train"].kept == 2


@pytest.mark.parametrize("printed", ["['In {0}.', 'There.']", "['In {0}.' 'There.']", '["In {0}."]'])
def test_texts_that_are_printed_lists_are_rejected_in_csv(tmp_path, printed):
    """If only one value in a CSV column looks like a list, the value may be code. In JSON files, no text is taken for a list."""
    rows = [{"prompt": f"Where is {n}?", "completion": printed.format(n)} for n in range(3)]
    path = tmp_path / "train.csv"

    def read(rows):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "completion"])
            writer.writeheader()
            writer.writerows(rows)
        files = {"train": find_files(str(path), "data.train")}
        return resolve_labels(source_kinds("sft", Data(train=str(path))), files)

    with pytest.raises(
        InputError, match=r"each 'completion' is a list in Python's notation, .*to_json or to_parquet"
    ):
        read(rows)
    read([*rows, {"prompt": "Where is Rome?", "completion": "In Italy."}])
    look(tmp_path, rows, "sft")
