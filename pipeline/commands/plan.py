"""Estimates the memory, time and cost of a job before it starts.

    python -m pipeline plan jobs/llama3-8b/ppo.yaml [section.key=value ...]

`plan` needs no weights and no GPU. The estimates are for this machine's GPUs. If this machine has no GPU, or RAY_ADDRESS is set,
they are for the GPUs that `scaling.accelerator_type` or `scaling.label_selector` names, or for all GPUs that `plan` knows. If the
job does not fit into memory, the exit status is 1, and the message says which keys to change.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pipeline import registry
from pipeline.errors import Failure, InputError, blame_key, error_summary
from pipeline.input_uri import InputURI
from pipeline.job import Job
from pipeline.models import adapter_files
from pipeline.models.gpus import list_local_gpus
from pipeline.planning import plan
from pipeline.planning.plan import GIB, GPUS, Plan
from pipeline.planning.rows import Rows, estimate_rows
from pipeline.planning.shape import config_of
from pipeline.registry import lineage
from pipeline.settle import placement
from pipeline.settle.identity import tracking_of
from pipeline.settle.inputs import pin_inputs, room_for_prompts
from pipeline.settle.placement import Group, Places
from pipeline.settle.places import places_of
from pipeline.settle.settle import sections_of
from pipeline.settle.work import Sections
from pipeline.system import console, prices
from pipeline.text import table

RAY_BYTES = 1.5 * GIB  # memory of Ray's processes on this machine
EPOCH_ROWS = 10_000  # assumed number of rows in an epoch, if the data cannot be counted


def run(job: Job) -> dict[str, Any]:
    if job.spec.runs_in == "here":
        raise InputError(f"found {job.stage}; expected a stage with workers", key="stage")
    gpus = [] if placement.on_cluster() or not job.scaling.get("use_gpu") else list_local_gpus()
    work = sections_of(job, places_of(job, elsewhere=not gpus))
    places = work.places
    folders, notes = folders_of_adapters(job.inputs, tracking_of(job).uri, partial(pin_inputs, job))
    check_shapes(work, folders)
    loras = {name.split(".")[0]: adapter_files.describe_adapter(folder) for name, folder in folders.items()}
    planned = plan.make_plan(work, loras)
    print(f"\n== plan  {job.source}  {job.model.name_or_path}\n")
    size = f"{planned.shape.parameters / 1e9:.3g} B parameters, frozen; {planned.trainable / 1e6:.3g} M learn"
    print(f"   {size}. Memory of one worker, for rows of the maximum length:")
    for item in planned.items:
        phase = "" if item.phase == "always" else f"  ({item.phase})"
        print(f"   {item.size / GIB:>8.2f} GiB  {item.what}{phase}")
    print(f"   {planned.peak / GIB:>8.2f} GiB  peak, including the allocator's fragmentation")
    if job.spec.learns:
        print(
            f"   {planned.checkpoint / 1e9:>8.3f} GB   per checkpoint on disk; run.num_to_keep checkpoints are retained"
        )
    if unread := planned.shape.unread:
        notes.append(f"using a built-in shape, because the base's config.json cannot be read: {unread}")
    notes += [f"this machine has {name}, {size / GIB:.0f} GiB" for name, size in gpus]
    print("".join(f"   note: {note}\n" for note in notes))
    memory = on_gpus(planned, gpu_names(places)) if places.on_gpu else on_this_machine(planned, places)
    check_fit(planned, places, loras, min((size for _, size in gpus), default=memory), len(gpus) or None)
    if places.rollout:
        print(of_rollout_workers(places.rollout, plan.make_plan(work, loras, learns=False)))
    return {"peak_bytes": planned.peak, "items": [vars(item) for item in planned.items]}


def check_fit(
    planned: Plan,
    places: Places,
    loras: dict[str, dict[str, Any]],
    memory: float,
    gpus: int | None = None,
) -> None:
    """Raises Failure, with the keys to change, if the workers need more memory or more GPUs than are available.

    Args:
        memory: bytes that a worker has.
        gpus: number of this machine's GPUs, or None for a cluster.
    """
    problems, changes = [], list[str]()
    gpus_per_worker = places.workers.each.resources.get("GPU", 0)
    if gpus is not None and (gpu_count := places.workers.fewest * gpus_per_worker) > gpus:
        problems.append(f"the workers need {gpu_count:g} GPUs, but this machine has {gpus}")
        if not (change := places.fewer(gpus / gpus_per_worker)):
            raise Failure(f"{problems[0]}; lower scaling.resources_per_worker")
        changes, count = [change], int(change.split("=")[1])
        workers = places.workers._replace(fewest=count, most=count)
        planned = plan.make_plan(replace(planned.work, places=replace(places, workers=workers)), loras)
    if planned.peak > memory:
        problems.append(f"a worker needs {planned.peak / GIB:.1f} GiB, but has {memory / GIB:.1f}")
        reductions, planned = plan.fit_into(planned.work, memory, loras)
        changes += reductions
    if not problems:
        return
    if changes:
        problems.append(f"with {' '.join(changes)} a worker needs {planned.peak / GIB:.1f} GiB")
    if planned.peak > memory:
        larger = ", ".join(plan.fitting_gpus(planned)) if planned.device == "cuda" else "a larger machine"
        problems.append(f"use {larger or 'larger GPUs'}, a smaller model, or a shorter data.max_length")
    raise Failure("; ".join(problems))


def gpu_names(places: Places) -> list[str]:
    """Returns the names of the GPUs that the workers may get. Raises InputError if the table of `plan` has none of these GPUs."""
    gpu_type = places.scaling.get("accelerator_type")
    names = plan.gpus_called(gpu_type) if gpu_type else list(GPUS)
    names = gpus_with_label(places.workers.each.selector, names)
    if not names:
        key = "accelerator_type" if gpu_type else "label_selector"
        if gpu_type and plan.gpus_called(gpu_type):
            problem = f"which scaling.label_selector={places.scaling['label_selector']} excludes; change it, or set it to {{}}"
            raise InputError(f"found {gpu_type!r}, {problem}", key=f"scaling.{key}")
        raise InputError(f"found {places.scaling[key]!r}; plan knows {', '.join(GPUS)}", key=f"scaling.{key}")
    return names


def gpus_with_label(selector: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Returns the GPUs in `names` that a label selector allows."""
    gpu_labels = {key: value for key, value in selector.items() if key == placement.GPU_LABEL}
    return [name for name in names if placement.matches_labels(gpu_labels, {placement.GPU_LABEL: name})]


