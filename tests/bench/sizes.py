"""What both sides of a measurement share: the models, the rows, the settings, and the clock.

Both sides import this file and nothing of each other, so that neither pays for the other's imports.
"""

import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "jobs/demo/model"
WORK = ROOT / "runs/bench"  # random models, rows, and what each measurement left
# TRL 1.12, the last one with a PPOTrainer: only the process that measures it sees it
TRL_PPO = ROOT / ".bench/trl"
LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
LEARNING_RATE = 1e-5
SEED = 6  # of our sampling: at size `large` the completions of both updates take about 39 % of the limit
NEVER = -1e4  # added to a logit

SPECIAL = {
    token["content"]: token["id"]
    for token in json.loads((ROOT / "jobs/demo/model/tokenizer.json").read_text())["added_tokens"]
}
EOS, BOS = SPECIAL["<|eot_id|>"], SPECIAL["<|begin_of_text|>"]  # both sizes speak with the demo's tokenizer


@dataclass(frozen=True)
class Size:
    """One size of model, and how much of everything is measured at it."""

    shape: dict[str, int] | None  # of a random Llama; None: the demo model, which is trained
    prompts: int  # of one PPO update
    together: int  # rows of one forward and backward of ours; TRL's minibatch cannot be cut
    generations: int  # completions of each prompt where prompts are shared
    prompt_tokens: int | None  # of each prompt; None: the demo's own
    long_prompt_tokens: int | None  # of each of the long prompts; None: there are none
    new_tokens: int  # most in a completion
    eos_bias: float  # on the end's logit where completions end by themselves, after 40 % of the limit
    updates: int  # of PPO, the first of them a warm-up
    rows: int  # of one step of sft; a step of rm and dpo has half as many pairs, which are two rows each
    words: int | None  # of each row of sft, rm and dpo; None: the demo's rows
    steps: int  # of sft, rm, dpo
    warmup: int  # of these, the first, which are not counted
    logging_steps: int


SMALL = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=1024
)
LLAMA = dict(
    hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, vocab_size=32_000
)
SIZES = {
    "toy": Size(  # for the test of this bench: it shows nothing
        shape=SMALL, prompts=4, together=2, generations=2, prompt_tokens=8, long_prompt_tokens=24, new_tokens=6, eos_bias=4.6,
        updates=2, rows=4, words=10, steps=2, warmup=1, logging_steps=1,
    ),
    "demo": Size(
        shape=None, prompts=64, together=32, generations=8, prompt_tokens=None, long_prompt_tokens=None, new_tokens=40,
        eos_bias=0.0, updates=6, rows=16, words=None, steps=150, warmup=75, logging_steps=5,
    ),
    "large": Size(  # 110 M parameters
        shape=LLAMA, prompts=16, together=3, generations=8, prompt_tokens=32, long_prompt_tokens=96, new_tokens=96, eos_bias=6.6,
        updates=2, rows=8, words=40, steps=10, warmup=2, logging_steps=1,
    ),
}  # fmt: skip


# -------------------------------------------------------------------------------------------------- the models


def prepare(size: str) -> None:
    """Writes the random model and the rows of a size, once."""
    folder = WORK / size
    if (folder / "ready").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    shape = SIZES[size].shape
    if shape:
        write_model(folder / "model", shape)
    write_rows(folder, size)
    (folder / "ready").touch()


def write_model(folder: Path, shape: dict[str, int]) -> None:
    """A Llama of random numbers, with the demo's tokenizer: it knows fewer ids than the model, which nothing minds."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ends = {"eos_token_id": EOS, "bos_token_id": BOS, "pad_token_id": None}
    LlamaForCausalLM(
        LlamaConfig(**shape, max_position_embeddings=512, tie_word_embeddings=True, **ends)
    ).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)


def model_folder(size: str) -> Path:
    return WORK / size / "model" if SIZES[size].shape else DEMO


def write_rows(folder: Path, size: str) -> None:
    """Demonstrations and preferences: those of the demo, or sentences of random words."""
    data, words = ROOT / "jobs/demo/data", SIZES[size].words
    if words is None:
        for name in ("demonstrations", "preferences"):
            (folder / f"{name}.jsonl").write_text((data / f"{name}.jsonl").read_text())
        return
    known = sorted(set((data / "demonstrations.jsonl").read_text().replace('"', " ").split()))
    known = [word for word in known if word.isalpha()]
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choices(known, k=words // 2))

    pairs = [{"prompt": text(), "chosen": text(), "rejected": text()} for _ in range(200)]
    turns = [
        [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair["chosen"]}]
        for pair in pairs
    ]
    write_lines(folder / "preferences.jsonl", pairs)
    write_lines(folder / "demonstrations.jsonl", [{"messages": messages} for messages in turns])


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokenizer(size: str) -> Any:
    """The demo's, with a pad token that is not its end."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(model_folder(size))
    found.pad_token = "<|finetune_right_pad_id|>"
    return found


