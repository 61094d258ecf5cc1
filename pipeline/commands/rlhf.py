"""The whole pipeline of a profile in one session: sft, rm, ppo, evaluate, and a table of what was learned.

    make rlhf    or    python -m pipeline rlhf jobs/demo [section.key=value ...] [STAGE.section.key=value ...]

An override applies to every stage, or to one if it begins with the stage's name.
"""

import gc
import os
import time
from pathlib import Path
from typing import Any

from pipeline import report, text
from pipeline.config import STAGES, libraries, load_job
from pipeline.config.stages import STAGE
from pipeline.errors import Failure, InputError
from pipeline.on_ray import placement
from pipeline.on_ray.session import session
from pipeline.registry import file_of_uri
from pipeline.runtime.inputs import check_paths
from pipeline.runtime.preparation import heading
from pipeline.stages import evaluate, ppo, rm, sft
from pipeline.system import console, storage

ORDER = {"sft": sft, "rm": rm, "ppo": ppo, "evaluate": evaluate}


def run(folder: str, overrides: list[str]) -> list[dict[str, Any]]:
    """Runs the stages of `folder` in order; each registers what the next one takes as input."""
    started = time.monotonic()
    jobs = {
        stage: load_job(Path(folder) / f"{stage}.yaml", overrides_of(stage, overrides), stage)
        for stage in ORDER
    }
    named = [(job.run.storage_path, job.run.name) for job in jobs.values() if job.run.name]
    if twice := next((name for name in named if named.count(name) > 1), None):
        apart = " ".join(f"{stage}.run.name={twice[1]}-{stage}" for stage in ORDER)
        raise InputError(
            f"found {twice[1]!r} for several stages, and each is a separate run; use {apart}",
            key="run.name",
        )
    for job in jobs.values():  # not after an hour of the stages before
        check_paths(job)
    for job in jobs.values():
        placement.check_scaling(job)
    results = []
    # The stages share the session and the checks of their jobs that start here.
    on_ray = [job for job in jobs.values() if not job.in_process]
    with libraries.asked(*on_ray), session(next(iter(on_ray), jobs["sft"])):
        for number, (stage, module) in enumerate(ORDER.items(), 1):
            heading.set(f"[{number}/{len(ORDER)}]")
            results.append(module.run(jobs[stage]))
            gc.collect()  # the models of a stage in this process
            missed = results[-1].get("registered_model") and not results[-1]["alias"]
            if missed:
                raise Failure(
                    f"{stage}: {results[-1]['registered_model']} v{results[-1]['version']} was registered, but its gate "
                    f"{results[-1]['gate']}; the next stage would not find it. Look at {results[-1]['checkpoint']}, or "
                    f"change the gate: {stage}.gate.METRIC=..."
                )
    with console.waiting("drawing the report on all of them"):
        folders = [result["folder"] for result in results]
        home = storage.join(folders[-1], "report")
        page = report.of_several(folders, home) if jobs["evaluate"].run.report else None
    print(table(results, folder, time.monotonic() - started, page), flush=True)
    return results


def overrides_of(stage: str, overrides: list[str]) -> list[str]:
    """Returns the overrides for one stage, without its name."""
    mine = []
    for override in overrides:
        first, _, rest = override.partition(".")
        if first == stage:
            mine.append(rest)
        elif first not in STAGES:
            mine.append(override)
        elif first not in ORDER:
            raise InputError(f"{override}: `rlhf` has no stage {first!r}; its stages are {', '.join(ORDER)}")
    return mine


def table(results: list[dict[str, Any]], folder: str, seconds: float, page: str | None) -> str:
    """Returns a table (stage, metric, before, after, version, seconds), and where to look next.

    Args:
        folder: of the job files.
        page: the report on all of them, if it could be drawn.
    """
    rows = []
    for result in results:
        metrics, figures = result.get("metrics", {}), STAGE[result["stage"]].headline
        figure = next((one for one in figures if one.after in metrics), figures[0])
        version = f"{result['registered_model']} v{result['version']}" if result.get("version") else ""
        numbers = (text.number(metrics.get(key)) for key in (figure.before, figure.after))
        rows.append((result["stage"], figure.label, *numbers, version, f"{result.get('seconds', 0):.0f}"))
    last = results[-1]
    store, home = last.get("tracking_uri", ""), last["folder"].rpartition("/")[0]
    local = file_of_uri(store) == os.path.abspath("runs/mlflow.db") if store else home == "runs"
    jobs = Path(folder)
    profile = "" if jobs.name == "demo" else f" PROFILE={jobs.name}"
    again = f'make ppo{profile} ARGS="trainer.kl_coef=0.1"'
    if jobs.parent != Path("jobs"):
        again = f"python -m pipeline ppo {jobs / 'ppo.yaml'} trainer.kl_coef=0.1"
    look = [
        (page, "curves, samples, lineage of all four, on one page"),
        (f"{last['folder']}/result.json", "every number, and samples before and after"),
        (
            "make ui" if local else store,
            "curves and lineage in MLflow" + (", at http://127.0.0.1:5000" if local else ""),
        ),
        (str(jobs / "ppo.yaml"), f"what to change, and what it does; then: {again}"),
    ]
    return "\n".join(
        [
            "",
            text.table(("stage", "metric", "before", "after", "registered", "seconds"), rows),
            f"{seconds:.0f} s in all. Look next at",
            *(f"  {where:<30}  {what}" for where, what in look if where),
        ]
    )
