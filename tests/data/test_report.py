"""Tests the report on a dataset, which datasets are rejected, and that a row's text cannot control the terminal."""

import json
from types import SimpleNamespace

import pytest
from toy_data import BOT, CHATML, ROWS, USER, WEATHER, make, tokenizer, use_small_chunks, write

from pipeline.commands.chat import Writer
from pipeline.data.report import Report
from pipeline.data.values import RowError, show_json
from pipeline.errors import InputError, escape_controls
from pipeline.models.tokenizer import eos_ids
from pipeline.run.summary import sample_table

EVIL = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\x7f\x08\u202eolleh\u2066\u200f\ufeff\U000e0041\ud800"


SHOWN = r"\x1b]0;owned\x07\x1b[2J\r\x9b31m\x7f\x08\u202eolleh\u2066\u200f\ufeff\U000e0041\ud800"


def commands(text: str) -> list[str]:
    """Returns the characters in a text that are control characters or cannot be encoded."""
    unseen = [c for c in text if c not in "\n\t" and not c.isprintable()]
    return unseen + [c for c in text if "\ud800" <= c <= "\udfff"]


def test_control_characters_are_shown_escaped(capsys):
    assert escape_controls(EVIL) == str(InputError(EVIL)) == SHOWN and not commands(SHOWN)
    assert escape_controls("é 東京 🦙 👨‍👩‍👧 \t\n") == "é 東京 🦙 👨‍👩‍👧 \t\n"  # no control characters
    assert escape_controls("a\nb\tc", lines=False) == r"a\nb\tc"
    error = RowError("null", f"x{EVIL}\n", show_json(EVIL), "a text", file=f"{EVIL}\nerror: no", line=1)
    assert not commands(str(error)) and "\n" not in str(error)
    report = Report("sft", 9, skipped=[f"a.jsonl:1: {EVIL}\n"], samples=[f"one {EVIL}\ntwo"])
    assert SHOWN in report.render() and not commands(report.render())
    assert report.to_dict()["samples"] == [f"one {EVIL}\ntwo"], "a file keeps what was"
    side = {"completion": EVIL, "reward": 1.0}
    table = sample_table([{"prompt": EVIL, "before": side, "after": side}], width=200)
    assert r"\x1b]0;owned" in table and not commands(table)
    writer = Writer(SimpleNamespace(decode=lambda tokens, **_: "".join(tokens)))
    writer.show([EVIL])
    writer.show([EVIL, " \x1b[0m"], last=True)
    assert writer.shown == f"{EVIL} \x1b[0m"
    assert capsys.readouterr().out == rf"{SHOWN} \x1b[0m"


TALK = {"messages": [USER, BOT]}
WORDS = "{% generation %}{{ m.content }}{% endgeneration %}"
APART = "{% for m in messages %}{{ m.role }}: " + WORDS + " </s>{% endfor %}"
LONG = [{"prompt": "p" * (50 if i else 5), "completion": f" {i}"} for i in range(4)]
MARGIN = {"prompt": "q", "chosen": " a", "rejected": " b", "margin": 1, "source": "x"}
JOINS = [
    {"prompt": "A red", "chosen": "apple", "rejected": " pear"},
    {"prompt": "A ", "chosen": "b", "rejected": "c"},
]
TOOLS = {**TALK, "tools": [WEATHER], "id": 7, "label": True}
ONCE = [ROWS[0], ROWS[0], {**ROWS[1], "completion": "a</s>"}]
WINNER = {"columns": {"first": "x", "second": "y", "label": "winner"}}
STARS = {"columns": {"label": "stars"}, "label": {"good": 4, "bad": 2}}


def judged(*winners):
    return [{"prompt": f"q{i}", "x": f"a{i}", "y": f"b{i}", "winner": one} for i, one in enumerate(winners)]


