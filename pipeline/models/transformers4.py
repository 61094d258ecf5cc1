"""Saves tokenizers and configs with the names of transformers 5 and 4, so that both versions read the same model.

transformers 4 ignores most new names without a word: its RoPE base then is 10000, whatever the model has.
"""

import json
import re
from pathlib import Path
from typing import Any

OF_ROPE = re.compile("rope_|rotary_")  # keys of config.json that transformers 5 moves into rope_parameters


def oldest_version(base: dict[str, Any]) -> str:
    """Returns the oldest transformers for a model, by its base's config.json: 4.57 (tested) if 4 wrote that, or 5.0."""
    by_4 = str(base.get("transformers_version", "4")).startswith("4") and "rope_parameters" not in base
    return "4.57" if by_4 else "5.0"


def save_tokenizer(tokenizer: Any, folder: str | Path) -> None:
    """Saves a tokenizer. Its class is the plain fast one, for which tokenizer.json says everything in both versions."""
    tokenizer.save_pretrained(folder)
    path = Path(folder, "tokenizer_config.json")
    settings = json.loads(path.read_text(encoding="utf-8"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": tokenizer.model_input_names}
    if isinstance(settings.get("extra_special_tokens"), list):  # transformers 4 expects a mapping
        names["additional_special_tokens"] = settings.pop("extra_special_tokens")
    path.write_text(json.dumps(settings | names, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def add_old_names(folder: str | Path, base: dict[str, Any]) -> None:
    """Adds the names of transformers 4 that `base`, the config.json of its base, has to a folder's config.json."""
    path = Path(folder, "config.json")
    config = json.loads(path.read_text(encoding="utf-8"))
    for new, own in ((config, base), (config.get("text_config") or {}, base.get("text_config") or {})):
        old = {key: own[key] for key in own if OF_ROPE.search(key)}
        old |= {"torch_dtype": new["dtype"]} if "dtype" in new else {}
        new |= {key: value for key, value in old.items() if key not in new}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
