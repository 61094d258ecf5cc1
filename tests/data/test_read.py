"""Files -> token tables on an embedded Ray: reports, errors with file:line, the cache, the hold-out, packing."""

import hashlib
import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from running import ROOT, SHARED
from toy_data import ROWS, make, rows_of, tokenizer, write

from pipeline.config import Data
from pipeline.data import read, source
from pipeline.data.read import prepare
from pipeline.errors import InputError


def test_rows_become_tokens_in_order_and_are_reused(tmp_path, embedded_ray, monkeypatch):
    monkeypatch.setattr(source, "plan", lambda *args, plan=source.plan: plan(*args, 300))  # several chunks
    path = write(tmp_path / "rows.jsonl", ROWS)
    first = make(tmp_path, train=path)
    tok = tokenizer()
    assert [tok.decode(row["input_ids"]) for row in rows_of(first.train)] == [
        f"<s>question {i} answer {i}</s>" for i in range(50)
    ]
    assert first.eval is None and set(first.fingerprints) == set(first.digests) == {"train"}
    assert str(first.train.schema().base_schema.field("labels").type) == "list<element: int32>"
    second = make(tmp_path, train=path)
    assert (first.report.reused, second.report.reused) == (False, True)
    assert (second.fingerprints, second.digests) == (first.fingerprints, first.digests)
    assert rows_of(second.train) == rows_of(first.train)
    split = second.report.splits["train"]
    assert (split.read, split.kept, second.report.duplicates) == (50, 50, 0)
    assert "⟦ answer 0</s>⟧" in second.report.render() and json.dumps(second.report.to_dict())
    assert not make(tmp_path, train=path, max_length=100).report.reused  # other options, other parts
    write(tmp_path / "rows.jsonl", [*ROWS, ROWS[0]])
    changed = make(tmp_path, train=path)
    assert not changed.report.reused and changed.report.duplicates == 1
    assert changed.digests != first.digests


def test_a_half_written_cache_is_not_used(tmp_path, embedded_ray):
    path = write(tmp_path / "rows.jsonl", ROWS)
    make(tmp_path, train=path)
    (manifest,) = (tmp_path / "cache").glob("*/manifest.json")
    (part,) = manifest.parent.glob("*.parquet")
    manifest.unlink()
    part.write_bytes(part.read_bytes()[:40])
    again = make(tmp_path, train=path)
    assert not again.report.reused and len(rows_of(again.train)) == 50
    part = manifest.parent / json.loads(manifest.read_text())["parts"]["train"][0][0]
    part.unlink()
    assert not make(tmp_path, train=path).report.reused