SAID = [  # stage, rows, options, texts that the report has, texts that it lacks
    ("sft", [TALK], {"template": APART}, ["no training completion contains a token that ends generation",
        "the chat template omits such a token (model.chat_template)"], []),
    ("sft", ROWS, {"max_length": 15, "overlong": "truncate"}, ["all completions are truncated (data.max_length)"], []),
    ("sft", ROWS[:1], {}, ["read        1 row\n"], ["stops on"]),
    ("sft", ONCE, {}, ["1 row equal to an earlier row (data.deduplicate=true removes them)",
        "1 row with special tokens in the text (</s> in 1), which are encoded as ordinary text"], []),
    ("sft", [*LONG, LONG[0]], {"max_length": 20, "overlong": "truncate"}, ["dropped     3 prompt too long",
        "\n\nduplicates    1 row equal", "rows.jsonl:2: found no token of the completion among the first 20"], []),
    ("sft", LONG, {"max_length": 20, "overlong": "drop"}, ["dropped     3 too long", "rows.jsonl:2: found 54 tokens"], []),
    ("sft", [TOOLS] * 3, {}, ["not read    columns id, tools\n", "the model does not see the `tools` of 3 rows"], []),
    ("ppo", [{"prompt": "q", "id": 1}], {}, [], ["not read"]),  # a Python reward may read `id`
    ("ppo", [{"prompt": [{**USER, "id": 1}]}], {}, ["not read    column prompt[].id\n"], []),
    ("sft", [TALK, {"messages": [USER, {**BOT, "thinking": "x"}], "id": 7}], {}, ["not read    columns messages[].thinking (1 row), id (1 row)\n",
        "the model does not see the `messages[].thinking` of 1 row, because the chat template omits this key"], []),
    ("sft", ONCE, {"apply_chat_template": True}, ["(data.parse_special_tokens=true encodes them as control tokens; rows that contain the chat template's markup also need data.apply_chat_template=false)"], []),
    ("dpo", [MARGIN], {}, ["dpo ignores the column `margin`", "not read    column source\n"], []),
    ("rm", [MARGIN], {}, ["not read    column source\n"], ["ignores the column", "white space"]),
    ("rm", JOINS, {}, ["1 row of plain text without white space between prompt and completion; to separate prompt and completion, set model.chat_template=plain"], []),
    ("rm", JOINS, {"apply_chat_template": True}, [], ["white space"]),
    ("kto", JOINS, {}, ["labels      2 desirable, 2 undesirable"], []),
    # The report shows what each label value means and how often it occurs.
    ("dpo", judged("a", "b", "tie", "a", None), WINNER, ["  label       winner: a = first 2, b = second 1, tie 1\n"], []),
    ("dpo", judged(0, 1, 0.25, 0), {**WINNER, "label": {"first": 0, "second": 1}}, ["  label       winner: 0 = first 2, 0.25 = first 1, 1 = second 1\n"], []),
    ("dpo", judged(*(1 + i / 20 for i in range(20))), {**WINNER, "label": {"first": 1, "second": 2}}, ["  label       winner: first 10, tie 1, second 9\n"], []),
    ("kto", [{"prompt": f"q{i}", "completion": "a", "stars": i % 5 + 1} for i in range(10)], STARS,
     ["label       stars: 1 = bad 2, 2 = bad 2, 3 = neither 2, 4 = good 2, 5 = good 2\n"], []),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "rows", "options", "said", "unsaid"), SAID)
def test_texts_of_the_report(tmp_path, stage, rows, options, said, unsaid):
    text = make(tmp_path, stage, train=write(tmp_path / "rows.jsonl", rows), **options).report.render()
    assert [one for one in said if one not in text] == [one for one in unsaid if one in text] == []


@pytest.mark.parametrize("stage", ["sft", "dpo", "ppo", "rm"])
def test_an_end_of_turn_that_is_no_eos(tmp_path, stage):
    """The report warns if the template ends a turn with a text that does not stop generation."""
    rows = {"sft": TALK, "ppo": {"prompt": [USER]}}
    row = rows.get(stage, {"prompt": [USER], "chosen": "yo", "rejected": "no"})
    path = write(tmp_path / "rows.jsonl", [row])
    for end, known in (("<|stop|>\n", False), ("<|im_end|>\n", True), ("</s>\n", True)):
        text = make(tmp_path, stage, train=path, template=CHATML.replace("<|im_end|>\n", end)).report.render()
        warning = 'the chat template ends a completion with "<|stop|>\\n", but generation stops on </s> (id '
        assert (warning in text) == (not known and stage != "rm"), text
        assert ("only at the end of a row" in text) == (not known and stage in ("sft", "dpo"))
    tok = tokenizer(CHATML)
    tok.generation_eos = [1]  # as if generation_config.json listed this EOS token
    assert 1 in eos_ids(tok)


# ---- datasets that are rejected ------------------------------------------------------------------------------------------


