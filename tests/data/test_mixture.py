"""Tests that an epoch has as many rows of each source as the weights say, within one row, for any number of workers."""

from collections import Counter
from fractions import Fraction

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_data import make, rows_of, tokenizer, use_small_chunks, write

from pipeline.data.mixture import Mixture, mix_sources
from pipeline.errors import InputError
from pipeline.job.job import Source
from pipeline.ppo.episodes import prompt_order
from pipeline.stages.exact_batches import ExactBatchSampler

SOURCES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=4)
STRATEGIES = st.sampled_from(["first_exhausted", "all_exhausted"])


def mixture(sizes, weights, strategy="first_exhausted") -> Mixture:
    sources = [Source(path=name, weight=weight) for name, weight in zip("abcd", weights, strict=False)]
    return mix_sources(sources, sizes, strategy)


@settings(max_examples=200, deadline=None)
@given(sources=SOURCES, strategy=STRATEGIES, seed=st.integers(0, 2**31), epochs=st.integers(1, 6))
def test_shares_are_exact_to_one_row_per_epoch(sources, strategy, seed, epochs):
    sizes, weights = zip(*sources, strict=True)
    try:
        mixed = mixture(sizes, [weight / 10 for weight in weights], strategy)
    except InputError:
        return  # the weights would give an epoch no row of one of the sources
    drawn = [Counter(mixed.rows(epoch, seed).tolist()) for epoch in range(epochs)]
    start = 0
    for (size, weight), draws in zip(sources, mixed.draws, strict=True):
        mine = [[rows[row] for row in range(start, start + size)] for rows in drawn]
        for epoch in mine:
            assert sum(epoch) == draws and abs(draws - Fraction(weight, sum(weights)) * len(mixed)) < 1
            assert max(epoch) <= 1 if strategy == "first_exhausted" else min(epoch) >= 1
        often = [*map(sum, zip(*mine, strict=True))]
        assert max(often) - min(often) <= 1  # over several epochs, all rows are drawn equally often
        start += size
    assert sum(drawn[0].values()) == len(mixed) and max(drawn[0]) < start


def test_sources_are_mixed_within_an_epoch_and_epochs_differ():
    mixed = mixture([700, 300], [0.7, 0.3])
    assert mixed.draws == (700, 300)  # 0.7 means exactly seven tenths, not the nearest float
    sampler = ExactBatchSampler(1000, 100, 0, 1, 3, mixed)
    shares = [sum(row < 700 for row in batch) for batch in sampler]
    assert min(shares) > 50 and max(shares) < 90
    first = list(sampler)
    assert sorted(row for batch in first for row in batch) == sorted(mixed.rows(0, 3).tolist())
    ranks = [ExactBatchSampler(1000, 25, rank, 4, 3, mixed) for rank in range(4)]
    steps = [[row for part in parts for row in part] for parts in zip(*ranks, strict=True)]
    assert steps == first  # in each step, four workers have the same rows as one worker
    sampler.set_epoch(1)
    assert list(sampler) != first


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_prompts_of_ppo_are_drawn_epoch_by_epoch(batch):
    mixed = mixture([6, 9], [1, 1])
    order = []
    for at in range(0, 36, batch):
        order += prompt_order(at, min(batch, 36 - at), len(mixed), 5, lambda epoch: mixed.rows(epoch, 5))
    for epoch in range(3):
        assert sorted(order[epoch * 12 : epoch * 12 + 12]) == sorted(mixed.rows(epoch, 5).tolist())


@pytest.mark.parametrize(("sizes", "weights", "name"), [([5, 0], [1, 1], "b"), ([5, 500], [1, 1000], "a")])
def test_weights_that_do_not_fit_the_rows(sizes, weights, name):
    with pytest.raises(InputError, match=f"no row of {name} is in an epoch"):
        mixture(sizes, weights)


