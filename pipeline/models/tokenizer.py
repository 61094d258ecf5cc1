"""Loads the tokenizer of a base, with its chat template, pad token and end-of-sequence tokens (no torch import).

Every tokenizer that `load_tokenizer` returns has an end-of-sequence token, and a pad token that never ends a completion. With
these tokens, losses include the end of a completion, and libraries that look for the "rightmost non-pad token" find the last
token. No embedding is ever resized, because every token id in use already has a row in the base's embedding.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from pipeline.errors import InputError, in_brief
from pipeline.models.template import set_template
from pipeline.system.hub import KEY, base_config, base_file, base_json, source

# Tokens that end a turn in common chat templates, even if tokenizer.eos_token is a different token.
END_OF_TURN = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|eot|>", "<|return|>",
)  # fmt: skip
MIN_ENDED = 0.1  # a warning is printed if a smaller fraction of completions ends with EOS
LLAMA_PAD = "<|finetune_right_pad_id|>"
RESERVED = re.compile(r"reserved|unused|placeholder|dummy|control_\d|extra_id|extra_\d", re.IGNORECASE)

# Tokens of bytes that no UTF-8 text contains, in byte-level BPE and in SentencePiece's byte fallback. No text is encoded to these
# byte tokens. ÿ, the rarest character, is first, because other programs may mistake this character for the pad token.
NEVER_PRODUCED = tuple(
    spelling
    for byte in (0xFF, 0xFE, 0xFD, 0xFC, 0xFB, 0xFA, 0xF9, 0xF8, 0xF7, 0xF6, 0xF5, 0xC1, 0xC0)
    for spelling in (chr(byte), f"<0x{byte:02X}>")
)

SOME_TEXT = "What is 2 + 3?\n\u00c9\u6f22\U0001f600"


def load_tokenizer(
    name_or_path: str,
    revision: str | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Returns the tokenizer of a base, with a chat template, a pad token and an end-of-sequence token. The tokenizer can be
    pickled. The tokenizer has two attributes that transformers does not define: `text_as_chat` (see template.set_template), and
    `generation_eos`, the ids that end a completion in transformers' generation config of the base.

    Raises InputError if the base, its tokenizer or the template is missing or damaged, or if no token can be
    the pad token or end a completion.

    Args:
        chat_template: a Jinja file, "plain", or None for the tokenizer's own template ("plain" if it has none).
    """
    config = base_config(name_or_path, revision)
    text_config = config.get("text_config") or config
    # Without this file, transformers uses config.json.
    generation = base_json(name_or_path, "generation_config.json", revision)
    generation_eos = _as_list((text_config if generation is None else generation).get("eos_token_id"))
    rows: Any = text_config.get("vocab_size")
    tokenizer = _read(name_or_path, revision, trust_remote_code)
    if tokenizer.eos_token_id is None:
        ends = [*generation_eos, *_as_list(config.get("eos_token_id"))]
        tokens = [tokenizer.convert_ids_to_tokens(i) for i in ends if 0 <= i < len(tokenizer)]
        if not tokens:
            raise InputError(
                f"the tokenizer of {name_or_path!r} has no end-of-sequence token; name one as eos_token in its "
                "tokenizer_config.json",
                KEY,
            )
        tokenizer.eos_token = tokens[0]
    set_template(tokenizer, chat_template, name_or_path)
    _check_ids(tokenizer, rows, name_or_path)
    tokenizer.generation_eos = [i for i in generation_eos if rows is None or i < rows]
    tokenizer.pad_token = _pad_token(tokenizer, set(eos_ids(tokenizer)), rows, name_or_path)
    tokenizer.padding_side = "right"
    return tokenizer


def _read(name_or_path: str, revision: str | None, trust_remote_code: bool) -> Any:
    """Returns the tokenizer as transformers loads it. Loads a plain fast tokenizer without AutoTokenizer, which imports torch."""
    settings = base_json(name_or_path, "tokenizer_config.json", revision) or {}
    options: dict[str, Any] = {"revision": revision}
    if settings.get("pad_token") in NEVER_PRODUCED:
        # An earlier run of this pipeline chose this pad token. If it were loaded as a special token, every occurrence of its
        # character in a text would be encoded as padding.
        options["pad_token"] = None
    plain = settings.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
    try:
        if plain and base_file(name_or_path, "tokenizer.json", revision) is not None:
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader

            options["trust_remote_code"] = trust_remote_code
        tokenizer = Loader.from_pretrained(source(name_or_path), **options)
        tokenizer(SOME_TEXT)  # raises an error if a component has wrong settings
    except (InputError, KeyboardInterrupt, SystemExit, MemoryError):  # a signal raises SystemExit
        raise
    except BaseException as error:  # for a damaged file, tokenizers raises PanicException, a BaseException
        raise InputError(
            f"no tokenizer can be read from {name_or_path!r} ({in_brief(error)}); expected tokenizer.json "
            "and tokenizer_config.json next to the model: fetch or save them again",
            KEY,
        ) from error
    if not tokenizer.is_fast:
        raise InputError(
            f"the tokenizer of {name_or_path!r} ({type(tokenizer).__name__}) has no tokenizer.json form; save one next to the "
            "model with tokenizers, or use a model that has it",
            KEY,
        )
    return tokenizer


