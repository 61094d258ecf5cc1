"""Tests that exports of Argilla and Label Studio become rows. If annotators disagree, the majority decides the label."""

import pytest
from toy_data import make, write

from pipeline.data import guess
from pipeline.data.annotations import flatten_annotation
from pipeline.data.files import find_files
from pipeline.data.formats import kind_of
from pipeline.data.preview import first_rows

FIELDS = {"prompt": "Is it open on Sunday?", "reply_1": "Yes, from ten.", "reply_2": "No idea, call later."}
VOTES = [["reply_1", "reply_2", "reply_1"], ["reply_2"], ["reply_1", "reply_2"], [], ["reply_2", "reply_2"]]


def datasets_of_argilla(votes, **more):
    status = ["submitted"] * len(votes)
    return {
        "id": "7", "status": "completed", "_server_id": "x", **FIELDS, **more,
        "better.responses": [*votes, "reply_1", "reply_1"] if votes else None,
        "better.responses.users": [*"abcdefgh"][: len(votes) + 2] if votes else None,
        "better.responses.status": [*status, "draft", "discarded"] if votes else None,
        "better.suggestion": "reply_1", "better.suggestion.score": None, "better.suggestion.agent": "gpt",
    }  # fmt: skip


def json_of_argilla(votes, **more):
    responses = {"better": [{"value": vote, "user_id": "a"} for vote in votes]} if votes else {}
    suggestions = {"better": {"value": "reply_1", "score": None, "agent": None}}
    return {
        "id": "7", "fields": {**FIELDS, **more}, "metadata": {}, "suggestions": suggestions, "responses": responses,
        "vectors": {}, "_server_id": "x",
    }  # fmt: skip


def task(kind, key, votes, **more):
    """Returns a Label Studio task whose last annotation was canceled."""

    def annotation(vote, cancelled=False):
        result = {"id": "a", "from_name": "better", "to_name": "x", "type": kind, "value": {key: vote}}
        region = {"from_name": "span", "type": "labels", "value": {"text": "no answer", "labels": ["x"]}}
        return {"id": 1, "completed_by": 1, "result": [result, region], "was_cancelled": cancelled}

    annotations = [*map(annotation, votes), annotation(["left"], cancelled=True)]
    return {"id": 7, "data": {**FIELDS, **more}, "annotations": annotations, "predictions": [], "meta": {}}


def pairwise(votes, **more):
    return task(
        "pairwise", "selected", [{"reply_1": "left", "reply_2": "right"}[vote] for vote in votes], **more
    )


def choices(votes, **more):
    return task("choices", "choices", [[vote] for vote in votes], **more)


EXPORTS = [datasets_of_argilla, json_of_argilla, pairwise, choices]


def test_other_answers_and_rows():
    for answer, expected in (
        (task("rating", "rating", [4]), 4),
        (task("textarea", "text", [["Yes, on Sunday too."]]), "Yes, on Sunday too."),
        (task("number", "number", [3]), 3),
    ):
        assert flatten_annotation(answer)["better"] == expected
    for row in (
        7,
        {"data": {}, "annotations": "none"},
        {"data": [], "annotations": []},
        {"fields": [], "responses": {}},
    ):
        assert flatten_annotation(row) is row


@pytest.mark.parametrize("export", EXPORTS)
def test_an_export_of_preferences_is_guessed_and_read_by_majority(tmp_path, export):
    made = [export(votes, prompt=f"Is it open on day {n}?") for n, votes in enumerate(VOTES * 4)]
    path = write(tmp_path / "export.jsonl", made)
    (file,) = find_files(path, "data.train")
    rows, _ = first_rows(file, kind_of("sft"))
    # With only reply_1 as completion, sft would imitate bad replies.
    assert guess.guess_columns(rows, kind_of("sft")) is None
    columns = {"first": "reply_1", "second": "reply_2", "label": "better"}
    assert guess.guess_columns(rows, kind_of("rm")) == columns and guess.is_clear(columns, rows)
    report = make(tmp_path, "rm", train=path, columns=columns).report
    split = report.splits["train"]
    assert (split.kept, split.dropped) == (12, {"tie": 4, "unlabeled": 4})
    assert "(4 tie, or without a clear label)" in report.headline()


def test_several_columns_of_labels_are_reported(tmp_path):
    pair = {"prompt": "Why {}?", "a": "Because.", "b": "No idea."}
    labels = [("A", "A", "a "), ("A", "B", ""), ("B", "tie", "B"), (None, "", " "), ("tie", "tie", "A")]
    made = [
        {**pair, "prompt": f"Why {n}?", **dict(zip("xyz", votes, strict=True))}
        for n, votes in enumerate(labels)
    ]
    columns = {"first": "a", "second": "b", "label": ["x", "y", "z"]}
    split = make(tmp_path, "rm", train=write(tmp_path / "rows.jsonl", made), columns=columns).report.splits[
        "train"
    ]
    assert (split.kept, split.dropped) == (2, {"tie": 2, "unlabeled": 1})
    assert split.label_values == {"x, y, z": {"first": 1, "second": 1, "tie": 2}}
