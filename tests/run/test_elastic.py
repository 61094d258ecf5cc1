"""Tests `scaling.num_workers: [1, 2]` on a cluster that loses a node and later gets a new node."""

import collections
import json
from pathlib import Path

import pytest

EPOCHS, BATCH = 3, 8
SMALL = [
    "data.train=jobs/demo/data/demonstrations_eval.jsonl", "data.eval=null", "trainer.eval_strategy=no",
    "trainer.eval_on_start=false", f"trainer.num_train_epochs={EPOCHS}", f"data.batch_size={BATCH}",
    "trainer.per_device_train_batch_size=4", "trainer.logging_steps=1", "trainer.save_strategy=steps", "trainer.save_steps=2",
]  # fmt: skip


def steps_of(folder: Path) -> tuple[dict[int, collections.Counter], list[int]]:
    """Returns ({step: rows}, number of workers of each attempt). The rows of a repeated step come from its last attempt."""
    written = [text for path in folder.glob("*.jsonl") for text in path.read_text().splitlines()]
    # a killed process may leave an incomplete last line
    lines = [json.loads(text) for text in written if text.endswith("}")]
    last = {line["step"]: line["attempt"] for line in sorted(lines, key=lambda line: line["attempt"])}
    rows: dict[int, collections.Counter] = collections.defaultdict(collections.Counter)
    for line in lines:
        if line["attempt"] == last[line["step"]]:
            rows[line["step"]].update(map(tuple, line["rows"]))
    workers = {line["attempt"]: line["world"] for line in lines}
    return dict(rows), [workers[attempt] for attempt in sorted(workers)]


@pytest.mark.slow
def test_each_row_comes_once_per_epoch_while_workers_come_and_go(tmp_path):
    from faults import Nodes, ended
    from runs import Run, Server, until

    with Server(tmp_path) as server:
        untouched = Run("sft", "untouched", tmp_path, server, [*SMALL, "scaling.num_workers=1"])
        untouched.env["CHAOS_ROWS"] = str(tmp_path / "rows-untouched")
        elastic = Run("sft", "elastic", tmp_path, server, [*SMALL, "scaling.num_workers=[1, 2]"])
        elastic.env["CHAOS_ROWS"] = str(tmp_path / "rows-elastic")
        elastic.arguments.append("scaling.elastic_resize_monitor_interval_s=5")
        for run in (untouched, elastic):
            Path(run.env["CHAOS_ROWS"]).mkdir()
        untouched.pause = 0.0
        ended(untouched.start())
        elastic.pause = 1.5
        try:
            nodes = Nodes(elastic, 2)
            elastic.start("run.max_failures=5")
            elastic.wait_for(r"\bstep +5/")
            nodes.kill(until(nodes.busy, "a busy node")[0])
            elastic.wait_for(r"\bstep +9/")
            nodes.add()
            ended(elastic)
        finally:
            elastic.stop()
    expected, one = steps_of(tmp_path / "rows-untouched")
    found, workers = steps_of(tmp_path / "rows-elastic")
    assert one == [1] and workers[0] == 2 and {1, 2} <= set(workers[1:]), workers
    assert found == expected, "a step took other rows than with one worker"
    every, size = [collections.Counter() for _ in range(EPOCHS)], len(expected) // EPOCHS
    for step, rows in found.items():
        every[(step - 1) // size].update(rows)
    assert every[0] == every[1] == every[2] and every[0].total() == 60
    metrics = [run.result()["metrics"]["train_loss"] for run in (untouched, elastic)]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-3)
