"""Faults that can happen to a run.

`FAULTS[name](run, rng)` starts the run, disturbs it at a random moment, and waits for its end. Each function
returns a description of the fault.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from runs import AUTHENTICATION, STEPS, Run, until

from pipeline.run.session import _read_by_ray

TRAINER, ROLLOUT_WORKER = "RayTrainWorker", "RolloutWorker"  # names of Ray's actors
RESTARTS = "run.max_failures=3"


def moment(run: Run, rng: random.Random, first: int = 1, last: int = STEPS - 1) -> int:
    """Waits until a random moment after the end of a random step, and returns the number of the step."""
    step = rng.randint(first, last)
    run.wait_for(rf"\bstep +{step}/{STEPS}\b")
    time.sleep(rng.uniform(0, 0.4))
    return step


def ended(run: Run) -> None:
    """Waits for the end of a run. Raises RuntimeError if the run failed."""
    status = run.ends()
    if status != 0:
        raise RuntimeError(f"exit status {status}; see {run.log}\n" + "".join(run.lines[-15:]))


def below(root: int) -> dict[int, str]:
    """Returns {process: command line} for all descendants of a process."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(root).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # the process has ended in the meantime
                found[child.pid] = " ".join(child.cmdline())
    return found


def actors(run: Run, kind: str) -> list[int]:
    """Returns the processes of all actors with this name that belong to the run's embedded Ray."""
    return sorted(pid for pid, command in below(run.process.pid).items() if kind in command)


def kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def again(run: Run) -> None:
    """Runs the same command again after its driver was killed."""
    run.process.wait()
    ended(run.again())


def worker(run: Run, rng: random.Random) -> str:
    """Kills one of two training workers with SIGKILL. Ray Train restarts both workers."""
    run.start(RESTARTS)
    step = moment(run, rng)
    victims = until(lambda: actors(run, TRAINER), "a training worker")
    victim = rng.randrange(len(victims))
    kill(victims[victim])
    ended(run)
    return f"killed worker {victim} of {len(victims)} after step {step}"


def driver(run: Run, rng: random.Random) -> str:
    """Kills the driver with SIGKILL, and runs the same command again immediately."""
    run.start()
    step = moment(run, rng)
    kill(run.process.pid)
    again(run)
    return f"killed the driver after step {step}, ran the command again"


def rollout_worker(run: Run, rng: random.Random) -> str:
    """Kills the rollout worker with SIGKILL. Another rollout worker replaces the killed worker."""
    run.start()
    step = moment(run, rng)
    kill(actors(run, ROLLOUT_WORKER)[0])
    ended(run)
    return f"killed the rollout worker after step {step}"


def hang(run: Run, rng: random.Random) -> str:
    """Stops the rollout worker with SIGSTOP, so that its process still exists but does nothing."""
    run.start()
    step = moment(run, rng, last=STEPS - 3)
    os.kill(actors(run, ROLLOUT_WORKER)[0], signal.SIGSTOP)
    run.wait_for("has not answered")
    ended(run)
    return f"stopped the rollout worker after step {step}"


def node(run: Run, rng: random.Random, notice: bool = False, actor: str = TRAINER) -> str:
    """Kills all processes of a node with an actor of this name. A spare node is available.

    Args:
        notice: first announces that the node ends in 5 seconds, as clouds do for spot nodes. With a notice, no training worker
            may fail.
    """
    training = actor == TRAINER
    ahead = int("rollout.num_workers=1" in run.arguments)  # number of additional nodes for a rollout worker
    nodes = Nodes(run, 3, for_rollouts=ahead) if training else Nodes(run, 1, for_rollouts=2)
    if notice:
        run.pause = 1.2  # slows the run down, so that it does not end before the node does
    run.start(*([f"run.max_failures={0 if notice else 3}"] if training else []))
    step = moment(run, rng, last=4 if notice else STEPS - 1)
    victim = rng.choice(until(lambda: nodes.busy(actor), f"a node with a {actor}"))
    done = f"{'drained' if notice else 'killed'} a node with a {actor} after step {step}"
    if notice:
        nodes.drain(victim, seconds=5)
        if training:
            run.wait_for(r"node is being reclaimed: checkpoint of step \d+ committed")
            saved = next(line for line in run.lines if "node is being reclaimed" in line).strip()
            done = f"{saved.removesuffix(' committed')} (after step {step})"
        time.sleep(5)
    nodes.kill(victim)
    ended(run)
    return done


