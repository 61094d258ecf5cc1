"""Checks a ppo job: loads its models, makes one rollout and one minibatch, and runs all self-checks on them.

    python -m pipeline doctor jobs/demo/ppo.yaml [section.key=value ...]

It trains and registers nothing, and leaves no files. Exit status 1 if a check fails.
"""

from dataclasses import asdict, replace
from typing import Any

from pipeline.config import Job
from pipeline.errors import Failure, InputError
from pipeline.runtime import resume
from pipeline.runtime.preparation import announce, prepared
from pipeline.runtime.run import train_in_workers
from pipeline.runtime.worker import Worker
from pipeline.system import storage

COMPLETIONS = 16  # completions that it checks; more if a minibatch of the job is larger


def run(job: Job) -> dict[str, Any]:
    if job.stage != "ppo":
        raise InputError(
            f"found {job.stage}; doctor examines ppo jobs (for the data of a {job.stage} job: "
            f"python -m pipeline validate {job.source})",
            key="stage",
        )
    if job.model.fsdp and job.workers[0] > 1:
        raise InputError(
            "doctor loads the full base into one process; set model.fsdp=false if it fits, or check the job with a smaller base",
            key="model.fsdp",
        )
    scaling = {**job.scaling, "num_workers": 0 if job.in_process else 1}
    # a separate folder, so that the run itself stays as it is
    name = f"doctor-{resume.named(replace(job, run=replace(job.run, name=None))).run.name}"
    job = resume.named(replace(job, scaling=scaling, run=replace(job.run, name=name, max_failures=0)))
    storage.require_writable(job.run.storage_path)
    announce(job, "doctor")
    try:
        with prepared(job) as run:
            outcome = train_in_workers(run.work, run.rows, train)
    finally:
        storage.remove(job.folder)
    examined = outcome["samples"][0]
    print(f"\n{examined['table']}\n", flush=True)
    if wrong := [finding["check"] for finding in examined["findings"] if finding["holds"] is False]:
        raise Failure(f"{len(wrong)} of {len(examined['findings'])} checks failed: {'; '.join(wrong)}")
    return examined


def train(worker: Worker) -> dict[str, Any]:
    from transformers import set_seed

    from pipeline.planning import plan
    from pipeline.ppo.selfcheck import doctor
    from pipeline.ppo.trainer import PPOTrainer
    from pipeline.runtime import roles

    asked = replace(worker.job.args, gradient_checkpointing=plan.recomputes(worker))
    completions = min(asked.batch_size, max(COMPLETIONS, asked.per_device_train_batch_size))
    completions = max(1, completions // asked.num_generations) * asked.num_generations
    args = replace(
        asked,
        batch_size=completions,
        num_mini_batches=1,
        num_ppo_epochs=1,
        total_episodes=completions,
        critic_warmup_steps=0,  # policy and critic both learn
    )
    set_seed(args.seed)
    shared = roles.shared_base(worker)
    roles.add_policy(worker, shared, args)
    rewards = roles.add_rewards(worker, shared)
    if args.uses_critic:
        roles.add_critic(worker, shared, args)
    with roles.trainers_decoder(worker, shared, args) as decoder:
        trainer = PPOTrainer(shared, worker.tokenizer, args, worker.rows("train"), rewards, decoder=decoder)
        print("checking one rollout and one minibatch", flush=True)
        findings, phases = doctor.examine(trainer, roles.folders(worker, shared))
    table = doctor.render(findings, phases, completions, asked)
    found = [asdict(finding) for finding in findings]
    return worker.finish({}, samples=[{"table": table, "findings": found}])
