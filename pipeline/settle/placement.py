"""Checks that Ray can place the workers of a job, and on a cluster waits for resources with a timeout.

Without these checks, Ray waits silently and without limit, even for resources that no node will ever have.
"""

import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import Failure, InputError, LeaseLost, OutOfMemory, SelfCheckFailed, causes_of
from pipeline.system import terminal

GPU_LABEL = "ray.io/accelerator-type"  # node label whose value is the name of the node's GPUs
ACCELERATOR_TYPE = "accelerator_type:"  # prefix of Ray's resource for scaling.accelerator_type
# CPUs that a local Ray declares; data tasks need CPUs in addition to the workers
EMBEDDED_CPUS = max(4, os.cpu_count() or 1)
REPORT_INTERVAL_S = 30.0  # time between two lines about missing resources
# States in which Ray Train's controller has no running workers.
WAITING = ("InitializingState", "SchedulingState", "ReschedulingState", "RestartingState")


def on_cluster() -> bool:
    """Returns True if this driver runs on a cluster. Ray sets RAY_ADDRESS for the driver of a submitted job."""
    return bool(os.environ.get("RAY_ADDRESS"))


# -------------------------------------------------------------------------------------------------- bundles


@dataclass(frozen=True)
class Bundle:
    """The resources that one worker requests from Ray, and the label selector of its node."""

    resources: dict[str, float]
    selector: dict[str, str]

    def options(self) -> dict[str, Any]:
        """Returns the resources and the selector as arguments for ray.remote and Ray Data."""
        arguments = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        options: dict[str, Any] = {"num_cpus": 0, "label_selector": self.selector or None}
        options |= {arguments[key]: value for key, value in self.resources.items() if key in arguments}
        if custom := {key: value for key, value in self.resources.items() if key not in arguments}:
            options["resources"] = custom
        return options

    def fits(self, resources: Mapping[str, float], labels: Mapping[str, str]) -> int:
        """Returns how many copies of this bundle fit on a node with the given resources and labels."""
        if not matches_labels(self.selector, labels):
            return 0
        shares = [resources.get(name, 0) / amount for name, amount in self.resources.items()]
        return int(min(shares, default=0))

    def __str__(self) -> str:
        amounts = [f"{k}: {v:g}" for k, v in self.resources.items() if not k.startswith(ACCELERATOR_TYPE)]
        return f"{{{', '.join(amounts)}}}" + (f" on nodes with {self.selector}" if self.selector else "")


class Group(NamedTuple):
    """The training or rollout workers of a job: their minimum and maximum number, and the resources of each worker."""

    section: str  # `scaling` or `rollout`
    label: str  # name in messages
    fewest: int
    most: int
    each: Bundle


@dataclass(frozen=True)
class Places:
    """Where a job runs: in this process or in Ray workers, and with or without separate rollout workers."""

    in_process: bool
    workers: Group
    rollout: Group | None  # rollout workers, or None if the training workers also sample
    on_gpu: bool
    rollout_on_gpu: bool  # whether rollout workers have their models on GPUs
    scaling: dict[str, Any]  # the keys of Ray's ScalingConfig
    smaller: list[int]  # numbers of workers below the minimum that would also be valid, largest first
    timeout_s: float  # time limit for the placement of workers, or -1 for no limit

    @property
    def groups(self) -> list[Group]:
        return [self.workers, self.rollout] if self.rollout else [self.workers]

    @property
    def count(self) -> str:
        """Returns the number of workers as text, for example `2` or `2 to 4`."""
        _, _, low, high, _ = self.workers
        return f"{low}" if low == high else f"{low} to {high}"

    def fewer(self, room: float) -> str:
        """Returns an override that lowers scaling.num_workers to at most `room`, or "" if no such number is valid."""
        count = next((n for n in self.smaller if n <= room), None)
        return f"scaling.num_workers={count}" if count else ""


_CPU = Bundle({"CPU": 1}, {})
# Places of a job that only reads rows: one worker with one CPU.
ROWS = Places(False, Group("scaling", "worker", 1, 1, _CPU), None, False, False, {}, [], -1)


