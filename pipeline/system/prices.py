"""Reads the prices of GPUs and machines from prices.yaml and from the user's own price file, and computes the cost of a run."""

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import InputError, error_summary


@dataclass(frozen=True)
class Prices:
    date: str
    machine: float | None  # price of this machine in dollars per hour, or None if unknown
    gpus: dict[str, float]  # {label such as A100-80G: price of one GPU in dollars per hour}
    instances: dict[str, float]  # {instance type of a cloud: dollars per hour}

    def of(self, device: str) -> float | None:
        """Returns a GPU's dollars per hour, or None if unknown. `device` is torch's name, such as NVIDIA A100-SXM4-80GB."""
        words = set(re.split(r"[^A-Za-z0-9]+", device.replace("GB", "G")))
        return next((dollars for label, dollars in self.gpus.items() if set(label.split("-")) <= words), None)


def own_file() -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(os.environ.get("RLHF_PRICES") or os.path.join(folder, "rlhf-pipeline", "prices.yaml"))


@functools.cache
def read_prices() -> Prices:
    """Returns the prices of prices.yaml, updated with the user's price file. Raises InputError if the user's file is invalid."""
    prices = yaml.safe_load(Path(__file__).with_name("prices.yaml").read_text(encoding="utf-8"))
    file, keys = own_file(), {*prices}
    try:
        if file.exists() or "RLHF_PRICES" in os.environ:
            overrides = yaml.safe_load(file.read_text(encoding="utf-8"))
            for table in ("gpus", "instances"):
                overrides[table] = prices[table] | (overrides.get(table) or {})
            prices |= overrides
        if unknown := prices.keys() - keys:
            raise ValueError(f"unknown key {', '.join(unknown)}")
        gpus, instances = (
            {str(name): float(dollars) for name, dollars in prices[table].items()}
            for table in ("gpus", "instances")
        )
        machine = None if prices["machine"] is None else float(prices["machine"])
        return Prices(str(prices["date"]), machine, gpus, instances)
    except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{file}: {error_summary(error)}; expected `date`, `machine` (dollars per hour), `gpus` (dollars "
            "per hour of one GPU) and `instances`, as in {L4: 0.98}"
        ) from error


def cost_of_run(usage: dict[str, Any], seconds: float, local: bool) -> dict[str, Any]:
    """Returns the entry `cost` of result.json: GPU hours, dollars (None if unknown), tokens, dollars per 1,000 completions.

    Args:
        usage: `gpu` (torch's name), `gpus` (their number), and the `tokens` and `completions` that the stage counted.
        local: whether the run was on this machine. If the price of this machine is known, it replaces the prices of the GPUs.
    """
    prices, hours, dollars = read_prices(), seconds / 3600, None
    price = prices.of(usage["gpu"]) if usage["gpus"] else None
    if local and prices.machine is not None:
        dollars = hours * prices.machine
    elif price is not None:
        dollars = hours * usage["gpus"] * price
    completions, per_1000 = usage.get("completions"), None
    if completions and dollars is not None:
        per_1000 = round(1000 * dollars / completions, 4)
    return {
        "gpu_hours": round(hours * usage["gpus"], 4),
        "dollars": None if dollars is None else round(dollars, 4),
        "tokens": usage.get("tokens"),
        "dollars_per_1000_completions": per_1000,
        "prices": None if dollars is None else prices.date,
    }


def in_dollars(amount: float) -> str:
    return "under $0.01" if 0 < amount < 0.01 else f"${amount:.2f}"


def cost_in_words(cost: dict[str, Any]) -> str:
    """Returns the cost of a run as one line of text, or "" if there is nothing to report."""
    parts = [f"{cost['gpu_hours']:.3g} GPU hours"] if cost["gpu_hours"] else []
    if cost["dollars"] is not None:
        parts.append(f"{in_dollars(cost['dollars'])} at prices of {cost['prices']}")
    if cost["dollars_per_1000_completions"] is not None:
        parts.append(f"{in_dollars(cost['dollars_per_1000_completions'])} per 1,000 completions")
    if cost["tokens"]:
        parts.append(f"{cost['tokens']:,} tokens")
    return ", ".join(parts)
