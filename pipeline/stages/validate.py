"""Look at the data of a job before anything is trained: what was read, kept, dropped, truncated, and three rows as the model sees them.

    python -m pipeline validate jobs/demo/sft.yaml [section.key=value ...]

The tokenised rows stay in the cache: the run that follows does not make them again.
"""

from typing import Any

from pipeline import cluster, registry, storage
from pipeline.config import Job
from pipeline.inputs import check_buckets, pin_inputs
from pipeline.run import prepare


def run(job: Job) -> dict[str, Any]:
    job = cluster.name_run(job)
    storage.require_writable(job.run.storage_path)
    if job.policy or job.reward or job.model.name_or_path.startswith("models:/"):
        registry.check(job)
    check_buckets(job)
    job, inputs = pin_inputs(job)
    with cluster.session(job):
        _, _, report = prepare(job, inputs)
        print(report.render(), flush=True)
    return report.to_dict()
