"""The tensors of safetensors files: names, dtypes and shapes from the headers, and their numbers (no torch import)."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import InputError, in_brief

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATING = ("F64", "F32", "F16", "BF16")
FIX = "fetch or save the model again"


class Stored(NamedTuple):
    """A tensor in a file."""

    dtype: str  # in the notation of safetensors: F32, BF16, ...
    shape: tuple[int, ...]


def stored_in(file: Path, fix: str = FIX) -> dict[str, Stored]:
    """Returns {name: dtype and shape} of the tensors of one file, from its header.

    Raises:
        InputError: if it is not a safetensors file, or is truncated; `fix` ends the message.
    """
    from safetensors import SafetensorError, safe_open

    try:
        # Opening checks header, offsets, sizes and the file's length.
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  (not a dict)
            return {name: Stored(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({in_brief(error)}); {fix}") from error
    except SafetensorError as error:
        raise InputError(
            f"{file}: not a complete safetensors file of {file.stat().st_size} bytes ({in_brief(error)}); {fix}"
        ) from error


def stored_by_index(folder: Path, file_of: dict[str, str]) -> dict[str, Stored]:
    """Returns {name: dtype and shape} of the tensors of a model in several files.

    Args:
        file_of: the `weight_map` of its index, {tensor: file}.

    Raises:
        InputError: if a file is missing or damaged, or lacks a tensor.
    """
    files = {name: stored_in(folder / name) for name in sorted(set(file_of.values()))}
    if missing := sorted(tensor for tensor, name in file_of.items() if tensor not in files[name]):
        raise InputError(
            f"{folder / file_of[missing[0]]}: lacks {missing[0]!r}, which {INDEX} places there ({len(missing)} such tensors); {FIX}"
        )
    return {tensor: files[name][tensor] for tensor, name in file_of.items()}


def not_finite(file: Path) -> str | None:
    """Returns the name of the first tensor with NaN or infinity in a file that `stored_in` has checked, or None."""
    import numpy as np

    return next((name for name, values in numbers_in(file) if not np.isfinite(values).all()), None)


def numbers_in(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields (name, flat numpy array) for each floating-point tensor of a file that `stored_in` has checked."""
    import numpy as np

    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name == "__metadata__" or entry["dtype"] not in FLOATING:
                continue
            begin, stop = entry["data_offsets"]
            stream.seek(8 + length + begin)
            numbers = stream.read(stop - begin)
            if entry["dtype"] == "BF16":  # numpy has no bfloat16: its upper bits are float32's
                yield name, (np.frombuffer(numbers, "<u2").astype("<u4") << 16).view("<f4")
            else:
                yield name, np.frombuffer(numbers, f"<f{int(entry['dtype'][1:]) // 8}")