def folders_of_adapters(
    references: Mapping[str, str], uri: str, pin: Callable[[], tuple[Job, dict[str, str]]]
) -> tuple[dict[str, str], list[str]]:
    """Returns {input: folder} of the adapters that a job names, and notes about adapters that could not be read.

    Args:
        references: {input: reference in the job}.
        uri: the MLflow store.
        pin: returns the inputs with versions instead of aliases.
    """
    assumption = "the sizes of all adapters are estimated from the section `lora`"
    registered = any(InputURI.parse(ref).is_registered for ref in references.values())
    if registered and (file := registry.file_of_uri(uri)) and not os.path.exists(file):
        return {}, [f"no model is registered yet; {assumption}"]
    try:
        if registered:
            registry.check_reachable(uri)
        _, inputs = pin()
        models = {name: ref for name, ref in inputs.items() if InputURI.parse(ref).is_model}
        folders = {name: registry.fetch(ref, uri) for name, ref in models.items()}
    except Exception as error:  # MLflow's store and the network raise errors of any type
        return {}, [
            f"{assumption} ({error if isinstance(error, InputError) else f'{uri}: {error_summary(error)}'})"
        ]
    return {name: folder for name, folder in folders.items() if lineage.is_adapter(folder)}, []


def check_shapes(work: Sections, folders: dict[str, str]) -> None:
    """Checks that the adapters and the section `lora` fit the base. A run repeats this check with the adapters' weights."""
    from pipeline.models.base import check_base
    from pipeline.models.compatibility import check_lora
    from pipeline.settle.inputs import makes_adapter
    from pipeline.system.hub import local, weight_files

    _, unread = config_of(work.model)
    if unread:
        return  # without config.json, the modules of the base are unknown
    weights = bool(weight_files(local(work.model.name_or_path)))
    base = check_base(work.model, weights=weights)
    for name, folder in folders.items():
        with blame_key(work.keys[name]):
            scores = name == "judge" or name.startswith("reward")
            adapter_files.check_adapter_fits_base(base, folder, scores, reference=folder)
    if makes_adapter(work.spec, work.args, folders):
        check_lora(base, work.lora, work.spec.learns == "reward")


