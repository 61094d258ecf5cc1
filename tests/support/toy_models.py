"""Registers random adapters of the demo's base as a policy and reward models."""

from functools import cache
from pathlib import Path

import torch
from registered import published
from running import ROOT

from pipeline import registry
from pipeline.job import Model, load_job
from pipeline.models.adapters import SharedBase
from pipeline.models.base import base_identity, load_base
from pipeline.models.tokenizer import eos_ids, load_tokenizer
from pipeline.registry import lineage
from pipeline.settle.identity import tracking_of
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.rows import Completion, Sampling

DEMO = ROOT / "jobs/demo/model"
BASE = str(DEMO)


def settings(folder, **changes) -> Model:
    """Returns the `model` section of a job."""
    return Model(str(folder), **changes)


@cache
def tokenizer():
    return load_tokenizer(BASE)


def shared_base() -> SharedBase:
    job = load_job(ROOT / "jobs/demo/generate.yaml", [f"model.name_or_path={BASE}"], "generate")
    return SharedBase(load_base(job.model))


@cache
def registered(storage: Path) -> dict[str, str]:
    """Registers toy-policy, toy-rm and other-rm under `storage`, each with the alias champion. Returns {name: folder}."""
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
    """Registers another version of toy-policy, with the alias `other`. Returns its number."""
    folder = str(storage / "made-second")
    make(folder, seed=9, head=False)
    facts = lineage.read(registered(storage)["toy-policy"], "models:/toy-policy/1")
    return str(register(storage, "toy-policy", folder, facts, {}, "mlflow.alias=other").version)


def register(storage: Path, name: str, folder: str, facts: dict, metrics: dict, *more: str):
    """Registers an adapter in the same way as a run does at its end. Returns the model version."""
    lineage.write(folder, facts)
    tokenizer().save_pretrained(folder)
    overrides = [f"run.storage_path={storage}", f"run.name={Path(folder).name}", "gate={}", *more]
    job = load_job(ROOT / "jobs/demo/sft.yaml", [*overrides, f"mlflow.registered_model={name}"], "sft")
    with registry.mlflow_run(tracking_of(job), {}) as run_id:
        return published(job, run_id, folder, metrics, facts)


def make(folder: str, seed: int, head: bool) -> None:
    torch.manual_seed(seed)
    shared = shared_base()
    shared.add("toy", lora={"r": 4, "target_modules": "all-linear"}, head=head)
    # peft initializes the LoRA matrices B to 0. An adapter that does not change the base's output would hide faults.
    for parameter in shared.parameters_of("toy"):
        parameter.data += 0.04 * torch.randn_like(parameter)
    shared.save("toy", folder)


class Engine:
    """A policy and a reward model on one base, to compare with commands and the server. Conversations start with a user turn."""

    def __init__(self, folders: dict[str, str]):
        self.shared = shared_base()
        self.shared.add("policy", folder=folders["toy-policy"])
        self.shared.add("reward", folder=folders["toy-rm"], head=True)

    def ids(self, *turns: str) -> list[int]:
        """Returns the tokens of a conversation, plus the generation prompt if the last turn is the user's."""
        roles = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        add_prompt = len(turns) % 2 == 1
        return tokenizer().apply_chat_template(roles, add_generation_prompt=add_prompt, return_dict=False)

    def sample(self, prompts: list[list[int]], length: int, **keys) -> list[Completion]:
        sampling = Sampling(length, tuple(eos_ids(tokenizer())), **keys)
        decoder = SlotDecoder(self.shared, len(prompts), tokenizer().pad_token_id)
        return decoder.generate("policy", prompts, range(len(prompts)), sampling)

    def greedy(self, *turns: str, length: int = 20) -> str:
        [completion] = self.sample([self.ids(*turns)], length, temperature=0.0)
        return tokenizer().decode(completion.tokens, skip_special_tokens=True)

    def score(self, *turns: str) -> float:
        return self.shared.score("reward", self.ids(*turns))
