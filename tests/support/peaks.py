"""Measures the memory of a training step, for tests/planning/test_plan.py.

Usage: `python tests/support/peaks.py STAGE DTYPE CHECKPOINTING`. Prints JSON with the bytes by which the process grew in a
step, and with the planned bytes of the phase `update` and of Adam. Pages of files are subtracted, because their number depends
on the page cache. Set MALLOC_MMAP_THRESHOLD_, so that the process returns unused memory to the system.
"""

import gc
import json
import sys
import tempfile
from pathlib import Path

import datasets
import torch
import toy_ppo as toy
from peft import LoraConfig
from running import ROOT
from settled import plan_of
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from pipeline.job import load_job
from pipeline.models.adapters import SharedBase
from pipeline.models.tokenizer import load_tokenizer
from pipeline.planning import plan
from pipeline.ppo.clock import Phases
from pipeline.stages.kl_pairs import PairedBatches

ROWS, WIDTH = 8, 128
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
SHAPE = {
    "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 16_000, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip


class Dpo(DPOTrainer):
    def _prepare_dataset(self, dataset, *_):
        return dataset


class Kto(PairedBatches, KTOTrainer):
    def _prepare_dataset(self, dataset, *_):
        return dataset


def ids(count):
    return torch.randint(10, 1000, (count,)).tolist()


def row(stage):
    if stage == "sft":
        tokens = ids(WIDTH)
        return {"input_ids": tokens, "labels": tokens}
    if stage == "rm":
        return {"chosen_ids": ids(WIDTH), "rejected_ids": ids(WIDTH)}
    if stage == "kto":
        return {"prompt_ids": ids(WIDTH // 2), "completion_ids": ids(WIDTH // 2), "label": ids(1)[0] % 2 == 0}
    return {"prompt_ids": ids(WIDTH // 2), "chosen_ids": ids(WIDTH // 2), "rejected_ids": ids(WIDTH // 2)}


def trl_step(stage, config, dtype, checkpointing, folder):
    """Returns a function that runs two training steps with TRL's trainer."""
    kind = LlamaForSequenceClassification if stage == "rm" else LlamaForCausalLM
    trainer_class, config_class, options = {
        "sft": (SFTTrainer, SFTConfig, {"dataset_kwargs": {"skip_prepare_dataset": True}}),
        "rm": (RewardTrainer, RewardConfig, {}),
        "dpo": (Dpo, DPOConfig, {}),
        "kto": (Kto, KTOConfig, {}),
    }[stage]
    trainer = trainer_class(
        model=kind._from_config(config, dtype=dtype),
        args=config_class(
            output_dir=folder, per_device_train_batch_size=ROWS, max_steps=2, report_to="none", max_length=None,
            bf16=dtype == torch.bfloat16, use_cpu=True, gradient_checkpointing=checkpointing, save_strategy="no",
            disable_tqdm=True, **options,
        ),
        train_dataset=datasets.Dataset.from_list([row(stage) for _ in range(2 * ROWS)]),
        peft_config=LoraConfig(task_type="SEQ_CLS" if stage == "rm" else "CAUSAL_LM", **LORA),
        processing_class=load_tokenizer(str(ROOT / "jobs/demo/model")),
    )  # fmt: skip
    return trainer.train


def ppo_step(config, dtype, checkpointing):
    """Returns a function that runs an update with our PPO trainer."""
    bf16 = dtype == torch.bfloat16
    model = LlamaForCausalLM._from_config(config, dtype=dtype).eval()
    shared = SharedBase(model, autocast=torch.bfloat16 if bf16 else None)
    shared.add("reference", lora=LORA)
    shared.add("policy", copy_of="reference", trainable=True)
    shared.add("reward", lora=LORA, head=True)
    shared.add("critic", copy_of="reward", head=True, trainable=True)
    rows = [{"input_ids": ids(WIDTH // 2), "row": json.dumps({"prompt": str(i)})} for i in range(16)]
    trainer = toy.trainer(
        shared=shared, rows=rows, response_length=WIDTH // 2, batch_size=16, per_device_train_batch_size=ROWS,
        local_rollout_forward_batch_size=16, bf16=bf16, gradient_checkpointing=checkpointing, num_ppo_epochs=1,
        num_mini_batches=1, total_episodes=16,
    )  # fmt: skip
    return trainer.run_update


def planned(stage, folder, dtype, checkpointing):
    settings = {
        "model.name_or_path": folder, "model.dtype": str(dtype).removeprefix("torch."),
        "trainer.bf16": str(dtype == torch.bfloat16).lower(), "trainer.per_device_train_batch_size": ROWS,
        "trainer.gradient_checkpointing": str(checkpointing).lower(),
    }  # fmt: skip
    if stage == "ppo":
        half = WIDTH // 2
        settings |= {
            "trainer.critic": "adapter",
            "data.max_length": half,
            "trainer.response_length": half,
            "trainer.batch_size": 16,
        }
    else:
        settings |= {"data.max_length": WIDTH, "data.batch_size": ROWS}
    job = load_job(ROOT / f"jobs/demo/{stage}.yaml", [f"{k}={v}" for k, v in settings.items()])
    items = plan_of(job).items
    return sum(item.size for item in items if item.phase == "update" or "Adam" in item.what)


def file_bytes():
    """Returns the bytes of the process's resident memory that are mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))


def main(stage, dtype, checkpointing):
    config, folder = LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"]), tempfile.mkdtemp()
    config.save_pretrained(folder)
    if stage == "rm":
        config.num_labels = 1
    step = ppo_step(config, dtype, checkpointing) if stage == "ppo" else None
    step = step or trl_step(stage, config, dtype, checkpointing, folder)
    gc.collect()
    phases, file_start = Phases(torch.device("cpu")), file_bytes()
    with phases("before"):
        pass
    if stage == "ppo":
        grown = step()["memory/peak"] * plan.GIB - phases.peak_bytes["before"]
    else:
        with phases("step"):
            step()
        grown = phases.peak_bytes["step"] - phases.peak_bytes["before"]
    grown -= file_bytes() - file_start
    print(json.dumps({"grown": grown, "planned": planned(stage, folder, dtype, checkpointing)}))


if __name__ == "__main__":
    main(sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3] == "true")
