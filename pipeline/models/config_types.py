"""What every reader of a config.json stumbles over: wrong types, and sizes that no model has (no torch import).

What only one architecture knows, transformers checks when it builds its configuration (fit.py).
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
# Whole numbers of config.json, each with the largest that is no mistake: a library would count to any that is said.
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
    """Refuses a config.json with such a value.

    Raises:
        InputError: naming the key and the value.
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
        for key, most in SIZES.items():
            size = part.get(key)
            if size is None or isinstance(size, list):  # of each layer its own
                continue
            if type(size) is not int or not 1 <= size <= most:
                raise InputError(
                    f"{path}: {key}: found {size!r:.80}, expected a whole number from 1 to {most}; "
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
