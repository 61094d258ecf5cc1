"""Tests reading files into token tables: row order, memory, held-out rows, packing, cache, and the same bytes with Ray Data."""

import gzip
import json
import re
import tracemalloc
from collections import Counter
from functools import partial

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from toy_data import CHATML, ROWS, make, rows_of, tokenizer, use_small_chunks, write

from pipeline.data import chunks, files
from pipeline.data.formats import hash_text, kind_of
from pipeline.errors import InputError


def test_rows_become_tokens_in_order_and_are_reused(tmp_path, monkeypatch):
    use_small_chunks(monkeypatch, 300)
    path = write(tmp_path / "rows.jsonl", ROWS)
    first = make(tmp_path, train=path)
    tok = tokenizer()
    assert [tok.decode(row["input_ids"]) for row in rows_of(first.train)] == [
        f"<s>question {i} answer {i}</s>" for i in range(50)
    ]
    assert first.eval is None and set(first.fingerprints) == set(first.digests) == {"train"}
    assert str(first.train.schema.field("labels").type) == "list<item: int32>"
    second = make(tmp_path, train=path)
    assert (first.report.reused, second.report.reused) == (False, True)
    assert (second.fingerprints, second.digests) == (first.fingerprints, first.digests)
    assert rows_of(second.train) == rows_of(first.train)
    split = second.report.splits["train"]
    assert (split.read, split.kept, second.report.duplicates) == (50, 50, 0)
    assert "read and tokenized in" in first.report.render()
    assert "loaded from the cache in" in second.report.render()
    assert "⟦ answer 0</s>⟧" in second.report.render() and json.dumps(second.report.to_dict())
    assert not make(tmp_path, train=path, max_length=100).report.reused
    write(tmp_path / "rows.jsonl", [*ROWS, ROWS[0]])
    changed = make(tmp_path, train=path)
    assert not changed.report.reused and changed.report.duplicates == 1
    assert changed.digests != first.digests


def test_ray_data_makes_the_same_bytes(tmp_path, embedded_ray, monkeypatch):
    use_small_chunks(monkeypatch, 300)
    pairs = [{"prompt": f"q{i}", "chosen": f"a{i}", "rejected": f"b{i % 7}"} for i in range(40)]
    cases = [
        ("sft", {"packing": True, "max_length": 100}, ROWS),
        ("sft", {"template": CHATML, "on_error": "skip"}, [*ROWS, "{", ROWS[7]]),
        ("dpo", {"deduplicate": True, "eval_fraction": 0.3}, [*pairs, *pairs[3:30], pairs[0]]),
    ]
    for number, (stage, options, rows) in enumerate(cases):
        path = write(tmp_path / f"{number}.jsonl", rows)
        here = make(tmp_path / "here", stage, train=path, **options)
        there = make(tmp_path / "there", stage, train=path, on_ray=True, **options)
        reports = [one.report.to_dict() | {"seconds": 0} for one in (here, there)]
        assert reports[0] == reports[1] and not there.report.reused
        assert (here.digests, here.fingerprints) == (there.digests, there.fingerprints)
        for name in here.digests:
            assert rows_of(getattr(here, name)) == rows_of(getattr(there, name))
    with pytest.raises(InputError, match=r"1.jsonl:51: found .* \(Expecting"):
        make(tmp_path / "there", train=str(tmp_path / "1.jsonl"), on_ray=True)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.csv", "rows.parquet"])
def test_reading_a_large_file_takes_little_memory(tmp_path, name):
    """Reads files of 18 MB while memory grows by less than 8 MB."""
    rows = [{"prompt": f"{i:06}" * 150, "completion": "x"} for i in range(20_000)]
    path, table = tmp_path / name, pa.Table.from_pylist(rows)
    if name.endswith("parquet"):
        pq.write_table(table, path)
    elif name.endswith("csv"):
        pa.csv.write_csv(table, path)
    else:
        text = json.dumps(rows) if name == "rows.json" else "\n".join(map(json.dumps, rows))
        path.write_bytes(gzip.compress(text.encode(), 1) if name.endswith("gz") else text.encode())
    del rows, table
    arrow, arrow_peak, count = pa.total_allocated_bytes(), 0, 0
    tracemalloc.start()
    for chunk in chunks.plan_chunks(*files.find_files(str(path), "data.train"), "train", kind_of("sft")):
        for _ in chunks.chunk_rows(chunk):
            count, arrow_peak = count + 1, max(arrow_peak, pa.total_allocated_bytes() - arrow)
    python_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000 and python_peak + arrow_peak < 8 << 20