def prompts(size: str, tokens: Any, long: bool = False) -> list[list[int]]:
    """Token ids of the prompts of all updates."""
    here = SIZES[size]
    width = here.long_prompt_tokens if long else here.prompt_tokens
    if width:
        draw = random.Random(1)
        return [[draw.randrange(10, 1000) for _ in range(width)] for _ in range(here.prompts * here.updates)]
    lines = (ROOT / "jobs/demo/data/prompts.jsonl").read_text().splitlines()
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    return [tokens.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]


def with_ends(model: Any, size: str, case: str) -> Any:
    """The model with completions that end by themselves (`own`) or never (`full`): a bias on its lm head says which.

    One id alone ends a completion, the tokenizer's: TRL's PPO knows no more than one.
    """
    import torch

    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    head = model.get_output_embeddings()
    bias = torch.zeros(model.config.vocab_size, dtype=head.weight.dtype)
    bias[ends] = NEVER
    if case == "own":
        bias[EOS] = SIZES[size].eos_bias
    head.bias = torch.nn.Parameter(bias, requires_grad=False)
    model.generation_config.eos_token_id = EOS
    return model


# ------------------------------------------------------------------------------------------- sft, rm and dpo


def arguments(stage: str, name: str) -> dict[str, Any]:
    """TRL's arguments of a stage, for both sides."""
    size = SIZES[name]
    rows = size.rows if stage == "sft" else size.rows // 2
    return {
        "max_steps": size.steps,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "logging_steps": size.logging_steps,
        "logging_first_step": True,
        "eval_strategy": "no",
        "eval_on_start": False,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "seed": 1,
    }


def raw_rows(stage: str, name: str) -> Iterator[dict[str, Any]]:
    """The rows of a stage's file as TRL's own messages."""
    rows = "demonstrations" if stage == "sft" else "preferences"
    for line in (WORK / name / f"{rows}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if stage == "sft":
            yield {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
        else:
            say = {key: [{"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")}
            yield {"prompt": [{"role": "user", "content": row["prompt"]}], **say}


# --------------------------------------------------------------------------------------------------- the clock


class Clock:
    """When each step ended, and what the process held at most; written as JSON to where the parent asked for it.

    The process was started at `BENCH_BEGIN` (seconds since the epoch), so that imports count as start-up.
    """

    def __init__(self) -> None:
        self.ends: list[tuple[int, float]] = []
        self.processor: list[float] = []
        self.begin = float(os.environ["BENCH_BEGIN"])
        self.facts: dict[str, Any] = {}

    def step(self, number: int, at: float | None = None) -> None:
        self.ends.append((number, at or time.time()))
        self.processor.append(time.process_time())

    def write(self, peak: int, warmup: int = 1) -> None:
        """Seconds from the start to the end of the first step, seconds a step after the warm-up, peak bytes."""
        first = next(i for i, (number, _) in enumerate(self.ends) if number >= warmup)
        (start, begin), (last, end) = self.ends[first], self.ends[-1]
        found = {
            "first_step": self.ends[0][1] - self.begin,
            "step": (end - begin) / (last - start),
            "processor": (self.processor[-1] - self.processor[first]) / (last - start),
            "peak": peak,
            **self.facts,
        }
        Path(os.environ["BENCH_OUT"]).write_text(json.dumps(found))


def high_water() -> int:
    """Bytes: the most that this process held at once."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
