"""Tests how a replica follows aliases: versions with missing or damaged files, errors while loading, and rollbacks."""

import json
import shutil
import time

import pytest
import torch
from served import POLICIES, REWARDS
from toy_models import ROOT, tokenizer

from pipeline import registry
from pipeline.job import load_job
from pipeline.run.model_host import load_model_host
from pipeline.serving.batching import ServedRow
from pipeline.serving.models import Models, start_decoder
from pipeline.system.hub import TENSORS
from pipeline.writing.rows import Sampling

FIRST = "models:/toy-policy/1"


@pytest.fixture(scope="module")
def server(storage, models, tmp_path_factory):
    given = [POLICIES, REWARDS, f"run.storage_path={storage}"]
    host = load_model_host(load_job(ROOT / "jobs/demo/serve.yaml", given, "serve"))
    shared, batcher = start_decoder(host)
    yield Models(host, shared, batcher)
    batcher.close()


@pytest.fixture
def registered(server, storage, models):
    """Returns a function that registers a folder as a version of toy-policy and moves the alias to it for one test."""
    mlflow = registry.client(server.uri)

    def moved(folder):
        version = mlflow.create_model_version("toy-policy", f"file://{folder}").version
        mlflow.set_registered_model_alias("toy-policy", "champion", version)
        return f"models:/toy-policy/{version}"

    yield moved
    mlflow.set_registered_model_alias("toy-policy", "champion", "1")
    server.follow_aliases()
    assert server.versions["toy"] == FIRST


@pytest.fixture
def copied(storage, models, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(models["toy-policy"], folder)
    return folder


def written(server, name):
    """Returns the log-probs of a completion by the policy, and the reward model's score of the prompt."""
    served, tokens = server.policies[name], []
    prompt = tokenizer()("What is the capital of Peru?").input_ids
    row = ServedRow(prompt, 0, Sampling(8, (), temperature=0.0), served.role, 0, deliver=tokens.append)
    server.batcher.submit([row])
    while not tokens or not tokens[-1].last:
        time.sleep(0.001)
    score = server.batcher.run(lambda: server.shared.score(server.rewards["toy-rm"].role, prompt)).result()
    return [token.logprob for token in tokens], score


def test_a_version_is_served_when_its_missing_files_return(server, registered, copied, tmp_path):
    away = copied.rename(tmp_path / "away")
    version = registered(copied)
    for _ in range(2):
        [line] = server.follow_aliases().values()
        assert "its files cannot be fetched" in line and f"keeping {FIRST}" in line
    # All files except the weights are restored.
    shutil.copytree(away, copied, ignore=shutil.ignore_patterns("*.safetensors"))
    [line] = server.follow_aliases().values()
    assert f"{TENSORS}: no such file" in line
    shutil.copy(away / TENSORS, copied)
    assert list(server.follow_aliases().values()) == [f"toy: {version}"] and server.versions["toy"] == version


@pytest.mark.parametrize("method", ["fetch", "add"])
def test_a_version_that_could_not_be_loaded_is_tried_again(server, registered, copied, monkeypatch, method):
    def fail(*given):
        raise torch.OutOfMemoryError("out of memory")

    version = registered(copied)
    with monkeypatch.context() as patch:
        patch.setattr(registry if method == "fetch" else server.batcher.decoder, method, fail)
        for _ in range(2):
            [line] = server.follow_aliases().values()
            assert "out of memory" in line and f"keeping {FIRST}" in line
    assert list(server.follow_aliases().values()) == [f"toy: {version}"]


def truncate(folder):
    file = folder / TENSORS
    file.write_bytes(file.read_bytes()[:-100])


def set_wrong_rank(folder):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 3}))


@pytest.mark.parametrize("damage", [truncate, set_wrong_rank])
def test_a_bad_version_changes_no_answer(server, registered, copied, damage):
    before = {name: written(server, name) for name in server.policies}
    damage(copied)
    version = registered(copied)
    [line] = server.follow_aliases().values()
    assert line.startswith(f"cannot serve {version} (InputError: ") and f"keeping {FIRST}" in line
    assert {name: written(server, name) for name in server.policies} == before
    registry.client(server.uri).set_registered_model_alias("toy-policy", "champion", "1")
    assert server.follow_aliases() == {}
    assert {name: written(server, name) for name in server.policies} == before