def test_a_hold_out_keeps_prompts_together(tmp_path):
    def row(i):
        return {"prompt": f"q{i % 40}", "pos_answers": [f"a{i}", f"b{i}"], "neg_answers": [f"c{i}", f"d{i}"]}

    rows = [row(i) for i in range(80)]
    path = write(tmp_path / "rows.jsonl", rows)
    made = make(tmp_path, "dpo", train=path, eval_fraction=0.3)
    sides = [{tuple(row["prompt_ids"]) for row in rows_of(part)} for part in (made.train, made.eval)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 40
    assert 5 <= len(sides[1]) <= 20
    assert len(made.train) + len(made.eval) == 160
    other = make(tmp_path, "dpo", train=path, eval_fraction=0.3, seed=1)
    assert {tuple(row["prompt_ids"]) for row in rows_of(other.eval)} != sides[1]


def test_a_hold_out_keeps_conversations_together(tmp_path):
    """A log may have a row after each turn. If these rows were in both splits, eval rows would also be trained on."""

    def turns(number, count):
        for turn in range(count):
            yield {"role": "user", "content": f"question q{number}" if turn == 0 else "And then?"}
            yield {"role": "assistant", "content": f"a{number}, {turn}"}

    system = {"role": "system", "content": "Be brief."}
    for name, head in (("plain", []), ("system", [system])):
        rows = [{"messages": [*head, *turns(i, count)]} for i in range(40) for count in (1, 2, 3)]
        path = write(tmp_path / f"{name}.jsonl", rows)
        made = make(tmp_path, train=path, eval_fraction=0.3, template=CHATML)
        texts = [tokenizer().decode(row["input_ids"]) for row in rows_of(made.eval)]
        # the same conversations as if each row had only its first turn
        keys = {
            f"q{i}": json.dumps([["system", "Be brief."], ["user", f"question q{i}"]])
            if head
            else f"question q{i}"
            for i in range(40)
        }
        held_out = {question for question, key in keys.items() if hash_text(f"0:{key}") < 0.3 * 2**64}
        assert Counter(re.search(r"q\d+", text)[0] for text in texts) == dict.fromkeys(held_out, 3)
        assert len(made.train) == 120 - 3 * len(held_out)


def test_conversations_that_begin_with_a_greeting_are_on_both_sides(tmp_path):
    """Otherwise all rows would have one key, and no share would give rows for both splits."""
    rows = [
        {
            "messages": [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant") * 2, texts, strict=True)
            ]
        }
        for texts in (("Hi", "Hello!", f"How far is city {i}?", f"{i} km") for i in range(40))
    ]
    made = make(tmp_path, train=write(tmp_path / "rows.jsonl", rows), eval_fraction=0.3, template=CHATML)
    assert len(made.train) > len(made.eval) > 0


def test_packing_does_not_split_rows(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    made = make(tmp_path, train=path, packing=True, max_length=100)
    packed = rows_of(made.train)
    plain = make(tmp_path, train=path, max_length=100)
    alone = sorted(tuple(row["input_ids"]) for row in rows_of(plain.train))
    pieces = []
    for row in packed:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"]) <= 100
        start = 0
        for length in row["seq_lengths"]:
            pieces.append(tuple(row["input_ids"][start : start + length]))
            start += length
    assert sorted(pieces) == alone and made.report.packed == len(packed)
    # the fewest rows into which the examples can be packed
    assert len(packed) == -(-50 // (100 // max(map(len, alone))))
    assert made.report.splits["train"].kept == 50
    held_out = make(tmp_path, eval=path, packing=True, max_length=100)
    assert rows_of(held_out.eval) == packed and held_out.report.packed is None


@pytest.mark.parametrize("stage", ["sft", "kto"])
def test_duplicates_are_dropped(tmp_path, monkeypatch, stage):
    use_small_chunks(monkeypatch, 300)
    rows = ROWS if stage == "sft" else [{**row, "chosen": "a", "rejected": "b"} for row in ROWS]
    one = write(tmp_path / "one.jsonl", [*rows[:30], "", rows[3]])
    two = write(tmp_path / "two.jsonl", [*rows[20:], rows[45], "{", "{"])
    held = write(tmp_path / "eval.jsonl", [rows[3], rows[4], rows[3]])
    options = {"train": [one, two], "eval": held, "on_error": "skip"}
    made = make(tmp_path, stage, deduplicate=True, **options)
    unique = write(tmp_path / "unique.jsonl", rows)
    assert rows_of(made.train) == rows_of(make(tmp_path, stage, train=unique).train)
    split = made.report.splits["train"]
    assert (split.read, split.dropped) == (64, {"duplicate": 12, "not_json": 2})
    assert made.report.splits["eval"].dropped == {"duplicate": 1}
    # Identical rows that cannot be read count as bad rows, not as duplicates.
    assert made.report.duplicates == 0
    assert "dropped     12 equal to an earlier row" in made.report.render()
    kept = make(tmp_path, stage, **options)
    assert kept.report.duplicates == 13 and "data.deduplicate=true removes them" in kept.report.render()


def test_margins_are_a_column_if_a_row_has_one(tmp_path):
    pair = {"prompt": "p", "chosen": "a", "rejected": "b"}
    for name, rows, margins in (
        ("some", [{**pair, "margin": 0.5}, pair], [0.5, 0.0]),
        ("none", [pair], [None]),
    ):
        made = make(tmp_path, "rm", train=write(tmp_path / f"{name}.jsonl", rows))
        assert [row.get("margin") for row in rows_of(made.train)] == margins


def test_a_damaged_cache_is_made_again(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    make(tmp_path, train=path)
    (manifest,) = (tmp_path / "cache").glob("*/manifest.json")

    def cut_short():
        for part in manifest.parent.glob("*.arrow"):
            part.write_bytes(part.read_bytes()[:-9])

    damages = [
        manifest.unlink,
        cut_short,
        partial(manifest.write_text, "{"),
        partial(manifest.write_text, "[]"),
    ]
    for damage in damages:
        damage()
        again = make(tmp_path, train=path)
        assert not again.report.reused and len(again.train) == 50
