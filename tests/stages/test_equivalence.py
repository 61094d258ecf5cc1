"""Tests that the pipeline does not change training: bare TRL and two workers give the same losses."""

import json

import pytest
from running import NO_EVAL, ROOT, curve, stage

from pipeline.config import load_job

STEPS = 12
QUICK = [
    *NO_EVAL, "trainer.lr_scheduler_type=constant", "trainer.warmup_steps=0", "trainer.logging_steps=1", "trainer.save_strategy=no",
    "data.batch_size=16", f"trainer.max_steps={STEPS}", "trainer.per_device_train_batch_size=8",
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("embedded_ray")


@pytest.fixture(scope="module")
def one_worker(embedded_ray, storage):
    """Returns {stage: run} with one worker and two micro-batches per step."""
    found = {}
    for name in ("sft", "rm", "dpo", "kto"):
        policy = [f"policy=models:/rlhf-sft/{found['sft']['version']}"] if name in ("dpo", "kto") else []
        found[name] = stage(name, storage, f"equal-{name}", *QUICK, *policy)
    return found


@pytest.mark.parametrize("name", ["sft", "rm", "dpo", "kto"])
def test_losses_equal_those_of_bare_trl(name, one_worker, storage):
    ours = curve(storage, one_worker[name])
    theirs = bare(name, one_worker["sft"]["adapter"])
    assert len(ours) == len(theirs) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert max(theirs) - min(theirs) > 1e-2, "the losses do not move: nothing was compared"


# On toy rows, tests/data/test_feed.py and tests/ppo/test_trainer.py test this for all stages.
@pytest.mark.slow
def test_two_workers_equal_one_with_twice_the_batch(one_worker, storage):
    two = stage("rm", storage, "equal-rm-2", *QUICK, "scaling.num_workers=2")
    ours = curve(storage, two)
    assert len(ours) == STEPS
    assert ours == pytest.approx(curve(storage, one_worker["rm"]), abs=1e-4)


# ------------------------------------------------------------------------------------------------ bare TRL


def rows(name):
    """Returns the raw rows as TRL's own messages, so that the test also covers templating and tokenizing."""
    files = {"sft": "demonstrations", "kto": "thumbs"}
    path = ROOT / "jobs/demo/data" / f"{files.get(name, 'preferences')}.jsonl"
    for row in map(json.loads, path.read_text().splitlines()):
        if name == "sft":
            yield {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
            continue
        sides = {key: row[key] for key in ("completion", "chosen", "rejected") if key in row}
        said = {key: [{"role": "assistant", "content": text}] for key, text in sides.items()}
        label = {"label": row["label"]} if name == "kto" else {}
        yield {"prompt": [{"role": "user", "content": row["prompt"]}], **said, **label}


def parts(name, config):
    """Returns tokenizer, raw rows, arguments and LoRA settings of a demo job, for TRL alone."""
    import datasets
    from transformers import AutoTokenizer

    job = load_job(ROOT / f"jobs/demo/{name}.yaml", QUICK, name)
    args = dict(job.trainer) | {"gradient_accumulation_steps": 2}
    args |= {"output_dir": str(ROOT / "runs/bare"), "report_to": "none", "disable_tqdm": True}
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "jobs/demo/model")
    # The tokenizer names no pad token, like Llama 3's. By default, TRL would pad with eos and read the reward before it.
    tokenizer.pad_token = "<|finetune_right_pad_id|>"
    return tokenizer, datasets.Dataset.from_list(list(rows(name))), config(**args), job.lora


def bare(name, policy=None):
    """Returns the losses of TRL's trainer on the base, with a new adapter or, for dpo and kto, the adapter in `policy`."""
    import torch
    import transformers
    import trl
    from peft import LoraConfig, PeftModel

    trainer = {"sft": "SFT", "rm": "Reward", "dpo": "DPO", "kto": "KTO"}[name]
    tokenizer, data, args, lora = parts(name, getattr(trl, f"{trainer}Config"))
    transformers.set_seed(args.seed)
    kind = "SequenceClassification" if name == "rm" else "CausalLM"
    head = {"num_labels": 1} if name == "rm" else {}
    loader = getattr(transformers, f"AutoModelFor{kind}")
    model = loader.from_pretrained(ROOT / "jobs/demo/model", dtype="float32", **head)
    adapter = {"peft_config": LoraConfig(task_type="SEQ_CLS" if head else "CAUSAL_LM", **lora)}
    if name in ("dpo", "kto"):
        model, adapter = PeftModel.from_pretrained(model, policy, is_trainable=True), {}
    if name == "kto":
        # TRL computes its KL term per micro-batch in file order. So a full step is one micro-batch in the pipeline's order.
        args.per_device_train_batch_size, args.gradient_accumulation_steps = 16, 1
        data = data.select(torch.randperm(len(data), generator=torch.Generator().manual_seed(args.seed)))
    made = getattr(trl, f"{trainer}Trainer")(
        model, args=args, train_dataset=data, processing_class=tokenizer, **adapter
    )
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]
