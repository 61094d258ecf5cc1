"""Settings, models, rows and a clock, which both programs of a comparison use.

The two programs do not import each other, because the time for imports is measured, too.
"""

import json
import os
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA, DEMO = ROOT / "jobs/demo/data", ROOT / "jobs/demo/model"
WORK = ROOT / "runs/bench"  # random models, rows, and outputs of measurements
# TRL 1.12, the last version with a PPOTrainer. Only tools/bench/ppo_trl.py imports TRL 1.12.
TRL_PPO = ROOT / ".bench/trl"
LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
LEARNING_RATE = 1e-5
SEED = 6  # sampling seed; with this seed, completions of size `large` have about 39% of the maximum length
NEVER = -1e4  # added to the logit of a token that must not be sampled
PHASES = ("rollout", "score", "values", "update")  # phases of our PPO
CASES = {"full": "all completions up to the limit", "own": "each until it ends by itself"}

SPECIAL = {
    token["content"]: token["id"]
    for token in json.loads((DEMO / "tokenizer.json").read_text())["added_tokens"]
}
EOS, BOS = SPECIAL["<|eot_id|>"], SPECIAL["<|begin_of_text|>"]  # all sizes use the demo's tokenizer


@dataclass(frozen=True)
class Setting:
    """A setting of our PPO or of TRL 1.12's PPO."""

    trl: bool = False
    critic: str = "head"
    bf16: bool = False  # dtype of base and trainer
    # different: one completion per prompt. shared: several completions per prompt. repeated: the same episodes as `shared`, but
    # with the prompt repeated for each completion, so that no forward pass shares a prompt
    prompts: str = "different"

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.bf16 else "float32"

    def __str__(self) -> str:
        name = f"{'TRL 1.12' if self.trl else 'ours'}, {'bf16' if self.bf16 else 'fp32'}"
        name += "" if self.trl else f", critic {self.critic}"
        return name if self.prompts == "different" else f"{name}, {self.prompts} prompts"


# name of a variant -> (our setting, the setting to compare it with)
VARIANTS = {
    "head": (Setting(), Setting(trl=True)),
    "adapter": (Setting(critic="adapter"), Setting(trl=True)),
    "bf16-head": (Setting(bf16=True), Setting(trl=True, bf16=True)),  # for CPUs with bf16 instructions
    "shared-long": (Setting(prompts="shared"), Setting(prompts="repeated")),
}


@dataclass(frozen=True)
class Size:
    """A model size: the model, and the amount of work in each measurement."""

    name: str
    shape: dict[str, int] | None  # config of a random Llama; None means the trained demo model
    prompts: int  # prompts of one PPO update
    together: int  # rows per forward and backward pass of our PPO; TRL always uses the full minibatch
    generations: int  # completions per prompt, if prompts are shared
    prompt_tokens: int | None  # tokens per prompt; None means the demo's prompts
    long_prompt_tokens: int | None  # tokens per prompt if completions share prompts
    new_tokens: int  # maximum tokens of a completion
    eos_bias: float  # added to the logit of EOS in the case `own`, so that completions end at about 40% of the limit
    updates: int  # PPO updates; the first update is a warmup
    rows: int  # rows per step of sft; rm and dpo have half as many pairs, of two rows each
    words: int | None  # words per row of sft, rm and dpo; None means the demo's rows
    steps: int  # steps of sft, rm, dpo
    warmup: int  # number of first steps that are not measured
    logging_steps: int
    pairs: int  # pairs of `evaluate`
    serve_tokens: int  # tokens per completion of `serve`
    serve_seconds: int

    @property
    def folder(self) -> Path:
        return WORK / self.name

    @property
    def model(self) -> Path:
        return self.folder / "model" if self.shape else DEMO

    def prepare(self) -> None:
        """Writes the random model and the rows, unless they exist."""
        if (self.folder / "ready").exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.shape:
            write_model(self.model, self.shape)
        if self.words:
            write_rows(self.folder, self.words)
        else:
            for name in ("demonstrations.jsonl", "preferences.jsonl"):
                shutil.copy(DATA / name, self.folder)
        (self.folder / "ready").touch()

    def adapter(self, seed: int, head: bool = False) -> Path:
        """Returns the folder of a random adapter. Creates the adapter if the folder does not exist."""
        folder = self.folder / f"{'reward' if head else 'policy'}-{seed}"
        if not (folder / "adapter_model.safetensors").exists():
            import torch
            from transformers import AutoModelForCausalLM

            from pipeline.models.adapters import SharedBase

            shared = SharedBase(AutoModelForCausalLM.from_pretrained(self.model, dtype="float32"))
            torch.manual_seed(seed)
            shared.add("random", lora=LORA, head=head)
            for parameter in shared.parameters_of("random"):
                parameter.data += 0.02 * torch.randn_like(parameter)
            shared.save("random", folder)
        return folder

    def tokenizer(self) -> Any:
        """Returns the demo's tokenizer, with a pad token that differs from its end token."""
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(self.model)
        found.pad_token = "<|finetune_right_pad_id|>"
        return found

    def token_ids(self, tokens: Any, long: bool = False) -> list[list[int]]:
        """Returns the token ids of the prompts of all updates."""
        if width := self.long_prompt_tokens if long else self.prompt_tokens:
            draw = random.Random(1)
            return [
                [draw.randrange(10, 1000) for _ in range(width)] for _ in range(self.prompts * self.updates)
            ]
        lines = (DATA / "prompts.jsonl").read_text().splitlines()
        chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
        return [tokens.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]

    def base(self, case: str, dtype: str) -> Any:
        """Returns the model. A bias on the lm head makes the model sample EOS sometimes (case `own`) or never (case `full`).

        Only the tokenizer's end token ends a completion, because TRL's PPO supports only one.
        """
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype)
        ends = model.generation_config.eos_token_id
        head = model.get_output_embeddings()
        bias = torch.zeros(model.config.vocab_size, dtype=head.weight.dtype)
        bias[ends] = NEVER
        if case == "own":
            bias[EOS] = self.eos_bias
        head.bias = torch.nn.Parameter(bias, requires_grad=False)
        model.generation_config.eos_token_id = EOS
        return model


