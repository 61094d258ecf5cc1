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
from pipeline.commands import hub as cards
from pipeline.config import load_job
from pipeline.inference.decoder import SlotDecoder
from pipeline.inference.rows import Sampling
from pipeline.models.base import base_identity
from pipeline.models.tokenizer import eos_ids
from pipeline.registry import lineage
from pipeline.runtime import roles
from pipeline.runtime.preparation import load_host

POLICY = ["policy=models:/toy-policy@champion", "reward=null"]
REWARD = ["policy=null", "reward=models:/toy-rm@champion"]
ADAPTER = ["trainer.merge=false", "trainer.hub_model_id=owner/mine"]
PUSH = "trainer.push_to_hub=true"


@pytest.fixture
def hub(tmp_path):
    with connected(tmp_path / "hub") as hub:
        yield hub


def test_a_dry_run_sends_nothing(models, storage, hub, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
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
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", lfs)
    hub.lfs = lfs
    result = stage("export", storage, f"pushed-{lfs}", *POLICY, *ADAPTER, PUSH)
    folder = Path(result["exported"]["policy"]["folder"])
    assert of_folder(folder).items() <= hub.files("owner/mine").items()
    assert hub.repos["owner/mine"]["private"]
    assert {sent for _, path, sent in hub.requests if not path.startswith("/lfs/")} == {f"Bearer {TOKEN}"}
    assert result["hub"] == {
        "repo_id": "owner/mine",
        "revision": "main",
        "commit": hub.repos["owner/mine"]["branches"]["main"],
    }
    commits = hub.repos["owner/mine"]["commits"]
    stage("export", storage, f"pushed-{lfs}", *POLICY, *ADAPTER, PUSH)  # again: nothing changes
    assert hub.repos["owner/mine"]["commits"] == commits and len(commits) == 2
    files = b"".join(path.read_bytes() for path in (storage / f"pushed-{lfs}").rglob("*") if path.is_file())
    assert TOKEN.encode() not in files and TOKEN not in "".join(capsys.readouterr())


def test_a_version_replaces_the_files_of_the_one_before(models, storage, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    merged = ["trainer.hub_model_id=owner/mine", PUSH]
    stage("export", storage, "first", *POLICY, *ADAPTER, PUSH)
    stage("export", storage, "second", *POLICY, *merged)
    there = set(hub.files("owner/mine"))
    assert "model.safetensors" in there and ".gitattributes" in there
    assert not [name for name in there if name.startswith("adapter") or name == "lineage.json"]
    assert len(hub.repos["owner/mine"]["commits"]) == 3  # nothing is lost: the adapter is in the history


def test_a_push_during_the_merge_is_not_replaced(models, storage, hub, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
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
    ("token", "repo", "overrides", "says"),
    [
        (None, "owner/mine", [], r"trainer\.push_to_hub: HF_TOKEN is not set; make a token with write access at https://"),
        ("hf_" + "xX1" * 11, "owner/mine", [], "HTTP 401: the hub does not know this HF_TOKEN"),
        (TOKEN, "owner/theirs", [], r"owner/theirs holds files that do not come from an export \(README\.md, model\.safetensors\)"),
        (TOKEN, "owner/open", [], r"owner/open exists and is public; set trainer\.hub_private_repo=false"),
    ],
)  # fmt: skip
def test_a_push_that_cannot_be_is_refused_before_anything_is_merged(
    token, repo, overrides, says, models, storage, hub, capsys, monkeypatch
):
    hub.put("owner/theirs", {"README.md": b"---\ntags: [x]\n---\n", "model.safetensors": b"1"}, private=True)
    hub.put("owner/open", {".gitattributes": b""})
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    where = [f"trainer.hub_model_id={repo}", PUSH, *overrides]
    stage("export", storage, "refused", *POLICY, *where, status=2)
    assert re.search(says, said := capsys.readouterr().err), said
    assert hub.writes() == [] and not (storage / "refused").exists()


def test_a_push_into_the_house_of_others_fails_in_one_line(models, storage, hub, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
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
    monkeypatch.setenv("HF_TOKEN", TOKEN)
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


def test_a_branch_of_its_own_leaves_what_others_put_there(models, storage, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.put("owner/theirs", {"README.md": b"theirs", "model.safetensors": b"1"}, private=True)
    where = ["trainer.merge=false", "trainer.hub_model_id=owner/theirs", "trainer.hub_revision=mine", PUSH]
    stage("export", storage, "branch", *POLICY, *where)
    assert set(hub.files("owner/theirs")) == {"README.md", "model.safetensors"}
    assert "adapter_model.safetensors" in hub.files("owner/theirs", "mine")
    assert "model.safetensors" not in hub.files("owner/theirs", "mine")


def test_without_network_nothing_is_merged(models, storage, hub, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    stage("export", storage, "offline", *POLICY, *ADAPTER, PUSH, status=2)
    assert "trainer.push_to_hub: the hub cannot be reached (ConnectError" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    stage("export", storage, "offline", *POLICY, *ADAPTER, PUSH, status=2)
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err
    assert not (storage / "offline").exists()


def printed(code: str, folder: Path) -> str:
    """What the Python of a card prints, in the folder that it is about."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as said:
        exec(code, {})
    return said.getvalue().strip()


@pytest.mark.parametrize("models_of", [POLICY, REWARD], ids=["policy", "reward"])
@pytest.mark.parametrize("merge", ["true", "false"])
def test_the_code_of_a_card_says_what_the_adapter_says(models_of, merge, models, storage, in_root):
    """On the demo's base, named by its folder, with plain peft and transformers."""
    kind = "policy" if models_of is POLICY else "reward"
    name = f"card-{kind}-{merge}"
    folder = Path(
        stage("export", storage, name, *models_of, f"trainer.merge={merge}")["exported"][kind]["folder"]
    )
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    said = printed(code.replace('"jobs/demo/model"', f'"{BASE}"'), folder)
    host = load_host(load_job("jobs/demo/export.yaml", [*models_of, f"run.storage_path={storage}"], "export"))
    shared = roles.shared_base(host)
    turns = [{"role": "user", "content": "What is the capital of Peru?"}]
    if kind == "reward":
        shared.add("it", folder=host.input("reward.0"), head=True)
        turns.append({"role": "assistant", "content": "Lima."})
        ids = host.tokenizer.apply_chat_template(turns, return_dict=False)
        assert float(said) == pytest.approx(shared.score("it", ids), abs=1e-4)
        return
    shared.add("it", folder=host.input("policy"))
    ids = host.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    greedy = Sampling(128, tuple(eos_ids(host.tokenizer, shared.base.generation_config)), temperature=0.0)
    [completion] = SlotDecoder(shared, 1, host.tokenizer.pad_token_id).generate("it", [ids], [0], greedy)
    assert said == host.tokenizer.decode(completion.tokens, skip_special_tokens=True).strip()


def test_a_card_has_what_the_hub_reads(models, storage, hub, in_root):
    """Of an adapter on a base on the hub: its license, and the datasets of it and its parents."""
    readme = b"---\nlicense: llama3.1\nlicense_link: https://x.org/licence\n---\nA base."
    hub.put("org/base", of_folder(Path(BASE)) | {"README.md": readme})
    folder = storage / "on-the-hub"
    shutil.copytree(models["toy-rm"], folder)
    facts = lineage.describe("rm", base_identity("org/base"), tokenizer(), {}, {"train": "ab" * 32})
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


def test_a_card_says_which_versions_wrote_the_rows(models, storage, tmp_path):
    folder = shutil.copytree(models["toy-policy"], tmp_path / "adapter")
    facts = lineage.read(str(folder), "adapter")
    lineage.write(str(folder), {**facts, "rows_from": {"models:/demo-ppo/3": 300, "models:/demo-sft/1": 1}})
    [first, *_] = cards.ancestors(str(folder), f"sqlite:///{storage}/mlflow.db")
    lines = cards._shown(first)
    assert lines[1:3] == ["  - 300 rows from `models:/demo-ppo/3`", "  - 1 row from `models:/demo-sft/1`"]
