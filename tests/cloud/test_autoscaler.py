"""Tests the message that a job prints if it waits for a node that the cloud cannot start. Uses Ray's autoscaler v2."""

import json
import os
import subprocess
import sys

import pytest
from head import TOKEN, Head

from tools.chaos.runs import until

PROVIDER = """
import json
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import *

class Cloud(NodeProvider):
    '''A fake cloud with a running head and no capacity for other nodes.'''
    def non_terminated_nodes(self, tags): return ["head"]
    def is_running(self, node): return True
    def is_terminated(self, node): return False
    def internal_ip(self, node): return ""
    external_ip = internal_ip
    def node_tags(self, node):
        return {TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_USER_NODE_TYPE: "head", TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
                TAG_RAY_NODE_NAME: "head"}
    def create_node_with_resources_and_labels(self, config, tags, count, resources, labels):
        with open(self.provider_config["log"], "a") as log:
            log.write(tags[TAG_RAY_USER_NODE_TYPE] + chr(10))
        raise NodeLaunchException("InsufficientInstanceCapacity", "no g6.2xlarge in us-west-2a", None)
"""
SECTIONS = ("auth", "file_mounts")
LISTS = """initialization_commands setup_commands head_setup_commands worker_setup_commands head_start_ray_commands
    worker_start_ray_commands cluster_synced_files rsync_exclude rsync_filter""".split()
WAITS = """
import ray, sys, time
from pipeline.job import load_job
from pipeline.settle import placement
from pipeline.settle.places import places_of

ray.init(log_to_driver=False, logging_level="error")
print("before:", repr(placement.launch_failure()), flush=True)
placement.REPORT_INTERVAL_S = 1.0

def say(text):
    print(text, flush=True)
    if "launches of" in text:
        sys.exit()

placement.terminal.say = say
job = load_job("jobs/demo/sft.yaml", ["scaling.use_gpu=true", "run.placement_timeout_s=120"], "sft")
placement.wait_for_one(places_of(job, elsewhere=True))
"""


@pytest.fixture
def head(tmp_path, monkeypatch):
    """Starts a head whose autoscaler prefers gpu1_spot to gpu1."""
    (tmp_path / "cloud.py").write_text(PROVIDER)
    gpu = {"resources": {"CPU": 8, "GPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2}
    types = {"head": {"resources": {"CPU": 4}, "node_config": {}, "max_workers": 0}}
    types |= {"gpu1_spot": {**gpu, "priority": 10}, "gpu1": {**gpu, "priority": 1}}
    provider = {"type": "external", "module": "cloud.Cloud", "log": str(tmp_path / "launches")}
    config = {"cluster_name": "c", "max_workers": 4, "idle_timeout_minutes": 1, "upscaling_speed": 1.0}
    config |= {"provider": provider, "available_node_types": types, "head_node_type": "head"}
    config["file_mounts_sync_continuously"] = False
    config |= {name: {} for name in SECTIONS} | {name: [] for name in LISTS}
    (tmp_path / "cluster.yaml").write_text(json.dumps(config))
    for name in ("RAY_CLOUD_INSTANCE_ID", "RAY_NODE_TYPE_NAME"):
        monkeypatch.setenv(name, "head")
    monkeypatch.setenv("RAY_enable_autoscaler_v2", "1")
    with Head(f"--autoscaling-config={tmp_path / 'cluster.yaml'}", PYTHONPATH=str(tmp_path)) as one:
        yield one


@pytest.mark.slow
def test_a_wait_names_the_launch_that_failed_and_ray_tries_no_other_type(head, tmp_path, in_root):
    """Fails if a new version of Ray falls back from a spot node type to an on-demand type.

    If this test fails, update the sections of the documentation on spot nodes.
    """
    environment = {"RAY_ADDRESS": head.gcs, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    command = [sys.executable, "-c", WAITS]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=200)
    lines = done.stdout.splitlines()
    assert lines[0] == "before: ''", done.stderr[-2000:]
    why = "launches of gpu1_spot failed, and Ray tries no other type: Node Launch Exception (InsufficientInstanceCapacity): no g6"
    assert [line for line in lines if line.startswith("waiting for") and why in line], (
        done.stdout + done.stderr[-2000:]
    )
    assert set(until((tmp_path / "launches").read_text, "launches").split()) == {"gpu1_spot"}
