"""Checks that the workers of a job can be scheduled; on a cluster, waits for them with a timeout and reports progress.

Ray by itself waits silently and forever, for resources that no node will ever have as well as for nodes that are starting.
"""

import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config import Job
from pipeline.errors import Failure, InputError, OutOfMemory, SelfCheckFailed, causes

ELSEWHERE = "or run on a cluster that has it (RAY_ADDRESS=http://HEAD:8265)"
GPU_LABEL = "ray.io/accelerator-type"  # a node's label; the name of its GPUs, which Ray takes from the driver
ACCELERATOR_TYPE = "accelerator_type:"  # prefix of the resource that Ray makes of scaling.accelerator_type
EVERY = 30.0  # seconds between two lines about what is waited for
# States of Ray Train's controller in which it has no workers yet.
WAITING = ("InitializingState", "SchedulingState", "ReschedulingState", "RestartingState")


def check_scaling(job: Job) -> None:
    """Refuses workers that neither this machine nor any cluster of the allowed size can hold.

    Called before Ray starts, and again afterwards: only then are the memory that Ray hands out and the autoscaler's limits
    known.

    Raises:
        InputError: with what is there and what was asked for.
    """
    if os.environ.get("RAY_ADDRESS"):
        _check_cluster(job)
        return
    _check_kinds(job)
    _check_amounts(job)
    if job.rollout_config.workers[1]:
        _check_rollout(job)


