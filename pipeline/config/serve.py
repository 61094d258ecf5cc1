"""The `serve` section: what answers under which name, who may ask, and how much."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from pipeline.config.jobfile import Tree
from pipeline.errors import show
from pipeline.references import Ref

if TYPE_CHECKING:
    from pipeline.config import Job

MODEL_ID = r"[A-Za-z0-9][\w.-]{0,63}"


@dataclass(frozen=True)
class Serve:
    # {model id of a request: models:/NAME@ALIAS, which is followed when the alias moves, a version, a folder, a hub id, or base}
    policies: dict[str, str] = field(default_factory=dict)
    rewards: dict[str, str] = field(default_factory=dict)  # the same of /score; also python:MODULE:FUNCTION
    host: str = "127.0.0.1"  # another one needs tokens in RLHF_SERVE_TOKENS
    port: Annotated[int, "[0, 65535]"] = 8000  # 0: any free one
    max_queue: Annotated[int, "[1, 1000000]"] = (
        256  # completions of a replica that wait for a place in its batch; a request beyond gets 429
    )
    max_choices: Annotated[int, "[1, 128]"] = 16  # completions of one request (its `n`)
    max_body_bytes: Annotated[int, "[1024, 1073741824]"] = 1048576  # of a request; more gets 413
    timeout_s: Annotated[float, "(0, 86400]"] = (
        300.0  # for a whole answer, the wait for its place included; then 504
    )
    cache_tokens: Annotated[int | None, "[16, 1000000000000]"] = (
        None  # of the KV cache; None: what half of a GPU's free memory holds, on a CPU a quarter
    )
    poll_s: Annotated[float, "(0, 86400]"] = (
        5.0  # seconds between two looks at the registry for aliases that have moved
    )
    log_prompts: bool = False  # keep conversations, so that feedback on them becomes rows to learn from; else only its figures
    feedback_path: str | None = None  # a local folder; None: <run.storage_path>/feedback
    feedback_bytes: Annotated[int, "[4096, 1000000000000]"] = (
        1073741824  # of that folder: half for rows, beyond which feedback gets 507, half for conversations
    )


def check(tree: Tree, job: Job) -> None:
    """Refuses model ids that no request could name, or that mean two things."""
    if job.stage != "serve":
        return
    serve = job.serve
    if not serve.policies and not serve.rewards:
        raise tree.error(
            "serve.policies",
            "missing; `serve` needs it, or serve.rewards: 'serve.policies={my-policy: models:/rlhf-ppo@champion}'",
        )
    for key, given in (("policies", serve.policies), ("rewards", serve.rewards)):
        for name in given:
            if not re.fullmatch(MODEL_ID, str(name)):
                raise tree.error(
                    f"serve.{key}", f"found {show(name)}, expected an id of letters, digits, `.`, `_` and `-`"
                )
    if both := sorted(serve.policies.keys() & serve.rewards.keys()):
        raise tree.error(
            "serve.rewards", f"found {both[0]}, which serve.policies names, too; expected another id"
        )
    if "://" in (serve.feedback_path or job.run.storage_path):
        raise tree.error(
            "serve.feedback_path",
            f"feedback goes into a folder of one node, not into a bucket ({serve.feedback_path or job.run.storage_path}); "
            "set serve.feedback_path=FOLDER",
        )
    if serve.cache_tokens is not None and job.rollout.get("engine") == "vllm":
        raise tree.error(
            "serve.cache_tokens",
            f"found {show(serve.cache_tokens)}; expected null with rollout.engine=vllm, whose KV cache fills what "
            "rollout.gpu_memory_utilization leaves it",
        )


def alias_of(reference: str) -> tuple[str, str] | None:
    """(registered model, alias) of models:/NAME@ALIAS; None for what never changes."""
    ref = Ref.parse(reference)
    return (ref.name, ref.alias) if ref.alias else None


def named(serve: Serve) -> dict[str, str]:
    """{input: name}: policies.ID and rewards.ID of all that the section names."""
    return {f"policies.{key}": name for key, name in serve.policies.items()} | {
        f"rewards.{key}": name for key, name in serve.rewards.items()
    }