def write(run: Run, rng: random.Random) -> str:
    """Kills the worker, or all processes of the run, at the moment when a checkpoint appears."""
    everything = rng.random() < 0.5
    run.start(*([] if everything else [RESTARTS]))
    number = rng.randint(1, 4)
    run.wait_for(rf"\bstep +{3 * number - 2}/{STEPS}\b")
    name = f"checkpoint_{3 * number:08d}"
    victims = [run.process.pid, *below(run.process.pid)] if everything else actors(run, TRAINER)
    delay = rng.uniform(0, 0.004)
    until(lambda: (run.folder / name).exists(), name, every=0.0002)
    time.sleep(delay)
    kill(*victims)
    there = [path.name for path in (run.folder / name).rglob("*") if path.is_file()]
    if everything:
        again(run)
    else:
        ended(run)
    who = "all processes" if everything else "the worker"
    return f"killed {who} while writing {name}, which had {len(there)} files"


def corrupt(run: Run, rng: random.Random) -> str:
    """Corrupts the newest checkpoint between two runs: flips a bit, truncates a file, or deletes a file."""
    run.start()
    # Waits for two checkpoints, so that an older one is left if the newest is corrupt.
    step = moment(run, rng, first=8)
    kill(run.process.pid, *below(run.process.pid))
    run.process.wait()
    complete = (path for path in run.folder.glob("checkpoint_*[0-9]") if (path / "digests.json").exists())
    newest = max(complete)
    victim = rng.choice(sorted(p for p in newest.rglob("*") if p.is_file() and p.stat().st_size))
    how = rng.choice(["flipped a bit of", "truncated", "deleted"])
    if how == "deleted":
        victim.unlink()
    elif how == "truncated":
        os.truncate(victim, rng.randrange(victim.stat().st_size))
    else:
        content = bytearray(victim.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        victim.write_bytes(content)
    since = len(run.lines)
    again(run)
    # A checkpoint without digests is unfinished.
    if not run.says(rf"{newest.name} (is damaged|was never finished)", since):
        raise RuntimeError(f"{how} {newest.name}/{victim.name}, and no line said so")
    return f"killed all after step {step}, {how} {newest.name}/{victim.relative_to(newest)}"


class Nodes:
    """A Ray cluster of processes on this machine: a head without CPUs, and nodes for one training worker each.

    Args:
        for_rollouts: number of nodes that are reserved for rollout workers, which may use no other nodes.
    """

    def __init__(self, run: Run, count: int, for_rollouts: int = 0):
        # Workers inherit the environment of their node's process. With two threads, the order of sums would change.
        before = dict(os.environ)
        run.finally_do.append(lambda: (os.environ.clear(), os.environ.update(before), _read_by_ray()))
        os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0", **AUTHENTICATION)
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        _read_by_ray()  # an earlier session of this process may have had another Ray token
        from ray.cluster_utils import Cluster

        self.small: dict[str, Any] = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **self.small})
        run.finally_do.append(self.cluster.shutdown)
        self.nodes: list[Any] = []
        for _ in range(count):
            self.add()
        for _ in range(for_rollouts):
            self.add(num_cpus=1, labels={"for": "rollouts"})
        run.address = self.cluster.address
        run.arguments.append("scaling.resources_per_worker={CPU: 2}")  # one worker per node
        if for_rollouts:
            run.arguments.append("rollout.label_selector={for: rollouts}")

    def add(self, num_cpus: int = 2, **more: Any) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=num_cpus, **self.small, **more))

    def busy(self, actor: str) -> list[Any]:
        """Returns the nodes on which an actor of this name runs."""
        return [
            node
            for node in self.nodes
            if any(actor in command for pid in self.raylets(node) for command in below(pid).values())
        ]

    @staticmethod
    def raylets(node: Any) -> list[int]:
        return [info.process.pid for info in node.all_processes.get("raylet", [])]

    def kill(self, node: Any) -> None:
        for pid in self.raylets(node):
            kill(*below(pid), pid)

    def drain(self, node: Any, seconds: int) -> None:
        command = [
            str(Path(sys.executable).parent / "ray"), "drain-node", "--address", self.cluster.address, "--node-id", node.node_id,
            "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "chaos",
            "--deadline-remaining-seconds", str(seconds),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)


FAULTS = {
    "worker": worker,
    "driver": driver,
    "node": node,
    "preemption": partial(node, notice=True),
    "write": write,
    "corrupt": corrupt,
    "rollout-worker": rollout_worker,
    "hang": hang,
    "rollout-node": partial(node, actor=ROLLOUT_WORKER),
    "rollout-drain": partial(node, actor=ROLLOUT_WORKER, notice=True),
}
TWO_WORKERS = ("worker", "node", "preemption")
ROLLOUT = ("rollout-worker", "hang", "rollout-node", "rollout-drain")  # faults of runs with rollout workers
