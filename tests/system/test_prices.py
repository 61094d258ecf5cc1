"""Prices: the shipped list, the user's own file, what a run cost, and what `plan` says about both."""

import datetime

import pytest
import yaml

from pipeline.__main__ import main
from pipeline.errors import InputError
from pipeline.planning.plan import GPUS
from pipeline.system import prices


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes the user's price file; without a call there is none."""
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
    assert {node.gpu for node in shipped.nodes} == set(GPUS)


def test_a_file_of_your_own_replaces_and_adds(own):
    own("{date: 2027-01-02, machine: 0.4, instances: {box: {gpu: L4, gpus: 1, dollars: 0.5}}}")
    mine = prices.read()
    assert (mine.date, mine.machine) == ("2027-01-02", 0.4)
    assert mine.rent("L4", 1)[1].instance == "box"
    assert mine.rent("L4", 6) == (2, next(node for node in mine.nodes if node.instance == "g6.12xlarge"))
    assert mine.rent("T4", 1) is None


@pytest.mark.parametrize(
    "text", ["[1]", "{", "machine: much", "prices: {}", "instances: {box: {gpu: L4}}", "[" * 9999]
)
def test_a_wrong_file_is_named_before_the_work(own, text, capsys, in_root):
    own(text)
    with pytest.raises(InputError, match=r"prices\.yaml: "):
        prices.read()
    assert main(["sft", "jobs/demo/sft.yaml"]) == 2
    assert "expected `date`, `machine`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "labels"),
    [("NVIDIA A100-SXM4-80GB", ["A100-80G"]), ("NVIDIA H100 80GB HBM3", ["H100"]), ("NVIDIA L4", ["L4"]), ("Tesla T4", [])],
)  # fmt: skip
def test_a_gpu_is_known_by_the_name_that_torch_gives(own, device, labels):
    assert prices.read().labels(device) == labels


def test_what_a_run_cost(own):
    cpu = {"gpu": None, "gpus": 0, "tokens": 1000}
    assert prices.of_run(cpu, 3600, local=True) == {
        "gpu_hours": 0, "dollars": None, "tokens": 1000, "dollars_per_1000_completions": None, "prices": None,
    }  # fmt: skip
    rented = {"gpu": "NVIDIA L4", "gpus": 3, "tokens": 1000, "completions": 2000}
    cost = prices.of_run(rented, 7200, local=True)
    assert (cost["gpu_hours"], cost["dollars"]) == (6, 2 * 4.60)  # the four GPUs of the node are paid for
    assert cost["dollars_per_1000_completions"] == 4.60
    assert prices.in_words(cost) == (
        f"6 GPU hours, $9.20 at prices of {cost['prices']}, $4.60 per 1,000 completions, 1,000 tokens"
    )
    own("machine: 0.25")
    assert prices.of_run(cpu, 3600, local=True)["dollars"] == 0.25
    assert prices.of_run(rented, 7200, local=False)["dollars"] == 9.2


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_plan_prints_dollars_for_this_machine_and_the_alternatives(own, stage, capsys, in_root):
    assert main(["plan", f"jobs/demo/{stage}.yaml"]) == 0
    text = capsys.readouterr().out
    assert "This machine: price unknown; set `machine`" in text and str(prices.own_file()) in text
    assert f"A rented GPU instead, at prices of {prices.read().date}: " in text
    own(yaml.safe_dump({"machine": 0.4, "instances": {"box": {"gpu": "L4", "gpus": 1, "dollars": 0.01}}}))
    assert main(["plan", f"jobs/demo/{stage}.yaml"]) == 0
    text = capsys.readouterr().out
    assert "This machine: $0.40 an hour" in text and ": box under $0.01 in 1 min; " in text
