"""Batch inference: runs a function on each row of a file, in Ray Data actors or in this process. A killed run can resume.

    launch_rows(job, RowRecipe("completions.jsonl", load, measure)) -> the content of result.json

Rows are processed in parts of consecutive rows. Each part is written to its own file, atomically, and existing files are skipped.
Each input row therefore has exactly one output, in the order of the input. An output depends only on the job, the row and the
row's number, not on the number of actors or on interruptions. The workers of `evaluate` use `in_parts`.
"""

import contextlib
import json
import pickle
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline import run_folder
from pipeline.data.read import to_hf
from pipeline.errors import Failure, InputError
from pipeline.job import Job
from pipeline.job.identity import identity_of
from pipeline.run import memory
from pipeline.run.launch import finished_result, open_run, write_result
from pipeline.run.model_host import ModelHost
from pipeline.run.resume import find_earlier
from pipeline.run.worker import Worker, like_a_worker, name_output
from pipeline.run_folder import Result
from pipeline.settle import placement
from pipeline.settle.identity import with_run_name
from pipeline.settle.work import Work
from pipeline.system import console, storage
from pipeline.system.lease import hold

BATCHES = 4  # forward passes per part; enough rows to group by length, but few rows to repeat after a crash

Record = dict[str, Any]  # the output for one row
# (token rows, number of the first row) -> records
Answer = Callable[[list[dict[str, Any]], int], list[Record]]
Load = Callable[[ModelHost], Answer]  # loads the models, once in each actor
Batches = Generator[dict[str, Any], None, None]  # results of Parts.__call__


@dataclass(frozen=True)
class RowRecipe:
    """Defines how a subcommand processes each row, and what the subcommand writes."""

    output: str  # output file in the run's folder
    load: Load
    # f(record) -> metrics. result.json has the mean of each metric.
    measure: Callable[[Record], dict[str, float]]
    lines: Callable[[Record], list[Record]] = lambda record: [record]  # f(record) -> lines of the output
    # f(record) -> counts. result.json has the sum of each count.
    count: Callable[[Record], Mapping[str, int]] = lambda _: {}
    # f(number of rows) -> the numbers of the rows to process, in order, or None to process all rows.
    choose: Callable[[int], Sequence[int]] | None = None


def launch_rows(job: Job, recipe: RowRecipe) -> Result:
    """Processes the rows of data.train. Returns the content of result.json."""
    job = with_run_name(job)
    earlier = find_earlier(identity_of(job))
    if result := finished_result(earlier):
        return result
    with open_run(job, earlier) as (work, rows, report):
        count = report.splits["train"].kept
        chosen = recipe.choose(count) if recipe.choose else range(count)
        computed = compute_missing_parts(work, rows["train"], chosen, recipe.load)
        path = storage.join(work.folder, recipe.output)
        outcome = join_parts(work, len(chosen), recipe, path)
        entries: Result = {"output": path, "rows": len(chosen), "rows_done_now": computed, **outcome}
        result = write_result(work, report, entries)
    numbers = {**outcome["metrics"], **outcome["counts"]}
    print("\n" + "\n".join(f"   {name:<28}{value:.4g}" for name, value in numbers.items()))
    print(f"   {len(chosen)} rows in {result['seconds']:.0f} s  {path}", flush=True)
    return result


def part_file(folder: str, part: int, prefix: str = "") -> str:
    return storage.join(folder, run_folder.PARTS, f"{prefix}{part:06d}.jsonl")


def part_size(args: Any) -> int:
    return BATCHES * args.rows_per_forward


