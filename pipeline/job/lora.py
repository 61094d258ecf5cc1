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


def ignored_by_vllm(adapter: dict[str, Any]) -> str | None:
    """Returns a setting of an adapter that vLLM ignores, or None. For example, vLLM always scales by lora_alpha / r."""
    return next((key for key in ("use_dora", "rank_pattern", "alpha_pattern") if adapter.get(key)), None)


def is_named(setting: Any, module: str) -> bool:
    """Returns True if a module matches a list of names or a pattern."""
    return any(matches_module(name, setting, module) for name in listed_modules(setting))


def listed_modules(setting: Any) -> list[Any]:
    return [setting] if isinstance(setting, (str, int)) else list(setting or ())


def matches_module(name: str, setting: Any, module: str) -> bool:
    """Returns True if the entry `name` of `setting` includes a module, by peft's rules.

    An entry of a list matches the end of the module's name. Any other setting is a pattern.
    """
    if isinstance(setting, list):  # `module` may be only the end of a name, as in the files of some bases
        return f".{module}".endswith(f".{name}") or f".{name}".endswith(f".{module}")
    return bool(re.fullmatch(name if isinstance(setting, str) else rf"(.*\.)?({name})", module))
