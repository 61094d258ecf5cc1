"""dpo's `reference`: the policy itself where the job names none, else another adapter, or the bare base."""

import json

import pytest
from running import NO_EVAL, stage
from toy_models import registered

from pipeline.registry.lineage import folder_digests


def trained(storage, name, *overrides):
    settings = [
        "policy=models:/toy-policy/1",
        "trainer.max_steps=2",
        "trainer.loss_type=[sigmoid]",
        "trainer.loss_weights=[1.0]",
    ]
    result = stage(
        "dpo", storage, name, *settings, *NO_EVAL, "mlflow.registered_model=toy-reference", *overrides
    )
    digests = folder_digests(result["adapter"])
    return result, digests["adapter_model.safetensors"]


@pytest.mark.slow
def test_the_policy_is_held_to_the_reference_that_the_job_names(storage):
    registered(storage)
    itself, bits = trained(storage, "reference-none")
    assert trained(storage, "reference-same", "reference=models:/toy-policy/1")[1] == bits
    other, others = trained(storage, "reference-other", f"reference={itself['adapter']}")
    assert others != bits
    base, on_base = trained(storage, "reference-base", "reference=base")
    assert on_base not in (bits, others)
    with open(f"{other['adapter']}/lineage.json") as file:
        assert json.load(file)["parents"] == {
            "policy": "models:/toy-policy/1",
            "reference": itself["adapter"],
        }
    assert base["inputs"] == {"policy": "models:/toy-policy/1"}


@pytest.mark.parametrize(
    ("reference", "says"),
    [("models:/toy-rm/1", "is a reward adapter"), ("models:/nobody/1", "no registered model 'nobody'")],
)
def test_a_reference_that_is_none_is_refused(reference, says, storage, capsys):
    registered(storage)
    stage(
        "dpo", storage, "reference-wrong", "policy=models:/toy-policy/1", f"reference={reference}", status=2
    )
    assert f"error: reference: {reference}" in (errors := capsys.readouterr().err) and says in errors
