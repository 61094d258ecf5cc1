"""Rows, files and a tokenizer that are small enough to read, for the tests of pipeline/data."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pipeline.config import Data
from pipeline.data.encode import Example
from pipeline.data.feed import to_hf
from pipeline.data.read import prepare
from pipeline.models.template import PLAIN

ROWS = [{"prompt": f"question {i}", "completion": f" answer {i}"} for i in range(50)]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template: str | None = None, bos: bool = True):
    """A tokenizer of single bytes with special tokens: each character is a token, so masks are easy to read."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tok = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tok.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    if bos:
        tok.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tok.bos_token_id)]
        )
    tok.chat_template = PLAIN.read_text() if template is None else template
    tok.text_as_chat = template is not None
    return tok


def trained(tok, example: Example) -> list[str]:
    """The runs of trained tokens as text."""
    runs, last = [], -2
    for at, (token, label) in enumerate(
        zip(example.columns["input_ids"], example.columns["labels"], strict=True)
    ):
        if label == -100:
            continue
        assert label == token
        if at != last + 1:
            runs.append([])
        runs[-1].append(token)
        last = at
    return [tok.decode(run) for run in runs]


def write(path: Path, rows: list) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def make(tmp_path, stage="sft", packing=False, context=400, **options):
    return prepare(stage, Data(**options), tokenizer(), context, str(tmp_path / "cache"), packing)


def rows_of(dataset) -> list[dict]:
    return to_hf(dataset, "x").to_list()
