"""Tests the versions of a running server: aliases that move to unusable versions, files that disappear and return."""

import json
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from served import POLICIES, REWARDS
from toy_models import ROOT, tokenizer

from pipeline import registry
from pipeline.job import load_job
from pipeline.run.model_host import load_model_host
from pipeline.serving.batching import ServedRow
from pipeline.serving.models import Models, start
from pipeline.system.hub import TENSORS
from pipeline.writing.rows import Sampling

FIRST = "models:/toy-policy/1"


@pytest.fixture(scope="module")
def server(storage, models, tmp_path_factory):
    given = [POLICIES, REWARDS, f"run.storage_path={storage}"]
    host = load_model_host(load_job(ROOT / "jobs/demo/serve.yaml", given, "serve"))
    shared, batcher = start(host)
    yield Models(host, shared, batcher)
    batcher.close()


@pytest.fixture
def registered(server, storage, models):
    """Registers a version of toy-policy with a folder's files, and moves the alias to it until the test ends."""
    mlflow = registry.client(server.uri)

    def moved(folder):
        version = mlflow.create_model_version("toy-policy", f"file://{folder}").version
        mlflow.set_registered_model_alias("toy-policy", "champion", version)
        return f"models:/toy-policy/{version}"

    yield moved
    mlflow.set_registered_model_alias("toy-policy", "champion", "1")
    server.follow()
    assert server.versions["toy"] == FIRST


@pytest.fixture
def copied(storage, models, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(models["toy-policy"], folder)
    return folder


def written(server, name):
    """Returns the log-probs of a completion by a model id's policy, and the score of the reward model for it."""
    served, tokens = server.policies[name], []
    prompt = tokenizer()("What is the capital of Peru?").input_ids
    row = ServedRow(prompt, 0, Sampling(8, (), temperature=0.0), served.role, 0, deliver=tokens.append)
    server.batcher.submit([row])
    while not tokens or not tokens[-1].last:
        time.sleep(0.001)
    score = server.batcher.run(lambda: server.shared.score(server.rewards["toy-rm"].role, prompt)).result()
    return [token.logprob for token in tokens], score


def test_missing_files_are_served_when_they_return(server, registered, copied, tmp_path):
    away = copied.rename(tmp_path / "away")
    version = registered(copied)
    for _ in range(3):
        [line] = server.follow().values()
        assert "its files cannot be fetched" in line and f"{FIRST} stays" in line
    shutil.copytree(away, copied, ignore=shutil.ignore_patterns("*.safetensors"))  # half of the files return
    [line] = server.follow().values()
    assert f"{TENSORS}: not there" in line
    shutil.copy(away / TENSORS, copied)
    assert list(server.follow().values()) == [f"toy: {version}"] and server.versions["toy"] == version


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), TimeoutError("no answer")])
def test_a_version_that_could_not_be_loaded_is_retried(server, registered, copied, monkeypatch, error):
    def fail(*given):
        raise error

    version = registered(copied)
    with monkeypatch.context() as patch:
        patch.setattr(server.batcher.decoder, "add", fail)
        for _ in range(2):
            [line] = server.follow().values()
            assert str(error) in line and f"{FIRST} stays" in line
    assert list(server.follow().values()) == [f"toy: {version}"]


def test_an_unreachable_registry_is_queried_again(server, registered, copied, monkeypatch):
    version = registered(copied)
    with monkeypatch.context() as patch:
        patch.setattr(registry, "fetch", lambda *given: 1 / 0)
        assert [FIRST in line for line in server.follow().values()] == [True]
    assert list(server.follow().values()) == [f"toy: {version}"]


def truncate(folder):
    file = folder / TENSORS
    file.write_bytes(file.read_bytes()[:-100])


def fill_with_nan(folder):
    tensors = load_file(folder / TENSORS)
    save_file(
        {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}, folder / TENSORS
    )


def setting(**changes):
    def change(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


BAD = {
    "damaged": truncate,
    "NaN": fill_with_nan,
    "another rank": setting(r=3),
    "changes the base": setting(bias="all"),
    "PiSSA": setting(init_lora_weights="pissa"),
    "no LoRA": setting(peft_type="IA3"),
    "a reward": setting(task_type="SEQ_CLS"),
}


@pytest.mark.parametrize("damage", BAD.values(), ids=BAD)
def test_a_bad_version_is_checked_once_and_the_others_keep_answering_until_a_rollback(
    server, registered, copied, monkeypatch, damage
):
    before = {name: written(server, name) for name in server.policies}
    damage(copied)
    version = registered(copied)
    [line] = server.follow().values()
    assert line.startswith(f"{version} cannot be served (InputError: ") and f"{FIRST} stays" in line
    with monkeypatch.context() as patch:
        patch.setattr(server, "_checked", None)  # the version is not read again
        assert server.follow() == {}
    assert {name: written(server, name) for name in server.policies} == before
    registry.client(server.uri).set_registered_model_alias("toy-policy", "champion", "1")
    assert server.follow() == {}
    assert {name: written(server, name) for name in server.policies} == before


def test_a_problem_is_printed_once_per_cause(server, monkeypatch, capsys):
    """The text of an error may differ from poll to poll."""
    polls = iter(
        [
            {"a": "no answer at 0x7f1"},
            {"a": "no answer at 0x7f2"},
            {"b": "damaged"},
            {},
            {"a": "no answer at 0x7f3"},
        ]
    )

    class Ended(BaseException):
        pass

    def follow():
        found = next(polls, None)
        if found is None:
            raise Ended
        return found

    monkeypatch.setattr(server, "follow", follow)
    with pytest.raises(Ended):
        server.watch(0.0)
    assert capsys.readouterr().out.splitlines() == ["no answer at 0x7f1", "damaged", "no answer at 0x7f3"]
