"""Tests the shipped prices, the user's own price file, and the cost of a run."""

import datetime

import pytest

from pipeline.__main__ import main
from pipeline.planning.plan import GPUS
from pipeline.system import prices


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Returns a function that writes the user's own price file, which does not exist before."""
    monkeypatch.delenv("RLHF_PRICES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    prices.read_prices.cache_clear()

    def write(text):
        prices.own_file().parent.mkdir(exist_ok=True)
        prices.own_file().write_text(text)
        prices.read_prices.cache_clear()

    yield write
    prices.read_prices.cache_clear()


def test_the_shipped_prices_are_dated_and_cover_every_gpu_that_plan_knows(own):
    shipped = prices.read_prices()
    assert datetime.date.fromisoformat(shipped.date) <= datetime.date.today()
    assert shipped.machine is None
    assert set(shipped.gpus) == set(GPUS)


def test_the_users_own_file_replaces_and_adds_prices(own):
    shipped = prices.read_prices().gpus
    own("{date: 2027-01-02, machine: 0.4, gpus: {L4: 0.5, T4: 0.2}}")
    mine = prices.read_prices()
    assert (mine.date, mine.machine) == ("2027-01-02", 0.4)
    assert mine.gpus == shipped | {"L4": 0.5, "T4": 0.2}


@pytest.mark.parametrize("text", ["[1]", "{", "machine: much"])
def test_a_wrong_price_file_stops_a_run_before_it_starts(own, text, capsys, in_root):
    own(text)
    assert main(["sft", "jobs/demo/sft.yaml"]) == 2
    error = capsys.readouterr().err
    assert "prices.yaml: " in error and "expected `date`, `machine`" in error


@pytest.mark.parametrize(
    ("device", "label"),
    [("NVIDIA A100-SXM4-80GB", "A100-80G"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA L4", "L4"), ("Tesla T4", None)],
)  # fmt: skip
def test_a_gpu_has_a_price_under_the_name_that_torch_reports(own, device, label):
    assert prices.read_prices().of(device) == prices.read_prices().gpus.get(label)


def test_the_cost_of_a_run_needs_a_price_of_its_gpu_or_machine(own):
    cpu = {"gpu": None, "gpus": 0, "tokens": 1000}
    assert prices.cost_of_run(cpu, 3600, local=True) == {
        "gpu_hours": 0, "dollars": None, "tokens": 1000, "dollars_per_1000_completions": None, "prices": None,
    }  # fmt: skip
    rented = {"gpu": "NVIDIA L4", "gpus": 3, "tokens": 1000, "completions": 2000}
    cost = prices.cost_of_run(rented, 7200, local=True)
    assert (cost["gpu_hours"], cost["dollars"]) == (6, 6 * 0.98)
    assert cost["dollars_per_1000_completions"] == 2.94
    assert prices.cost_in_words(cost) == (
        f"6 GPU hours, $5.88 at prices of {cost['prices']}, $2.94 per 1,000 completions, 1,000 tokens"
    )
    own("machine: 0.25")
    assert prices.cost_of_run(cpu, 3600, local=True)["dollars"] == 0.25
    assert prices.cost_of_run(rented, 7200, local=False)["dollars"] == 5.88
