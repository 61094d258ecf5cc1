"""What machines cost: prices.yaml, overridden by the user's own file. Everything that prints dollars reads them here."""

import functools
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import InputError, summary


@dataclass(frozen=True)
class Node:
    """An instance type."""

    instance: str
    gpu: str  # its label, for example A100-80G
    gpus: int
    dollars: float  # an hour


@dataclass(frozen=True)
class Prices:
    date: str
    machine: float | None  # dollars an hour of this machine, or None if unknown
    nodes: tuple[Node, ...]  # the smallest first, of equal ones the cheapest

    def of(self, gpu: str) -> list[Node]:
        """Returns the instances that have this kind of GPU."""
        return [node for node in self.nodes if node.gpu == gpu]

    def rent(self, gpu: str, gpus: int) -> tuple[int, Node] | None:
        """Returns how many of which instance hold `gpus` GPUs: the smallest that holds all, or else the largest. None if
        there is no price.
        """
        nodes = self.of(gpu)
        node = next((node for node in nodes if node.gpus >= gpus), nodes[-1] if nodes else None)
        return (math.ceil(gpus / node.gpus), node) if node else None

    def labels(self, device: str) -> list[str]:
        """Returns the labels that torch's name of a GPU may mean: NVIDIA A100-SXM4-80GB is A100-80G."""
        words = set(re.split(r"[^A-Za-z0-9]+", device.replace("GB", "G")))
        known = dict.fromkeys(node.gpu for node in self.nodes)
        return [label for label in known if set(label.split("-")) <= words]


def own_file() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(os.environ.get("RLHF_PRICES") or os.path.join(home, "rlhf-pipeline", "prices.yaml"))


@functools.cache
def read() -> Prices:
    """Returns the prices. Raises InputError if the user's file is wrong."""
    prices = yaml.safe_load(Path(__file__).with_name("prices.yaml").read_text(encoding="utf-8"))
    file, known = own_file(), {*prices}
    try:
        if file.exists() or "RLHF_PRICES" in os.environ:
            own = yaml.safe_load(file.read_text(encoding="utf-8"))
            own["instances"] = prices["instances"] | (own.get("instances") or {})
            prices |= own
        if unknown := prices.keys() - known:
            raise ValueError(f"unknown key {', '.join(unknown)}")
        nodes = [Node(name, **one) for name, one in prices["instances"].items()]
        nodes.sort(key=lambda node: (node.gpus, float(node.dollars)))
        machine = None if prices["machine"] is None else float(prices["machine"])
        return Prices(str(prices["date"]), machine, tuple(nodes))
    except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{file}: {summary(error)}; expected `date`, `machine` (dollars an hour) and `instances`, as in "
            "g6.2xlarge: {gpu: L4, gpus: 1, dollars: 0.98}"
        ) from error


def of_run(usage: dict[str, Any], seconds: float, local: bool) -> dict[str, Any]:
    """Returns `cost` of a result.json: GPU hours, dollars if known, tokens, and dollars per 1,000 sampled completions.

    Args:
        usage: gpu (torch's name of it), gpus, and what the stage counted: tokens, completions.
        local: the run was on this machine, so the price of `machine` counts, if there is one.
    """
    prices, hours, dollars = read(), seconds / 3600, None
    labels = prices.labels(usage["gpu"]) if usage["gpus"] else []
    if local and prices.machine is not None:
        dollars = hours * prices.machine
    elif labels and (rented := prices.rent(labels[0], usage["gpus"])):
        dollars = hours * rented[0] * rented[1].dollars
    completions, each = usage.get("completions"), None
    if completions and dollars is not None:
        each = round(1000 * dollars / completions, 4)
    return {
        "gpu_hours": round(hours * usage["gpus"], 4),
        "dollars": None if dollars is None else round(dollars, 4),
        "tokens": usage.get("tokens"),
        "dollars_per_1000_completions": each,
        "prices": None if dollars is None else prices.date,
    }


def in_dollars(amount: float) -> str:
    return "under $0.01" if 0 < amount < 0.01 else f"${amount:.2f}"


def in_words(cost: dict[str, Any]) -> str:
    """Returns the cost of a run on one line: nothing if it counted nothing and used no GPU."""
    parts = [f"{cost['gpu_hours']:.3g} GPU hours"] if cost["gpu_hours"] else []
    if cost["dollars"] is not None:
        parts.append(f"{in_dollars(cost['dollars'])} at prices of {cost['prices']}")
    if cost["dollars_per_1000_completions"] is not None:
        parts.append(f"{in_dollars(cost['dollars_per_1000_completions'])} per 1,000 completions")
    if cost["tokens"]:
        parts.append(f"{cost['tokens']:,} tokens")
    return ", ".join(parts)
