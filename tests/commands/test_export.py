"""Tests that other libraries load exported models and compute the adapter's outputs, and that a push is one commit."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import requests
import torch
from huggingface_hub import ModelCard
from model_hub import READER, TOKEN, connected, of_folder
from registered import published
from running import ROOT, stage
from safetensors.torch import load_file
from toy_models import BASE, tokenizer
from transformers import AutoModelForSequenceClassification

from pipeline import registry
from pipeline.__main__ import main
from pipeline.commands import export
from pipeline.job import load_job
from pipeline.models.base import base_identity
from pipeline.registry import lineage
from pipeline.settle.identity import tracking_of

MODELS = ["policy=models:/toy-policy@champion", "reward=models:/toy-rm@champion"]
POLICY = [MODELS[0], "reward=null"]
REWARD = ["policy=null", MODELS[1]]
ADAPTER = ["trainer.merge=false", "trainer.hub_model_id=owner/mine"]
QUESTION = "What is the capital of Peru?"
PUSH = "trainer.push_to_hub=true"


@pytest.fixture(scope="module")
def exported(models, storage):
    return stage("export", storage, "exported", *MODELS)["exported"]


def test_a_folder_has_the_files_that_transformers_needs(exported, models):
    assert exported["policy"]["same_greedy_completions"] == 1.0
    for kind in ("policy", "reward"):
        folder = Path(exported[kind]["folder"])
        names = {path.name for path in folder.iterdir()}
        wanted = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"}
        assert wanted <= names
        assert not any(name.startswith(("adapter", "pytorch_model")) for name in names)
        settings = json.loads((folder / "config.json").read_text())  # the key names that transformers 4 reads
        assert settings["rope_theta"] == 10000.0 and settings["torch_dtype"] == settings["dtype"] == "float32"
        words = json.loads((folder / "tokenizer_config.json").read_text())
        assert words["tokenizer_class"] == "PreTrainedTokenizerFast"
        card = (folder / "README.md").read_text()
        version = "toy-policy/1" if kind == "policy" else "toy-rm/1"
        named = (f"models:/{version}", "sha256:abababab", "eval_accuracy: 0.75", "trl 1.16.0")
        # The base was saved in a format that needs transformers 5.
        for text in (*named, "Needs transformers 5.0 or newer"):
            assert text in card
    assert "as its policy" in card and "models:/toy-policy/1" in card
    said = json.loads((Path(exported["policy"]["folder"]) / "generation_config.json").read_text())
    assert said["eos_token_id"] == [817, 825] and said["pad_token_id"] == tokenizer().pad_token_id


def test_bfloat16_is_rounded_once(models, storage):
    left = storage / "rounded/policy.partial/model.safetensors"  # as an interrupted export would leave it
    left.parent.mkdir(parents=True)
    left.write_text("half")
    result = stage("export", storage, "rounded", *POLICY, "model.dtype=bfloat16")["exported"]
    assert not left.exists()
    assert list(result) == ["policy"] and result["policy"]["largest_logprob_difference"] < 0.1
    weights = load_file(f"{result['policy']['folder']}/model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    base = load_file(f"{BASE}/model.safetensors")[name].float()
    adapter = load_file(f"{models['toy-policy']}/adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight"] for x in "AB")
    scale = 8 / 4  # lora_alpha / r
    assert weights[name].dtype == torch.bfloat16
    assert torch.equal(weights[name], (base + scale * (b @ a)).bfloat16())


def test_a_failed_merge_is_not_exported(models, storage, capsys, monkeypatch):
    right = export.merge_adapter

    def wrong(base, adapter, dtype):
        merged = right(base, adapter, dtype)
        merged.get_output_embeddings().weight.data *= 0.5
        return merged

    monkeypatch.setattr(export, "merge_adapter", wrong)
    assert stage("export", storage, "wrong-merge", *POLICY, status=1) == {}
    assert "the exported policy differs from the adapter" in capsys.readouterr().err
    left = {path.name for path in (storage / "wrong-merge").iterdir()}
    assert left == {"job.json", "failed.json", "lease"}  # the failed export left no folder with a model


def test_an_error_keeps_the_run_that_was_to_be_overwritten(models, storage, capsys, tmp_path, in_root):
    whole = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1)
    whole.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (storage / "precious").mkdir()
    (storage / "precious/result.json").write_text("{}")
    name = [f"run.storage_path={storage}", "run.name=precious", "run.overwrite=true"]
    assert main(["export", "jobs/demo/export.yaml", *MODELS, *name, f"reward={tmp_path}"]) == 2
    assert "reward: " in (said := capsys.readouterr().err) and "there is nothing to merge" in said
    assert [path.name for path in (storage / "precious").iterdir()] == ["result.json"]


# ------------------------------------------------------------------------------------------------- a push to the Hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with connected(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def test_without_push_to_hub_nothing_is_sent(models, storage, hub, capsys):
    result = stage("export", storage, "dry", *POLICY, *ADAPTER)
    assert hub.requests == [] and "hub" not in result
    folder, said = result["exported"]["policy"]["folder"], capsys.readouterr().out
    assert f"nothing was uploaded; set trainer.push_to_hub=true to push {folder} to owner/mine" in said
    assert "warning: the base is a local folder" in said


@pytest.mark.parametrize("lfs", [True, False])
def test_a_push_is_complete_and_private(models, storage, hub, capsys, monkeypatch, lfs):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", lfs)
    hub.lfs = lfs
    result = stage("export", storage, f"pushed-{lfs}", *POLICY, *ADAPTER, PUSH)
    folder = Path(result["exported"]["policy"]["folder"])
    assert of_folder(folder).items() <= hub.files("owner/mine").items()
    assert hub.repos["owner/mine"]["private"]
    assert {sent for _, path, sent in hub.requests if not path.startswith("/lfs/")} == {f"Bearer {TOKEN}"}
    commit = hub.repos["owner/mine"]["branches"]["main"]
    assert result["hub"] == {"repo_id": "owner/mine", "commit": commit}
    commits = hub.repos["owner/mine"]["commits"]
    stage("export", storage, f"pushed-{lfs}", *POLICY, *ADAPTER, PUSH)  # a second push changes nothing
    assert hub.repos["owner/mine"]["commits"] == commits and len(commits) == 2
    files = [path.read_bytes() for path in (storage / f"pushed-{lfs}").rglob("*") if path.is_file()]
    assert TOKEN.encode() not in b"".join(files) and TOKEN not in "".join(capsys.readouterr())


def test_a_version_replaces_the_files_of_the_previous_one(models, storage, hub):
    """A push removes the previous version's files. Files that the user added to the repository stay."""
    stage("export", storage, "first", *POLICY, *ADAPTER, PUSH)
    added = {"notes.md": b"mine", "gguf/config.json": b"{}"}
    hub.put("owner/mine", hub.files("owner/mine") | added, private=True)
    stage("export", storage, "second", *POLICY, "trainer.hub_model_id=owner/mine", PUSH)
    there = set(hub.files("owner/mine"))
    assert "model.safetensors" in there and ".gitattributes" in there
    assert not [name for name in there if name.startswith("adapter") or name == "lineage.json"]
    assert added.items() <= hub.files("owner/mine").items()
    assert len(hub.repos["owner/mine"]["commits"]) == 4  # the adapter is still in the commit history


