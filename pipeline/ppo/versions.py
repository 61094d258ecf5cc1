"""The policy's adapter as it was after each of the last updates: what samplers that run ahead of the trainer sample from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.models.adapters import SharedBase
from pipeline.ppo.batch import gather

FILE = "versions.safetensors"
Tensors = Mapping[str, Tensor]  # an adapter, by its names in peft's files


class Versions:
    """The last versions of a role; version u is the role after u updates.

    Args:
        staleness: how many versions before the newest one may still be asked for.
    """

    def __init__(self, shared: SharedBase, role: str, staleness: int) -> None:
        self.shared, self.role, self.staleness = shared, role, staleness
        self.held: dict[int, dict[str, Tensor]] = {}
        self.digests: dict[int, str] = {}

    def add(self, version: int) -> None:
        """Keep the role as it is now, and forget versions that nobody asks for any more."""
        self._keep(
            version, {name: tensor.clone() for name, tensor in self.shared.tensors_of(self.role).items()}
        )
        for old in [held for held in self.held if held < version - self.staleness]:
            del self.held[old], self.digests[old]

    def _keep(self, version: int, tensors: dict[str, Tensor]) -> None:
        # Rank 0's adapter is the one that is published; one that another kind of processor made may differ in a last bit.
        self.held[version], self.digests[version] = tensors, gather(digest(tensors))[0]

    @contextmanager
    def use(self, version: int) -> Iterator[None]:
        """Within the block the role is that version; afterwards it is what it was."""
        now = {name: tensor.clone() for name, tensor in self.shared.tensors_of(self.role).items()}
        self.shared.fill(self.role, self.held[version])
        try:
            yield
        finally:
            self.shared.fill(self.role, now)

    def save(self, folder: str | Path, newest: int) -> None:
        """Write the versions that may still be asked for before `newest`, which is the role itself."""
        older = [version for version in sorted(self.held) if newest - self.staleness <= version < newest]
        tensors = {
            f"{version}/{name}": tensor for version in older for name, tensor in self.held[version].items()
        }
        if tensors:
            save_file(tensors, Path(folder) / FILE)

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote, if it wrote anything."""
        path = Path(folder) / FILE
        self.held, self.digests = {}, {}
        stored: dict[int, dict[str, Tensor]] = {}
        for key, tensor in (load_file(path) if path.exists() else {}).items():
            version, _, name = key.partition("/")
            stored.setdefault(int(version), {})[name] = tensor
        for version, tensors in stored.items():
            self._keep(version, tensors)


def digest(tensors: Tensors) -> str:
    """Of names and values."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()
