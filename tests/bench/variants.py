"""What the part `ppo` compares: the rows of its table, each one setting of our PPO beside one of TRL's, or of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from sizes import SIZES

PHASES = ("rollout", "score", "values", "update")
# Of completions: all up to the limit, or each until it ends by itself.
CASES = {"full": "full length", "own": "own length"}


# Ours: 1e-5, and gradients clipped to 1
OPTIMIZER_OF_TRL: dict[str, Any] = {
    "adam_epsilon": 1e-8,
    "max_grad_norm": 0.0,
}


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

# What the part `score` measures beside TRL.
LEARNERS = [Ours(), Ours("adapter"), Ours(like_trl=True), Ours("adapter", like_trl=True)]


def chosen(names: list[str] | None, size: str, case: str, matmul: dict[str, Any]) -> dict[str, Variant]:
    """The variants of that name, or those that are measured by default, as far as they have a meaning here: long prompts at
    a size that has them, a precision of fp32 products other than torch's default, bf16 where the processor has it.

    Args:
        matmul: what matmul.py found.
    """
    found = {}
    for name, variant in VARIANTS.items():
        ours, beside = variant.ours, variant.beside
        asked = name in names if names else case in variant.cases
        too_long = ours.long_prompts and not SIZES[size].long_prompt_tokens
        as_before = isinstance(beside, Theirs) and beside.matmul and matmul["precision"] == "highest"
        imitated = ours.dtype == "bfloat16" and not matmul["bf16"]
        if asked and not (too_long or as_before or imitated):
            found[name] = variant
    return found
