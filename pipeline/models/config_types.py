"""Checks of a config.json that hold for every architecture: types, and sizes that no model has (no torch import).

The rest transformers checks when it builds its configuration (fit.py).
"""

from __future__ import annotations

import math
from typing import Any

from pipeline.errors import InputError

CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "max_sequence_length",
)
# Integers of config.json with the largest plausible value: a library would try to build a model of any size.
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 10_000),
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "n_embd", "d_model", "intermediate_size", "head_dim"), 1 << 24
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), 1 << 16),
    **dict.fromkeys(CONTEXT_KEYS, 1 << 31),
}
POSITIVE = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rope_theta")


def check_types(path: str, config: dict[str, Any]) -> None:
    """Check the types and sizes in a config.json.

    Args:
        path: of the file, for messages.

    Raises:
        InputError: names the key and the value.
    """
    expected = {
        "model_type": str, "architectures": list, **dict.fromkeys(("text_config", "id2label", "quantization_config"), dict)
    }  # fmt: skip
    for key, kind in expected.items():
        if config.get(key) is not None and not isinstance(config[key], kind):
            raise InputError(
                f"{path}: {key}: found {config[key]!r:.80}, expected a {kind.__name__}; fetch the model again",
                key="model.name_or_path",
            )
    for part in (config, config.get("text_config") or {}):
        for key, limit in SIZES.items():
            size = part.get(key)
            if size is None or isinstance(size, list):  # a list: one per layer
                continue
            if type(size) is not int or not 1 <= size <= limit:
                raise InputError(
                    f"{path}: {key}: found {size!r:.80}, expected a whole number from 1 to {limit}; "
                    "fetch the model again",
                    key="model.name_or_path",
                )
        rope = part.get("rope_parameters")
        for key, number in {**part, **(rope if isinstance(rope, dict) else {})}.items():
            positive = type(number) in (int, float) and 0 < number < math.inf
            if key in POSITIVE and number is not None and not positive:
                raise InputError(
                    f"{path}: {key}: found {number!r:.80}, expected a finite number above 0; fetch the "
                    "model again",
                    key="model.name_or_path",
                )
