"""What can happen to a run. Each takes a run that is ready to be started and a random generator, and returns when it has ended.

FAULTS[name](run, rng) -> what was done, in words
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from runs import AUTHENTICATION, STEPS, Run, until


def moment(run: Run, rng: random.Random, first: int = 1, last: int = STEPS - 1) -> int:
    """Waits for a random step, and then for a random part of the next one; the step."""
    step = rng.randint(first, last)
    run.wait_for(rf"\bstep +{step}/{STEPS}\b")
    time.sleep(rng.uniform(0, 0.4))
    return step


def ended(run: Run) -> None:
    status = run.ends()
    if status != 0:
        raise RuntimeError(f"exit status {status}; see {run.log}\n" + "".join(run.lines[-15:]))


# ------------------------------------------------------------------------------------------------ processes


def below(root: int) -> dict[int, str]:
    """{process: command line} of all descendants of a process."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(root).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                found[child.pid] = " ".join(child.cmdline())
    return found


def actors(run: Run, kind: str) -> list[int]:
    """The processes of the run's actors of this kind, on the embedded Ray."""
    assert run.process is not None
    return sorted(pid for pid, command in below(run.process.pid).items() if kind in command)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------ the faults


def worker(run: Run, rng: random.Random) -> str:
    """kill -9 of one of two workers; Ray Train restarts them."""
    run.start("run.max_failures=3")
    step = moment(run, rng)
    victims = until(lambda: actors(run, "RayTrainWorker"), "a training worker")
    victim = rng.randrange(len(victims))
    kill(victims[victim])
    ended(run)
    return f"killed worker {victim} of {len(victims)} after step {step}"


def driver(run: Run, rng: random.Random) -> str:
    """kill -9 of the driver; then the same command at once."""
    run.start()
    step = moment(run, rng)
    assert run.process is not None
    kill(run.process.pid)
    run.process.wait()
    ended(run.again())
    return f"killed the driver after step {step}, gave the command again"


def rollout_worker(run: Run, rng: random.Random) -> str:
    """kill -9 of the rollout worker; another one takes its place."""
    run.start()
    step = moment(run, rng)
    kill(actors(run, "RolloutWorker")[0])
    ended(run)
    return f"killed the rollout worker after step {step}"


def hang(run: Run, rng: random.Random) -> str:
    """SIGSTOP of the rollout worker: it is there, and does nothing."""
    run.start()
    step = moment(run, rng, last=STEPS - 3)
    os.kill(actors(run, "RolloutWorker")[0], signal.SIGSTOP)
    run.wait_for("missed its heartbeat")
    ended(run)
    return f"stopped the rollout worker after step {step}"


def rollout_node(run: Run, rng: random.Random) -> str:
    """SIGKILL of all processes of the rollout worker's node; there is another one for it."""
    nodes = Nodes(run, 1)
    nodes.add_for_rollouts(2)
    run.start()
    step = moment(run, rng)
    nodes.kill(until(lambda: nodes.busy("RolloutWorker"), "a node with a rollout worker")[0])
    ended(run)
    return f"killed the rollout worker's node after step {step}"


def rollout_drain(run: Run, rng: random.Random) -> str:
    """Notice that the rollout worker's node will be gone in 5 seconds; then it is."""
    nodes = Nodes(run, 1)
    nodes.add_for_rollouts(2)
    run.pause = 1.2
    run.start()
    step = moment(run, rng, last=4)
    victim = until(lambda: nodes.busy("RolloutWorker"), "a node with a rollout worker")[0]
    nodes.drain(victim, seconds=5)
    time.sleep(5)
    nodes.kill(victim)
    ended(run)
    return f"drained the rollout worker's node after step {step}"


def node(run: Run, rng: random.Random) -> str:
    """SIGKILL of all processes of a node of a cluster of three, where two are needed."""
    nodes = Nodes(run, 3)
    run.start("run.max_failures=3")
    step = moment(run, rng)
    victim = rng.choice(until(nodes.busy, "a node with a training worker"))
    nodes.kill(victim)
    ended(run)
    return f"killed a node after step {step}"


