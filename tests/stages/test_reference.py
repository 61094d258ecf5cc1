"""dpo's `reference`: the policy itself if the job names none, else another adapter, or the bare base."""

import json
from pathlib import Path

import pytest
from running import NO_EVAL, stage
from toy_models import registered

from pipeline.registry.lineage import folder_digests


def trained(storage, name, *overrides):
    loss = ["trainer.loss_type=[sigmoid]", "trainer.loss_weights=[1.0]", "trainer.max_steps=2", *NO_EVAL]
    names = ["policy=models:/toy-policy/1", "mlflow.registered_model=toy-reference"]
    result = stage("dpo", storage, name, *names, *loss, *overrides)
    return result, folder_digests(result["adapter"])["adapter_model.safetensors"]


@pytest.mark.slow
def test_the_policy_is_held_to_the_reference_that_the_job_names(storage):
    registered(storage)
    itself, bits = trained(storage, "reference-none")
    assert trained(storage, "reference-same", "reference=models:/toy-policy/1")[1] == bits
    other, others = trained(storage, "reference-other", f"reference={itself['adapter']}")
    assert others != bits
    base, on_base = trained(storage, "reference-base", "reference=base")
    assert on_base not in (bits, others)
    parents = json.loads(Path(other["adapter"], "lineage.json").read_text())["parents"]
    assert parents == {"policy": "models:/toy-policy/1", "reference": itself["adapter"]}
    assert base["inputs"] == {"policy": "models:/toy-policy/1"}
