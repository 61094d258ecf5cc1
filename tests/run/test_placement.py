"""Tests that a job that needs too many resources fails on one machine, and waits for a limited time on a cluster."""

import os
import re
import subprocess
import sys
import time

import pytest
from ray._private.accelerators import NvidiaGPUAcceleratorManager
from running import NO_EVAL, ROOT

from pipeline.__main__ import main
from pipeline.commands import run as rlhf
from pipeline.errors import Failure, InputError
from pipeline.job import load_job
from pipeline.settle import placement
from pipeline.settle.places import places_of


def job(*overrides):
    return load_job(ROOT / "jobs/demo/sft.yaml", ["data.batch_size=null", *overrides], "sft")


def places(*overrides):
    return places_of(job(*overrides))


GPU = ["scaling.use_gpu=true"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["scaling.resources_per_worker={CPU: 1, memory: 1e14}"], r"scaling\.resources_per_worker: 1 worker with memory: 1e\+14 each, but this machine has \S+; lower"),
        (["scaling.num_workers=500"], r"scaling\.num_workers: 500 workers with CPU: 1 each, but this machine has (\d+); set scaling\.num_workers=\1$"),
        ([*GPU, "scaling.resources_per_worker={CPU: 0.1, GPU: 64}"], "1 worker with GPU: 64 each, but this machine has"),
    ],
)  # fmt: skip
def test_what_this_machine_can_never_hold_is_refused(overrides, says, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(InputError, match=says):
        placement.check_fits(places(*overrides))
    placement.check_fits(places("scaling.resources_per_worker={CPU: 0.5, memory: 1e9}"))


def test_as_many_workers_are_proposed_as_can_share_a_batch(monkeypatch, capsys, in_root):
    """Three workers cannot share a batch of 32 rows, so the error proposes a command with two workers."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(NvidiaGPUAcceleratorManager, "get_current_node_num_accelerators", lambda: 3)
    given = ["scaling.num_workers=4", "trainer.per_device_train_batch_size=4", "mlflow.experiment=a b", *GPU]
    assert main(["sft", "jobs/demo/sft.yaml", *given]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-2].endswith("4 workers with GPU: 1 each, but this machine has 3; set scaling.num_workers=2")
    typed = " ".join(given).replace("mlflow.experiment=a b", "'mlflow.experiment=a b'")
    assert said[-1] == f'run: make sft ARGS="{typed} scaling.num_workers=2"'
    # Skips the check of paths, because the rows of this profile are on the Hub.
    monkeypatch.setattr(rlhf, "check_paths", lambda job: None)
    assert main(["run", "jobs/llama3-8b"]) == 2
    again = 'run: make rlhf PROFILE=llama3-8b ARGS="scaling.num_workers=3"'
    assert capsys.readouterr().err.splitlines()[-1] == again


def test_a_worker_has_a_gpu_unless_the_job_says_otherwise():
    assert places(*GPU).workers.each.resources == {"CPU": 1, "GPU": 1}
    assert places(*GPU, "scaling.resources_per_worker=null").workers.each.resources == {"GPU": 1}


def test_one_machine_ignores_keys_that_choose_among_nodes(monkeypatch, capsys):
    """Keys that choose among nodes have no effect on one machine, so a job file for a cluster also runs there."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    selected = job("scaling.label_selector={zone: a}", "scaling.accelerator_type=H100")
    here = places_of(selected, note=True)
    assert here.workers.each == placement.Bundle({"CPU": 1}, {})
    assert not here.scaling.keys() & {"label_selector", "accelerator_type"}
    out = capsys.readouterr().out
    assert "note: ignoring scaling.accelerator_type, scaling.label_selector: this is" in out
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert places_of(selected).workers.each.selector == {"zone": "a"}
    assert places_of(selected).scaling == selected.scaling
    monkeypatch.setenv("RAY_ADDRESS", "")  # an empty variable means the same as an unset one
    assert job("scaling.num_workers=0").in_process


def test_runs_side_by_side_are_counted_node_by_node(monkeypatch):
    """Tests how many equal runs fit on the cluster at the same time. ray.nodes() is replaced."""
    import ray
    from ray._private.state import state

    def node(cpus, gpus, labels=None, alive=True):
        return {"Alive": alive, "Labels": labels or {}, "Resources": {"CPU": cpus, "GPU": gpus}}

    nodes = [node(16, 4, {"zone": "a"}), node(16, 4, {"zone": "b"}), node(16, 4, alive=False), node(8, 0)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(state, "get_max_resources_from_cluster_config", lambda: {})
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    count = placement.side_by_side
    assert count(places("scaling.num_workers=2")) == 20
    assert count(places("scaling.resources_per_worker={CPU: 9}")) == 2  # one run on each node with 16 CPUs
    assert count(places(*GPU, "scaling.num_workers=4")) == 2
    assert count(places(*GPU, "scaling.label_selector={zone: a}")) == 4
    # The run needs more resources than are free, but Ray Train waits for free resources.
    assert count(places(*GPU, "scaling.num_workers=9")) == 1
    rollouts = ["rollout.num_workers=2", "rollout.use_gpu=true", "rollout.label_selector={zone: b}"]
    # On each node, two runs fit: trainers in zone a or anywhere, and rollout workers in zone b.
    for trainers in (
        ["scaling.use_gpu=true", "scaling.num_workers=2"],
        ["scaling.resources_per_worker={CPU: 8}"],
    ):
        assert count(places_of(load_job(ROOT / "jobs/demo/ppo.yaml", [*trainers, *rollouts]))) == 2
    monkeypatch.setattr(state, "get_max_resources_from_cluster_config", lambda: {"CPU": 64.0, "GPU": 32.0})
    assert count(places(*GPU, "scaling.num_workers=4")) == 8
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(state, "get_max_resources_from_cluster_config", lambda: {})
    monkeypatch.setattr(ray, "nodes", lambda: [node(4, 0)])
    # Without RAY_ADDRESS, an embedded Ray has all CPUs of this machine.
    assert count(places()) == (os.cpu_count() or 1)


def test_what_an_autoscaler_may_never_add_is_refused(embedded_ray, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(placement, "_autoscaler_limits", lambda: {"CPU": 64, "GPU": 4})
    placement.check_fits(places("scaling.num_workers=64"))
    with pytest.raises(
        InputError, match=r"65 workers with CPU: 1 each, but this cluster at its maximum size has 64"
    ):
        placement.check_fits(places("scaling.num_workers=65"))
    monkeypatch.setattr(placement, "_autoscaler_limits", dict)  # the limits of the cluster are unknown
    placement.check_fits(places("scaling.num_workers=65"))


def test_a_wait_says_what_it_waits_for_and_ends(embedded_ray, monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    wait = placement.Wait(places("scaling.resources_per_worker={CPU: 64}", "run.placement_timeout_s=100"))
    for seconds in (0, 29):
        now[0] += seconds
        wait.check()
        assert capsys.readouterr().out == ""
    now[0] += 1
    wait.check()
    assert re.match(r"waiting for 1 x \{CPU: 64\}, 30 s so far; the cluster has \{CPU: \d+, memory: .* GiB\}, of which .* are free\n",
                    capsys.readouterr().out)  # fmt: skip
    now[0] += 60
    wait.since = None  # simulates that a node came back; the next wait has a new time limit
    wait.check()
    now[0] += 100
    with pytest.raises(
        Failure, match=r"^run.placement_timeout_s: no resources for 1 x \{CPU: 64\} were free"
    ):
        wait.check()
    endless = placement.Wait(places("run.placement_timeout_s=-1"))
    endless.check()
    now[0] += 1e9
    endless.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "overrides", "need"),
    [
        ("sft", [*NO_EVAL, "scaling.num_workers=[3, 4]", "data.batch_size=48", "trainer.per_device_train_batch_size=4"], r"3 to 4 x \{CPU: 1\}"),
        ("score", ["reward=python:bad_rewards:length", "scaling.resources_per_worker={CPU: 64}"], r"1 x \{CPU: 64\}"),
    ],
    ids=["elastic", "pool"],
)  # fmt: skip
def test_on_a_cluster_a_wait_ends_with_one_message(verb, overrides, need, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False},
    )
    try:
        env = os.environ | {"RAY_ADDRESS": cluster.address, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "1"}
        given = ["run.placement_timeout_s=3", "gate={}", f"run.storage_path={tmp_path}", *overrides]
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", verb, f"jobs/demo/{verb}.yaml", *given],
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    finally:
        cluster.shutdown()
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    [message] = [line for line in done.stderr.splitlines() if line.startswith("failed: ")]
    says = rf"failed: run\.placement_timeout_s: no resources for {need} were free within 3 s; the cluster has"
    assert re.match(says, message)