def matches_labels(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Returns True if a node's labels satisfy a label selector. Calls a private function of Ray 2.60."""
    from ray._raylet import node_labels_match_selector  # type: ignore[attr-defined]

    return bool(node_labels_match_selector(dict(labels), dict(selector)))


# ------------------------------------------------------------------------------------------------ what fits


def check_fits(places: Places) -> None:
    """Raises InputError if this machine, or the cluster at its maximum size, has too few resources for the workers of a job.

    This check runs before Ray starts. The check runs again after Ray's start, when Ray reports its memory and the autoscaler's
    limits.
    """
    machine = "this cluster at its maximum size" if on_cluster() else "this machine"
    limits, usage = _limits(), defaultdict[str, float](float)
    for section, worker, count, _, bundle in places.groups if limits else ():
        for name, amount in bundle.resources.items():
            limit = limits.get(name, 0)
            if usage[name] + count * amount > limit:
                trainer = f", next to a trainer with {usage[name]:g}" if usage[name] else ""
                key = "num_workers" if amount <= limit else "resources_per_worker"
                key = "use_gpu" if name == "GPU" and not limit else key
                change = places.fewer(limit / amount) if section == "scaling" else ""
                advice = f"lower {section}.num_workers or {section}.resources_per_worker, or run the job where more resources are available"
                raise InputError(
                    f"{count} {worker}{'s' * (count > 1)} with {name}: {amount:g} each{trainer}, but {machine} has {limit:g}; "
                    f"{f'set {change}' if change else advice}",
                    key=f"{section}.{key}",
                    change=change,
                )
            usage[name] += count * amount


def _limits() -> dict[str, float]:
    """Returns {resource: maximum amount} for this machine or cluster, or {} if the limits are unknown."""
    import ray

    if on_cluster():
        return _autoscaler_limits() if ray.is_initialized() else {}
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if ray.is_initialized():
        memory = float(ray.cluster_resources().get("memory", 0.0))
    gpus = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
    return {"CPU": EMBEDDED_CPUS, "GPU": gpus, "memory": memory}


def _autoscaler_limits() -> dict[str, float]:
    """Returns {resource: amount} for the cluster at its maximum size, or {} without an autoscaler. Private in Ray 2.60."""
    from ray._private.state import state

    return state.get_max_resources_from_cluster_config() or {}


def side_by_side(places: Places) -> int:
    """Returns how many runs of a job can run at the same time, at least 1. Includes nodes that the autoscaler could add."""
    import ray

    nodes = [(node["Resources"], node["Labels"]) for node in ray.nodes() if node["Alive"]]
    limits = _autoscaler_limits()
    if limits:  # the autoscaler's limits are totals over all nodes, and do not include labels
        nodes = [(limits, {})]
    elif not on_cluster():  # a local Ray may declare more CPUs than the machine has
        nodes = [({**nodes[0][0], "CPU": float(os.cpu_count() or 1)}, {})]
    free_nodes = [(defaultdict[str, float](float, resources), labels) for resources, labels in nodes]
    bundles: list[Bundle] = []
    for group in places.groups:
        bundles += [replace(group.each, selector={}) if limits else group.each] * group.fewest
    runs = 0
    while True:
        for bundle in bundles:
            node = next((node for node, labels in free_nodes if bundle.fits(node, labels)), None)
            if node is None:
                return max(1, runs)
            for name, amount in bundle.resources.items():
                node[name] -= amount
        runs += 1


# ------------------------------------------------------------------------------------------------- waiting


class Wait:
    """Prints every REPORT_INTERVAL_S which resources are missing, and raises Failure after run.placement_timeout_s."""

    def __init__(self, places: Places) -> None:
        self.limit = places.timeout_s
        kind = places.scaling.get("accelerator_type")
        self.need = f"{places.count} x {places.workers.each}{f' with {kind}' if kind else ''}"
        self.since: float | None = None  # start of the wait, or None while the workers are placed
        self.reported = 0.0

    def check(self) -> None:
        """Reports the wait, or raises Failure after the time limit. Callers repeat the call until the workers are placed."""
        now = time.monotonic()
        if self.since is None:
            self.since = self.reported = now
        if self.limit >= 0 and now - self.since >= self.limit:
            raise Failure(
                f"run.placement_timeout_s: no resources for {self.need} were free within {self.limit:g} s; {describe_cluster()}. Add "
                "nodes, lower scaling.num_workers or scaling.resources_per_worker, or raise run.placement_timeout_s; the same "
                "command with its run.name resumes the run"
            )
        if now - self.reported >= REPORT_INTERVAL_S:
            self.reported = now
            terminal.say(f"waiting for {self.need}, {now - self.since:.0f} s so far; {describe_cluster()}")


def describe_cluster() -> str:
    """Returns a text with the cluster's total resources, its free resources, and its resources at maximum size."""
    import ray

    def shown(resources: dict[str, float]) -> str:
        """Returns the amounts as text, with memory in GiB. Omits Ray's internal resources such as `node:...`."""
        amounts = [
            f"{name}: {amount / 2**30:.1f} GiB" if name == "memory" else f"{name}: {amount:g}"
            for name, amount in sorted(resources.items())
            if not name.startswith(("node:", "object_store", "bundle"))
        ]
        return f"{{{', '.join(amounts)}}}"

    limits = _autoscaler_limits()
    growth = f", and may grow to {shown(limits)}" if limits else ""
    total, free = shown(ray.cluster_resources()), shown(ray.available_resources())
    return f"the cluster has {total}, of which {free} are free{growth}{launch_failure()}"


def launch_failure() -> str:
    """Returns a text that says which nodes the autoscaler failed to start, and why. Returns "" if no launch has failed.

    Ray 2.60 retries the same node type without limit, and often writes the reason only to monitor.log on the head node. The
    driver can read monitor.log because it runs on the head node.
    """
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status

    launches = get_cluster_status(ray.get_runtime_context().gcs_address).failed_launches
    if not launches:
        return ""
    failure = max(launches, key=lambda launch: launch.failed_ts_s or launch.request_ts_s)
    log = Path(ray._private.worker._global_node.get_logs_dir_path(), "monitor.log")
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    reasons = re.findall(rf"Failed to launch \d+ nodes of type {failure.ray_node_type_name}: (.+)", text)
    cause = failure.details or (reasons[-1] if reasons else "monitor.log on the head has the reason")
    return f"; {len(launches)} launches of {failure.ray_node_type_name} failed, and Ray tries no other type: {cause[:300]}"


def placement_callback(places: Places) -> Any:
    """Returns a Ray Train callback that ends a run if its workers are not placed in time, or after a fatal error.

    Ray 2.60 retries a placement without limit and restarts workers after any error, and has no setting to change this. The
    controller calls its callbacks whenever its state changes and at each retry. If a callback raises an error, the run ends.
    Remove this callback when FailureConfig has a deadline and a list of errors that are not retried.
    """
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
    from ray.train.v2._internal.execution.callback import ControllerCallback

    def is_news(record: logging.LogRecord) -> bool:
        """Returns False for the traceback that Ray logs at each retry. The class Wait prints one line instead."""
        return not (
            record.exc_info and isinstance(record.exc_info[1], (Failure, WorkerGroupStartupTimeoutError))
        )

    class Placement(ControllerCallback):
        def __init__(self) -> None:
            self.wait = Wait(places)

        def after_controller_start(self, train_run_context: Any) -> None:
            for name in ("controller.controller", "callback_manager"):
                logging.getLogger(f"ray.train.v2._internal.execution.{name}").addFilter(is_news)

        def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
            failed = getattr(current_state, "training_failed_error", None)
            for error in causes_of(failed):
                if type(error) in (LeaseLost, OutOfMemory, SelfCheckFailed):
                    raise error
            if type(current_state).__name__ not in WAITING:
                self.wait.since = None
                return
            self.wait.check()

    return Placement()


def wait_for_one(places: Places) -> None:
    """Waits until the cluster has resources for one worker. Ray Data needs only one actor to start."""
    from ray.util import placement_group, remove_placement_group

    wait, bundle = Wait(places), places.workers.each
    place = placement_group([bundle.resources], bundle_label_selector=[bundle.selector])
    try:
        while not place.wait(0.5):
            wait.check()
    finally:
        remove_placement_group(place)
