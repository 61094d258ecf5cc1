"""The models of a replica: one base, and the versions behind the model ids. The versions follow aliases that move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline import registry
from pipeline.errors import InputError, in_brief
from pipeline.references import Ref
from pipeline.registry import lineage
from pipeline.runtime.host import Host
from pipeline.runtime.inputs import check_adapters

if TYPE_CHECKING:
    from pipeline.models.adapters import SharedBase
    from pipeline.ppo.rewards import Reward
    from pipeline.serving.batching import Batcher

BASE = "base"  # the version of the bare base


@dataclass(frozen=True)
class Served:
    """A loaded version. A policy has a role in the batch, the bare base None."""

    version: str
    role: str | None = None
    reward: Reward | None = None


class Models:
    """The versions that answer under each model id.

    At first they are those that the driver pinned when it checked the job. `follow` replaces them as the registry says. If a
    version cannot be loaded, the previous one stays.
    """

    def __init__(self, host: Host, shared: SharedBase | None, batcher: Batcher) -> None:
        from pipeline.models.base import check_base

        self.host, self.shared, self.batcher = host, shared, batcher
        self.files = check_base(host.job.model, gpu=bool(host.job.scaling.get("use_gpu")))
        self.uri = registry.tracking_uri(host.job)
        self.policies: dict[str, Served] = {}  # model id -> policy
        self.rewards: dict[str, Served] = {}
        self.remove: dict[str, Callable[[str], None]] = {}  # role -> how to remove it
        self.refused: set[tuple[str, str]] = set()  # (input, version) that cannot be served
        self.unused: set[str] = set()  # roles that no model id used at the last poll
        self.loaded = 0
        for key in host.job.serve.inputs:
            version = host.work.inputs.get(key, BASE)
            self._serve(key, version, self._checked(key, version))

    @property
    def versions(self) -> dict[str, str]:
        return {name: served.version for name, served in {**self.policies, **self.rewards}.items()}

    # --------------------------------------------------------------------------------------------- loading

    def _checked(self, key: str, version: str) -> str | None:
        """Returns the local folder of an adapter that fits the base, or None if the version is none. Raises InputError."""
        from pipeline.models.tokenizer import template_digest

        if version == BASE:
            return None
        work = self.host.work
        folder = check_adapters(work.job, {key: version}, work.base, self.files).get(key)
        if not key.startswith("policies.") or folder is None or work.job.model.chat_template is not None:
            return folder
        template = lineage.read(folder, version).get("chat_template")
        if template not in (None, template_digest(self.host.tokenizer)):
            raise InputError(
                f"{version} was trained with another chat template than the other policies; serve it separately, or set "
                "model.chat_template for all of them",
                key=f"serve.{key}",
            )
        return folder

    def _serve(self, key: str, version: str, folder: str | None) -> None:
        """Loads a version, unless another model id has it, and answers with it."""
        kind, _, name = key.partition(".")
        models = self.policies if kind == "policies" else self.rewards
        loaded = {served.version: served for served in models.values()}
        if version not in loaded:
            self.loaded += 1
            loaded[version] = (
                self._policy(version, folder) if models is self.policies else self._reward(key, version)
            )
        models[name] = loaded[version]

    def _policy(self, version: str, folder: str | None) -> Served:
        if folder is None:
            return Served(version)
        role = f"version_{self.loaded}"
        self.batcher.decoder.add(role, folder)
        self.remove[role] = self.batcher.decoder.remove
        return Served(version, role)

    def _reward(self, key: str, version: str) -> Served:
        from pipeline.runtime import roles

        host = Host(replace(self.host.work, inputs={key: version}))
        reward = roles.reward(host, self.shared, key, f"reward_{self.loaded}")
        if (role := getattr(reward, "role", None)) and self.shared is not None:
            self.remove[role] = self.shared.remove
        return Served(version, role, reward)

    # ------------------------------------------------------------------------------------------- following

    def follow(self) -> list[str]:
        """Checks the registry once, loads the versions that aliases have moved to, and frees versions that nothing uses.
        Returns what to report.

        Blocks; called from a thread of its own.
        """
        said = [
            line
            for key, reference in self.host.job.serve.inputs.items()
            for line in self._follow(key, reference)
        ]
        self.batcher.run(self._remove_unused).result()
        return said

    def _follow(self, key: str, reference: str) -> list[str]:
        name, before = key.partition(".")[2], self.versions[key.partition(".")[2]]
        ref = Ref.parse(reference)
        if not ref.alias:
            return []
        try:
            version = registry.aliases(ref.name, self.uri).get(ref.alias, before)
        except Exception as error:
            return [f"{reference}: the registry cannot be reached ({in_brief(error)}); {before} stays"]
        if version == before or (key, version) in self.refused:
            return []
        try:
            folder = self._checked(key, version)  # fetched and checked here, so that the batch does not wait
            self.batcher.run(lambda: self._serve(key, version, folder)).result()
        except Exception as error:
            self.refused.add((key, version))
            return [f"{version} cannot be served ({in_brief(error)}); {before} stays"]
        return [f"{name}: {version}"]

    def _remove_unused(self) -> None:
        """Removes roles that no model id has used for two polls and whose completions are all finished.

        By then, every request that got such a role has joined the batch.
        """
        wanted = self.batcher.roles() | {
            one.role for one in (*self.policies.values(), *self.rewards.values())
        }
        unused = self.remove.keys() - wanted
        for role in unused & self.unused:
            self.remove.pop(role)(role)
        self.unused = unused - self.unused
