"""Makes small rows, files and a tokenizer for the tests of pipeline/data."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pipeline.data import chunks, files, read
from pipeline.data.encode import Encoder, Example
from pipeline.data.formats import kind_of, parse_row
from pipeline.data.read import prepare_rows, to_hf
from pipeline.job import Data
from pipeline.job.stages import STAGE_SPECS
from pipeline.models.template import PLAIN

ROWS = [{"prompt": f"question {i}", "completion": f" answer {i}"} for i in range(50)]
USER, BOT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
NO = {"role": "assistant", "content": "no"}
SYSTEM = {"role": "system", "content": "s"}
ASIDE = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "so"}]
PREFERENCES = [  # one pair in each row format
    {"prompt": [USER], "chosen": "yo", "rejected": "no"},
    {"prompt": [USER], "chosen": [BOT], "rejected": [NO]},
    {"prompt": "hi", "chosen": [USER, BOT], "rejected": [USER, NO]},
    {"chosen": [USER, BOT], "rejected": [USER, NO]},
    {"chosen": "\n\nHuman: hi\n\nAssistant: yo", "rejected": "\n\nHuman: hi\n\nAssistant: no"},
    {"conversations": [{"from": "human", "value": "hi"}], "chosen": {"from": "gpt", "value": "yo"},
     "rejected": {"from": "gpt", "value": "no"}},
    {"conversations": [{"from": "human", "value": "hi"}], "chosen": BOT, "rejected": NO},
    {"prompt": [USER], "pos_answers": ["yo"], "neg_answers": ["no"]},
]  # fmt: skip
CONVERSATION = {
    "messages": [USER, BOT, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "bye"}]
}
REASONED = {
    "messages": [
        USER,
        {"role": "assistant", "content": "<think>\none\n</think>\n\nyo"},
        {"role": "user", "content": "yo and?"},
        {"role": "assistant", "content": "<think>\ntwo\n</think>\n\nbye"},
    ]
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLING = (  # CHATML with tools and tool calls
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (  # like Qwen3's template, but without the rules for thoughts in earlier turns
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def tokenizer(template: str | None = None, bos: bool = True):
    """Returns a tokenizer whose tokens are single bytes and special tokens, so that tests can read masks."""
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


def parsed(row, stage: str):
    return parse_row(row, kind_of(stage))


def encoder(stage, template=None, max_length=500, overlong="error", apply=False, bos=True, ends=("</s>",)):
    """Returns an encoder for rows. The tokens in `ends` end a completion."""
    tok = tokenizer(template, bos)
    return Encoder(tok, kind_of(stage), max_length, overlong, apply, tok.convert_tokens_to_ids([*ends]))


def encoded(stage, row, **options):
    """Encodes one row. Returns the tokenizer, and the row's examples or errors."""
    coder = encoder(stage, **options)
    return coder.tokenizer, coder.encode([parse_row(row, coder.kind)])[0]


def trained(tok, example: Example) -> list[str]:
    """Returns the text of each contiguous sequence of trained tokens in an example."""
    runs, last = [], -2
    for position, (token, label) in enumerate(
        zip(example.columns["input_ids"], example.columns["labels"], strict=True)
    ):
        if label == -100:
            continue
        assert label == token
        if position != last + 1:
            runs.append([])
        runs[-1].append(token)
        last = position
    return [tok.decode(run) for run in runs]


def write(path: Path, rows: list) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def make(tmp_path, stage="sft", packing=False, context=400, template=None, on_ray=False, **options):
    """Tokenizes the rows of a job with these keys of `data`, in this process or with Ray Data."""
    session = None if on_ray else contextlib.nullcontext
    tok = tokenizer(template)
    return prepare_rows(stage, Data(**options), tok, context, str(tmp_path / "cache"), packing, session)


def use_small_chunks(monkeypatch, size=300):
    """Makes the pipeline read files in chunks of `size` bytes, so that small files have several chunks."""
    plan = read.plan_chunks
    monkeypatch.setattr(read, "plan_chunks", lambda *args: plan(*args, size))


def evaluator(folder, tokenizer=None, rows_per_forward=64) -> SimpleNamespace:
    """Returns a stand-in for the worker of an `evaluate` run. The stand-in has no models."""
    data, args = SimpleNamespace(subset=None), SimpleNamespace(rows_per_forward=rows_per_forward)
    lease = SimpleNamespace(require=lambda: None)
    work = SimpleNamespace(
        context=1 << 20, folder=str(folder), lease=lease, data=data, inputs={}, spec=STAGE_SPECS["evaluate"]
    )
    return SimpleNamespace(
        rank=0, world=1, gather=lambda value: [value], tokenizer=tokenizer, work=work, args=args
    )


def rows_of(dataset) -> list[dict]:
    return to_hf(dataset, "x").to_list()


def read_rows(path, chunk_bytes=chunks.CHUNK, stage="sft") -> list[tuple]:
    """Returns [(number in the file, row)] of a file, read in chunks of `chunk_bytes`."""
    rows = []
    for chunk in chunks.plan_chunks(
        *files.find_files(str(path), "data.train"), "train", kind_of(stage), chunk_bytes
    ):
        offset = chunks.lines_before(chunk)
        rows += [(number + offset, row) for number, row, _ in chunks.chunk_rows(chunk)]
    return rows