def embedded_cpus() -> int:
    """CPUs of an embedded Ray: logical, for data tasks must find a slot beside the workers."""
    return max(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Bundle:
    """What one worker asks Ray for: amounts, and labels of the node (a label selector of Ray's)."""

    resources: dict[str, float]
    selector: dict[str, str]

    def options(self) -> dict[str, Any]:
        """The same in the words of ray.remote and of Ray Data."""
        named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        options: dict[str, Any] = {"num_cpus": 0, "label_selector": self.selector or None}
        options |= {named[key]: value for key, value in self.resources.items() if key in named}
        if further := {key: value for key, value in self.resources.items() if key not in named}:
            options["resources"] = further
        return options

    def fits(self, resources: Mapping[str, float], labels: Mapping[str, str]) -> int:
        """How many of it a node with these resources and labels holds."""
        if not matches(self.selector, labels):
            return 0
        return int(
            min((resources.get(name, 0) / amount for name, amount in self.resources.items()), default=0)
        )


def bundles(job: Job) -> list[Bundle]:
    """What the job's workers, the fewest with which it starts, ask Ray for; actors of Ray Data ask like workers of Ray Train."""
    scaling, count = job.scaling, job.workers[0]
    given = scaling.get("resources_per_worker") or {"GPU" if scaling.get("use_gpu") else "CPU": 1}
    each = {name: amount for name, amount in given.items() if amount}
    if scaling.get("use_gpu"):
        each.setdefault("GPU", 1)
    if kind := scaling.get("accelerator_type"):
        each.setdefault(f"{ACCELERATOR_TYPE}{kind}", 0.001)
    selector = scaling.get("label_selector") or {}
    selectors = selector[:count] if isinstance(selector, list) else [selector] * count
    return [Bundle(each, one) for one in selectors]


def side_by_side(job: Job) -> int:
    """How many runs of such a job the nodes hold at the same time, those included that an autoscaler may add; at least 1.

    On one machine the CPUs that it has count, not those that an embedded Ray hands out for tasks beside the workers.
    """
    import ray

    trainers, samplers = job.workers[0], job.rollout_config.workers[1]
    kinds = [(bundles(job)[0], trainers)] + ([(rollout_bundle(job), samplers)] if samplers else [])
    one: dict[str, float] = {}  # what a run asks for in all
    for each, count in kinds:
        for name, amount in each.resources.items():
            one[name] = one.get(name, 0) + count * amount
    if most := _autoscaler_limits():
        return max(1, int(min(most.get(name, 0) / amount for name, amount in one.items())))
    nodes = [(dict(node["Resources"]), node["Labels"]) for node in ray.nodes() if node["Alive"]]
    if not os.environ.get("RAY_ADDRESS"):
        nodes[0][0]["CPU"] = float(os.cpu_count() or 1)
    runs = 0
    while all(_take(each, count, nodes) for each, count in kinds):
        runs += 1
    return max(1, runs)


def _take(each: Bundle, count: int, nodes: list[tuple[dict[str, float], dict[str, str]]]) -> bool:
    """Takes `count` such bundles off the resources of the nodes, one after another; whether there was room for all."""
    for _ in range(count):
        node = next((free for free, labels in nodes if each.fits(free, labels)), None)
        if node is None:
            return False
        for name, amount in each.resources.items():
            node[name] -= amount
    return True


def rollout_on_gpu(job: Job) -> bool:
    """Whether rollout workers hold their models on GPUs."""
    asked = job.rollout_config.use_gpu
    return bool(job.scaling.get("use_gpu") if asked is None else asked)


def rollout_bundle(job: Job) -> Bundle:
    """What one rollout worker asks Ray for."""
    config, gpu = job.rollout_config, rollout_on_gpu(job)
    given = config.resources_per_worker or ({"GPU": config.tensor_parallel_size} if gpu else {"CPU": 1})
    each = {name: amount for name, amount in given.items() if amount}
    if gpu:
        each.setdefault("GPU", config.tensor_parallel_size)
    return Bundle(each, config.label_selector or {})


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels satisfies a label selector, decided by Ray's own function (2.60, private)."""
    from ray._raylet import node_labels_match_selector  # type: ignore[attr-defined]

    return bool(node_labels_match_selector(dict(labels), dict(selector)))


def asked(job: Job) -> dict[str, float]:
    """The resources that one worker requests from Ray."""
    return bundles(job)[0].resources


def _check_kinds(job: Job) -> None:
    """Kinds of resources that this machine does not have, whatever the amount."""
    each, scaling = job.scaling.get("resources_per_worker") or {}, job.scaling
    if strange := sorted(set(each) - {"CPU", "GPU", "memory"}):
        raise InputError(
            f"found {', '.join(strange)}, which this machine does not have; expected CPU, "
            f"GPU or memory, {ELSEWHERE}",
            key="scaling.resources_per_worker",
        )
    if each.get("GPU") and not scaling.get("use_gpu"):
        raise InputError(
            f"found GPU: {each['GPU']} without scaling.use_gpu; type scaling.use_gpu=true, or take GPU out",
            key="scaling.resources_per_worker",
        )
    here = local_labels()
    # Without any GPU, _check_amounts says so.
    if (here or not scaling.get("use_gpu")) and not all(matches(one.selector, here) for one in bundles(job)):
        has = f"GPUs of the type {here[GPU_LABEL]}" if here else "no labels"
        raise InputError(
            f"found {scaling['label_selector']}, but this machine has {has}; type scaling.label_selector=null "
            f"if they have the memory that `make plan JOB={job.source}` shows, {ELSEWHERE}",
            key="scaling.label_selector",
        )
    if scaling.get("placement_strategy") == "STRICT_SPREAD" and job.workers[0] > 1:
        raise InputError(
            f"STRICT_SPREAD wants a machine for each worker, and this is one; take it out, {ELSEWHERE}",
            key="scaling.placement_strategy",
        )
    wanted = scaling.get("accelerator_type")
    if wanted is not None and wanted != (detected := _local_gpu_type()):
        raise InputError(
            f"found {wanted}, but this machine has {detected or 'no GPU'}; take it out, {ELSEWHERE}",
            key="scaling.accelerator_type",
        )


def _check_amounts(job: Job) -> None:
    least, each = job.workers[0], asked(job)
    cpus, memory = os.cpu_count() or 1, _local_memory()
    if each.get("CPU", 0) > cpus:
        raise InputError(
            f"found CPU: {each['CPU']}, but this machine has {cpus}; type "
            f"'scaling.resources_per_worker={{CPU: {cpus}}}', or run on a cluster (RAY_ADDRESS=http://HEAD:8265)",
            key="scaling.resources_per_worker",
        )
    if least * each.get("CPU", 0) > cpus:
        raise InputError(
            f"{least} workers with {each.get('CPU', 0)} CPU each, but this machine has {cpus} "
            f"CPUs; type scaling.num_workers={max(1, int(cpus // max(each.get('CPU', 1), 1e-9)))}, lower "
            "scaling.resources_per_worker, or run on a cluster (RAY_ADDRESS=http://HEAD:8265)",
            key="scaling.num_workers",
        )
    if least * each.get("memory", 0) > memory:
        raise InputError(
            f"{least} worker{'s' * (least > 1)} with memory: {each['memory']:g} bytes each, but "
            f"this machine has {memory:g} for them; take it out, {ELSEWHERE}",
            key="scaling.resources_per_worker",
        )
    if job.scaling.get("use_gpu") and least * each["GPU"] > (gpus := _local_gpus()):
        want = "a GPU" if each["GPU"] == 1 else f"{each['GPU']} GPUs"
        raise InputError(
            f"{least} workers want {want} each, but this machine has {gpus}; run on a cluster "
            "(RAY_ADDRESS=http://HEAD:8265), or try it on the CPU with the demo profile (make rlhf)",
            key="scaling.use_gpu",
        )


def _check_rollout(job: Job) -> None:
    """What a rollout worker asks for, and how many there are at least, beside the trainer's workers on this machine."""
    fewest, one = job.rollout_config.workers[0], rollout_bundle(job)
    if strange := sorted(set(one.resources) - {"CPU", "GPU", "memory"}):
        raise InputError(
            f"found {', '.join(strange)}, which this machine does not have; expected CPU, GPU or memory, {ELSEWHERE}",
            key="rollout.resources_per_worker",
        )
    if one.resources.get("GPU") and not rollout_on_gpu(job):
        raise InputError(
            f"found GPU: {one.resources['GPU']} without rollout.use_gpu; type rollout.use_gpu=true, or take GPU out",
            key="rollout.resources_per_worker",
        )
    if not matches(one.selector, local_labels()):
        raise InputError(
            f"found {one.selector}, but this machine has {local_labels() or 'no labels'}; type rollout.label_selector=null, "
            f"{ELSEWHERE}",
            key="rollout.label_selector",
        )
    there = {"CPU": embedded_cpus(), "GPU": _local_gpus(), "memory": _local_memory()}
    trainers = asked(job)
    for name, amount in one.resources.items():
        taken = job.workers[0] * trainers.get(name, 0)
        if taken + fewest * amount > there[name]:
            raise InputError(
                f"{fewest} rollout worker{'s' * (fewest > 1)} with {name}: {amount:g} each, beside a trainer with {taken:g}, but "
                f"this machine has {there[name]:g}; lower rollout.num_workers or rollout.resources_per_worker, {ELSEWHERE}",
                key="rollout.num_workers",
            )


def _check_cluster(job: Job) -> None:
    """Compares with the most that the autoscaler may start, where there is one and Ray is up to say so."""
    import ray

    if not ray.is_initialized():
        return
    most = _autoscaler_limits()
    trainers, fewest = asked(job), job.rollout_config.workers[0]
    for name, amount in rollout_bundle(job).resources.items() if fewest and most else ():
        taken = job.workers[0] * trainers.get(name, 0)
        if taken + fewest * amount > most.get(name, 0):
            raise InputError(
                f"{fewest} rollout workers with {name}: {amount:g} each, beside a trainer with {taken:g}, but with all nodes that "
                f"its autoscaler may start this cluster has {most.get(name, 0):g}; lower rollout.num_workers, or let the "
                "cluster grow (max_workers in cluster.yaml)",
                key="rollout.num_workers",
            )
    for name, amount in trainers.items():
        if most and job.workers[0] * amount > most.get(name, 0):
            raise InputError(
                f"scaling: {job.workers[0]} workers with {name}: {amount:g} each, but with all nodes that its autoscaler may "
                f"start this cluster has {most.get(name, 0):g}; lower scaling.num_workers or "
                "scaling.resources_per_worker, or let the cluster grow (max_workers in cluster.yaml)"
            )


def _autoscaler_limits() -> dict[str, float]:
    """{resource: amount} of all nodes that may ever be there; {}: no autoscaler says. (ray 2.60, private: Ray Train asks so)"""
    from ray._private.state import state

    return state.get_max_resources_from_cluster_config() or {}


def _local_memory() -> float:
    """Bytes that Ray gives to workers; before it runs, all that the machine has."""
    import ray

    if ray.is_initialized():
        return float(ray.cluster_resources().get("memory", 0.0))
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _local_gpus() -> int:
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    return NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()


def _local_gpu_type() -> str | None:
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    return NvidiaGPUAcceleratorManager.get_current_node_accelerator_type()


def local_labels() -> dict[str, str]:
    """The label of this machine's GPUs; {} without one.

    Ray calls both sizes of the A100 "A100" and leaves it to the user to label them A100-40G or A100-80G, its names for
    them (ray.util.accelerators); NVIDIA's driver has the size in the card's name. start-node.sh does the same.
    """
    kind = _local_gpu_type()
    if kind == "A100" and (size := re.search(r"(40|80)GB", _local_gpu_name())):
        kind = f"A100-{size[1]}G"
    return {GPU_LABEL: kind} if kind else {}


def _local_gpu_name() -> str:
    """What NVIDIA's driver calls the first GPU, e.g. NVIDIA A100-SXM4-80GB."""
    import ray._private.thirdparty.pynvml as pynvml

    pynvml.nvmlInit()
    try:
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    finally:
        pynvml.nvmlShutdown()
    return name.decode() if isinstance(name, bytes) else name


# ------------------------------------------------------------------------------------------------- waiting


class Wait:
    """A wait for workers: prints what is missing every EVERY seconds, and gives up after `limit` seconds."""

    def __init__(self, job: Job) -> None:
        self.limit: float = job.run.placement_timeout_s
        self.need = _need(job)
        self.since: float | None = None
        self.said = 0.0

    def placed(self) -> None:
        self.since = None

    def waiting(self) -> str | None:
        """Called repeatedly while the workers cannot be placed; the error that ends the wait, once it is over."""
        now = time.monotonic()
        if self.since is None:
            self.since = self.said = now
        if self.limit >= 0 and now - self.since >= self.limit:
            return (
                f"run.placement_timeout_s: no place for {self.need} was found in {self.limit:g} s; {there()}. Add "
                "nodes, lower scaling.num_workers or scaling.resources_per_worker, or raise run.placement_timeout_s; the same command resumes"
            )
        if now - self.said >= EVERY:
            self.said = now
            print(f"waiting for {self.need}, {now - self.since:.0f} s so far; {there()}", flush=True)
        return None


def _need(job: Job) -> str:
    low, high = job.workers
    each = described(replace(bundles(job)[0], selector={}))
    more = [
        f"{key} {job.scaling[key]}" for key in ("accelerator_type", "label_selector") if job.scaling.get(key)
    ]
    return " ".join([f"{low if low == high else f'{low} to {high}'} x {each}", *more])


def described(bundle: Bundle) -> str:
    """A bundle in a line about what is waited for, e.g. {CPU: 1} on nodes with {'market': 'spot'}."""
    each = ", ".join(
        f"{name}: {amount:g}"
        for name, amount in bundle.resources.items()
        if not name.startswith(ACCELERATOR_TYPE)
    )
    return f"{{{each}}}" + (f" on nodes with {bundle.selector}" if bundle.selector else "")


def there() -> str:
    """The cluster's resources: in all, free, and at its largest size."""
    import ray

    most = _autoscaler_limits()
    grow = f", and may grow to {_amounts(most)}" if most else ""
    return (
        f"the cluster has {_amounts(ray.cluster_resources())}, of which {_amounts(ray.available_resources())} "
        f"are free{grow}"
    )


def _amounts(resources: dict[str, float]) -> str:
    """Without Ray's own entries (node:..., object_store_memory); memory in GiB."""
    shown = {
        name: f"{amount / 2**30:.1f} GiB" if name == "memory" else f"{amount:g}"
        for name, amount in sorted(resources.items())
        if not name.startswith(("node:", "object_store", "bundle"))
    }
    return "{" + ", ".join(f"{name}: {amount}" for name, amount in shown.items()) + "}"


def callback(job: Job, beside: Any = None) -> Any:
    """A callback of Ray Train's controller: ends the run when its workers were waited for too long, or are out of memory.

    Args:
        beside: an actor that is told when the workers wait for their places (`trainers_wait`), and when they have them
            (`trainers_placed`). None: nobody is.

    Ray (2.60) retries a placement for ever, and after any error of a worker starts it again; it has no setting for either. A
    controller's callback is called at every change of its state, and at each new try; what it raises ends the run. Remove
    when FailureConfig has a deadline, and errors that are not retried.
    """
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
    from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

    def untold(record: logging.LogRecord) -> bool:
        """Ray logs each try with its traceback; Wait says it in a line."""
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, (Failure, WorkerGroupStartupTimeoutError))

    class Placement(ControllerCallback, WorkerGroupCallback):
        def __init__(self) -> None:
            self.wait = Wait(job)

        def after_controller_start(self, train_run_context: Any) -> None:
            for name in ("controller.controller", "callback_manager"):
                logging.getLogger(f"ray.train.v2._internal.execution.{name}").addFilter(untold)

        def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
            failed = getattr(current_state, "training_failed_error", None)
            if hopeless := next(
                (e for e in causes(failed) if type(e) in (OutOfMemory, SelfCheckFailed)), None
            ):
                raise hopeless
            name = type(current_state).__name__
            if name not in WAITING:
                self.wait.placed()
                return
            if beside:
                beside.trainers_wait.remote()
            if over := self.wait.waiting():
                raise Failure(over)

        def before_init_train_context(self, workers: Any) -> dict[str, list[Any]]:
            if beside:
                beside.trainers_placed.remote()
            return {}

    return Placement()


def wait_for_one(job: Job) -> None:
    """Returns when there is a place for one worker; Ray Data starts its pool of actors with the first that it gets.

    Raises:
        Failure: when there is none within run.placement_timeout_s.
    """
    from ray.util import placement_group, remove_placement_group

    wait, one = Wait(job), bundles(job)[0]
    place = placement_group([one.resources], bundle_label_selector=[one.selector])
    try:
        while not place.wait(0.5):
            if over := wait.waiting():
                raise Failure(over)
    finally:
        remove_placement_group(place)
