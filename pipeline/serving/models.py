"""What a replica holds: one base, and the versions behind the model ids as roles on it; followed when aliases move."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline import registry
from pipeline.config.serve import alias_of
from pipeline.errors import InputError, in_brief
from pipeline.registry import lineage
from pipeline.runtime.host import Host
from pipeline.runtime.inputs import check_adapters
from pipeline.serving.traffic import Route, Traffic, route

if TYPE_CHECKING:
    from pipeline.models.adapters import SharedBase
    from pipeline.ppo.rewards import Reward
    from pipeline.serving.batching import Batcher

BASE = "base"  # the version of the bare base


class Models:
    """The versions that are loaded, and the routes that lead to them.

    `pinned` says at first what the driver found when it checked the job; `follow` what the registry says now. A version that
    cannot be loaded leaves the one before in its place.
    """

    def __init__(self, host: Host, shared: SharedBase | None, batcher: Batcher) -> None:
        from pipeline.models.fit import check_base

        self.host, self.shared, self.batcher = host, shared, batcher
        self.files = check_base(host.job.model, gpu=bool(host.job.scaling.get("use_gpu")))
        self.uri = registry.tracking_uri(host.job)
        self.traffic = Traffic(host.job.serve)
        self.roles: dict[str, str | None] = {BASE: None}  # version -> role
        self.rewards: dict[str, Reward] = {}  # model id -> reward
        self.reward_roles: set[str] = set()  # on the shared base
        self.reward_versions: dict[str, str] = {}
        self.refused: dict[str, str] = {}  # version -> why it cannot be served
        self.unused: set[str] = set()  # roles that no route led to at the last look
        self.loaded = 0
        for name, version in self._pinned("policies").items():
            if version != BASE:
                self._load(version, self._folder(f"policies.{name}", version))
            self.traffic.routes[name] = Route(version)
        for name, version in self._pinned("rewards").items():
            self._load_reward(name, version)

    def _pinned(self, kind: str) -> dict[str, str]:
        """{model id: version} as the driver pinned them."""
        given = getattr(self.host.job.serve, kind)
        return {name: self.host.work.inputs.get(f"{kind}.{name}", BASE) for name in given}

    # --------------------------------------------------------------------------------------------- loading

    def _load(self, version: str, folder: str) -> None:
        """A policy's version, of which this is the folder, becomes a role, unless it is one."""
        if version in self.roles:
            return
        self.loaded += 1
        role = f"version_{self.loaded}"
        self.batcher.add(role, folder)
        self.roles[version] = role

    def _folder(self, key: str, version: str) -> str:
        """The local folder of a version that was proved to fit the base. Raises InputError."""
        from pipeline.models.tokenizer import template_digest

        work = self.host.work
        folder = check_adapters(work.job, {key: version}, work.base, self.files)[key]
        template = lineage.read(folder, version).get("chat_template")
        if (
            template not in (None, template_digest(self.host.tokenizer))
            and work.job.model.chat_template is None
        ):
            raise InputError(
                f"{version} was trained with another chat template than the policies beside it; serve it apart, or name one for "
                "all in model.chat_template",
                key=f"serve.{key}",
            )
        return folder

    def _load_reward(self, name: str, version: str) -> None:
        from pipeline.runtime import roles

        key = f"rewards.{name}"
        self.loaded += 1
        host = Host(replace(self.host.work, inputs={key: version}))
        reward = roles.reward(host, self.shared, key, f"reward_{self.loaded}")
        if role := getattr(reward, "role", None):
            self.reward_roles.add(role)
        self.rewards[name], self.reward_versions[name] = reward, version

    # ------------------------------------------------------------------------------------------- following

    def follow(self) -> list[str]:
        """Look at the registry once, load what aliases have moved to, let go of what nothing uses; what there is to say.

        Blocks; called from a thread of its own.
        """
        said: list[str] = []
        serve = self.host.job.serve
        for name, reference in serve.policies.items():
            if (alias := alias_of(reference)) is None:
                continue
            now = self.traffic.routes[name]
            try:
                aliases = registry.aliases(alias[0], self.uri)
            except Exception as error:  # the registry is away: what is served stays
                said.append(
                    f"{reference}: the registry cannot be asked ({in_brief(error)}); {now.version} goes on"
                )
                continue
            pinned = aliases.get(alias[1], now.version)
            wanted = self._served(route(serve, reference, pinned, aliases), now, name, said)
            if wanted != now:
                self.traffic.routes[name] = wanted
                said.append(f"{name}: {shown(wanted)}")
        for name, reference in serve.rewards.items():
            self._follow_reward(name, reference, said)
        self._let_go()
        return said

    def _served(self, wanted: Route, now: Route, name: str, said: list[str]) -> Route:
        """The route with those of its versions that can be loaded; for the others what was there."""
        kept: dict[str, Any] = {}
        for key in ("version", "canary", "shadow"):
            version = getattr(wanted, key)
            if (
                version is not None
                and version not in self.roles
                and not self._try(f"policies.{name}", version, said)
            ):
                kept[key] = getattr(now, key)
        return replace(wanted, **kept)

    def _try(self, key: str, version: str, said: list[str]) -> bool:
        if version in self.refused:
            return False
        try:
            folder = self._folder(key, version)  # fetched and checked here: the batch does not wait for it
            done: Future[Any] = self.batcher.run(lambda: self._load(version, folder))
            done.result()
        except Exception as error:
            self.refused[version] = in_brief(error)
            said.append(f"{version} cannot be served ({in_brief(error)}); what was served stays")
            return False
        return True

    def _follow_reward(self, name: str, reference: str, said: list[str]) -> None:
        if (alias := alias_of(reference)) is None:
            return
        try:
            version = registry.aliases(alias[0], self.uri).get(alias[1])
        except Exception as error:
            said.append(f"{reference}: the registry cannot be asked ({in_brief(error)})")
            return
        before = self.reward_versions[name]
        if version in (None, before) or version in self.refused:
            return
        try:
            check_adapters(self.host.job, {f"rewards.{name}": version}, self.host.work.base, self.files)
            self.batcher.run(lambda: self._load_reward(name, version)).result()
        except Exception as error:
            self.refused[version] = in_brief(error)
            said.append(f"{version} cannot be served ({in_brief(error)}); {before} stays")
            return
        said.append(f"{name}: {version}")

    def _let_go(self) -> None:
        """Removes roles to which no route led at the last look either, once their last completion is written.

        A request that was given one of them a moment ago has joined the batch by now.
        """

        def remove() -> None:
            wanted = {self.roles.get(version) for version in self.traffic.versions()} | self.batcher.roles()
            wanted |= {getattr(reward, "role", None) for reward in self.rewards.values()}
            written = {role for role in self.roles.values() if role}
            unused = (written | self.reward_roles) - wanted
            for role in unused & self.unused & written:
                self.roles = {version: held for version, held in self.roles.items() if held != role}
                self.batcher.remove(role)
            for role in unused & self.unused & self.reward_roles:
                assert self.shared is not None
                self.reward_roles.remove(role)
                self.shared.remove(role)
            self.unused = unused

        self.batcher.run(remove).result()


def shown(route: Route) -> str:
    further = "".join(f", {key} {getattr(route, key)}" for key in ("canary", "shadow") if getattr(route, key))
    return f"{route.version}{further}"
