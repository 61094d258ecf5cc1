"""Progress: lines every EVERY seconds where stderr is no terminal, and of a model's own weights."""

import pytest
from running import ROOT

from pipeline.config import load_job
from pipeline.system import progress


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)


def test_counted_work_is_reported_until_it_is_done(impatient, capsys):
    report = progress.Counter("scoring pairs: batch", 3)
    for done in (1, 2, 3):
        report(done)
    assert capsys.readouterr().out == "scoring pairs: batch 1 of 3\nscoring pairs: batch 2 of 3\n"


def test_short_work_prints_nothing(capsys):
    report = progress.Counter("scoring pairs: batch", 2)
    report(1)
    for _ in progress.Bar(range(3), desc="Loading weights"):
        pass
    assert capsys.readouterr() == ("", "")


def test_bytes_are_reported_as_bytes(impatient, capsys):
    with progress.Bar(total=16_000_000_000, unit="B", unit_scale=True, desc="model.safetensors") as bar:
        bar.update(4_000_000_000)
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith("model.safetensors: 4.00GB of 16.0GB, "), out


def test_the_loading_of_a_base_is_shown(impatient, capsys, monkeypatch):
    """TQDM_DISABLE, which every process of a run sets against other bars, does not hide it."""
    from pipeline.models.base import load_base

    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.chdir(ROOT)
    load_base(load_job("jobs/demo/sft.yaml", [], "sft").model)
    assert "Loading weights: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (16_060_000_000, "16.1 GB"), (3 * 10**12, "3000.0 GB")],
)
def test_sizes_are_those_of_the_hub(count, shown):
    assert progress.size(count) == shown
