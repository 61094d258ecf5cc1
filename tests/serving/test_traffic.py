"""Which version answers."""

import pytest

from pipeline.config import Serve
from pipeline.serving.traffic import Route, Traffic, route

ALIASES = {"champion": "models:/p/3", "canary": "models:/p/4", "shadow": "models:/p/5"}
REFERENCE = "models:/p@champion"


def traffic(**shares):
    made = Traffic(Serve(**shares))
    made.routes["p"] = Route("models:/p/3", "models:/p/4", "models:/p/5")
    return made


@pytest.mark.parametrize("share", [0.1, 0.33, 0.5, 1.0])
def test_shares_are_exact(share):
    split = traffic(canary_share=share)
    for count in range(1, 301):
        chosen = split.choose("p", None)
        assert chosen in ("models:/p/3", "models:/p/4")
        split.counted = getattr(split, "counted", 0) + (chosen == "models:/p/4")
        assert split.counted == int(count * share + 1e-9)


def test_a_user_stays_where_it_fell():
    split = traffic(canary_share=0.3)
    first = {f"user {i}": split.choose("p", f"user {i}") for i in range(1000)}
    assert all(split.choose("p", user) == version for user, version in first.items())
    assert 250 < sum(version == "models:/p/4" for version in first.values()) < 350


def test_canary_and_shadow_have_to_be_asked_for_and_to_be_there():
    assert route(Serve(), REFERENCE, "models:/p/3", ALIASES) == Route("models:/p/3")
    both = Serve(canary_share=0.1, shadow_share=1.0)
    assert route(both, REFERENCE, "models:/p/3", ALIASES) == Route(
        "models:/p/3", "models:/p/4", "models:/p/5"
    )
    assert route(both, REFERENCE, "models:/p/4", ALIASES).canary is None, "it has been promoted"
    assert route(both, REFERENCE, "models:/p/3", {"champion": "models:/p/3"}) == Route("models:/p/3")
    assert route(both, "models:/p/3", "models:/p/3", ALIASES) == Route("models:/p/3"), "a version is pinned"


def test_nothing_is_drawn_twice():
    split = traffic(canary_share=0.5, shadow_share=0.25, pair_share=0.1)
    answers = [(split.choose("p", None), split.shadow("p"), split.pair("p")) for _ in range(400)]
    assert sum(version == "models:/p/4" for version, _, _ in answers) == 200
    assert sum(shadow == "models:/p/5" for _, shadow, _ in answers) == 100
    assert sum(pair for _, _, pair in answers) == 40
    assert split.versions() == {"models:/p/3", "models:/p/4", "models:/p/5"}