def test_bad_rows_are_named_by_line_in_all_chunks(tmp_path, monkeypatch):
    use_small_chunks(monkeypatch, 200)
    rows = [*ROWS]
    rows[17] = {"prompt": "x", "completion": ""}
    rows[30] = '{"prompt": "'
    rows[41] = {"instruction": "x", "output": "y"}  # a row may have another format than the other rows
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InputError) as caught:
        make(tmp_path, train=path)
    message = str(caught.value)
    assert f"{path}:18: `completion`" in message and f"{path}:31: found" in message
    assert "2 of 50 rows" in message and "data.on_error=skip" in message and " at at " not in message
    assert not list((tmp_path / "cache").glob("*/manifest.json"))
    made = make(tmp_path, train=path, on_error="skip")
    split = made.report.splits["train"]
    assert (split.read, split.kept) == (50, 48)
    assert split.dropped == {"empty_completion": 1, "not_json": 1}
    assert [line.split(": ")[0] for line in made.report.skipped] == [f"{path}:18", f"{path}:31"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_length": 8}, "data.overlong=truncate"),
        ({"max_length": 8, "overlong": "drop"}, r"none of 50 rows is usable \(50 too long\).*data.overlong=truncate"),
        ({"max_length": 9, "overlong": "truncate"}, "50 prompt too long.*the prompts alone fill the 9 tokens"),
        ({"eval_fraction": 1e-9}, "leaves no rows for `eval`"),
        ({"train": "empty.jsonl"}, "empty file"),
        ({"train": "empty.jsonl", "on_error": "skip"}, "none of 0 rows is usable"),
        ({"train": "array.json"}, r"array.json: element 2: `prompt`: found int 7"),
    ],
)  # fmt: skip
def test_rejected_before_training(tmp_path, monkeypatch, options, expected):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "array.json").write_text(json.dumps([ROWS[0], {"prompt": 7, "completion": "x"}]))
    with pytest.raises(InputError, match=expected):
        make(tmp_path, **{"train": "rows.jsonl", **options})


def complaint(tmp_path, rows) -> tuple[str, list[str]]:
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InputError) as caught:
        make(tmp_path, train=path)
    return path, caught.value.message.splitlines()


def test_rows_with_the_same_problem_share_a_line(tmp_path, monkeypatch):
    use_small_chunks(monkeypatch, 300)
    empty = [{"prompt": f"q{i}", "completion": ""} for i in range(40)]
    path, (first, same, advice) = complaint(tmp_path, empty)
    assert first == "40 of 40 rows cannot be used (40 empty completion):"
    assert same.startswith(f"  {path}:1: `completion`: found")
    assert same.endswith("(and 39 more with the same problem)") and "data.on_error=skip" in advice
    wrong = [{"messages": [*[USER] * (i % 3), {"role": "robot", "content": "b"}]} for i in range(9)]
    path, lines = complaint(tmp_path, [*wrong, TALK])
    assert f"{path}:1: `messages[0].role`" in lines[1] and "(and 8 more with" in lines[1]


def test_rare_labels_without_a_meaning_are_skipped_and_frequent_ones_are_an_error(tmp_path):
    pair = {"prompt": "Say {}.", "first": "It is {}.", "second": "No, not {}."}
    made = [{key: text.format(n) for key, text in pair.items()} | {"label": "ab"[n % 2]} for n in range(40)]
    made[30]["label"] = "C?"
    report = make(tmp_path, "rm", train=write(tmp_path / "rare.jsonl", made), on_error="skip").report
    assert report.splits["train"].kept == 39
    assert report.splits["train"].dropped == {"unclear_label": 1}
    unknown = [*made, *({**row, "label": "C?"} for row in made[:9])] * 30
    late = [*made[:20], *made[:20]] * 26 + unknown  # the unknown labels come after the first 1,000 rows
    with pytest.raises(InputError, match=r"set data\.label to the meanings of the labels"):
        make(tmp_path, "rm", train=write(tmp_path / "late.jsonl", late), on_error="skip")


def test_the_headline_names_what_is_not_read_and_reasons_for_dropped_rows(tmp_path):
    good, bad = {"prompt": "a", "completion": " b", "by": "x"}, {"prompt": "a"}
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "a.jsonl", [good] * 36 + [bad] * 3 + [{**good, "label": 0}])
    write(tmp_path / "rows" / "test.jsonl", [good])
    (tmp_path / "rows" / "scores.xlsx").write_bytes(b"PK")
    folder, options = tmp_path / "rows", {"on_error": "skip"}
    for _ in range(2):  # the second report comes from the cache
        report = make(tmp_path, train=str(folder), **options).report
        assert report.headline() == (
            "36 of 40 training rows (3 wrong or missing field), 37 duplicates; "
            f"not read: column by; not read: {folder}/scores.xlsx (not a data file), {folder}/test.jsonl (excluded by its file name)"
        )
        assert f"warning     not read: {folder}/scores.xlsx" in report.render()
    report = make(tmp_path, train=str(folder), eval=str(folder), **options).report
    assert "test.jsonl" not in report.headline() and "scores.xlsx" in report.headline()
    few = make(tmp_path, train=write(tmp_path / "few.jsonl", [good] * 60 + [bad] * 3), **options).report
    assert few.headline() == "60 of 63 training rows, 61 duplicates; not read: column by"
