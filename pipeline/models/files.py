"""Names of model files, and a reader for JSON files from outside (no torch import)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, in_brief

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"  # peft's names of an adapter's files
HEAD_NAMES = ("score", "classifier", "classification_head")  # transformers' names of a scalar head


def json_object(path: str | Path, fix: str = "fetch or save it again") -> dict[str, Any]:
    """Returns the content of a JSON file.

    Args:
        fix: the end of an error's message, what to do about it.

    Raises:
        InputError: if it cannot be read, is not UTF-8, not JSON, nested too deeply, holds NaN, or not an object.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_constant)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {fix}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({in_brief(error)}); {fix}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: found {type(content).__name__}, expected a JSON object; {fix}")
    return content


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is not a value of JSON")
    return float(name)  # Infinity: in Mamba's configurations