def test_a_hold_out_keeps_prompts_together(tmp_path, embedded_ray):
    rows = [
        {"prompt": f"q{i % 40}", "pos_answers": [f"a{i}", f"b{i}"], "neg_answers": [f"c{i}", f"d{i}"]}
        for i in range(80)
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    made = make(tmp_path, "dpo", train=path, eval_fraction=0.3)
    sides = [{tuple(row["prompt_ids"]) for row in rows_of(part)} for part in (made.train, made.eval)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 40
    assert 5 <= len(sides[1]) <= 20
    assert made.train.count() + made.eval.count() == 160
    other = make(tmp_path, "dpo", train=path, eval_fraction=0.3, seed=1)
    assert {tuple(row["prompt_ids"]) for row in rows_of(other.eval)} != sides[1]


def test_bad_rows_are_named_by_line_in_all_chunks(tmp_path, embedded_ray, monkeypatch):
    monkeypatch.setattr(source, "plan", lambda *args, plan=source.plan: plan(*args, 200))
    rows = [*ROWS]
    rows[17] = {"prompt": "x", "completion": ""}
    rows[30] = '{"prompt": '
    rows[41] = {"instruction": "x", "output": "y"}
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InputError) as caught:
        make(tmp_path, train=path)
    said = str(caught.value)
    assert f"{path}:18: `completion`" in said and f"{path}:31: found" in said
    assert (
        f"{path}:42: found a row of shape instruction+output; expected shape prompt+completion, as in row 1"
        in said
    )
    assert "3 of 50 rows" in said and "data.on_error=skip" in said
    assert not list((tmp_path / "cache").glob("*/manifest.json"))
    made = make(tmp_path, train=path, on_error="skip")
    split = made.report.splits["train"]
    assert (split.read, split.kept) == (50, 47)
    assert split.dropped == {"empty_completion": 1, "not_json": 1, "mixed_shapes": 1}
    assert made.report.skipped[0].startswith(f"{path}:18")


def test_elements_of_an_array_are_named_as_such(tmp_path, embedded_ray):
    (tmp_path / "rows.json").write_text(json.dumps([ROWS[0], {"prompt": 7, "completion": "x"}]))
    with pytest.raises(InputError, match=r"rows.json: element 2: `prompt`: found number 7"):
        make(tmp_path, train=str(tmp_path / "rows.json"))


@pytest.mark.parametrize(
    "options,said",
    [
        ({"max_length": 500}, "context of 400"),
        ({"max_length": 8}, "data.too_long=truncate"),
        ({"max_length": 8, "too_long": "drop"}, "no row is left of 50"),
        ({"eval_fraction": 1e-9}, "leaves none for `eval`"),
        ({"eval": "nowhere.jsonl"}, "data.eval: there is no file"),
        ({"train": None}, "needs rows"),
        ({"train": "empty.jsonl"}, "empty file"),
        ({"train": "empty.jsonl", "on_error": "skip"}, "no row is left of 0"),
    ],
)
def test_refused_before_training(tmp_path, embedded_ray, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match=said):
        make(tmp_path, **{"train": "rows.jsonl", **options})


def test_packing_keeps_whole_rows(tmp_path, embedded_ray):
    path = write(tmp_path / "rows.jsonl", ROWS)
    made = make(tmp_path, train=path, packing=True, max_length=100)
    packed = rows_of(made.train)
    alone = sorted(
        tuple(row["input_ids"]) for row in rows_of(make(tmp_path, train=path, max_length=100).train)
    )
    pieces = []
    for row in packed:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"]) <= 100
        start = 0
        for length in row["seq_lengths"]:
            pieces.append(tuple(row["input_ids"][start : start + length]))
            start += length
    assert sorted(pieces) == alone and made.report.packed == len(packed)
    assert len(packed) == -(-50 // (100 // max(map(len, alone))))  # as few as rows of this length allow
    assert made.report.splits["train"].kept == 50


def test_margins_and_prompt_columns(tmp_path, embedded_ray):
    pair = {"prompt": "p", "chosen": "a", "rejected": "b"}
    path = write(tmp_path / "rows.jsonl", [{**pair, "margin": 0.5}, pair])
    assert [row["margin"] for row in rows_of(make(tmp_path, "rm", train=path).train)] == [0.5, 0.0]
    path = write(tmp_path / "plain.jsonl", [pair])
    assert set(rows_of(make(tmp_path, "rm", train=path).train)[0]) == {"chosen_ids", "rejected_ids"}
    path = write(tmp_path / "prompts.jsonl", [{"prompt": "p", "gold": 1}])
    (row,) = rows_of(make(tmp_path, "ppo", train=path).train)
    assert json.loads(row["row"]) == {"prompt": "p", "gold": 1}


def test_tasks_do_not_import_torch(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    code = f"""
import sys
from pipeline.data import read, source
from toy_data import tokenizer
options = read.Options("sft", 400, "error", "raise", False, (1,), 0.0, 0, False)
(chunk,) = source.plan(source.find({path!r}, "data.train"), "train", "sft")
assert read.tokenise(chunk, 0, tokenizer(), options, {str(tmp_path)!r}).splits["train"].kept == 50
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_duplicates_are_counted_over_chunks():
    assert read.duplicates([b"a" * 8 + b"b" * 8, b"a" * 8]) == 1
    assert read.duplicates([b"", None]) is None


@pytest.mark.skipif(not SHARED.exists(), reason="third-party data is not here")
def test_real_files(tmp_path, embedded_ray):
    from pipeline.models.tokenizer import load_tokenizer

    tok = load_tokenizer(str(SHARED / "models" / "stories260K"))
    preferences = str(SHARED / "data" / "hh_harmless_test.jsonl.gz")
    data = Data(train=preferences, on_error="skip", too_long="drop")
    made = prepare("rm", data, tok, 512, str(tmp_path))
    split = made.report.splits["train"]
    assert (split.read, split.kept) == (2312, 1601)
    assert split.dropped == {"too_long": 702, "empty_completion": 4, "prompts_differ": 5}
    with pytest.raises(InputError, match=r"hh_harmless_test.jsonl.gz:87: `chosen`"):
        prepare("rm", Data(train=preferences), tok, 512, str(tmp_path))
    messages = Data(train=str(SHARED / "data" / "tinker_conversations.jsonl"))
    assert prepare("sft", messages, tok, 512, str(tmp_path)).train.count() == 128


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[{},,{}]", "behind a comma"),
        ("[{} {}]", "behind an element"),
        ("[{},]", "behind a comma"),
        ("[,{}]", "behind the bracket"),
    ],
)
def test_an_array_is_json_to_its_last_comma(text, says):
    from pipeline.data import source

    *_, (_, wrong, _) = source.elements(io.BytesIO(text.encode()), hashlib.sha256())
    assert isinstance(wrong, source.RowError) and says in str(wrong)
    good = source.elements(io.BytesIO(b"[{} ,\n {}, []]"), hashlib.sha256())
    assert [value for _, value, _ in good] == [{}, {}, []]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_file_of_bad_rows_is_not_read_to_its_end(on_error, monkeypatch):
    monkeypatch.setattr(read, "ENOUGH", 100)
    options = SimpleNamespace(on_error=on_error)
    stats = read.Stats()
    split = stats.split("train")
    for number in range(101 if on_error == "raise" else 1001):
        assert not read.hopeless(stats, options)
        read.bad(stats, split, number, source.RowError("null", "prompt", "null", "a value"))
    assert read.hopeless(stats, options)
    split.kept = 1  # some rows are good, and the job says to leave the others out
    assert read.hopeless(stats, options) == (on_error == "raise")


def test_lines_without_end_and_without_rows_are_not_read_to_their_end(monkeypatch):
    monkeypatch.setattr(source, "EMPTY", 100)
    found = list(source.lines(iter([b"{}\n", *[b"\n"] * 100, b"{}\n", *[b" \n"] * 5000])))
    assert [value for _, value, _ in found[:2]] == [{}, {}] and len(found) == 3
    assert found[2][0] == 203 and "101 empty lines" in str(found[2][1])