def preemption(run: Run, rng: random.Random) -> str:
    """Notice that a node will be gone in 5 seconds, as a spot node gets it; then it is. No failure is allowed for."""
    nodes = Nodes(run, 3)
    run.pause = 1.2  # the run is not to end before the node does
    run.start("run.max_failures=0")
    step = moment(run, rng, last=4)
    victim = rng.choice(until(nodes.busy, "a node with a training worker"))
    nodes.drain(victim, seconds=5)
    run.wait_for(r"node is being reclaimed: checkpoint of step \d+ committed")
    saved = next(line for line in run.lines if "node is being reclaimed" in line).strip()
    time.sleep(5)
    nodes.kill(victim)
    ended(run)
    return f"{saved.removesuffix(' committed')} (after step {step})"


def write(run: Run, rng: random.Random) -> str:
    """kill -9 in the moment in which a checkpoint appears: of the worker, or of all processes of the run."""
    everything = rng.random() < 0.5
    run.start(*([] if everything else ["run.max_failures=3"]))
    number = rng.randint(1, 4)
    run.wait_for(rf"\bstep +{3 * number - 2}/{STEPS}\b")
    name = f"checkpoint_{3 * number:08d}"
    assert run.process is not None
    victims = [run.process.pid, *below(run.process.pid)] if everything else actors(run, "RayTrainWorker")
    delay = rng.uniform(0, 0.004)
    until(lambda: (run.folder / name).exists(), name, every=0.0002)
    time.sleep(delay)
    for pid in victims:
        kill(pid)
    there = [str(p.relative_to(run.folder / name)) for p in (run.folder / name).rglob("*") if p.is_file()]
    if everything:
        run.process.wait()
        ended(run.again())
    else:
        ended(run)
    who = "everything" if everything else "the worker"
    return f"killed {who} in {name}: {len(there)} files" + (", digests.json too" * ("digests.json" in there))


def corrupt(run: Run, rng: random.Random) -> str:
    """The newest checkpoint is spoilt while the run lies still: a bit, the end of a file, or a whole file."""
    run.start()
    step = moment(run, rng, first=8)  # two checkpoints are there: something to fall back to
    assert run.process is not None
    for pid in [run.process.pid, *below(run.process.pid)]:
        kill(pid)
    run.process.wait()
    newest = [one for one in run.checkpoints() if (one / "digests.json").exists()][-1]
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
    ended(run.again())
    # Without its digests it counts as never finished.
    named = rf"{newest.name}: |{newest.name} was never finished"
    if not run.says(named, since):
        raise RuntimeError(f"{how} {newest.name}/{victim.name}, and nobody said so")
    return f"killed all after step {step}, {how} {newest.name}/{victim.relative_to(newest)}"


# ------------------------------------------------------------------------------------------------ several nodes


class Nodes:
    """A Ray cluster of processes on this machine: a head without CPUs, and nodes with one each."""

    def __init__(self, run: Run, count: int):
        # The workers are the nodes' children and not the driver's. Two threads would add in another order than one.
        before = dict(os.environ)
        run.finally_do.append(lambda: (os.environ.clear(), os.environ.update(before)))
        os.environ.update(
            OMP_NUM_THREADS="1", **AUTHENTICATION, RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=str(Path(__file__).parents[2]),
        )  # fmt: skip
        from ray.cluster_utils import Cluster

        self.run = run
        self.small: dict[str, Any] = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **self.small})
        run.finally_do.append(self.cluster.shutdown)
        self.nodes: list[Any] = []
        for _ in range(count):
            self.add()
        run.address = self.cluster.address
        run.arguments.append("scaling.resources_per_worker={CPU: 2}")  # one to a node

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=2, **self.small))

    def add_for_rollouts(self, count: int) -> None:
        """Nodes on which nothing but rollout workers fits, and they nowhere else."""
        for _ in range(count):
            self.nodes.append(self.cluster.add_node(num_cpus=1, labels={"for": "rollouts"}, **self.small))
        self.run.arguments.append("rollout.label_selector={for: rollouts}")

    def busy(self, actor: str = "RayTrainWorker") -> list[Any]:
        """Nodes on which a training worker runs, or another actor."""
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
            for child in below(pid):
                kill(child)
            kill(pid)

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
    "preemption": preemption,
    "write": write,
    "corrupt": corrupt,
    "rollout-worker": rollout_worker,
    "hang": hang,
    "rollout-node": rollout_node,
    "rollout-drain": rollout_drain,
}
WORKERS = {"worker": 2, "driver": 1, "node": 2, "preemption": 2, "write": 1, "corrupt": 1}
ROLLOUT = ("rollout-worker", "hang", "rollout-node", "rollout-drain")  # for runs with rollout workers alone
