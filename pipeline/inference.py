"""Batch inference: every row of a file through models in Ray Data actors, JSON Lines out, and a killed run goes on.

    launch(job, load, measure, "completions.jsonl") -> the content of result.json

Rows are done in parts of consecutive rows. A part's file appears whole or not at all, and a part that is there is not
done again: no row is lost, none comes twice, and the output has the order of the input. What is written about a row
depends on the job, the row and its number alone, not on the number of actors or on where a run was interrupted.
"""

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from pipeline import cluster, registry, storage
from pipeline.config import Inference, Job
from pipeline.data.feed import to_hf
from pipeline.errors import InputError
from pipeline.inputs import check_buckets, pin_inputs
from pipeline.run import finished, models, prepare
from pipeline.worker import Host, Work, hush, quiet

BATCHES = 4  # forwards of a part: enough to sort its rows by length, little enough to lose in a crash

Record = dict[str, Any]  # one line of the output: the row and what was found
Answer = Callable[
    [list[dict[str, Any]], int], list[Record]
]  # (token rows, number of the first one) -> records
Load = Callable[[Host], Answer]  # runs once in each actor
Measure = Callable[[Record], dict[str, float]]  # figures of a record, whose means end up in result.json


def launch(job: Job, load: Load, measure: Measure, output: str) -> dict[str, Any]:
    """Runs one job over all rows of data.train; the same `run.name` continues a run that was cut short.

    Raises:
        InputError: when the job, the rows or an input is wrong, or a run of that name was begun with other settings.
    """
    started = time.monotonic()
    job = cluster.name_run(job)
    storage.require_writable(job.run.storage_path)
    if done := finished(job):
        return done
    registry.check(job)
    check_buckets(job)
    job, inputs = pin_inputs(job)
    print(f"\n== {job.stage}  run {job.run.name}  {job.source}", flush=True)
    with cluster.session(job):
        work, rows, report = prepare(job, inputs)
        print(report.render(), flush=True)
        if job.run.fresh:
            storage.remove(job.folder)
        begin(work)
        count = report.splits["train"].kept
        fresh = complete(work, rows["train"], count, load)
        path = storage.join(job.folder, output)
        metrics = join(work, count, measure, path)
    seconds = time.monotonic() - started
    result = {
        "stage": job.stage,
        "name": job.run.name,
        "output": path,
        "rows": count,
        "rows_done_now": fresh,
        "metrics": metrics,
        "inputs": work.inputs,
        "data": {"digests": work.digests, "report": report.to_dict()},
        "seconds": round(seconds, 2),
        "job": job.to_dict(),
    }
    storage.write_json(storage.join(job.folder, "result.json"), result)
    storage.remove(parts_folder(job))  # not before: without result.json the run is not finished
    print("\n" + "\n".join(f"   {name:<28}{value:.4g}" for name, value in metrics.items()))
    print(f"   {count} rows in {seconds:.0f} s  {path}", flush=True)
    return result


def here(job: Job) -> Host:
    """The models of a job in this process, without Ray, for one user at a time; its inputs are pinned and checked.

    Raises:
        InputError: when one of them is not there or does not fit.
    """
    os.environ.update({k: v for k, v in cluster.ENVIRONMENT.items() if k not in os.environ})
    cluster.check_scaling(job)
    registry.check(job)
    job, inputs = pin_inputs(job)
    work = models(job, inputs)
    hush()
    return Host(work)


def options(job: Job) -> Inference:
    """The job's `trainer` section with its defaults."""
    return Inference(**job.trainer)


# ------------------------------------------------------------------------------------------------------ parts


def parts_folder(job: Job) -> str:
    return storage.join(job.folder, "parts")


def part_file(job: Job, part: int) -> str:
    return storage.join(parts_folder(job), f"{part:06d}.jsonl")


def part_size(job: Job) -> int:
    return BATCHES * options(job).local_rollout_forward_batch_size


def begin(work: Work) -> None:
    """Notes what the run is made from, or proves that the parts which are there were made from the same.

    Raises:
        InputError: naming the settings that are others now.
    """
    job, path = work.job, storage.join(parts_folder(work.job), "settings.json")
    settings = {
        "inputs": work.inputs,
        "weights": [weight for _, weight in job.rewards],
        "model": asdict(job.model),
        "base": work.base["digest"],
        "data.train": work.fingerprints["train"],
        "trainer": asdict(options(job)),
    }
    if not storage.exists(path):
        storage.write_json(storage.join(job.folder, "job.json"), job.to_dict())
        storage.write_json(path, settings)
        return
    before = storage.read_json(path)
    if different := list(_differences(before, json.loads(json.dumps(settings)))):
        raise InputError(
            f"run.name: {job.run.name!r} was begun with other settings ({'; '.join(different)}), so that its rows would not "
            "belong together; choose another run.name, or type run.fresh=true to start it over"
        )


