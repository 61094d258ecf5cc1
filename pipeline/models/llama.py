"""The tensors of a plain Llama, from its config.json, to check a base in milliseconds (no torch import).

For any unusual setting the answer is None; then transformers has to be asked, which takes three seconds to import.
"""

from __future__ import annotations

from typing import Any

Layout = dict[str, tuple[int, ...]]  # {name: shape} of tensors

# The linear layers of a block.
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
LINEAR = frozenset(ATTENTION + MLP)
FIXED = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "attention_dropout": (0.0,),
    "use_cache": (True, False),
    "tie_word_embeddings": (True, False),
    "dtype": ("float32", "bfloat16", "float16"),
}
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip
# Settings that do not affect names or shapes: checked elsewhere (token ids), or not read.
FREE = (
    "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "rms_norm_eps",
    "rope_parameters", "transformers_version",
)  # fmt: skip


def layout(config: dict[str, Any]) -> Layout | None:
    """{name: shape} of the tensors of a plain Llama; None for any other model, a scorer included."""
    if not _is_plain(config):
        return None
    hidden, inner, width = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (config[f"num_{kind}_heads"] * width for kind in ("attention", "key_value"))
    block: Layout = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors: Layout = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{number}.{name}.weight": shape for name, shape in block.items()}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = (config["vocab_size"], hidden)
    return tensors


def _is_plain(config: dict[str, Any]) -> bool:
    """Whether config.json has exactly the known keys, with values that no library would refuse."""
    if config.keys() != {*FIXED, *SIZES, *FREE}:
        return False
    if not all(config[key] in ok and type(config[key]) is type(ok[0]) for key, ok in FIXED.items()):
        return False
    if not all(type(config[key]) is int for key in SIZES):
        return False
    rope, heads = config["rope_parameters"], config["num_attention_heads"]
    return (
        isinstance(rope, dict)
        and rope.keys() == {"rope_type", "rope_theta"}
        and rope["rope_type"] == "default"
        and _is_number(rope["rope_theta"], 1, 1e9)
        and _is_number(config["rms_norm_eps"], 0, 1)
        and _is_number(config["initializer_range"], 0, 1)
        and _is_id(config["pad_token_id"], config["vocab_size"])
        and config["hidden_size"] % heads
        == heads % config["num_key_value_heads"]
        == config["head_dim"] % 2
        == 0
    )


def _is_number(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high


def _is_id(value: Any, rows: int) -> bool:
    return value is None or (type(value) is int and 0 <= value < rows)
