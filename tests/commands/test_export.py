"""`export`: plain transformers loads what was merged, and says what the registered adapter says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from running import ROOT, stage
from toy_models import BASE, tokenizer

from pipeline.__main__ import main
from pipeline.commands import export as exporting
from pipeline.config import load_job

MODELS = ["policy=models:/toy-policy@champion", "reward=models:/toy-rm@champion"]


@pytest.fixture(scope="module")
def exported(models, storage):
    return stage("export", storage, "exported", *MODELS)["exported"]


def test_a_folder_has_what_others_need(exported, models):
    assert exported["policy"]["same_greedy_completions"] == 1.0
    for kind in ("policy", "reward"):
        folder = Path(exported[kind]["folder"])
        names = {path.name for path in folder.iterdir()}
        wanted = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"}
        assert wanted <= names
        assert not any(name.startswith(("adapter", "pytorch_model")) for name in names)
        card = (folder / "README.md").read_text()
        version = "toy-policy/1" if kind == "policy" else "toy-rm/1"
        for text in (f"models:/{version}", "sha256:abababab", "eval_accuracy: 0.75", "license", "trl 1.16.0"):
            assert text in card
    assert "as its policy" in card and "models:/toy-policy/1" in card
    said = json.loads((Path(exported["policy"]["folder"]) / "generation_config.json").read_text())
    assert said["eos_token_id"] == [817, 825] and said["pad_token_id"] == tokenizer().pad_token_id


def test_bfloat16_is_rounded_once(models, storage):
    from safetensors.torch import load_file

    result = stage("export", storage, "rounded", *MODELS, "reward=null", "model.dtype=bfloat16")["exported"]
    assert list(result) == ["policy"] and result["policy"]["largest_logprob_difference"] < 0.1
    weights = load_file(f"{result['policy']['folder']}/model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    base = load_file(f"{BASE}/model.safetensors")[name].float()
    adapter = load_file(f"{models['toy-policy']}/adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight"] for x in "AB")
    scale = 8 / 4  # peft's lora_alpha over r
    assert weights[name].dtype == torch.bfloat16
    assert torch.equal(weights[name], (base + scale * (b @ a)).bfloat16())


def test_a_merge_that_went_wrong_is_not_exported(models, storage, capsys, monkeypatch):
    right = exporting.merge

    def wrong(base, adapter, dtype):
        merged = right(base, adapter, dtype)
        merged.get_output_embeddings().weight.data *= 0.5
        return merged

    monkeypatch.setattr(exporting, "merge", wrong)
    assert stage("export", storage, "wrong-merge", *MODELS, "reward=null", status=1) == {}
    assert "the exported policy differs from the adapter" in capsys.readouterr().err
    left = {path.name for path in (storage / "wrong-merge").iterdir()}
    assert left == {"job.json", "failed.json"}  # no model
    failed = json.loads((storage / "wrong-merge/failed.json").read_text())
    assert "the exported policy differs from the adapter" in failed["error"]


def test_a_mistake_does_not_cost_the_run_that_it_was_to_replace(models, storage, capsys, tmp_path, in_root):
    from transformers import AutoModelForSequenceClassification

    whole = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1)
    whole.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (storage / "precious").mkdir()
    (storage / "precious/result.json").write_text("{}")
    name = [f"run.storage_path={storage}", "run.name=precious", "run.fresh=true"]
    assert main(["export", "jobs/demo/export.yaml", *MODELS, *name, f"reward={tmp_path}"]) == 2
    assert "reward: " in (said := capsys.readouterr().err) and "there is nothing to merge" in said
    assert [path.name for path in (storage / "precious").iterdir()] == ["result.json"]


def test_what_an_interrupted_export_left_is_gone(models, storage, embedded_ray):
    for left in ("reward", "policy.partial"):
        (storage / "again" / left).mkdir(parents=True)
        (storage / "again" / left / "model.safetensors").write_text("half")
    stage("export", storage, "again", *MODELS, "reward=null")
    assert {path.name for path in (storage / "again").iterdir()} == {"job.json", "policy", "result.json"}


def test_a_run_that_is_interrupted_notes_its_name(models, storage, monkeypatch, in_root):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "write", stop)
    job = load_job("jobs/demo/export.yaml", [*MODELS, f"run.storage_path={storage}"], "export")
    with pytest.raises(KeyboardInterrupt) as caught:
        exporting.run(job)
    [note] = caught.value.__notes__
    assert (storage / note.removeprefix("export.run.name=") / "job.json").exists()


def test_a_probe_leaves_room_in_a_short_context(models):
    from pipeline.runtime.host import Host, Work

    settings = ["trainer.response_length=250", f"model.name_or_path={BASE}"]
    job = load_job(ROOT / "jobs/demo/export.yaml", settings, "export")
    host = Host(Work(job, tokenizer(), {"context_length": 256}, {}, {}, ""))
    rows, length = exporting.probes(host)
    assert length == 256 - max(map(len, rows))
    assert exporting.probes(Host(replace(host.work, base={"context_length": None})))[1] == 250
