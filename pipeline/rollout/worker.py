"""The actor that samples and scores: the same code as in the trainer (ppo/sampler.py), on models of its own."""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray

from pipeline.on_ray import placement
from pipeline.runtime.host import Host, Work

if TYPE_CHECKING:
    from pipeline.ppo.sampler import Sampler

SIGNS = "signs"  # the concurrency group that answers while the other one computes


@dataclass(frozen=True)
class Terms:
    """What the trainer has settled for all that compute in its run."""

    can_pack: bool  # SharedBase.can_pack
    threads: int  # torch.get_num_threads: sums of other numbers of threads have other bits
    longest: int  # tokens of the longest prompt and its completion


class RolloutWorker:
    """Holds the frozen base, the frozen roles and one version of the policy.

    Args:
        work: of the run; this worker has the device that `rollout.use_gpu` says.
    """

    def __init__(self, work: Work) -> None:
        job = work.job
        scaling = {**job.scaling, "use_gpu": placement.rollout_on_gpu(job)}
        self.work = replace(work, job=replace(job, scaling=scaling))
        self.stack = contextlib.ExitStack()
        self.sampler: Sampler | None = None
        self.holds: tuple[str, int] | None = None  # (session, version) of the policy
        self.digest = ""

    @ray.method(concurrency_group=SIGNS)
    def node(self) -> str:
        """The id of the node that it was placed on: it answers as soon as it was."""
        return ray.get_runtime_context().get_node_id()

    @ray.method(concurrency_group=SIGNS)
    def alive(self) -> bool:
        """It answers unless the process is stopped or gone."""
        return True

    def load(self) -> None:
        """Loads base and roles, as the trainer's workers do meanwhile."""
        from transformers import set_seed

        from pipeline.ppo.sampler import Sampler
        from pipeline.runtime import memory, roles
        from pipeline.runtime.resume import hold_worker_lock
        from pipeline.runtime.worker import name_output

        name_output("rollout")
        hold_worker_lock(self.work.job.folder)
        job = self.work.job
        with memory.explained(job):
            set_seed(job.args.seed)
            host = Host(self.work)
            shared = roles.shared_base(host)
            reference = roles.add_policy(host, shared, job.args)
            rewards = roles.add_rewards(host, shared)
            self.sampler = Sampler(shared, self.work.tokenizer, job.args, rewards, reference)

    def settle(self, terms: Terms) -> None:
        """Computes from here on as the trainer's workers do. Starts vLLM if the job samples with it."""
        import torch

        from pipeline.runtime import memory, roles

        assert self.sampler
        torch.set_num_threads(terms.threads)
        self.sampler.shared.can_pack = terms.can_pack
        job = self.work.job
        rows = job.args.decoded(job.workers[0])
        if job.rollout_config.engine == "transformers":
            self.sampler.fit_to_memory(rows, terms.longest)
        else:
            with memory.explained(job):
                vllm = roles.vllm(Host(self.work), self.sampler.shared, ["policy"], terms.longest, rows)
                self.sampler.decoder = self.stack.enter_context(vllm)

    def sample(self, session: str, chunk: bytes, tensors: list[Any]) -> bytes | None:
        """A chunk sampled and scored, pickled; None where its version is gone with the trainer that had published it.

        Args:
            session: within it, a version's number stands for one adapter.
            chunk: a ppo.sampler.Chunk, pickled.
            tensors: a reference to the adapter of its version; fetched where this worker does not hold it.
        """
        from pipeline.ppo.rollouts import digest
        from pipeline.runtime import memory

        one = pickle.loads(chunk)
        assert self.sampler
        with memory.explained(self.work.job):
            if self.holds != (session, one.version):
                try:
                    adapter = ray.get(tensors[0])
                except ray.exceptions.OwnerDiedError:
                    return None
                self.sampler.shared.fill("policy", adapter)
                self.sampler.decoder.changed("policy")
                self.digest = digest(self.sampler.shared.tensors_of("policy"))
                self.holds = (session, one.version)
            return pickle.dumps(self.sampler.sample_and_score(one, self.digest))
