"""Tests that dpo trains and resumes bit-identically with each loss and passes the first-rows checks. Tests kto's row order."""

import random
import re

import pytest
import torch
import toy_ppo as toy
from running import ROOT

from pipeline.job import load_job, schema
from pipeline.job.stages import STAGE_SPECS
from pipeline.stages import trl_checks, trl_trainer
from pipeline.stages.exact_batches import ExactBatches
from pipeline.stages.kl_pairs import PairedBatches
from pipeline.stages.kto import sampling_strategy

LOSSES = schema.keys(STAGE_SPECS["dpo"].trainer)["loss_type"]["items"]["enum"]
# Quick tests train with these losses: a logistic one, one with label smoothing, one with a running mean, one over a full batch,
# and a mixture.
QUICK = "sigmoid robust bco_pair aot discopop".split()
NEEDS = {"robust": {"label_smoothing": 0.1}, "exo_pair": {"label_smoothing": 0.001}}


def trainer(stage, batches, rows, folder, **settings):
    """Returns TRL's trainer as the stage builds it, for tokenized rows and a nonzero sft adapter."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from toy_data import tokenizer
    from transformers import LlamaForCausalLM

    class Trainer(trl_trainer.TokenizedRows, batches, getattr(trl, f"{stage.upper()}Trainer")):
        pass

    torch.manual_seed(0)
    words = tokenizer()
    model = LlamaForCausalLM(toy.config(vocab_size=len(words)))
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **toy.LORA))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.05 * torch.randn_like(parameter)
    args = getattr(trl, f"{stage.upper()}Config")(
        output_dir=str(folder), report_to="none", disable_tqdm=True, use_cpu=True, bf16=False, max_length=None, max_steps=2,
        gradient_checkpointing=False, per_device_train_batch_size=4, logging_steps=1, save_steps=1, learning_rate=1e-2, **settings,
    )  # fmt: skip
    return Trainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=words)


def dpo(loss, folder):
    dice = random.Random(0)
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = [
        {name: [dice.randrange(3, 250) for _ in range(dice.randrange(3, 8))] for name in names}
        for _ in range(16)
    ]
    return trainer("dpo", ExactBatches, rows, folder, loss_type=[loss], **NEEDS.get(loss, {}))


def weights(made):
    return torch.cat([p.detach().flatten() for p in made.model.parameters() if p.requires_grad])


@pytest.mark.parametrize(
    "loss",
    [pytest.param(loss, marks=[pytest.mark.slow] * (loss not in QUICK)) for loss in LOSSES],
)
def test_a_loss_is_checked_makes_steps_and_resumes(loss, tmp_path):
    made = dpo(loss, tmp_path)
    made.model.eval()
    with torch.no_grad():
        found = trl_checks.compare_with_single_rows("dpo", made, made.model, list(made.train_dataset))
    assert [result.holds for result in found] == [True, True]
    made.model.train()
    made._metrics["eval"].clear()
    start = weights(made)
    made.train()
    end = weights(made)
    assert end.isfinite().all() and (end - start).abs().max() > 1e-4
    again = dpo(loss, tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert torch.equal(weights(again), end)


def test_each_loss_is_explained_and_can_be_set(in_root):
    text = (ROOT / "jobs/demo/dpo.yaml").read_text()
    assert set(re.findall(r"^  #   (\w+)  +\S", text, re.MULTILINE)) == set(LOSSES)
    for loss in LOSSES:
        more = [f"trainer.{key}={value}" for key, value in NEEDS.get(loss, {}).items()]
        job = load_job(
            "jobs/demo/dpo.yaml", [f"trainer.loss_type={loss}", "trainer.loss_weights=null", *more], "dpo"
        )
        assert job.trainer["loss_type"] == [loss]


@pytest.mark.parametrize("loss", schema.keys(STAGE_SPECS["kto"].trainer)["loss_type"]["enum"])
def test_rows_of_kto_are_shuffled(loss, tmp_path):
    rows = [{"prompt_ids": [3], "completion_ids": [4 + i, 5], "label": bool(i % 2)} for i in range(32)]
    settings = {"loss_type": loss, "train_sampling_strategy": sampling_strategy(loss)}
    made = trainer("kto", PairedBatches, rows, tmp_path, **settings)
    # Each batch contains 4 rows to train on, followed by the rows for the KL term.
    own = 4 if made.calculate_KL else None
    batches = made.get_train_dataloader().batch_sampler
    order = [row for batch in batches for row in list(batch)[:own]]
    assert sorted(order) == list(range(32)) and order != sorted(order)
