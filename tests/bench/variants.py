"""What `ppo` compares, the rows of its table; and what both sides of `score` share: reward, settings and goal."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

from sizes import SIZES

PHASES = ("rollout", "score", "values", "update")
# Of completions: all up to the limit, or each until it ends by itself.
CASES = {"full": "full length", "own": "own length"}
OPTIMIZER_OF_TRL: dict[str, Any] = {
    "adam_epsilon": 1e-8,
    "max_grad_norm": 0.0,
}  # ours: 1e-5, and clipped to 1


@dataclass(frozen=True)
class Ours:
    """One setting of our PPO."""

    script: ClassVar[str] = "ppo_ours.py"
    critic: Literal["adapter", "head"] = "head"
    dtype: str = "float32"  # of the base; bfloat16 also turns on the trainer's bf16
    like_trl: bool = False  # OPTIMIZER_OF_TRL, and as many rows in a forward as TRL has
    # different; or shared: several completions to each; or repeated: the same episodes, where no forward shares a prompt
    prompts: str = "different"
    long_prompts: bool = False

    def __str__(self) -> str:
        words = [f"ours, {'bf16' if self.dtype == 'bfloat16' else 'fp32'}", f"critic {self.critic}"]
        if self.like_trl:
            words.append("TRL's settings")
        if self.prompts != "different":
            words.append(f"{'long ' if self.long_prompts else ''}{self.prompts} prompts")
        return ", ".join(words)


@dataclass(frozen=True)
class Theirs:
    """One setting of TRL 1.12's PPO."""

    script: ClassVar[str] = "ppo_trl.py"
    bf16: bool = False
    matmul: bool = False  # with the precision of fp32 products that our pipeline chooses on this machine

    def __str__(self) -> str:
        return f"TRL 1.12, {'bf16' if self.bf16 else 'fp32'}{', matmul as ours' if self.matmul else ''}"


class Variant(NamedTuple):
    """One row of the table: `ours`, measured beside `beside` in the same round."""

    ours: Ours
    beside: Ours | Theirs
    cases: tuple[str, ...] = tuple(CASES)  # at which it is measured unless it is asked for by name


VARIANTS = {
    "head": Variant(Ours(), Theirs()),
    "adapter": Variant(Ours("adapter"), Theirs()),
    "like-trl": Variant(Ours("adapter", like_trl=True), Theirs(), ("full",)),
    "matmul-head": Variant(Ours(), Theirs(matmul=True)),
    "matmul-adapter": Variant(Ours("adapter"), Theirs(matmul=True)),
    "bf16-head": Variant(Ours(dtype="bfloat16"), Theirs(bf16=True)),
    "bf16-adapter": Variant(Ours("adapter", dtype="bfloat16"), Theirs(bf16=True), ("full",)),
    "shared": Variant(Ours(prompts="shared"), Ours(prompts="repeated"), ("full",)),
    "shared-long": Variant(
        Ours(prompts="shared", long_prompts=True), Ours(prompts="repeated", long_prompts=True), ("full",)
    ),
}


def chosen(names: list[str] | None, size: str, case: str, matmul: dict[str, Any]) -> dict[str, Variant]:
    """Returns the variants of these names, or those that are measured by default, as far as they have a meaning here.

    Long prompts need a size that has them, `matmul` a precision of fp32 products other than torch's default, and bf16 a
    processor that has it.
    """

    def has_meaning(ours: Ours, beside: Ours | Theirs) -> bool:
        too_long = ours.long_prompts and not SIZES[size].long_prompt_tokens
        as_before = isinstance(beside, Theirs) and beside.matmul and matmul["precision"] == "highest"
        imitated = ours.dtype == "bfloat16" and not matmul["bf16"]
        return not (too_long or as_before or imitated)

    return {
        name: variant
        for name, variant in VARIANTS.items()
        if (name in names if names else case in variant.cases) and has_meaning(*variant[:2])
    }


# ------------------------------------------------------------------------------------------------------- score

# What is measured beside TRL.
LEARNERS = [Ours(), Ours("adapter"), Ours(like_trl=True), Ours("adapter", like_trl=True)]
KIND = {"good", "pleasure", "thank", "happy", "help", "helps", "hope", "nice", "please"}
GRUFF = {"obviously", "everybody", "look", "why", "who", "cares"}
# What is not here is the same by default (clip ranges 0.2, vf_coef 0.1, gamma 1, lam 0.95, whitened advantages)
SETTINGS: dict[str, Any] = {
    "num_ppo_epochs": 4,
    "num_mini_batches": 1,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "kl_coef": 0.05,
    "temperature": 1.0,
}


@dataclass(frozen=True)
class Goal:
    """How long a size learns, and what is read off its curve."""

    updates: int
    score: float  # updates and samples until it is reached
    kl: float  # nats per completion: the score where it is reached

    def read(self, curve: list[tuple[float, float]]) -> dict[str, Any]:
        """Returns what a curve of (mean score, KL) of each update says; None for what it never reaches."""
        updates = next((float(n) for n, (mean, _) in enumerate(curve, 1) if mean >= self.score), None)
        return {"curve": curve, "updates": updates, "score": self.score_at_kl(curve)}

    def score_at_kl(self, curve: list[tuple[float, float]]) -> float | None:
        """Returns the mean score where the KL first reaches the goal's, between two updates, or None."""
        for (score, before), (next_score, after) in pairwise(curve):
            if after >= self.kl:
                return score + (next_score - score) * (self.kl - before) / max(after - before, 1e-9)
        return None


# `large` writes random tokens: no text to score
GOALS = {"toy": Goal(2, -1.0, 0.0), "demo": Goal(24, 2.0, 6.0)}


def courtesy(completion: str) -> float:
    """Returns the number of kind words less that of gruff ones."""
    words = re.findall(r"[a-z]+", completion.lower())
    return float(sum((word in KIND) - (word in GRUFF) for word in words))
