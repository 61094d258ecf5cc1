"""Runs sft, rm, ppo and evaluate of a profile in one Ray session, and prints what the policy learned.

    make rlhf    or    python -m pipeline run jobs/demo [section.key=value ...] [STAGE.section.key=value ...]

An override applies to all stages. If an override begins with a stage's name, it applies only to that stage. `run.name=X` names
the runs sft-X, rm-X, ppo-X and evaluate-X. By default, X is the current time. To resume these runs, set the same name.
"""

import gc
import os
import time
from dataclasses import replace
from pathlib import Path

from pipeline import report
from pipeline.errors import Failure, InputError
from pipeline.job import TRAIN_STAGES, Job, command_line, load_job
from pipeline.job.libraries import check_with_libraries
from pipeline.job.stages import headline_metrics
from pipeline.registry import file_of_uri
from pipeline.run.launch import launch
from pipeline.run.prepare import heading
from pipeline.run.session import ray_session
from pipeline.run.summary import metric_change, sample_table
from pipeline.run_folder import Result
from pipeline.settle import placement
from pipeline.settle.identity import new_name, tracking_of
from pipeline.settle.inputs import check_paths
from pipeline.settle.places import places_of
from pipeline.stages import evaluate, ppo, rm, sft
from pipeline.system import storage, terminal

SHOWN_SAMPLES = 2
DEMO_SECONDS = 61.0  # time of jobs/demo on two cores, in the middle of the times in README.md
ORDER = {"sft": sft.RECIPE, "rm": rm.RECIPE, "ppo": ppo.RECIPE, "evaluate": evaluate.RECIPE}


def run(folder: str, overrides: list[str]) -> list[Result]:
    """Runs the stages of a folder of jobs in order. Each stage registers the model that the next stage starts from."""
    started, name = time.monotonic(), common_name(overrides) or new_name()
    jobs = load_profile(folder, overrides, name)
    for job in jobs.values():  # finds missing files before the first stage starts, not an hour later
        check_paths(job)
    for job in jobs.values():  # runs after check_paths, because it imports Ray
        placement.check_fits(places_of(job))
    time_needed = f", about {terminal.duration(DEMO_SECONDS)}" if Path(folder).name == "demo" else ""
    logs = f"logs and reports: {jobs['sft'].run.storage_path}/NAME/"
    terminal.say(f"{folder}: {', '.join(jobs)}{time_needed}; {logs}")
    results: list[Result] = []
    for job in jobs.values():
        check_with_libraries(job)
    # All stages use one Ray session.
    ray_jobs = [job for job in jobs.values() if not job.in_process]
    first_job = next(iter(ray_jobs), jobs["sft"])
    session = (places_of(first_job), first_job.run.storage_path, tracking_of(first_job).uri)
    with ray_session(*session):
        for number, (stage, recipe) in enumerate(ORDER.items(), 1):
            heading.set(f"[{number}/{len(ORDER)}]")
            try:
                results.append(result := launch(jobs[stage], recipe))
                if jobs[stage].run.report:
                    report.of_run(result)
            except (KeyboardInterrupt, SystemExit) as stop:
                stop.add_note(f"run.name={name}")
                raise
            gc.collect()  # frees the models of a stage in this process
            if result.get("registered_model") and not result["alias"]:
                raise Failure(
                    f"{stage}: {result['registered_model']} v{result['version']} was registered, but the gate {result['gate']}; "
                    f"the next stage would not find this version. See {result['checkpoint']}, or change the gate: "
                    f"{stage}.gate.METRIC=..."
                )
    folders = [result["folder"] for result in results]
    home = storage.join(folders[-1], "report")
    page = report.of_several(folders, home) if jobs["evaluate"].run.report else None
    terminal.say(end_of_profile(results, folder, time.monotonic() - started, page), result=True)
    return results


def load_profile(folder: str, overrides: list[str], name: str | None = None) -> dict[str, Job]:
    """Returns {stage: job}. If a job does not set run.name, its run gets the name STAGE-`name`."""
    jobs, name = {}, common_name(overrides) or name
    for stage in ORDER:
        stage_overrides = overrides_of(stage, overrides)
        job = load_job(Path(folder) / f"{stage}.yaml", stage_overrides, stage)
        if name and (job.run.name is None or f"run.name={job.run.name}" in overrides):
            job = replace(job, run=replace(job.run, name=f"{stage}-{name}"))
        jobs[stage] = job
    folders = [job.folder for job in jobs.values() if job.run.name]
    if duplicate := next((path for path in folders if folders.count(path) > 1), None):
        problem = f"{duplicate} would be the run folder of several stages"
        raise InputError(f"{problem}; set run.name=NAME, which names the runs STAGE-NAME", key="run.name")
    return jobs


def common_name(overrides: list[str]) -> str | None:
    """Returns X if `run.name=X` is among the overrides, or else None."""
    names = [override.partition("=")[2] for override in overrides if override.startswith("run.name=")]
    return names[-1] if names else None


def overrides_of(stage: str, overrides: list[str]) -> list[str]:
    """Returns the overrides that apply to a stage, without the stage's name."""
    selected = []
    for override in overrides:
        prefix, _, rest = override.partition(".")
        if prefix == stage:
            selected.append(rest)
        elif prefix not in TRAIN_STAGES:
            selected.append(override)
        elif prefix not in ORDER:
            raise InputError(f"{override}: `run` has no stage {prefix!r}; its stages are {', '.join(ORDER)}")
    return selected


def end_of_profile(results: list[Result], folder: str, seconds: float, page: str | None) -> str:
    """Returns the text that `run` prints at the end: samples, the first metric of the last two stages, and commands to run next.

    Args:
        folder: folder of the job files.
        page: path of the report about all stages, or None if the report could not be drawn.
    """
    verdict = []
    for result in results[-2:]:
        metrics = result["metrics"]
        shown = headline_metrics(result["stage"], metrics)[:1]
        verdict += [f"{result['stage']}: {metric.label} {metric_change(metrics, metric)}" for metric in shown]
    last_result = results[-1]
    store, home = last_result.get("tracking_uri", ""), last_result["folder"].rpartition("/")[0]
    local = file_of_uri(store) == os.path.abspath("runs/mlflow.db") if store else home == "runs"
    jobs = Path(folder)
    hints = [
        (page and storage.relative(page), "report about all stages"),
        ("make ui" if local else store, "curves in MLflow" + (": http://127.0.0.1:5000" if local else "")),
        (str(jobs / "ppo.yaml"), "explains the settings of ppo"),
        (command_line("ppo", str(jobs / "ppo.yaml"), ["trainer.kl_coef=0.1"]), "ppo with another KL penalty"),
    ]
    samples = last_result.get("samples", [])[:SHOWN_SAMPLES]
    lines = ["", sample_table(samples), ""] if samples else [""]
    lines.append(f"Done in {terminal.duration(seconds)}. {'; '.join(verdict)}")
    return "\n".join([*lines, *(f"  {target:<36}  {meaning}" for target, meaning in hints if target)])
