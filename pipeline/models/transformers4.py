"""Saves tokenizers and configs with the key names of both transformers 4 and 5, so that both versions load the same model.

transformers 4 silently ignores most key names of version 5. For example, without `rope_theta`, transformers 4 would use the
default RoPE base of 10000 for every model.
"""

import json
import re
from pathlib import Path
from typing import Any

OF_ROPE = re.compile("rope_|rotary_")  # keys of config.json that transformers 5 moves into rope_parameters
# {model type: {usual name in transformers 4: name in this model type}}
OWN_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}


def oldest_version(base: dict[str, Any]) -> str:
    """Returns the oldest transformers version that can load a saved model: 4.57 if version 4 saved the base, or else 5.0.

    Args:
        base: config.json of the base.
    """
    by_4 = str(base.get("transformers_version", "4")).startswith("4") and "rope_parameters" not in base
    return "4.57" if by_4 else "5.0"


def save_tokenizer(tokenizer: Any, folder: str | Path) -> None:
    """Saves a tokenizer as the plain fast class. In transformers 4 and 5, tokenizer.json describes this class completely."""
    tokenizer.save_pretrained(folder)
    path = Path(folder, "tokenizer_config.json")
    settings = json.loads(path.read_text(encoding="utf-8"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": tokenizer.model_input_names}
    if isinstance(settings.get("extra_special_tokens"), list):  # transformers 4 expects a mapping
        names["additional_special_tokens"] = settings.pop("extra_special_tokens")
    path.write_text(json.dumps(settings | names, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def add_old_names(folder: str | Path, base: dict[str, Any]) -> None:
    """Adds the keys of transformers 4 to a folder's config.json, copied from `base` or converted from the new keys."""
    path = Path(folder, "config.json")
    config = json.loads(path.read_text(encoding="utf-8"))
    for new, original in ((config, base), (config.get("text_config") or {}, base.get("text_config") or {})):
        old = old_rope(new) | {key: original[key] for key in original if OF_ROPE.search(key)}
        old |= {"torch_dtype": new["dtype"]} if "dtype" in new else {}
        new |= {key: value for key, value in old.items() if key not in new}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def old_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config's rope_parameters with the key names of transformers 4. Layer types may have different parameters."""
    rope = config.get("rope_parameters") or {}
    full, sliding = rope.get("full_attention", rope), rope.get("sliding_attention")
    if not full:
        return {}
    old = {key: full[key] for key in ("rope_theta", "partial_rotary_factor") if key in full}
    old["rope_scaling"] = None
    if (kind := full.get("rope_type", "default")) == "longrope":  # Phi-3's config rejects unknown keys
        old["rope_scaling"] = {"type": kind, **{key: full[key] for key in ("short_factor", "long_factor")}}
    elif kind != "default":
        old["rope_scaling"] = {key: full[key] for key in full if key not in (*old, "type")}
    if sliding:
        old["rope_local_base_freq"] = sliding["rope_theta"]
    names = OWN_NAMES.get(config.get("model_type", ""), {})
    return {names.get(key, key): value for key, value in old.items()}
