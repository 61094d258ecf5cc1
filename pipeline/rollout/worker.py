"""Defines the actor that samples and scores with the trainer's code (ppo/sampler.py), on its own copies of the models."""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray

from pipeline.run.model_host import ModelHost
from pipeline.settle.work import Work

if TYPE_CHECKING:
    from pipeline.ppo.sampler import Sampler


@dataclass(frozen=True)
class NumericSettings:
    """Settings that change how sums are rounded. Trainers and rollout workers must have the same settings."""

    can_pack: bool  # whether completions to a prompt share a row (SharedBase.can_pack)
    threads: int  # number of threads of torch's CPU kernels
    longest: int  # tokens of the longest prompt


class RolloutWorker:
    """Contains the frozen base, the frozen roles and one version of the policy.

    Args:
        work: the run's work. `rollout.use_gpu` chooses this worker's device.
    """

    def __init__(self, work: Work) -> None:
        self.work = replace(work, places=replace(work.places, on_gpu=work.places.rollout_on_gpu))
        self.stack = contextlib.ExitStack()
        self.sampler: Sampler | None = None
        self.settings: NumericSettings | None = None
        self.holds: tuple[str, int] | None = None  # (session, version) of this worker's policy
        self.digest = ""  # hash of the tensors of this worker's policy

    @ray.method(max_task_retries=-1)
    def placed(self) -> None:
        """Returns when this worker has resources. If this worker dies, Ray repeats the call on the process that replaces the
        worker."""

    def load(self) -> None:
        """Loads base and roles, at the same time as the trainers."""
        if self.sampler:
            return
        from transformers import set_seed

        from pipeline.ppo.sampler import Roles, Sampler
        from pipeline.run import memory, roles
        from pipeline.run.worker import name_output
        from pipeline.system.lease import hold

        name_output("rollout")
        hold(self.work.lease)
        with memory.memory_errors_explained(self.work):
            host = ModelHost(self.work)
            set_seed(host.args.seed)
            shared = roles.shared_base(host)
            roles.add_policy(host, shared, host.args)
            rewards = roles.add_rewards(host, shared)
            self.sampler = Sampler(Roles(shared, rewards), self.work.tokenizer, host.args)

    def apply_settings(self, settings: NumericSettings) -> None:
        """Applies the trainers' settings, so that results are bit-identical. Starts vLLM if the job samples with vLLM."""
        import torch

        from pipeline.run import memory, roles

        self.load()
        if settings == self.settings:
            return
        assert self.sampler
        torch.set_num_threads(settings.threads)
        self.sampler.shared.can_pack = settings.can_pack
        rows = self.work.args.decoded(self.work.places.workers.fewest)
        if self.work.rollout.engine == "transformers":
            self.sampler.fit_to_memory(rows, settings.longest)
        else:
            longest = settings.longest + self.work.args.response_length
            with memory.memory_errors_explained(self.work):
                vllm = roles.vllm_decoder(
                    ModelHost(self.work), self.sampler.shared, ["policy"], longest, rows
                )
                self.sampler.decoder = self.stack.enter_context(vllm)
        self.settings = settings

    def sample(
        self, settings: NumericSettings, session: str, chunk: bytes, tensors: list[Any]
    ) -> bytes | None:
        """Returns a sampled and scored chunk, pickled, or None if the trainer that published its policy version has ended.

        Args:
            settings: the trainers' settings. This method applies the settings if Ray restarted this process while the worker was
                idle.
            session: the trainers' session. Within a session, a version number identifies one adapter.
            chunk: a pickled ppo.sampler.Chunk.
            tensors: a list with the reference to the version's adapter, which is fetched if this worker has another version.
        """
        from pipeline.ppo.rollouts import digest_tensors
        from pipeline.run import memory

        self.apply_settings(settings)
        requested = pickle.loads(chunk)
        assert self.sampler
        with memory.memory_errors_explained(self.work):
            if self.holds != (session, requested.version):
                try:
                    adapter = ray.get(tensors[0])
                except ray.exceptions.OwnerDiedError:
                    return None
                self.sampler.shared.fill("policy", adapter)
                self.sampler.decoder.changed("policy")
                self.digest = digest_tensors(self.sampler.shared.tensors_of("policy"))
                self.holds = (session, requested.version)
            return pickle.dumps(self.sampler.sample_and_score(requested, self.digest))
