"""Files -> token tables on an embedded Ray: order, reuse, the hold-out, real files."""

import json
import os
import shutil

import pytest
from datasets import Dataset
from running import SHARED
from toy_data import ROWS, make, rows_of, tokenizer, write

from pipeline.config import Data
from pipeline.data import read
from pipeline.data.read import prepare
from pipeline.errors import InputError


def test_rows_become_tokens_in_order_and_are_reused(tmp_path, embedded_ray, monkeypatch):
    monkeypatch.setattr(read, "plan", lambda *args, plan=read.plan: plan(*args, 300))  # several chunks
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
    assert "read and tokenised in" in first.report.render()
    assert "loaded from the cache into Ray in" in second.report.render()
    assert "⟦ answer 0</s>⟧" in second.report.render() and json.dumps(second.report.to_dict())
    assert not make(tmp_path, train=path, max_length=100).report.reused  # other options, other parts
    write(tmp_path / "rows.jsonl", [*ROWS, ROWS[0]])
    changed = make(tmp_path, train=path)
    assert not changed.report.reused and changed.report.duplicates == 1
    assert changed.digests != first.digests


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_digests_are_of_the_content_not_of_the_path(tmp_path, embedded_ray, format):
    def table(rows, name):
        path = tmp_path / name
        set_of_rows = Dataset.from_list(rows)
        {"jsonl": set_of_rows.to_json, "csv": set_of_rows.to_csv, "parquet": set_of_rows.to_parquet}[format](
            path
        )
        return path

    first = table(ROWS, f"rows.{format}")
    shutil.copy(first, copy := tmp_path / f"copy.{format}")
    os.utime(copy, (1, 1))
    made = [make(tmp_path, train=str(path)) for path in (first, copy, table(ROWS[:-1], f"other.{format}"))]
    digests = [one.digests["train"] for one in made]
    assert digests[0] == digests[1] != digests[2] and not made[1].report.reused


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
