"""The tokenizer of a base: its chat template, and which tokens pad and end (no torch import).

Two rules hold for every tokenizer that `load_tokenizer` returns. It has an end-of-sequence token. And its pad token
is never one that ends a reply, so that the end is learned, and so that libraries which look for the "rightmost
non-pad token" find the real last one. No embedding is ever resized: every id used has a row in the base already.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.models.base import base_config, base_file, base_json

PLAIN_TEMPLATE = Path(__file__).with_name("plain.jinja")
BOS_LINE = "{{- bos_token }}\n"

# Tokens that end a turn in the chat templates of the day, where tokenizer.eos_token may name another one.
END_OF_TURN = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|eot|>",
    "<|return|>",
)
LLAMA_PAD = "<|finetune_right_pad_id|>"
SPARE = re.compile(r"reserved|unused|placeholder|dummy|control_\d|extra_id|extra_\d", re.IGNORECASE)

# Bytes that no UTF-8 text contains, as byte-level BPE and as SentencePiece byte fallback spell them: such a token is
# in the vocabulary, and no text is ever encoded to it. ÿ first: the reader of a saved tokenizer may take the literal
# character for the pad token, and it is the rarest.
NEVER_PRODUCED = tuple(
    spelling
    for byte in (0xFF, 0xFE, 0xFD, 0xFC, 0xFB, 0xFA, 0xF9, 0xF8, 0xF7, 0xF6, 0xF5, 0xC1, 0xC0)
    for spelling in (chr(byte), f"<0x{byte:02X}>")
)


def load_tokenizer(
    name_or_path: str,
    revision: str | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """The tokenizer of a base, with pad and eos rules applied and a chat template set; picklable.

    `chat_template` is a Jinja file, "plain", or None: the tokenizer's own, else "plain". `own_chat_template` on the
    result says whether the tokenizer came with one. Raises InputError: no such base, no usable pad token, no template.
    """
    config = base_config(name_or_path, revision)
    settings = base_json(name_or_path, "tokenizer_config.json", revision) or {}
    tokenizer = _read(name_or_path, revision, settings, trust_remote_code)
    rows = (config.get("text_config") or config).get("vocab_size")
    _set_eos(tokenizer, name_or_path, [base_json(name_or_path, "generation_config.json", revision), config])
    _set_template(tokenizer, chat_template)
    ends = eos_ids(tokenizer, base_json(name_or_path, "generation_config.json", revision))
    tokenizer.pad_token = _pad_token(tokenizer, set(ends), rows, name_or_path)
    tokenizer.padding_side = "right"
    return tokenizer


def _read(name_or_path: str, revision: str | None, settings: dict[str, Any], trust_remote_code: bool) -> Any:
    """The stored tokenizer. The plain fast class where that is what it is: it loads without torch, in a second."""
    from transformers import PreTrainedTokenizerFast

    where = str(Path(name_or_path).expanduser()) if Path(name_or_path).expanduser().is_dir() else name_or_path
    options: dict[str, Any] = {"revision": revision}
    if settings.get("pad_token") in NEVER_PRODUCED:
        options["pad_token"] = (
            None  # one of ours, saved: as a special token, its literal character would become pad
        )
    plain = settings.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
    if plain and base_file(name_or_path, "tokenizer.json", revision) is not None:
        return PreTrainedTokenizerFast.from_pretrained(where, **options)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise InputError(
            f"model.name_or_path: no tokenizer can be read from {name_or_path!r}: {' '.join(str(error).split())[:200]}; "
            "expected tokenizer.json and tokenizer_config.json beside the model"
        ) from error
    if not tokenizer.is_fast:
        raise InputError(
            f"model.name_or_path: the tokenizer of {name_or_path!r} ({type(tokenizer).__name__}) has no tokenizer.json "
            "form; save one beside the model with tokenizers, or take a model that has it"
        )
    return tokenizer


# ------------------------------------------------------------------------------------------- eos and pad rules


def _set_eos(tokenizer: Any, where: str, configs: list[dict[str, Any] | None]) -> None:
    if tokenizer.eos_token_id is not None:
        return
    for config in configs:
        ids = _as_list((config or {}).get("eos_token_id"))
        if ids and ids[0] < len(tokenizer):
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ids[0])
            return
    raise InputError(
        f"model.name_or_path: the tokenizer of {where!r} has no end-of-sequence token; name one as eos_token in its "
        "tokenizer_config.json"
    )


def eos_ids(tokenizer: Any, generation_config: Any = None) -> list[int]:
    """All ids that end a reply, sorted: the tokenizer's eos, the generation config's, the chat template's end of turn.

    `generation_config` is a transformers GenerationConfig, its dict, or None.
    """
    if generation_config is not None and not isinstance(generation_config, dict):
        generation_config = generation_config.to_dict()
    ids = {tokenizer.eos_token_id, *_as_list((generation_config or {}).get("eos_token_id"))}
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    added = tokenizer.get_added_vocab()
    ids |= {added[token] for token in END_OF_TURN if token in added and token in template}
    return sorted(ids)


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _pad_token(tokenizer: Any, ends: set[int], rows: int | None, where: str) -> str:
    """The token to pad with: never one that ends a reply, always one that the base has an embedding row for.

    In this order: the tokenizer's own; Llama 3.1's; another token made for padding; a reserved one; unk; any other
    special token that the template does not use; a byte that UTF-8 never contains.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = sorted(tokenizer.get_added_vocab(), key=vocabulary.__getitem__)
    template = str(tokenizer.chat_template)
    used = {tokenizer.bos_token, tokenizer.unk_token} | {token for token in special if token in template}
    candidates = [
        tokenizer.pad_token,
        LLAMA_PAD,
        *(token for token in special if "pad" in token.lower()),
        *(token for token in special if SPARE.search(token)),
        tokenizer.unk_token if tokenizer.unk_token != tokenizer.bos_token else None,
        *(token for token in special if token not in used),
        *NEVER_PRODUCED,
    ]
    for token in candidates:
        index = vocabulary.get(token) if token is not None else None
        if index is not None and index not in ends and (rows is None or index < rows):
            return token
    raise InputError(
        f"model.name_or_path: the tokenizer of {where!r} has no token to pad with that does not also end a reply; name a "
        "token that no text produces as pad_token in its tokenizer_config.json (its id must be below "
        f"{rows}, the rows of the embedding)"
    )


