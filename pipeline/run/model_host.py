"""Loads the models of a job in a process: a worker, an actor, a server, or the driver."""

import os
from typing import Any

from pipeline import registry
from pipeline.job import Job
from pipeline.run import session
from pipeline.settle import placement
from pipeline.settle.inputs import check_sampler
from pipeline.settle.settle import settle_job
from pipeline.settle.work import Work
from pipeline.system import console, hub


def load_model_host(job: Job) -> "ModelHost":
    """Resolves and checks a job. Returns a ModelHost that loads its models in this process, without Ray."""
    session.set_environment()
    check_sampler(job.rollout_config, job.model)
    with console.print_if_slow("checking the models"):
        work = settle_job(job)
    placement.check_fits(work.places)
    print(hub.loading_message(work.model.name_or_path, work.model.revision), flush=True)
    console.silence_libraries()
    return ModelHost(work)


class ModelHost:
    """Loads the base and finds the inputs of a job, for the current process."""

    rank = 0

    def __init__(self, work: Work):
        self.work, self.tokenizer, self.args = work, work.tokenizer, work.args

    @property
    def device(self) -> str:
        """Returns "cuda" if the job uses a GPU, or else "cpu"."""
        return "cuda" if self.work.places.on_gpu else "cpu"

    def load_base(self, scorer_tokenizer: Any = None) -> Any:
        """Loads the frozen base. Rank 0 warns if the job computes in bfloat16 on a processor that only emulates bfloat16."""
        import torch

        base = self.frozen_base(scorer_tokenizer)
        on_cpu = self.rank == 0 and base.device.type == "cpu"
        if on_cpu and self.work.bf16 and not torch.cpu._is_avx512_bf16_supported():
            print("warning: this processor emulates bfloat16; trainer.bf16=false may be faster", flush=True)
        return base

    def frozen_base(self, scorer_tokenizer: Any = None) -> Any:
        """Loads the frozen base directly onto the device of this process; see models.base.load_base."""
        from pipeline.models.base import load_base

        return load_base(self.work.frozen, scorer_tokenizer, self.device)

    def input(self, name: str) -> str:
        """Returns the local folder of an input (`policy`, `reward.0`, ...). Fetches the files if they are not on this machine."""
        job_input = self.work.inputs[name]
        # On other machines, the Hub's cache may have a folder with the same path, in which files are missing.
        is_local = os.path.isdir(job_input.folder) and not job_input.version.startswith(hub.SCHEME)
        return job_input.folder if is_local else registry.fetch(job_input.version, self.work.uri)
