"""A worker's own process: what it leaves of the group that Ray forms, and who may push it aside."""

import os
import subprocess
import sys

import pytest

# As Ray's TorchTrainer leaves a worker: a group of torch.distributed, and the environment that accelerate reads.
SCRIPT = """
import os, sys, tempfile
import torch.distributed as dist
from accelerate import PartialState
from pipeline.runtime.worker import leave_group_of_one

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
leave_group_of_one(int(sys.argv[1]), sys.argv[2] == "gpu")
print(PartialState(cpu=True).distributed_type.value, dist.is_initialized())
"""


@pytest.mark.parametrize(
    ("world", "device", "expected"),
    [("1", "cpu", "NO False"), ("2", "cpu", "MULTI_CPU True"), ("1", "gpu", "MULTI_CPU True")],
)
def test_a_single_worker_on_a_cpu_is_a_plain_process_to_accelerate(world, device, expected):
    """`NO`: accelerate wraps no model in DDP. The other two cases show that it would, and that their group stays."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, world, device], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[-2] == expected


def test_workers_of_an_embedded_ray_are_not_niced_behind_its_own_processes(embedded_ray):
    import ray

    @ray.remote(num_cpus=0)
    def niceness():
        return os.nice(0)

    assert ray.get(niceness.remote()) == os.nice(0)
