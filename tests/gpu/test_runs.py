"""Tests that every command runs on a pretended GPU, and that the commands together execute all CUDA-only code."""

import json
import multiprocessing
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import yaml
from resumed import assert_equal
from running import ROOT
from served import POLICIES, REWARDS
from toy_models import registered

os.environ["PRETEND"] = "1"  # tools.gpu chooses its sizes and device at import
from tests.gpu import runs as working
from tools.gpu.experiments import isolated
from tools.gpu.pretend import branches, command, worker

del os.environ["PRETEND"]

pytestmark = pytest.mark.slow  # test_pretend.py runs PPO on a pretended GPU within seconds

POLICY, REWARD = "policy=models:/toy-policy@champion", "reward=models:/toy-rm@champion"
TRL = [
    "trainer.max_steps=2", "trainer.warmup_steps=0", "data.batch_size=4",
    "trainer.per_device_train_batch_size=2", "trainer.logging_steps=1", "run.report=false",
]  # fmt: skip
GPU, BF16, CHECKPOINTING = "scaling.use_gpu=true", "trainer.bf16=true", "trainer.gradient_checkpointing=true"
NF4 = "model.load_in_4bit=true"
SHORT = "trainer.response_length=12"
BASE_BYTES = 1_400_000  # size in bytes of the demo's base model
PPO = [
    POLICY, REWARD, "trainer.total_episodes=8", "trainer.batch_size=4", "trainer.response_length=12", "trainer.save_steps=1",
    "trainer.kl_coef=0", "run.report=false",
]  # fmt: skip
RUNS = {  # name: (subcommand, its keys in addition to those in GPU)
    "sft": ("sft", TRL),
    "sft-checkpointing-bf16": ("sft", [*TRL, BF16, CHECKPOINTING, "trainer.packing=true"]),
    "sft-nf4": ("sft", [*TRL, BF16, NF4]),
    "rm": ("rm", [*TRL, BF16]),
    "dpo": ("dpo", [*TRL, POLICY]),
    "kto": ("kto", [*TRL, POLICY]),
    "ppo": ("ppo", PPO),
    "ppo-adapter-bf16": ("ppo", [*PPO, BF16, CHECKPOINTING, "trainer.critic=adapter"]),
    "ppo-grpo": ("ppo", [*PPO, BF16, "trainer.advantage_estimator=grpo", "trainer.num_generations=2"]),
    "evaluate": ("evaluate", [POLICY, "baseline=base", REWARD, SHORT]),
    "generate": ("generate", [POLICY, REWARD, SHORT]),
    "collect": ("collect", [POLICY, REWARD, SHORT, "trainer.num_generations=4"]),
    "score": ("score", [REWARD]),
    "export": ("export", [POLICY, REWARD, SHORT]),
}
REPLAYED = {"ppo", "ppo-adapter-bf16", "ppo-grpo", "evaluate", "generate", "collect", "export"}
ROWS = {"train": 16, "eval": 4, "pairs": 4}  # number of rows read from each file
# subcommand, free GiB of the GPU's 80 GiB, and the fraction of GPU memory that vLLM gets
VLLM = [("ppo", 40, 0.04), ("ppo", 2, 0.02), ("serve", 40, 0.4)]


def few_rows(verb, storage):
    """Returns the keys that limit a demo job to the first rows of its files."""
    data, keys = yaml.safe_load((ROOT / f"jobs/demo/{verb}.yaml").read_text()).get("data", {}), []
    for key in sorted({*data} & {*ROWS}):
        if data[key]:
            lines = (ROOT / data[key]).read_text().splitlines(keepends=True)[: ROWS[key]]
            (storage / f"{verb}-{key}.jsonl").write_text("".join(lines))
            keys.append(f"data.{key}={storage}/{verb}-{key}.jsonl")
    return keys


