"""Tests prices: the shipped list, the user's file, the cost of a run, and the output of `plan`."""

import datetime

import pytest

from pipeline.__main__ import main
from pipeline.errors import InputError
from pipeline.planning.plan import GPUS
from pipeline.system import prices


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes the user's price file. If the test does not call this, there is no file."""
    monkeypatch.delenv("RLHF_PRICES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    prices.read.cache_clear()

    def write(text):
        prices.own_file().parent.mkdir(exist_ok=True)
        prices.own_file().write_text(text)
        prices.read.cache_clear()

    yield write
    prices.read.cache_clear()


def test_the_shipped_prices_are_dated_and_cover_every_gpu_that_plan_knows(own):
    shipped = prices.read()
    assert datetime.date.fromisoformat(shipped.date) <= datetime.date.today()
    assert shipped.machine is None
    assert set(shipped.gpus) == set(GPUS)


def test_a_file_of_your_own_replaces_and_adds(own):
    shipped = prices.read().gpus
    own("{date: 2027-01-02, machine: 0.4, gpus: {L4: 0.5, T4: 0.2}}")
    mine = prices.read()
    assert (mine.date, mine.machine) == ("2027-01-02", 0.4)
    assert mine.gpus == shipped | {"L4": 0.5, "T4": 0.2}


@pytest.mark.parametrize("text", ["[1]", "{", "machine: much", "prices: {}", "gpus: {L4: {}}", "[" * 9999])
def test_a_wrong_file_is_named_before_the_work(own, text, capsys, in_root):
    own(text)
    with pytest.raises(InputError, match=r"prices\.yaml: "):
        prices.read()
    assert main(["sft", "jobs/demo/sft.yaml"]) == 2
    assert "expected `date`, `machine`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "label"),
    [("NVIDIA A100-SXM4-80GB", "A100-80G"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA L4", "L4"), ("Tesla T4", None)],
)  # fmt: skip
def test_a_gpu_is_known_by_the_name_that_torch_gives(own, device, label):
    assert prices.read().of(device) == prices.read().gpus.get(label)


def test_what_a_run_cost(own):
    cpu = {"gpu": None, "gpus": 0, "tokens": 1000}
    assert prices.of_run(cpu, 3600, local=True) == {
        "gpu_hours": 0, "dollars": None, "tokens": 1000, "dollars_per_1000_completions": None, "prices": None,
    }  # fmt: skip
    rented = {"gpu": "NVIDIA L4", "gpus": 3, "tokens": 1000, "completions": 2000}
    cost = prices.of_run(rented, 7200, local=True)
    assert (cost["gpu_hours"], cost["dollars"]) == (6, 6 * 0.98)
    assert cost["dollars_per_1000_completions"] == 2.94
    assert prices.in_words(cost) == (
        f"6 GPU hours, $5.88 at prices of {cost['prices']}, $2.94 per 1,000 completions, 1,000 tokens"
    )
    own("machine: 0.25")
    assert prices.of_run(cpu, 3600, local=True)["dollars"] == 0.25
    assert prices.of_run(rented, 7200, local=False)["dollars"] == 5.88
