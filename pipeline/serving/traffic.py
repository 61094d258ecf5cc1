"""Which version answers a request: that of the policy's alias, of a share of the requests the canary's; and its shadow."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config.serve import Serve, alias_of


@dataclass(frozen=True)
class Route:
    """The versions behind one model id, each pinned (models:/NAME/3)."""

    version: str
    canary: str | None = None
    shadow: str | None = None


class Traffic:
    """Shares are exact: of any n requests in succession, n * share go to the canary, rounded up or down.

    With a `user`, all requests of this user go where the hash of the name falls.
    """

    def __init__(self, serve: Serve) -> None:
        self.serve = serve
        self.routes: dict[str, Route] = {}
        self.asked: dict[tuple[str, str], int] = {}

    def versions(self) -> set[str]:
        """All that any request may need."""
        return {v for r in self.routes.values() for v in (r.version, r.canary, r.shadow) if v is not None}

    def choose(self, model: str, user: str | None) -> str:
        """The version that answers the next request."""
        route = self.routes[model]
        if route.canary and self._drawn("canary", model, self.serve.canary_share, user):
            return route.canary
        return route.version

    def shadow(self, model: str) -> str | None:
        """The version that answers the same request unseen, if any."""
        route = self.routes[model]
        return (
            route.shadow
            if route.shadow and self._drawn("shadow", model, self.serve.shadow_share, None)
            else None
        )

    def pair(self, model: str) -> bool:
        """Whether the version that answers is to write a second completion, unseen."""
        return self._drawn("pair", model, self.serve.pair_share, None)

    def _drawn(self, what: str, model: str, share: float, user: str | None) -> bool:
        if user is not None:
            digest = hashlib.blake2b(f"{model}\0{user}".encode(), digest_size=8).digest()
            return int.from_bytes(digest) < share * 2**64
        count = self.asked[what, model] = self.asked.get((what, model), 0) + 1
        return math.floor(count * share) > math.floor((count - 1) * share)


def route(serve: Serve, reference: str, pinned: str, aliases: Mapping[str, str]) -> Route:
    """The versions behind a policy.

    Args:
        reference: as the job names it.
        pinned: the version that it means now.
        aliases: {alias: version} of its registered model.
    """
    if alias_of(reference) is None:
        return Route(pinned)
    canary = aliases.get(serve.canary_alias) if serve.canary_share else None
    shadow = aliases.get(serve.shadow_alias) if serve.shadow_share else None
    return Route(pinned, None if canary == pinned else canary, None if shadow == pinned else shadow)