class Runs:
    """Runs each command in a new process, which has used neither Ray nor other devices before."""

    def __init__(self, storage):
        self.storage, self.statements = storage, storage / "statements"
        registered(storage)
        multiprocessing.set_forkserver_preload([working.__name__])

    def child(self, work, *args):
        gpus = worker.GPUS if work in (working.run_on_ray, working.served_answer) else 1
        return isolated(
            400, working.with_output, str(self.statements), gpus, work, *args, method="forkserver"
        )

    @cache  # noqa: B019  (one object, until the tests of this file end)
    def of(self, name, verb, *keys, work=command.run, more=()):
        """Runs `work` with the arguments of a run. Returns the result of `work`, plus the content of result.json as `result`."""
        keys = (*few_rows(verb, self.storage), f"run.storage_path={self.storage}", f"run.name={name}", *keys)
        found = self.child(work, [verb, f"jobs/demo/{verb}.yaml", "gate={}", *keys], *more)
        print(found["output"])
        file = self.storage / name / "result.json"
        return found | {"result": json.loads(file.read_text()) if file.exists() else {}}

    def table(self, name):
        verb, keys = RUNS[name]
        return self.of(name, verb, GPU, *keys)

    def interrupted(self):
        return self.of("cut", "ppo", GPU, *PPO, work=working.run_cut, more=(1,))

    def with_two_workers(self):
        keys = ["trainer.batch_size=8", "trainer.total_episodes=16", "scaling.num_workers=2"]
        return self.of("two", "ppo", GPU, *PPO, *keys, work=working.run_on_ray)

    def with_rollout_worker(self):
        keys = ["scaling.num_workers=1", "rollout.num_workers=1"]
        return self.of("rollout", "ppo", GPU, *PPO, *keys, work=working.run_on_ray)

    @cache  # noqa: B019
    def of_vllm(self, verb, free):
        models = [POLICIES, REWARDS] if verb == "serve" else [POLICY, REWARD]
        keys = [GPU, *models, "rollout.engine=vllm", f"run.storage_path={self.storage}"]
        return self.child(working.options_of_vllm, verb, keys, free)

    @cache  # noqa: B019
    def served(self):
        return self.child(working.served_answer, self.storage, GPU)

    @cache  # noqa: B019
    def planned(self):
        words = ["plan", "jobs/demo/ppo.yaml", GPU, *PPO, f"run.storage_path={self.storage}"]
        return self.child(command.run, words)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    before = os.getcwd()
    os.chdir(ROOT)
    yield Runs(tmp_path_factory.mktemp("pretended"))
    os.chdir(before)


@pytest.mark.parametrize("name", RUNS)
def test_a_command_runs_on_a_gpu(name, runs):
    found = runs.table(name)
    assert found["status"] == 0
    assert "CUDA graphs" not in found["output"] and "nothing was learned" not in found["output"]
    assert found["peak"] > BASE_BYTES and found["host_reads"]["copy from the host"]
    assert (found["replays"] > 0) == (name in REPLAYED)


def test_an_interrupted_run_resumes_to_the_same_adapter(runs):
    results = [run["result"] for run in (runs.table("ppo"), runs.interrupted())]
    one, other = (Path(result["adapter"], "adapter_model.safetensors") for result in results)
    assert one.read_bytes() == other.read_bytes()


def test_two_nccl_workers_train(runs):
    found = runs.with_two_workers()
    assert found["status"] == 0 and found["result"]["peak_memory_bytes"] > BASE_BYTES


def test_a_rollout_worker_on_its_own_gpu_gives_bit_identical_results(runs):
    found = runs.with_rollout_worker()
    assert found["status"] == 0 and found["result"]["metrics"]["rollout/workers"] > 0
    assert_equal(runs.storage, runs.table("ppo")["result"], found["result"])


@pytest.mark.parametrize(("verb", "free", "share"), VLLM)
def test_vllm_takes_only_free_memory(verb, free, share, runs):
    found = runs.of_vllm(verb, free)
    assert found == {"gpu_memory_utilization": share, "gpus": "3", "output": mock.ANY}


def test_a_replica_answers(runs):
    found = runs.served()
    assert found["status"] == 200 and found["answer"]["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_a_job_for_the_cpu_runs_next_to_a_gpu(name, runs):
    found = runs.of(f"{name}-cpu", name, *RUNS[name][1])
    assert found["status"] == 0
    # The memory of the process, not the memory of the GPU.
    assert found["result"]["peak_memory_bytes"] > 100e6


def test_the_command_of_the_pages_runs(tmp_path):
    lines = (ROOT / "docs/gpu.md").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("python -m tools.gpu.pretend ")]
    words = [sys.executable, *line.split()[1:], "trainer.max_steps=1", f"run.storage_path={tmp_path}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["status"] == 0 and found["peak"] > BASE_BYTES


def test_all_code_for_cuda_is_executed(runs):
    for name in RUNS:
        runs.table(name)
    for verb, free, _ in VLLM:
        runs.of_vllm(verb, free)
    runs.interrupted(), runs.with_two_workers(), runs.with_rollout_worker(), runs.served(), runs.planned()
    executed = {*runs.statements.read_text().splitlines()}
    assert [f"{at} {text}" for at, text in branches.statements().items() if at not in executed] == []