# --------------------------------------------------------------------------------------------- chat template


def _set_template(tokenizer: Any, chat_template: str | None) -> None:
    plain = _plain_template(tokenizer)
    own = tokenizer.chat_template
    if isinstance(own, dict):  # several named templates, of which "default" is the one for chats
        own = own.get("default")
    tokenizer.own_chat_template = own is not None and own != plain
    if chat_template is None:
        tokenizer.chat_template = own or plain
    elif chat_template == "plain":
        tokenizer.chat_template = plain
    else:
        tokenizer.chat_template = _template_file(chat_template)


def _plain_template(tokenizer: Any) -> str:
    """The built-in template; its text begins with the bos token only where the tokenizer begins every text with it."""
    text = PLAIN_TEMPLATE.read_text(encoding="utf-8")
    begins = tokenizer("a").input_ids[:1]
    if tokenizer.bos_token_id is not None and begins == [tokenizer.bos_token_id]:
        return text
    return text.replace(BOS_LINE, "")


def _template_file(path: str) -> str:
    import jinja2

    # Private (transformers 5.23), but it knows transformers' own tags. Remove when compiling alone is public.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(
            f"model.chat_template: there is no file {path!r}; expected a Jinja file, 'plain', or null"
        )
    text = file.read_text(encoding="utf-8")
    try:
        _compile_jinja_template(text)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"model.chat_template: {path}:{error.lineno}: {error.message}") from error
    return text


# -------------------------------------------------------------------------------------------------- digests


def tokenizer_digest(tokenizer: Any) -> str:
    """A sha256 that changes when any text would get other ids; stable over saving, loading and pickling."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend.pop("padding")  # the state of the last call, not the tokenizer
    backend.pop("truncation")
    specials = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    return _digest(json.dumps([backend, specials], sort_keys=True))


def template_digest(tokenizer: Any) -> str:
    """A sha256 of the chat template's text."""
    return _digest(json.dumps(tokenizer.chat_template))


def _digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