def on_this_machine(planned: Plan, places: Places) -> float:
    """Prints whether all workers and Ray fit into this machine's memory. Returns the bytes that each worker has."""
    workers = places.workers.most
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ray = 0 if places.in_process else RAY_BYTES
    memory = (total - ray) / workers
    total_needed = workers * planned.peak + ray
    print(
        f"   {workers} worker{'s' * (workers > 1)} on the CPU{' and Ray' * bool(ray)}: {total_needed / GIB:.1f} GiB; this machine has "
        f"{total / GIB:.1f} GiB: {'fits' if planned.peak <= memory else 'does not fit'}"
    )
    return memory


def on_gpus(planned: Plan, names: list[str]) -> float:
    """Prints for each GPU model whether a worker fits, and the time and cost of the run.

    Returns the memory of the largest GPU in bytes.
    """
    fitting, workers = plan.fitting_gpus(planned), planned.work.places.workers.most
    if not planned.work.spec.learns:
        print(
            f"   The job fits on {', '.join(name for name in names if name in fitting) or 'none of the GPUs that plan knows'}."
        )
        return GIB * max(GPUS[name].memory for name in names)
    rows, basis = rows_per_epoch(planned)
    completions = f"; completions of {planned.tokens[1]:,} tokens, the longest" if planned.tokens[1] else ""
    print(f"   data: {basis}{completions}\n")
    lines = []
    for name in names:
        fits, needs = "no", ""
        if name in fitting:
            hours = plan.estimate_hours(planned, name, rows)
            fits, needs = (
                "yes",
                f"{hours:>6.1f} h  ${hours * workers * prices.read_prices().gpus[name]:>5.0f}",
            )
        lines.append((name, f"{GPUS[name].memory:.0f}", fits, needs))
    print(table(("GPU", "GiB", "fits", f"the run on {workers}: about"), lines, "<><<"))
    caveat = "; the time to gather the base's shards is not included" * planned.in_shards
    print(
        f"   Assumed: {plan.UTILIZATION:.0%} of the datasheet's speed, and list prices of "
        f"{prices.read_prices().date}{caveat}"
    )
    return GIB * max(GPUS[name].memory for name in names)


def rows_per_epoch(planned: Plan) -> tuple[Rows, str]:
    """Returns the number and lengths of the rows in an epoch, and a text that says if rows were read or assumed."""
    work = planned.work
    with console.print_if_slow("reading some of the rows"):
        rows, basis = estimate_rows(
            work, room_for_prompts(work.writes, work.data.max_length, planned.shape.context)
        )
    if rows is not None:
        return rows, basis
    longest, trainer = planned.tokens[0], work.trainer
    sets_length = trainer.get("total_episodes") or (trainer.get("max_steps") or 0) > 0
    epoch = "" if sets_length else f"{EPOCH_ROWS:,} rows per epoch and "
    return Rows(EPOCH_ROWS, longest), f"{epoch}full-length rows of {longest:,} tokens assumed ({basis})"


def of_rollout_workers(group: Group, planned: Plan) -> str:
    """Returns a text with the memory that a rollout worker needs, the GPUs with enough memory, and the cost of all workers.

    Raises Failure if a rollout worker fits on no GPU that rollout.label_selector allows.
    """
    count, need = group.most, f"A rollout worker needs {planned.peak / GIB:.1f} GiB"
    if planned.device == "cpu":
        return f"   {need} of its node's memory."
    allowed = gpus_with_label(group.each.selector, GPUS)
    fits = [name for name in allowed if name in plan.fitting_gpus(planned)]
    if not fits:
        larger = ", ".join(plan.fitting_gpus(planned))
        raise Failure(
            f"rollout.label_selector: a{need[1:]}, more than {', '.join(allowed) or 'any GPU in the table of `plan`'} has; "
            f"lower trainer.local_rollout_forward_batch_size{f', or allow larger GPUs: {larger}' if larger else ''}"
        )
    gpus = count * group.each.resources["GPU"]
    dollars = gpus * min(prices.read_prices().gpus[name] for name in fits)
    return f"   {need} and fits on {', '.join(fits)}.\n   {count} rollout workers cost at least ${dollars:.2f} an hour on demand."
