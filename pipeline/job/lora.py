"""Determines which modules a `lora` section adapts, by the rules of peft, and which settings vLLM ignores."""

from __future__ import annotations

import re
from typing import Any


def adapts_lm_head(target_modules: Any) -> bool:
    """Returns whether peft's `target_modules`, a list of names or a pattern, include the lm head."""
    try:
        return is_named(target_modules, "lm_head")
    except re.error:  # models/compatibility.py reports the error
        return False


def ignored_by_vllm(given: dict[str, Any]) -> str | None:
    """Returns a setting of an adapter that vLLM ignores, or None. vLLM scales all modules by lora_alpha / r."""
    return next((key for key in ("use_dora", "rank_pattern", "alpha_pattern") if given.get(key)), None)


def is_named(given: Any, module: str) -> bool:
    """Returns whether a list of names, or a pattern, includes a module."""
    return any(matches(name, given, module) for name in listed(given))


def listed(given: Any) -> list[Any]:
    return [given] if isinstance(given, (str, int)) else list(given or ())


def matches(name: str, given: Any, module: str) -> bool:
    """Returns whether peft adapts a module. Entries of a list match the end of its name. Any other setting is a pattern."""
    if isinstance(given, list):  # the files of some bases lack the start of each name
        return f".{module}".endswith(f".{name}") or f".{name}".endswith(f".{module}")
    return bool(re.fullmatch(name if isinstance(given, str) else rf"(.*\.)?({name})", module))
