"""Tests that TRL stages save adapters in peft's format, which the other stages can read."""

import json
from types import SimpleNamespace

import alone
import peft
import pytest
import torch
import toy_ppo as toy
import transformers
import trl
from safetensors.torch import load_file

from pipeline.errors import InputError
from pipeline.job.stages import STAGE_SPECS
from pipeline.models.adapters import SharedBase
from pipeline.run import worker
from pipeline.stages import trl_trainer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    toy.base().save_pretrained(folder)
    return folder


def trained(base, task_type="CAUSAL_LM", **lora):
    """Returns a trainer with a peft model whose adapter has changed."""
    heads = {"CAUSAL_LM": {}, "SEQ_CLS": {"num_labels": 1}}[task_type]
    name = "CausalLM" if task_type == "CAUSAL_LM" else "SequenceClassification"
    model = getattr(transformers, f"AutoModelFor{name}").from_pretrained(base, **heads)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type=task_type, **{**toy.LORA, **lora}))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    return SimpleNamespace(
        model=model.eval(),
        accelerator=accelerator,
        processing_class=SimpleNamespace(pad_token_id=0),
        args=SimpleNamespace(bf16=False, fp16=False),
    )


@pytest.mark.parametrize(("task_type", "lora"), [("CAUSAL_LM", {"use_dora": True}), ("SEQ_CLS", {})])
def test_the_files_are_those_of_pefts_own_writer(task_type, lora, base, tmp_path):
    trainer = trained(base, task_type, **lora)
    trl_trainer.save_adapter(trainer, str(tmp_path / "ours"))
    assert not trainer.model.peft_config["default"].inference_mode  # saving does not change the model
    trainer.model.save_pretrained(tmp_path / "pefts")
    folders = [tmp_path / writer for writer in ("ours", "pefts")]
    tensors = [(folder / "adapter_model.safetensors").read_bytes() for folder in folders]
    assert tensors[0] == tensors[1]
    ours, pefts = (json.loads((folder / "adapter_config.json").read_text()) for folder in folders)
    pefts["target_modules"].sort()  # peft writes a set in random order
    assert ours == pefts


def test_an_adapter_on_the_lm_head_contains_no_base_weight(base, tmp_path):
    """The file must not contain lm_head.base_layer.weight, which peft's save_pretrained adds and other stages reject."""
    trainer = trained(base, target_modules=["q_proj", "lm_head"])
    trl_trainer.save_adapter(trainer, str(tmp_path))
    assert all("lora_" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    rows = [[5, 6, 7, 8], [9, 10]]
    worker.require_reload(
        trl_trainer.adapter_outputs(trainer, rows),
        trl_trainer.adapter_outputs(trainer, rows, str(tmp_path)),
        "",
    )
    shared = SharedBase(transformers.AutoModelForCausalLM.from_pretrained(base))
    shared.add("policy", folder=tmp_path)
    for row in rows:
        ids = torch.tensor([row])
        with torch.no_grad(), shared.use("policy"):
            ours = shared.logits(shared.hidden("policy", ids))
        torch.testing.assert_close(ours, trl_trainer.row_logits(trainer.model, row), rtol=1e-4, atol=1e-4)


def test_speed_counts_the_tokens_and_seconds_of_steps_only(base, monkeypatch):
    clock = iter([10.0, 12.0, 50.0, 52.0])
    monkeypatch.setattr(trl_trainer.time, "monotonic", lambda: next(clock))
    trainer = trained(base)
    trainer._total_train_tokens = 1000  # number of tokens that were trained before a resume
    notice = SimpleNamespace(poll=lambda step: False)
    two = SimpleNamespace(work=SimpleNamespace(spec=STAGE_SPECS["dpo"]), device="cpu", world=2, notice=notice)
    measured = trl_trainer.Reporter(two, trainer, None)
    measured.tokens = 1000
    assert measured.speed() == {}
    for _ in range(2):
        measured.on_step_begin(None, None, None)
        trainer._total_train_tokens += 300
        measured.on_step_end(None, SimpleNamespace(global_step=1), None)
    monkeypatch.setattr("pipeline.models.gpus.peak_flops", lambda device: 1e9)
    found = measured.speed()
    assert found["train_tokens_per_second"] == 600 / 4 and found["memory/peak"] > 0
    # three passes over 600 tokens: forward and backward of the policy, forward of the reference
    flops = 2 * trainer.model.get_base_model().num_parameters() * 600 * 3
    assert found["mfu"] == pytest.approx(flops / (4 * 1e9 * 2))
    assert measured.speed() == {}


@pytest.mark.parametrize(
    ("lora", "trainer", "error", "says"),
    [
        ({"target_modules": ["nope"]}, peft.get_peft_model, InputError, "^lora: peft rejects these settings .*nope"),
        ({"r": 4, "no_such_key": 1}, peft.get_peft_model, TypeError, "no_such_key"),
        ({"r": 4}, lambda model, peft_config: {}[0], KeyError, "0"),
    ],
    ids=["peft", "Python", "TRL"],
)  # fmt: skip
def test_only_an_error_of_peft_names_the_lora_section(lora, trainer, error, says):
    with pytest.raises(error, match=says):
        trl_trainer.make_trainer(trainer, lora, model=toy.base())


def test_a_policy_continues_without_its_patterns_and_initialization(base, tmp_path):
    """With these settings, loading the adapter with peft would hang or change the base."""
    trl_trainer.save_adapter(trained(base, rank_pattern={"q_proj": 2}), str(tmp_path))
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    changed = {"target_modules": r"(.*\w+)+\w+_projX", "init_lora_weights": False}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, **changed}))
    worker = SimpleNamespace(
        load_base=toy.base,
        work=SimpleNamespace(inputs={"policy": "x", "reference": "x"}, named={"reference": "x"}, lora={}),
        input=lambda _: str(tmp_path),
        rows=lambda _: None,
        tokenizer=None,
    )

    def trainer(model, **_):  # like TRL's DPOTrainer, copies the adapter for the reference
        model.add_adapter("ref", model.peft_config["default"])
        peft.set_peft_model_state_dict(model, peft.get_peft_model_state_dict(model), adapter_name="ref")
        return SimpleNamespace(model=model)

    model = trl_trainer.continue_policy(worker, trainer, args=None).model
    stored = load_file(tmp_path / "adapter_model.safetensors")
    for name in ("default", "ref"):
        tensors = peft.get_peft_model_state_dict(model, adapter_name=name)
        assert tensors.keys() == stored.keys()
        assert all(torch.equal(tensors[key], stored[key]) for key in stored)


def test_fp32_products_use_tf32_only_if_the_job_sets_it(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.training_args, "is_torch_tf32_available", lambda: True)  # as on a GPU
    before = torch.backends.fp32_precision
    for settings, expected in ([], "ieee"), (["trainer.tf32=true"], "tf32"):
        one = alone.worker("sft", tmp_path, "trainer.torch_compile=true", *settings)
        with worker.like_a_worker(one.work.places):
            trl_trainer.make_arguments(one, trl.SFTConfig)
            assert torch.backends.fp32_precision == expected
        assert torch.backends.fp32_precision == before