def _check_ids(tokenizer: Any, rows: int | None, base_name: str) -> None:
    """Raises InputError if a token in use has no row in the embedding.

    A special token without a row is harmless, unless it is the bos or eos token, or the template uses it.
    """
    added = tokenizer.get_added_vocab()
    used = {token for token in added if token in tokenizer.chat_template}
    used |= {tokenizer.bos_token, tokenizer.eos_token}
    beyond = [
        (token, index)
        for token, index in tokenizer.get_vocab().items()
        if rows is not None and index >= rows and (token not in added or token in used)
    ]
    if beyond:
        token, index = beyond[0]
        raise InputError(
            f"the tokenizer of {base_name!r} has {len(beyond)} tokens beyond the {rows} rows of the embedding (vocab_size in "
            f"config.json), for example {token!r:.80} with id {index}; use the tokenizer that belongs to these weights",
            KEY,
        )


# ------------------------------------------------------------------------------------------- eos and pad rules


def eos_ids(tokenizer: Any) -> list[int]:
    """Returns the sorted ids of all tokens that end a completion: the EOS tokens and the tokens that end a turn."""
    ids = {tokenizer.eos_token_id, *getattr(tokenizer, "generation_eos", ())}
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    added = tokenizer.get_added_vocab()
    ids |= {added[token] for token in END_OF_TURN if token in added and token in template}
    return sorted(i for i in ids if i >= 0)  # some configurations have -1 for a token that does not exist


def warn_of_endless(ended: float, completions: str) -> None:
    """Prints a warning if less than the fraction MIN_ENDED of the completions ended with EOS."""
    if ended < MIN_ENDED:
        print(
            f"warning: {ended:.0%} of {completions} ended with EOS, the other ones were truncated at trainer.response_length; "
            "raise this key, or train sft on rows that end, and check its eos_accuracy",
            flush=True,
        )


def _as_list(value: Any) -> list[int]:
    """Returns the ids of an `eos_token_id`, which may be one id, a list or None."""
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]


def _pad_token(tokenizer: Any, ends: set[int], rows: int | None, base_name: str) -> str:
    """Returns the pad token: the first candidate that does not end a completion and has a row in the embedding.

    The candidates are, in this order: the tokenizer's own pad token, Llama 3.1's pad token, a special token with "pad" in its
    name, a reserved token, unk, a special token that the template does not use, and a byte that UTF-8 never contains.

    Raises InputError if no candidate fits.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = sorted(tokenizer.get_added_vocab(), key=vocabulary.__getitem__)
    template = str(tokenizer.chat_template)
    used = {tokenizer.bos_token, tokenizer.unk_token} | {token for token in special if token in template}
    candidates = [
        tokenizer.pad_token,
        LLAMA_PAD,
        *(token for token in special if "pad" in token.lower()),
        *(token for token in special if RESERVED.search(token)),
        tokenizer.unk_token if tokenizer.unk_token != tokenizer.bos_token else None,
        *(token for token in special if token not in used),
        *NEVER_PRODUCED,
    ]
    for token in candidates:
        index = vocabulary.get(token) if token is not None else None
        if index is not None and index not in ends and (rows is None or index < rows):
            return token
    raise InputError(
        f"the tokenizer of {base_name!r} has no pad token, and each token that could be one also ends a completion; set pad_token "
        "in its tokenizer_config.json to a token that no text produces",
        KEY,
    )


# -------------------------------------------------------------------------------------------------- digests


def tokenizer_digest(tokenizer: Any) -> str:
    """Returns a SHA-256 of the settings that determine token ids. Saving, loading and pickling do not change the digest."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend.pop("padding")  # each call of the tokenizer may change its padding and truncation
    backend.pop("truncation")
    specials = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    return _digest(json.dumps([backend, specials], sort_keys=True))


def template_digest(tokenizer: Any) -> str:
    """Returns a SHA-256 of the chat template's text."""
    return _digest(json.dumps(tokenizer.chat_template))


def _digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
