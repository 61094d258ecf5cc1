"""Look at the data of a job before anything is trained: what was read, kept, dropped, truncated, and three rows as the model sees them.

    python -m pipeline validate jobs/demo/sft.yaml [section.key=value ...]

The tokenised rows stay in the cache: the run that follows does not make them again.
"""

from typing import Any

from pipeline import cluster, registry, storage
from pipeline.config import Job, libraries
from pipeline.inputs import pin_inputs
from pipeline.run import prepare


def run(job: Job) -> dict[str, Any]:
    job = cluster.name_run(job)
    storage.require_writable(job.run.storage_path)
    if job.policy or job.reward:
        registry.check(job)
    job, inputs = pin_inputs(job)
    # A job for GPUs may be looked at where not all of its packages are.
    asked = [] if job.scaling.get("use_gpu") else [job]
    with libraries.asked(*asked) as check_libraries, cluster.session(job):
        _, _, report = prepare(job, inputs)
        check_libraries()
        print(report.render(), flush=True)
    return report.to_dict()
