"""`export` to the hub: a dry run sends nothing, a push arrives whole in one commit, and what was pushed is loaded back."""

import contextlib
import io
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from model_hub import READER, TOKEN, connected, of_folder
from running import stage
from toy_models import BASE, tokenizer

from pipeline import registry
from pipeline.commands import export
from pipeline.config import load_job
from pipeline.models.base import base_identity
from pipeline.registry import lineage

POLICY = ["policy=models:/toy-policy@champion", "reward=null"]
REWARD = ["policy=null", "reward=models:/toy-rm@champion"]
ADAPTER = ["trainer.merge=false", "trainer.hub_model_id=owner/mine"]
QUESTION = "What is the capital of Peru?"
PUSH = "trainer.push_to_hub=true"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with connected(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def test_a_dry_run_sends_nothing(models, storage, hub, capsys):
    result = stage("export", storage, "dry", *POLICY, *ADAPTER)
    assert hub.requests == []
    said = capsys.readouterr().out
    folder = Path(result["exported"]["policy"]["folder"])
    for text in ("dry run: nothing was sent", f"{hub.address}/owner/mine, branch main, private", "HF_TOKEN, which is set",
                 "library_name: peft", *(path.name for path in folder.iterdir())):  # fmt: skip
        assert text in said
    assert TOKEN not in said and "hub" not in result


@pytest.mark.parametrize("lfs", [True, False])
def test_a_push_arrives_whole_and_private(models, storage, hub, capsys, monkeypatch, lfs):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", lfs)
    hub.lfs = lfs
    result = stage("export", storage, f"pushed-{lfs}", *POLICY, *ADAPTER, PUSH)
    folder = Path(result["exported"]["policy"]["folder"])
    assert of_folder(folder).items() <= hub.files("owner/mine").items()
    assert hub.repos["owner/mine"]["private"]
    assert {sent for _, path, sent in hub.requests if not path.startswith("/lfs/")} == {f"Bearer {TOKEN}"}
    commit = hub.repos["owner/mine"]["branches"]["main"]
    assert result["hub"] == {"repo_id": "owner/mine", "revision": "main", "commit": commit}
    commits = hub.repos["owner/mine"]["commits"]
    stage("export", storage, f"pushed-{lfs}", *POLICY, *ADAPTER, PUSH)  # again: nothing changes
    assert hub.repos["owner/mine"]["commits"] == commits and len(commits) == 2
    files = [path.read_bytes() for path in (storage / f"pushed-{lfs}").rglob("*") if path.is_file()]
    assert TOKEN.encode() not in b"".join(files) and TOKEN not in "".join(capsys.readouterr())


def test_a_version_replaces_the_files_of_the_one_before(models, storage, hub):
    stage("export", storage, "first", *POLICY, *ADAPTER, PUSH)
    stage("export", storage, "second", *POLICY, "trainer.hub_model_id=owner/mine", PUSH)
    there = set(hub.files("owner/mine"))
    assert "model.safetensors" in there and ".gitattributes" in there
    assert not [name for name in there if name.startswith("adapter") or name == "lineage.json"]
    assert len(hub.repos["owner/mine"]["commits"]) == 3  # nothing is lost: the adapter is in the history


def test_a_push_during_the_merge_is_not_replaced(models, storage, hub, capsys, monkeypatch):
    stage("export", storage, "before", *POLICY, *ADAPTER, PUSH)
    merge = export.write

    def meanwhile(*arguments):
        hub.put("owner/mine", {"of_another": b"1"}, private=True)
        return merge(*arguments)

    monkeypatch.setattr(export, "write", meanwhile)
    stage("export", storage, "late", *POLICY, "trainer.hub_model_id=owner/mine", PUSH, status=1)
    assert "owner/mine was changed by another push, and nothing was replaced" in capsys.readouterr().err
    assert set(hub.files("owner/mine")) == {"of_another"}


@pytest.mark.parametrize(
    ("token", "repo", "says"),
    [
        ("", "owner/mine", r"trainer\.push_to_hub: HF_TOKEN is not set; make a token with write access at https://"),
        ("hf_" + "xX1" * 11, "owner/mine", "HTTP 401: the hub does not know this HF_TOKEN"),
        (TOKEN, "owner/theirs", r"owner/theirs holds files that do not come from an export \(README\.md, model\.safetensors\)"),
        (TOKEN, "owner/open", r"owner/open exists and is public; set trainer\.hub_private_repo=false"),
    ],
)  # fmt: skip
def test_a_push_that_cannot_be_is_refused_before_anything_is_merged(
    token, repo, says, models, storage, hub, capsys, monkeypatch
):
    hub.put("owner/theirs", {"README.md": b"---\ntags: [x]\n---\n", "model.safetensors": b"1"}, private=True)
    hub.put("owner/open", {".gitattributes": b""})
    monkeypatch.setenv("HF_TOKEN", token)
    stage("export", storage, "refused", *POLICY, f"trainer.hub_model_id={repo}", PUSH, status=2)
    assert re.search(says, said := capsys.readouterr().err), said
    assert hub.writes() == [] and not (storage / "refused").exists()


def test_a_push_into_the_house_of_others_fails_in_one_line(models, storage, hub, capsys, monkeypatch):
    where = ["trainer.merge=false", "trainer.hub_model_id=others/mine", PUSH]
    stage("export", storage, "theirs", *POLICY, *where, status=1)
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "HTTP 403: the account of this HF_TOKEN may not write to others/mine" in said
    assert "run.name=theirs continues without merging again" in said
    assert hub.repos == {}
    monkeypatch.setenv("HF_TOKEN", READER)
    stage("export", storage, "reader", *POLICY, *ADAPTER, PUSH, status=1)
    assert hub.repos == {}


def test_a_push_that_was_cut_off_goes_on(models, storage, hub, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    hub.lfs, hub.broken_after = True, 4  # create, validate-yaml, preupload, lfs batch; not the file itself
    stage("export", storage, "cut", *POLICY, *ADAPTER, PUSH, status=1)
    said = capsys.readouterr().err
    assert "HTTP 507" in said and "run.name=cut continues without merging again" in said
    assert set(hub.files("owner/mine")) == {".gitattributes"}  # nothing half
    hub.broken_after = None
    result = stage("export", storage, "cut", *POLICY, *ADAPTER, PUSH)
    assert "the adapter" not in capsys.readouterr().out  # it was there
    assert of_folder(Path(result["exported"]["policy"]["folder"])).items() <= hub.files("owner/mine").items()


def test_a_branch_of_its_own_leaves_what_others_put_there(models, storage, hub):
    hub.put("owner/theirs", {"README.md": b"theirs", "model.safetensors": b"1"}, private=True)
    where = ["trainer.merge=false", "trainer.hub_model_id=owner/theirs", "trainer.hub_revision=mine", PUSH]
    stage("export", storage, "branch", *POLICY, *where)
    assert set(hub.files("owner/theirs")) == {"README.md", "model.safetensors"}
    assert "adapter_model.safetensors" in hub.files("owner/theirs", "mine")
    assert "model.safetensors" not in hub.files("owner/theirs", "mine")


def test_without_network_nothing_is_merged(models, storage, hub, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    stage("export", storage, "offline", *POLICY, *ADAPTER, PUSH, status=2)
    assert "trainer.push_to_hub: the hub cannot be reached (ConnectError" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    stage("export", storage, "offline", *POLICY, *ADAPTER, PUSH, status=2)
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err
    assert not (storage / "offline").exists()


@pytest.mark.parametrize("models_of", [POLICY, REWARD], ids=["policy", "reward"])
@pytest.mark.parametrize("merge", ["true", "false"])
def test_the_code_of_a_card_says_what_the_adapter_says(models_of, merge, engine, storage, in_root):
    """On the demo's base, named by its folder, with plain peft and transformers."""
    kind = "policy" if models_of is POLICY else "reward"
    made = stage("export", storage, f"card-{kind}-{merge}", *models_of, f"trainer.merge={merge}")["exported"]
    folder = Path(made[kind]["folder"])
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as said:
        exec(code.replace('"jobs/demo/model"', f'"{BASE}"'), {})
    if kind == "reward":
        assert float(said.getvalue()) == pytest.approx(engine.score(QUESTION, "Lima."), abs=1e-4)
    else:
        assert said.getvalue().strip() == engine.greedy(QUESTION, length=128).strip()


def test_a_card_has_what_the_hub_reads(models, storage, hub, in_root):
    """Of an adapter on a base on the hub: its license, the datasets of it and its parents, and who wrote its rows."""
    readme = b"---\nlicense: llama3.1\nlicense_link: https://x.org/licence\n---\nA base."
    hub.put("org/base", of_folder(Path(BASE)) | {"README.md": readme})
    folder = storage / "on-the-hub"
    shutil.copytree(models["toy-rm"], folder)
    wrote = {"models:/demo-ppo/3": 300, "models:/demo-sft/1": 1}
    facts = lineage.describe(
        "rm", base_identity("org/base"), tokenizer(), {}, {"train": "ab" * 32}, rows_from=wrote
    )
    lineage.write(str(folder), facts)
    settings = [
        f"run.storage_path={storage}", "run.name=made-hub-rm", "mlflow.registered_model=hub-rm", "gate={}",
        "data.train=hf://datasets/org/prefs@main:small/train", "model.load_in_4bit=true",
    ]  # fmt: skip
    job = load_job("jobs/demo/rm.yaml", settings, "rm")
    with registry.mlflow_run(job, {}) as run_id:
        registry.publish(job, run_id, str(folder), {"eval_accuracy": 0.75}, facts)
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
