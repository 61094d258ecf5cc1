"""Tests the three kinds of reference model in dpo: the initial policy (the default), another adapter, and the bare base."""

import contextlib
import json
from pathlib import Path

import alone
import pytest
import torch
from toy_models import make

from pipeline.errors import Failure
from pipeline.stages import trl_trainer


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Makes an adapter for the policy and an adapter for the reference, both with dropout."""
    folders = {}
    for seed, name in enumerate(("policy", "reference")):
        folder = folders[name] = str(tmp_path_factory.mktemp(name))
        make(folder, seed, head=False)
        settings = Path(folder, "adapter_config.json")
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"lora_dropout": 0.5}))
    return folders


class Stop(Exception):
    pass


def before_the_first_step(monkeypatch, folder, look, *settings, inputs):
    """Calls `look` with the trainer of a dpo job before the first step, and then ends the job."""

    def run(worker, trainer):
        look(trainer)
        raise Stop

    monkeypatch.setattr(trl_trainer, "train_trl", run)
    with pytest.raises(Stop):
        alone.train("dpo", folder, *settings, inputs=inputs)


def reference_logprobs(trainer):
    """Returns TRL's log-probs of the reference on the first rows, computed as in a training step."""
    batch = trainer.data_collator([dict(trainer.train_dataset[i]) for i in range(4)])
    trainer.model.train()
    return torch.cat(trainer.compute_ref_log_probs(trainer.model, batch))


@pytest.mark.parametrize(
    ("roles", "settings"),
    [
        (["policy", "reference"], ["reference=models:/other/1"]),
        (["policy"], ["trainer.disable_dropout=false"]),
    ],
    ids=["another", "itself"],
)
def test_no_reference_has_dropout(roles, settings, adapters, monkeypatch, tmp_path):
    def look(trainer):
        assert torch.equal(reference_logprobs(trainer), reference_logprobs(trainer))
        keeps = "trainer.disable_dropout=false" in settings
        found = [one["default"].p for one in dropouts(trainer.model) if hasattr(one["default"], "p")]
        assert found and set(found) == {0.5 if keeps else 0.0}

    inputs = {role: adapters[role] for role in roles}
    before_the_first_step(monkeypatch, tmp_path, look, *settings, inputs=inputs)


def dropouts(model):
    return [layer.lora_dropout for layer in model.modules() if hasattr(layer, "lora_dropout")]


@pytest.mark.parametrize("reference", ["models:/other/1", pytest.param("base", marks=pytest.mark.slow)])
def test_the_reference_in_trl_is_checked(reference, adapters, monkeypatch, tmp_path):
    roles = ["policy"] if reference == "base" else ["policy", "reference"]
    inputs = {role: adapters[role] for role in roles}
    # In fp32, the check tolerates only rounding errors.
    settings = [f"reference={reference}", "model.dtype=float32"]
    alone.train("dpo", tmp_path, *settings, inputs=inputs)  # without a fault, the run passes the self-check
    # From here on, TRL uses the policy as the reference, as if it computed log-probs before the reference exists.
    monkeypatch.setattr("trl.trainer.dpo_trainer.use_adapter", lambda *_, **__: contextlib.nullcontext())
    with pytest.raises(Failure, match=r"the reference's log-prob of the .* from the rows alone"):
        alone.train("dpo", tmp_path, *settings, inputs=inputs)