def _differences(before: dict[str, Any], now: dict[str, Any], above: str = "") -> Iterator[str]:
    for key in sorted(before.keys() | now.keys()):
        one, two = before.get(key), now.get(key)
        if isinstance(one, dict) and isinstance(two, dict):
            yield from _differences(one, two, f"{above}{key}.")
        elif one != two:
            shown = "" if key == "data.train" else f" was {one!r}, is {two!r}"
            yield f"{above}{key}{shown}"


def complete(work: Work, rows: Any, count: int, load: Load) -> int:
    """Makes the parts that are missing; the number of rows done now."""
    import ray

    job, size = work.job, part_size(work.job)
    missing = [i for i in range(-(-count // size)) if not storage.exists(part_file(job, i))]
    there = count - sum(min(size, count - i * size) for i in missing)
    if there:
        print(f"{there} of {count} rows are there from before", flush=True)
    if not missing:
        return 0
    low, high = (min(workers, len(missing)) for workers in job.workers)
    asked = ray.data.from_items([{"part": i} for i in missing], override_num_blocks=len(missing))
    done = asked.map_batches(
        Parts,
        fn_constructor_args=(load, work, rows),
        batch_size=None,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(min_size=low, max_size=high),
        **_resources(job),
    )
    begun, now = time.monotonic(), 0
    for batch in done.iter_batches(batch_size=None, batch_format="numpy"):
        now += int(batch["rows"].sum())
        rate = now / (time.monotonic() - begun)
        print(f"{job.stage}  {there + now}/{count} rows  {rate:.1f} rows/s", flush=True)
    return now


def _resources(job: Job) -> dict[str, Any]:
    """The job's resources of a worker, in the words of Ray Data."""
    each = {"CPU": 1, **(job.scaling.get("resources_per_worker") or {})}
    if job.scaling.get("use_gpu"):
        each.setdefault("GPU", 1)
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    found: dict[str, Any] = {named[key]: value for key, value in each.items() if key in named}
    further = {key: value for key, value in each.items() if key not in named}
    return {**found, **({"resources": further} if further else {})}


class Parts:
    """The actor: holds the models and, over Ray's shared blocks, all token rows; writes the parts that it is asked for."""

    def __init__(self, load: Load, work: Work, rows: Any):
        quiet(work.job.stage)
        self.load, self.work = load, work
        self.rows = to_hf(rows, work.fingerprints["train"])
        self.answer: Answer | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        # Loaded here and not in the constructor: what is raised there reaches the driver as text, not as what it is.
        self.answer = self.answer or self.load(Host(self.work))
        return {"part": batch["part"], "rows": [self._write(int(part)) for part in batch["part"]]}

    def _write(self, part: int) -> int:
        first = part * part_size(self.work.job)
        numbers = range(first, min(first + part_size(self.work.job), len(self.rows)))
        assert self.answer is not None
        records = self.answer([dict(row) for row in self.rows.select(numbers)], first)
        lines = (json.dumps(record, ensure_ascii=False) for record in records)
        storage.write_lines(part_file(self.work.job, part), lines)
        return len(records)


def join(work: Work, count: int, measure: Measure, path: str) -> dict[str, float]:
    """All parts as one file, in the order of the rows; the mean of each figure over the rows that have it.

    Raises:
        RuntimeError: when the parts do not hold `count` rows.
    """
    sums: dict[str, float] = defaultdict(float)
    seen: Counter[str] = Counter()

    def lines() -> Iterator[str]:
        for part in range(-(-count // part_size(work.job))):
            for line in storage.read_lines(part_file(work.job, part)):
                for name, value in measure(json.loads(line)).items():
                    sums[name] += value
                    seen[name] += 1
                seen[""] += 1
                yield line
        if seen[""] != count:
            raise RuntimeError(
                f"{parts_folder(work.job)} holds {seen['']} rows of {count}; run.fresh=true starts over"
            )

    storage.write_lines(path, lines())
    return {name: sums[name] / seen[name] for name in sums}