def test_a_job_of_two_sources(tmp_path):
    short = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(40)]
    one = write(tmp_path / "one.jsonl", [*short, {"prompt": "q", "completion": " "}])
    other = str(tmp_path / "other.parquet")
    long = [{"prompt": f"p{i}", "completion": "x" * 50} for i in range(100)]
    pq.write_table(pa.Table.from_pylist(long), other)
    train = [{"path": one, "weight": 0.8}, {"path": other, "weight": 0.2}]
    for options in ({}, {"packing": True, "max_length": 60}, {"eval_fraction": 0.2}):
        made = make(tmp_path, train=train, on_error="skip", **options)
        report, mixture = made.report, made.mixture
        first, second = report.sources["train"]
        assert (first.rows, second.rows) == mixture.sizes and sum(mixture.sizes) == len(made.train)
        assert (first.drawn, second.drawn) == mixture.draws and first.drawn == first.rows
        assert second.drawn == pytest.approx(first.drawn / 4, abs=1)
        assert first.dropped == {"empty_completion": 1}
        assert first.tokens + second.tokens == report.splits["train"].tokens
        text = report.render()
        assert f"source      {other}: read" in text and "drawn per epoch" in text
    assert {source.path for source in report.sources["eval"]} == {one, other}
    assert sum(source.kept for source in report.sources["eval"]) == len(made.eval)
    again = make(tmp_path, train=[{**source, "weight": 1} for source in train], on_error="skip")
    # Cached tokens are reused, because tokens do not depend on the weights of sources.
    assert again.report.reused and again.mixture.draws == (40, 40)
    plain = make(tmp_path, train=[one, other], on_error="skip")
    assert plain.mixture is None and "71.43% of the rows" in plain.report.render()


def test_sources_with_other_columns_make_one_dataset(tmp_path):
    """Each entry of data.train has its own columns. The report counts the rows of each source."""
    plain = write(tmp_path / "plain.jsonl", [{"text": f"p{i}", "completion": f"c{i}"} for i in range(6)])
    asked = write(tmp_path / "asked.jsonl", [{"q": f"q{i}", "a": f"a{i}"} for i in range(6)])
    train = [
        {"path": plain, "weight": 0.5},
        {"path": asked, "weight": 0.25, "columns": {"prompt": "q", "completion": "a"}},
        {"path": asked, "weight": 0.25, "columns": {}, "transform": "python:transforms:twice"},
    ]
    made = make(tmp_path, train=train, columns={"prompt": "text"})
    texts = [tokenizer().decode(row["input_ids"]) for row in rows_of(made.train)]
    assert texts[0:13:6] == ["<s>p0c0</s>", "<s>q0a0</s>", "<s>q0a0!</s>"] and texts[13] == "<s>q0a0?</s>"
    assert made.mixture.sizes == (6, 6, 12) and made.mixture.draws == (6, 3, 3)
    # One sample from each source.
    assert made.report.samples == ["<s>p0⟦c0</s>⟧", "<s>q0⟦a0</s>⟧", "<s>q0⟦a0!</s>⟧"]
    shown = made.report.render()
    assert f'{asked} with columns {{"prompt": "q", "completion": "a"}}: read 6, kept 6' in shown
    assert f"{asked} through python:transforms:twice: read 12, kept 12" in shown


@pytest.mark.parametrize("format", ["jsonl", "parquet", "csv"])
def test_rows_of_a_group_become_one_row(tmp_path, monkeypatch, format):
    """Chunks of a file never split a group of rows."""
    rows = [{"q": f"q{i // 3}", "a": f"a{i}", "rank": 2 - i % 3} for i in range(60)]

    def save(name, saved):
        path = str(tmp_path / f"{name}.{format}")
        if format == "jsonl":
            write(tmp_path / f"{name}.jsonl", saved)
        elif format == "csv":
            pa.csv.write_csv(pa.Table.from_pylist(saved), path)
        else:
            pq.write_table(pa.Table.from_pylist(saved), path, row_group_size=7)
        return path

    use_small_chunks(monkeypatch, 100)
    path, grouped = save("rows", rows), {"transform": "python:transforms:best_against_worst"}
    made = make(tmp_path, "dpo", train=path, group_by="q", **grouped)
    table = rows_of(made.train)
    decoded = [[tokenizer().decode(ids) for ids in row.values()] for row in table]
    assert len(table) == 20 and decoded[1] == ["<s>q1", "a5</s>", "a3</s>"]
    missing = r"`tree`: found fields q, a, rank; expected the column in data.group_by"
    with pytest.raises(InputError, match=rf"rows\.\w+:\d+: {missing}"):
        make(tmp_path, "dpo", train=path, group_by="tree", **grouped)
    shuffled = save("shuffled", [*rows[:7], rows[0], *rows[7:]])
    line = 9 if format == "csv" else 8
    again = (
        rf"data\.group_by: .*shuffled\.\w+:{line}: `q`: found \"q0\" again, .*; sort the file by this column"
    )
    with pytest.raises(InputError, match=again):
        make(tmp_path, "dpo", train=shuffled, group_by="q", **grouped)
    # rows without a value do not belong together
    blank = save("blank", [{**row, "q": row["q"].removeprefix("q5").removeprefix("q7")} for row in rows])
    assert (
        len(rows_of(make(tmp_path, "dpo", train=blank, group_by="q", on_error="skip", **grouped).train)) == 18
    )
