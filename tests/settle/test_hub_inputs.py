"""Tests that adapters and reward models from the Hub are pinned to a commit, downloaded once, and work like local folders."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from model_hub import TOKEN, connected, of_folder, serve
from running import ROOT, stage
from toy_models import BASE, tokenizer

from pipeline import registry
from pipeline.commands.export import expected_outputs
from pipeline.errors import InputError
from pipeline.job import load_job
from pipeline.registry import lineage
from pipeline.run.model_host import load_model_host


@pytest.fixture
def hub(tmp_path):
    with connected(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def adapter(models):
    return of_folder(Path(models["toy-policy"]))


def job(storage, *settings, verb="export"):
    return load_job(f"jobs/demo/{verb}.yaml", [f"run.storage_path={storage}", *settings], verb)


def host(storage, *settings):
    return load_model_host(job(storage, *settings))


@pytest.mark.parametrize(("name", "kind"), [("policy", "toy-policy"), ("reward.0", "toy-rm")])
def test_what_was_pushed_says_the_same_when_loaded_back(
    name, kind, models, storage, hub, monkeypatch, in_root
):
    key = name.removesuffix(".0")
    other = {"policy": "reward=null", "reward": "policy=null"}[key]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    where = ["trainer.merge=false", "trainer.hub_model_id=owner/mine", "trainer.push_to_hub=true"]
    stage("export", storage, f"back-{key}", f"{key}=models:/{kind}@champion", other, *where)
    here, there = (
        host(storage, f"{key}={reference}", other) for reference in (f"models:/{kind}@champion", "owner/mine")
    )
    commit = hub.repos["owner/mine"]["branches"]["main"]
    assert there.work.versions == {name: f"hf://owner/mine@{commit}"}
    assert expected_outputs(there, name) == expected_outputs(here, name)
    assert there.tokenizer.chat_template == here.tokenizer.chat_template


def test_an_adapter_is_downloaded_once_and_then_needs_no_hub(adapter, hub, storage, monkeypatch, in_root):
    # most adapters on the Hub have no chat template and no lineage.json
    del adapter["chat_template.jinja"], adapter["lineage.json"]
    first = hub.put("owner/mine", adapter | {"optimizer.pt": b"x" * 1000})
    reference = registry.pin("owner/mine", "")
    folder = registry.fetch(reference, "")
    assert reference == f"hf://owner/mine@{first}" and not (Path(folder) / "optimizer.pt").exists()
    second = hub.put("owner/mine", adapter | {"lineage.json": b"{}"})
    assert registry.pin("owner/mine", "") == registry.pin(f"owner/mine@{second}", "") != reference
    hub.requests.clear()
    assert registry.fetch(reference, "") == folder
    assert not [path for _, path, _ in hub.requests if "resolve" in path]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert registry.pin(reference, "") == reference and registry.fetch(reference, "") == folder
    with pytest.raises(
        InputError,
        match=r"'owner/other' is not .* cannot be read from the hub .*run `hf download owner/other`",
    ):
        registry.pin("owner/other", "")


def test_a_reward_model_of_its_own_is_pinned_too(hub, storage, tmp_path, in_root):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1)
    model.save_pretrained(tmp_path / "scorer")
    tokenizer().save_pretrained(tmp_path / "scorer")
    commit = hub.put("org/scorer", of_folder(tmp_path / "scorer"))
    from pipeline.run import roles

    job_ = job(storage, "reward=org/scorer", verb="score")
    host_ = load_model_host(job_)
    assert host_.work.versions == {"reward.0": f"hf://org/scorer@{commit}"}
    hub.put("org/scorer", {"config.json": b"moved on"})  # the run still uses the commit with which it began
    reward = roles.add_rewards(host_, roles.shared_base(host_))[0]
    assert type(reward).__name__ == "ModelReward"


def refuses(storage, says, *settings):
    with pytest.raises(InputError) as caught:
        host(storage, *settings)
    assert re.search(says, str(caught.value)), caught.value


def test_what_cannot_be_an_input_is_refused_with_what_to_type(adapter, hub, storage, in_root):
    plain = {name: data for name, data in adapter.items() if name != "lineage.json"}
    settings = json.loads(plain["adapter_config.json"])

    def trained_on(base):
        changed = json.dumps(settings | {"base_model_name_or_path": base}).encode()
        return plain | {"adapter_config.json": changed}

    repositories = {
        "pickled": {name.replace("model.safetensors", "model.bin"): data for name, data in plain.items()},
        "empty": {"README.md": b"nothing"},
        "mine": plain,
        "base": of_folder(Path(BASE)),
        "other": trained_on("org/large"),
        "same": trained_on("Org/base"),
    }
    for name, files in repositories.items():
        hub.put(f"org/{name}", files)
    hub.put("org/gated", plain, gated=True)
    for policy, says in {
        "org/pickled": r".*/adapter_model\.safetensors: no such file\. Adapters are read from safetensors only",
        "org/gated": r"'org/gated' is not a folder here, and cannot be read from the hub \(GatedRepoError: 401 .*HF_TOKEN",
        "org/empty": r"org/empty contains neither adapter_config\.json nor config\.json",
        "org/none": r"'org/none' is not a folder here, and cannot be read from the hub \(RepositoryNotFoundError: 401",
        "org/mine@v9": r"'org/mine' \(revision 'v9'\) .*RevisionNotFoundError: ",
        "hf://org": r"found 'hf://org', expected hf://OWNER/NAME",
    }.items():
        refuses(storage, f"policy: {says}", f"policy={policy}", "reward=null")
    refuses(storage, r"reward: .*without a scalar head", "policy=null", "reward=org/mine")
    # if base and adapter are on the Hub, the base's name must be the name that the adapter was trained on
    on_hub = ["model.name_or_path=org/base", "reward=null"]
    refuses(storage, r"policy: hf://org/other@\w+ was trained on base org/large, but model\.name_or_path is org/base\. .*use "
            r"model\.name_or_path=org/large", *on_hub, "policy=org/other")  # fmt: skip
    assert host(storage, *on_hub, "policy=org/same").work.versions["policy"].startswith("hf://org/same@")


def test_a_folder_of_that_name_is_meant_before_the_hub(tmp_path, monkeypatch):
    (tmp_path / "owner/mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert registry.pin("owner/mine", "") == "owner/mine"


def test_a_base_on_the_hub_is_pinned_for_all_workers(hub, storage, in_root, models):
    old = hub.put("org/base", of_folder(Path(BASE)), branch="v1")
    hub.put("org/base", of_folder(Path(BASE)) | {"x": b""})
    files = of_folder(Path(models["toy-policy"]))
    del files["lineage.json"]
    hub.put("org/mine", files)
    made = host(storage, "model.name_or_path=org/base@v1", "policy=org/mine", "reward=null")
    assert (made.work.model.name_or_path, made.work.model.revision) == ("org/base", old)
    # the revision that job.json and MLflow record
    assert made.work.identity.settings["model"]["revision"] == old
    assert made.work.base["digest"] == f"commit:{old}"
    facts = {"base": {"name_or_path": "org/base", "digest": "commit:" + "a" * 40}}
    with pytest.raises(InputError, match=f"set model.revision={'a' * 40}"):
        lineage.check_same_base(facts, made.work.base, "policy", "org/mine")


@pytest.mark.slow
def test_workers_of_ray_fetch_them_too(models, tmp_path):
    """Runs the command in a new process, because command and workers read HF_ENDPOINT only when they start."""
    with serve() as hub:
        hub.put("org/scorer", of_folder(Path(models["toy-rm"])), private=True)
        hub.put("org/writer", of_folder(Path(models["toy-policy"])), private=True)
        environment = os.environ | {
            "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN,
        }  # fmt: skip
        overrides = [
            "policy=org/writer",
            "reward=org/scorer",
            "trainer.response_length=8",
            "scaling.num_workers=1",
            f"run.storage_path={tmp_path}",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", "generate", "jobs/demo/generate.yaml", "run.name=answers", *overrides],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
        result = json.loads((tmp_path / "answers/result.json").read_text())
        commits = {name: repo["branches"]["main"] for name, repo in hub.repos.items()}
        assert result["inputs"] == {
            "policy": f"hf://org/writer@{commits['org/writer']}",
            "reward.0": f"hf://org/scorer@{commits['org/scorer']}",
        }
        assert TOKEN not in done.stdout + done.stderr
