"""The rendezvous of torch.distributed on one machine: a file that only its user can read.

torch's own way, a TCPStore, listens on every interface of the machine, asks nobody for a password and cannot be told
otherwise (torch 2.13: `master_listen_fd` is not offered by `init_process_group`;
https://github.com/pytorch/pytorch/issues/173909). On a cluster workers need it.
"""

import os
import tempfile
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.torch import TorchConfig

# Private: what TorchConfig's own backend runs in the workers. Remove when Ray's `init_method` takes a URL.
from ray.train.torch.config import _set_torch_distributed_env_vars, _setup_torch_process_group, _TorchBackend


@dataclass
class FileRendezvous(TorchConfig):
    """TorchConfig for workers on the driver's machine; `folder` is the user's own, and ends with the session."""

    folder: str = ""

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return _Backend


class _Backend(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: FileRendezvous) -> None:
        """Runs in Ray Train's controller: forms the group of all workers."""
        store = os.path.join(tempfile.mkdtemp(prefix="rendezvous-", dir=backend_config.folder), "store")
        group = {
            "backend": "nccl" if worker_group.get_resources_per_worker().get("GPU") else "gloo",
            "world_size": len(worker_group),
            "init_method": f"file://{store}",
            "timeout_s": backend_config.timeout_s,
        }
        worker_group.execute(_set_torch_distributed_env_vars)
        ray.get(
            [
                worker_group.execute_single_async(rank, _setup_torch_process_group, world_rank=rank, **group)
                for rank in range(len(worker_group))
            ]
        )