@pytest.mark.parametrize(
    ("token", "repo", "says"),
    [
        ("", "owner/mine", r"trainer\.push_to_hub: HF_TOKEN is not set; make a token with write access at https://"),
        ("hf_" + "xX1" * 11, "owner/mine", "Invalid user token.*; make a token with write access"),
        (TOKEN, "owner/theirs", r"owner/theirs has files that no export wrote \(README\.md, model\.safetensors\)"),
        (TOKEN, "owner/open", r"owner/open exists and is public; set trainer\.hub_private_repo=false"),
    ],
)  # fmt: skip
def test_a_push_that_must_fail_is_an_error_before_the_merge(
    token, repo, says, models, storage, hub, capsys, monkeypatch
):
    hub.put("owner/theirs", {"README.md": b"---\ntags: [x]\n---\n", "model.safetensors": b"1"}, private=True)
    hub.put("owner/open", {".gitattributes": b""})
    monkeypatch.setenv("HF_TOKEN", token)
    stage("export", storage, "refused", *POLICY, f"trainer.hub_model_id={repo}", PUSH, status=2)
    assert re.search(says, said := capsys.readouterr().err, re.DOTALL), said
    assert hub.writes() == [] and not (storage / "refused").exists()


@pytest.mark.parametrize(("token", "repo"), [(TOKEN, "others/mine"), (READER, "owner/mine")])
def test_a_push_without_the_right_to_write_fails_with_one_line(
    token, repo, models, storage, hub, capsys, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", token)
    where = ["trainer.merge=false", f"trainer.hub_model_id={repo}", PUSH]
    stage("export", storage, "theirs", *POLICY, *where, "run.overwrite=true", status=1)
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(rf"failed: the push to {repo} failed .*403.*run\.name=theirs continues without", said)
    assert hub.repos == {}


def test_without_network_nothing_is_merged(models, storage, hub, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    stage("export", storage, "offline", *POLICY, *ADAPTER, PUSH, status=2)
    assert "trainer.push_to_hub: the push to owner/mine failed (ConnectError" in capsys.readouterr().err
    assert not (storage / "offline").exists()


def test_an_interrupted_push_continues(models, storage, hub, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    hub.lfs, hub.broken_after = True, 4  # the fifth write request, which sends the weights, fails
    stage("export", storage, "cut", *POLICY, *ADAPTER, PUSH, status=1)
    said = capsys.readouterr().err
    assert "507" in said and "run.name=cut continues without merging again" in said
    assert set(hub.files("owner/mine")) == {".gitattributes"}  # the repository has no incomplete file
    hub.broken_after = None
    result = stage("export", storage, "cut", *POLICY, *ADAPTER, PUSH)
    # The second attempt does not export the adapter again.
    assert "policy  " not in capsys.readouterr().out
    assert of_folder(Path(result["exported"]["policy"]["folder"])).items() <= hub.files("owner/mine").items()


@pytest.mark.parametrize(
    ("models_of", "merge"),
    [
        (POLICY, "false"),
        (REWARD, "true"),
        pytest.param(POLICY, "true", marks=pytest.mark.slow),
        pytest.param(REWARD, "false", marks=pytest.mark.slow),
    ],
    ids=["policy", "merged-reward", "merged-policy", "reward"],
)
def test_the_code_of_a_card_gives_the_adapters_outputs(models_of, merge, engine, storage, in_root):
    """The model card's code uses only peft, transformers and the folder of the base."""
    kind = "policy" if models_of is POLICY else "reward"
    made = stage("export", storage, f"card-{kind}-{merge}", *models_of, f"trainer.merge={merge}")["exported"]
    folder = Path(made[kind]["folder"])
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    # The generation config of the base may lack the end token that the policy was trained with.
    assert ("eos_token_id=ends" in code and "ends = [817, 825]" in code) == (
        kind == "policy" and merge == "false"
    )
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as said:
        exec(code.replace('"jobs/demo/model"', f'"{BASE}"'), {})
    if kind == "reward":
        assert float(said.getvalue()) == pytest.approx(engine.score(QUESTION, "Lima."), abs=1e-4)
    else:
        assert said.getvalue().strip() == engine.greedy(QUESTION, length=128).strip()


def test_a_card_has_the_fields_that_the_hub_reads(models, storage, hub, in_root):
    """The card names the base's license, the datasets of all ancestors, and the model versions that wrote training rows."""
    readme = b"---\nlicense: llama3.1\nlicense_link: https://x.org/licence\n---\nA base."
    hub.put("org/base", of_folder(Path(BASE)) | {"README.md": readme})
    folder = storage / "on-the-hub"
    shutil.copytree(models["toy-rm"], folder)
    wrote = {"models:/demo-ppo/3": 300, "models:/demo-sft/1": 1}
    base, digests = base_identity("org/base"), {"train": "ab" * 32}
    facts = lineage.describe("rm", base, tokenizer(), {}, digests, rows_from=wrote)
    lineage.write(str(folder), facts)
    settings = [
        f"run.storage_path={storage}", "run.name=made-hub-rm", "mlflow.registered_model=hub-rm", "gate={}",
        "data.train=hf://datasets/org/prefs@main:small/train", "model.load_in_4bit=true",
    ]  # fmt: skip
    job = load_job("jobs/demo/rm.yaml", settings, "rm")
    with registry.mlflow_run(tracking_of(job), {}) as run_id:
        published(job, run_id, str(folder), {"eval_accuracy": 0.75}, facts)
    where = ["model.name_or_path=org/base", "policy=null", "reward=models:/hub-rm@champion", *ADAPTER]
    result = stage("export", storage, "hub-card", *where)
    text = (Path(result["exported"]["reward"]["folder"]) / "README.md").read_text()
    data = ModelCard(text).data.to_dict()
    expected = {
        "library_name": "peft", "base_model": "org/base", "base_model_relation": "adapter", "license": "llama3.1",
        "license_link": "https://x.org/licence", "datasets": ["org/prefs"], "pipeline_tag": "text-classification",
        "tags": ["rlhf-pipeline", "trl", "lora", "rm", "reward-model"],
    }  # fmt: skip
    assert expected.items() <= data.items()
    [figure] = data["model-index"][0]["results"][0]["metrics"]
    assert (figure["type"], figure["value"]) == ("accuracy", 0.75)
    assert "Its base was in 4 bits (nf4) in training." in text and "`reward: owner/mine`" in text
    assert "  - 300 rows from `models:/demo-ppo/3`\n  - 1 row from `models:/demo-sft/1`\n" in text


SERVES = ROOT / ".bench/vllm-serve/bin"


@pytest.mark.slow
def test_vllm_serves_an_adapter_with_the_command_that_export_prints(engine, models, storage, capsys, in_root):
    """Compares vLLM's reward scores (within 1e-4) and a greedy completion with the pipeline's.

    `make .bench/vllm-serve` installs vLLM.
    """
    if not (SERVES / "vllm").exists():
        pytest.skip("there is no .bench/vllm-serve; run `make .bench/vllm-serve`")
    stage("export", storage, "for-vllm", *MODELS, "trainer.merge=false")
    printed = re.findall(r"vllm serve .*", capsys.readouterr().out)
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Lima."}]
    ids = tokenizer().apply_chat_template(turns, return_dict=False)
    of_policy = {"messages": turns[:1], "temperature": 0, "max_tokens": 40, "stop_token_ids": [817, 825]}
    said = ask(printed[0], "/v1/chat/completions", {"model": "policy", **of_policy})
    assert said["choices"][0]["message"]["content"].strip() == engine.greedy(QUESTION).strip()
    scored = ask(printed[1], "/classify", {"model": "reward", "input": ids})
    assert scored["data"][0]["probs"] == pytest.approx([engine.score(QUESTION, "Lima.")], abs=1e-4)


def ask(command, path, body):
    """Starts a server with the given command, sends one request to the server, and returns the answer."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    words = [*shlex.split(command), "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256"]
    words += ["--enforce-eager"]  # vLLM starts faster without compiling the model
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "PATH": f"{SERVES}:{os.environ['PATH']}"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            for _ in range(240):
                assert server.poll() is None, (log.seek(0), log.read().decode()[-3000:])
                with contextlib.suppress(requests.ConnectionError):
                    answer = requests.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=60)
                    assert answer.ok, answer.text
                    return answer.json()
                time.sleep(1)
            raise AssertionError("no answer in four minutes")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