def write_model(folder: Path, shape: dict[str, int]) -> None:
    """Writes a random Llama with the demo's tokenizer. The tokenizer has fewer tokens than the model."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ends = {"eos_token_id": EOS, "bos_token_id": BOS, "pad_token_id": None}
    config = LlamaConfig(**shape, max_position_embeddings=512, tie_word_embeddings=True, **ends)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)


def write_rows(folder: Path, words: int) -> None:
    """Writes demonstrations and preference pairs, whose texts are random words of the demo."""
    known = sorted(set((DATA / "demonstrations.jsonl").read_text().replace('"', " ").split()))
    known, draw = [word for word in known if word.isalpha()], random.Random(0)
    with (
        (folder / "preferences.jsonl").open("w") as preferences,
        (folder / "demonstrations.jsonl").open("w") as demonstrations,
    ):
        for _ in range(200):
            keys = ("prompt", "chosen", "rejected")
            pair = {key: " ".join(draw.choices(known, k=words // 2)) for key in keys}
            turns = [
                {"role": "user", "content": pair["prompt"]},
                {"role": "assistant", "content": pair["chosen"]},
            ]
            preferences.write(json.dumps(pair) + "\n")
            demonstrations.write(json.dumps({"messages": turns}) + "\n")


def shape(vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip(names, (vocabulary, hidden, intermediate, layers, heads), strict=True))


ALL = (
    Size(  # the size that tests/test_bench.py uses
        name="toy", shape=shape(1024, 64, 96, 2, 2), prompts=4, together=2, generations=2,
        prompt_tokens=8, long_prompt_tokens=24, new_tokens=6, eos_bias=4.6, updates=2, rows=4, words=10, steps=2, warmup=1,
        logging_steps=1, pairs=4, serve_tokens=6, serve_seconds=3,
    ),
    Size(  # the demo's model of 0.8M parameters
        name="demo", shape=None, prompts=64, together=32, generations=8, prompt_tokens=None,
        long_prompt_tokens=None, new_tokens=40, eos_bias=0.0, updates=6, rows=16, words=None, steps=150, warmup=75,
        logging_steps=5, pairs=200, serve_tokens=40, serve_seconds=30,
    ),
    Size(  # a random Llama of 110M parameters
        name="large", shape=shape(32_000, 768, 2048, 12, 12), prompts=16, together=3,
        generations=8, prompt_tokens=32, long_prompt_tokens=96, new_tokens=96, eos_bias=6.6, updates=2, rows=8, words=40,
        steps=10, warmup=2, logging_steps=1, pairs=4, serve_tokens=64, serve_seconds=30,
    ),
)  # fmt: skip
SIZES = {size.name: size for size in ALL}


def write(found: dict[str, Any]) -> None:
    """Writes this process's results to the file BENCH_OUT, which the parent process reads."""
    Path(os.environ["BENCH_OUT"]).write_text(json.dumps(found))


def since_start(at: float) -> float:
    """Returns the seconds from the start of this process to `at`, a Unix timestamp."""
    return at - float(os.environ["BENCH_BEGIN"])


class Clock:
    """Records the time at which each step ends, and other results of a measurement."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, float]] = []
        self.facts: dict[str, Any] = {}

    def step(self, number: int, at: float | None = None) -> None:
        self.ends.append((number, at or time.time()))

    def write(self, peak: int, warmup: int = 1) -> None:
        """Writes the seconds until the first step ended, the mean seconds per step after the warmup, and the peak in bytes."""
        start, begin = next(step for step in self.ends if step[0] >= warmup)
        last, end = self.ends[-1]
        found = {
            "first_step": since_start(self.ends[0][1]),
            "step": (end - begin) / (last - start),
            "peak": peak,
        }
        write(found | self.facts)


def high_water() -> int:
    """Returns the peak memory of this process in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
