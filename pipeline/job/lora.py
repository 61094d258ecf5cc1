"""Determines which modules the section `lora` adapts, by the rules of peft, and which settings of an adapter vLLM ignores."""

from __future__ import annotations

import re
from typing import Any


def adapts_lm_head(target_modules: Any) -> bool:
    """Returns True if peft's `target_modules` (a list of names, or a pattern) include lm_head."""
    try:
        return is_named(target_modules, "lm_head")
    except re.error:  # models/compatibility.py reports the invalid pattern
        return False


def ignored_by_vllm(given: dict[str, Any]) -> str | None:
    """Returns a setting of an adapter that vLLM ignores, or None. For example, vLLM always scales by lora_alpha / r."""
    return next((key for key in ("use_dora", "rank_pattern", "alpha_pattern") if given.get(key)), None)


def is_named(given: Any, module: str) -> bool:
    """Returns True if a module matches a list of names or a pattern."""
    return any(matches_module(name, given, module) for name in listed_modules(given))


def listed_modules(given: Any) -> list[Any]:
    return [given] if isinstance(given, (str, int)) else list(given or ())


def matches_module(name: str, given: Any, module: str) -> bool:
    """Returns True if the entry `name` of a setting `given` includes a module, by peft's rules.

    An entry of a list matches the end of the module's name. Any other setting is a pattern.
    """
    if isinstance(given, list):  # `module` may be only the end of a name, as in the files of some bases
        return f".{module}".endswith(f".{name}") or f".{name}".endswith(f".{module}")
    return bool(re.fullmatch(name if isinstance(given, str) else rf"(.*\.)?({name})", module))
