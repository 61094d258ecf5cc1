"""The tensors of safetensors files: names, dtypes and shapes from the headers, and their numbers (no torch import)."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import InputError, in_brief
from pipeline.models.files import json_object, require_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATING = ("F64", "F32", "F16", "BF16")
MEND = "fetch or save the model again"


class Stored(NamedTuple):
    """A tensor in a file."""

    dtype: str  # as safetensors writes it: F32, BF16, ...
    shape: tuple[int, ...]


def stored_in(file: Path, mend: str = MEND) -> dict[str, Stored]:
    """{name: dtype and shape} of the tensors of one file, from its header.

    Raises:
        InputError: when it is not a safetensors file, or is truncated; `mend` ends the message.
    """
    from safetensors import SafetensorError, safe_open

    require_file(file, mend)
    try:
        # Opening checks header, offsets, sizes and the file's length.
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  (not a dict)
            return {name: Stored(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file}: not a whole safetensors file of {file.stat().st_size} bytes ({in_brief(error)}); {mend}"
        ) from error


def stored_in_model(folder: Path) -> dict[str, Stored]:
    """{name: dtype and shape} of all tensors of a model folder; empty if it has no safetensors.

    Raises:
        InputError: when a file is damaged, or index and files do not agree.
    """
    if os.path.lexists(folder / SINGLE):
        return stored_in(folder / SINGLE)
    if os.path.lexists(folder / INDEX):
        return _indexed(folder)
    return {}


def _indexed(folder: Path) -> dict[str, Stored]:
    index = folder / INDEX
    file_of = json_object(index, MEND).get("weight_map")
    if not isinstance(file_of, dict) or not file_of or not all(isinstance(f, str) for f in file_of.values()):
        raise InputError(f"{index}: `weight_map` is not a mapping of tensors to files; {MEND}")
    tensors: dict[str, Stored] = {}
    for name in sorted(set(file_of.values())):
        if not re.fullmatch(r"[\w.-]{1,250}\.safetensors", name):
            raise InputError(
                f"{index}: names the file {name!r:.100}, expected a .safetensors file beside it; {MEND}"
            )
        listed = {tensor for tensor, file in file_of.items() if file == name}
        stored = stored_in(folder / name)
        if missing := sorted(listed - stored.keys()):
            raise InputError(
                f"{folder / name}: lacks {len(missing)} tensors that {INDEX} places there, {missing[0]!r} for one; {MEND}"
            )
        tensors |= {tensor: stored[tensor] for tensor in listed}
    return tensors


def not_finite(file: Path, mend: str = MEND) -> str | None:
    """The name of the first tensor in a (small) file that holds NaN or infinity; None if all numbers are finite."""
    import numpy as np

    stored_in(file, mend)
    return next((name for name, values in numbers_in(file) if not np.isfinite(values).all()), None)


def numbers_in(file: Path) -> Iterator[tuple[str, Any]]:
    """(name, flat numpy array) of each floating-point tensor of a file that `stored_in` has checked."""
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
