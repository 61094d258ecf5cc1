"""Tests that the result of a run is bit-identical if hosts of rollout workers die and rejoin during the run.

    .venv/bin/python -m pytest tests/cluster/test_rollouts.py -s          # 5 minutes on two busy cores; needs root

The trainer is on a third host. tools/cluster/clusters.py describes the hosts.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from clusters import PATIENCE, ROOT, cluster_of
from hosts import missing

from tools.chaos.runs import comparable, until

UPDATES = 12
PPO = [
    "gate={}", "policy=base", "reward=python:pipeline.demo:gold", "judge=null", "data.eval=null", "run.report=false",
    "mlflow.registered_model=null", f"trainer.total_episodes={16 * UPDATES}", "trainer.batch_size=16",
    "trainer.local_rollout_forward_batch_size=8", "trainer.normalize_rewards=false", "scaling.label_selector={for: head}",
    "rollout.label_selector={for: rollouts}", "rollout.num_workers=2", "rollout.staleness=1", "rollout.worker_wait_timeout_s=-1",
    "mlflow.tracking_uri=http://127.0.0.1:5000",
]  # fmt: skip
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing(ssh=False) is not None, reason=str(missing(ssh=False))),
]


class Ppo:
    """A PPO run whose driver is on the first host."""

    def __init__(self, cluster, name):
        self.folder = cluster.folder / "runs" / name
        where = [f"run.storage_path={cluster.folder / 'runs'}", f"run.name={name}"]
        command = [sys.executable, str(ROOT / "tools/chaos/slowly.py"), "ppo", "jobs/demo/ppo.yaml"]
        self.process = cluster.start(cluster.hosts[0], *command, *PPO, *where)

    def reaches(self, step):
        """Waits until the run prints the metrics of this step."""
        pattern = re.compile(rf"\bstep +{step}/{UPDATES}\b")

        def there():
            assert self.process.poll() is None, "".join(self.process.lines[-30:])
            return any(pattern.search(line) for line in self.process.lines)

        until(there, f"step {step}", PATIENCE, every=0.02)

    def result(self):
        status, said = self.process.end()
        assert status == 0, said[-3000:]
        return json.loads((self.folder / "result.json").read_text())


@pytest.fixture(scope="module")
def cluster():
    with cluster_of(3, PYTHONPATH=f"{ROOT}:{ROOT / 'tools/chaos'}", CHAOS_STEP_S="0.3") as made:
        yield made


def test_hosts_of_rollout_workers_die_and_rejoin(cluster):
    _, one, other = cluster.hosts.hosts
    for host in (one, other):
        cluster.join(host, "rollouts")
    undisturbed = Ppo(cluster, "undisturbed")
    undisturbed.reaches(3)
    before = [host.sent() for host in cluster.hosts.hosts]
    undisturbed.reaches(UPDATES - 2)
    sent = [host.sent() - was for host, was in zip(cluster.hosts.hosts, before, strict=True)]
    expected = undisturbed.result()
    cluster.leave(other)

    # Only one host at a time has a rollout worker, so this rollout worker samples all completions of the update.
    run = Ppo(cluster, "disturbed")
    for step, leaves, joins in ((3, one, other), (6, other, one)):
        run.reaches(step)
        cluster.leave(leaves)
        cluster.join(joins, "rollouts")
    result = run.result()

    weights = [Path(each["adapter"], "adapter_model.safetensors") for each in (expected, result)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    metrics = [
        {key: value for key, value in comparable(each["metrics"]).items() if not key.startswith("rollout/")}
        for each in (expected, result)
    ]
    assert metrics[0] == metrics[1] and len(metrics[0]) > 20
    assert "".join(run.process.lines).count("another worker takes its place") >= 2

    updates = UPDATES - 5
    adapter = weights[0].stat().st_size
    print(
        f"\nadapter {adapter} bytes; an update: {sent[0] / updates:.0f} from the trainer's host, "
        f"{sum(sent[1:]) / updates:.0f} from the two others"
    )
    # Two rollout workers fetch each policy version. The base is ten times as large as an adapter, and is sent only once.
    assert adapter < sent[0] / updates < 4 * adapter
