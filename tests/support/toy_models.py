"""A policy and a reward model on the demo's base, registered, without the minutes of training: adapters of random numbers."""

from functools import cache
from pathlib import Path

import torch
from running import ROOT

from pipeline import registry
from pipeline.config import Model, load_job
from pipeline.models.adapters import SharedBase
from pipeline.models.base import base_identity, load_base
from pipeline.models.tokenizer import load_tokenizer
from pipeline.registry import lineage

DEMO = ROOT / "jobs/demo/model"
BASE = str(DEMO)


def settings(folder, **changes) -> Model:
    """The `model` section of a job."""
    return Model(str(folder), **changes)


@cache
def tokenizer():
    return load_tokenizer(BASE)


def shared_base() -> SharedBase:
    job = load_job(ROOT / "jobs/demo/generate.yaml", [f"model.name_or_path={BASE}"], "generate")
    return SharedBase(load_base(job.model))


@cache
def registered(storage: Path) -> dict[str, str]:
    """{name: folder} of models:/toy-policy@champion, models:/toy-rm@champion and models:/other-rm@champion under `storage`."""
    folders = {}
    for seed, name in enumerate(("toy-policy", "toy-rm", "other-rm")):
        folder = folders[name] = str(storage / f"made-{name}")
        head = name.endswith("rm")
        make(folder, seed, head)
        parents = {"policy": "models:/toy-policy/1"} if name == "toy-rm" else {}
        facts = lineage.describe(
            "rm" if head else "ppo", base_identity(BASE), tokenizer(), parents, {"train": "ab" * 32}
        )
        register(storage, name, folder, facts, {"eval_accuracy": 0.75})
    return folders


@cache
def second(storage: Path) -> str:
    """The number of a further version of toy-policy, with the alias `other`."""
    folder = str(storage / "made-second")
    make(folder, seed=9, head=False)
    facts = lineage.read(registered(storage)["toy-policy"], "models:/toy-policy/1")
    return str(register(storage, "toy-policy", folder, facts, {}, "mlflow.alias=other").version)


def register(storage: Path, name: str, folder: str, facts: dict, metrics: dict, *more: str):
    """Registers an adapter as a run would; the version."""
    lineage.write(folder, facts)
    tokenizer().save_pretrained(folder)
    given = [f"run.storage_path={storage}", f"run.name={Path(folder).name}", "gate={}", *more]
    job = load_job(ROOT / "jobs/demo/sft.yaml", [*given, f"mlflow.registered_model={name}"], "sft")
    with registry.mlflow_run(job, {}) as run_id:
        return registry.publish(job, run_id, folder, metrics, facts)


def make(folder: str, seed: int, head: bool) -> None:
    torch.manual_seed(seed)
    shared = shared_base()
    shared.add("toy", lora={"r": 4, "target_modules": "all-linear"}, head=head)
    # peft's B is 0: an adapter that changes nothing tests nothing
    for parameter in shared.parameters_of("toy"):
        parameter.data += 0.04 * torch.randn_like(parameter)
    shared.save("toy", folder)