def in_parts(
    worker: Worker, prefix: str, count: int, answer: Callable[[range], Iterable[Any]]
) -> Iterator[Any]:
    """Computes the missing part files on all workers. Then yields the records of all `count` rows, in order.

    Every rank must iterate to the end, and every rank gets the same records.

    Args:
        prefix: prefix of the part files' names.
        answer: f(numbers of consecutive rows) -> their records, which must be JSON.
    """
    size = part_size(worker.args)
    parts = range(-(-count // size))
    for part in parts[worker.rank :: worker.world]:
        path = part_file(worker.work.folder, part, prefix)
        if not storage.exists(path):
            numbers = range(count)[part * size : (part + 1) * size]
            records = list(answer(numbers))
            worker.work.lease.require()
            storage.write_lines(path, map(json.dumps, records))
    worker.gather(None)  # after this barrier, all part files exist
    for part in parts:
        yield from map(json.loads, storage.read_lines(part_file(worker.work.folder, part, prefix)))


def share_rows(worker: Worker, count: int, answer: Callable[[range], list[Any]]) -> list[Any]:
    """Computes the records of `count` rows, an equal share on each rank. Returns all records, in order, on every rank.

    Args:
        answer: f(numbers of rows) -> their records.
    """
    shares = worker.gather(answer(range(worker.rank, count, worker.world)))
    return [shares[i % worker.world][i // worker.world] for i in range(count)]


def compute_missing_parts(work: Work, rows: Any, chosen: Sequence[int], load: Load) -> int:
    """Computes the missing part files. Returns the number of rows in the new files."""
    size, count = part_size(work.args), len(chosen)
    missing = [i for i in range(-(-count // size)) if not storage.exists(part_file(work.folder, i))]
    done = count - sum(min(size, count - i * size) for i in missing)
    if done:
        print(f"{done} of {count} rows are already done", flush=True)
    if not missing:
        return 0
    make = _here if work.places.in_process else _actors
    batches = make(work, (load, work, rows, chosen), missing)
    started, computed = time.monotonic(), 0
    # Ends the actors before this process releases the lease of the run's folder, even after an error.
    with console.native_lines_filtered(), contextlib.closing(batches):
        for batch in batches:
            if problem := next(filter(None, batch["problem"]), None):
                raise pickle.loads(problem)
            computed += int(sum(batch["rows"]))
            rate = computed / (time.monotonic() - started)
            print(f"{work.identity.stage}  {done + computed}/{count} rows  {rate:.1f} rows/s", flush=True)
    return computed


def _here(work: Work, arguments: tuple[Any, ...], missing: list[int]) -> Batches:
    """Computes the missing part files in this process. Yields the result of Parts.__call__ for each batch."""
    console.silence_libraries()
    with like_a_worker(work.places):
        parts = Parts(*arguments)
        for part in missing:
            yield parts({"part": [part]})


def _actors(work: Work, arguments: tuple[Any, ...], missing: list[int]) -> Batches:
    """Computes the missing part files in Ray Data actors. Yields the result of Parts.__call__ for each batch."""
    import ray

    workers = work.places.workers
    low, high = (min(count, len(missing)) for count in (workers.fewest, workers.most))
    print(f"starting {high} worker{'s' * (high > 1)} and loading {work.model.name_or_path}", flush=True)
    placement.wait_for_one(work.places)
    dataset = ray.data.from_items([{"part": i} for i in missing], override_num_blocks=len(missing))
    results = dataset.map_batches(
        Parts,
        fn_constructor_args=arguments,
        batch_size=None,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(min_size=low, max_size=high),
        **workers.each.options(),
    )
    batches: Any = iter(results.iter_batches(batch_size=None, batch_format="numpy"))
    with contextlib.closing(batches):
        yield from batches


class Parts:
    """An actor that loads the models, and writes one file for each part of the rows."""

    def __init__(self, load: Load, work: Work, rows: Any, chosen: Sequence[int]):
        if not work.places.in_process:
            name_output(work.identity.stage)
            hold(work.lease)
        self.load, self.work = load, work
        self.rows, self.chosen = to_hf(rows, work.fingerprints["train"]), chosen
        self.answer: Answer | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Writes the part files. Returns the number of rows in each file, or an InputError or Failure for the driver to raise.

        If this method raised the error, Ray Data would log it with Ray's frames, and convert an error in a constructor to text.
        """
        parts = [int(part) for part in batch["part"]]
        try:
            with memory.memory_errors_explained(self.work):
                if self.answer is None:
                    self.answer = self.load(ModelHost(self.work))
                return {"rows": [self._write(part) for part in parts], "problem": [b""] * len(parts)}
        except (InputError, Failure) as error:
            return {"rows": [0] * len(parts), "problem": [pickle.dumps(error)] * len(parts)}

    def _write(self, part: int) -> int:
        size = part_size(self.work.args)
        start = part * size
        chosen = self.chosen[start : start + size]
        assert self.answer is not None
        records = self.answer([dict(row) for row in self.rows.select(chosen)], start)
        lines = (json.dumps(record, ensure_ascii=False) for record in records)
        self.work.lease.require()
        storage.write_lines(part_file(self.work.folder, part), lines)
        return len(records)


def join_parts(work: Work, count: int, recipe: RowRecipe, path: str) -> Result:
    """Joins all part files in the order of the rows. Returns the means of the metrics and the sums of the counts."""
    sums, occurrences, counts = defaultdict[str, float](float), Counter[str](), Counter[str]()
    total = 0

    def lines() -> Iterator[str]:
        nonlocal total
        for part in range(-(-count // part_size(work.args))):
            for record in map(json.loads, storage.read_lines(part_file(work.folder, part))):
                for name, value in recipe.measure(record).items():
                    sums[name] += value
                    occurrences[name] += 1
                counts.update(recipe.count(record))
                total += 1
                yield from (json.dumps(line, ensure_ascii=False) for line in recipe.lines(record))
        if total != count:  # another version of the pipeline may have written the parts
            raise InputError(
                f"{work.folder}/{run_folder.PARTS} contains {total} rows instead of {count}; set run.overwrite=true to start over",
                key="run.name",
            )

    work.lease.require()
    storage.write_lines(path, lines())
    return {"metrics": {name: sums[name] / occurrences[name] for name in sums}, "counts": dict(counts)}
