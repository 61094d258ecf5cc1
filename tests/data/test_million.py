"""Tests a million Parquet rows in two sources: memory of reading, shares, and an epoch over a kill. Takes minutes."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from running import ROOT

from pipeline.data.feed import ExactBatches, Mixture

SIZES, WEIGHTS = (600_000, 400_000), (0.7, 0.3)
BATCH, SAVE, KILL = 4096, 50, 130  # rows per step; steps between checkpoints; step in which the kill happens
MIB = 1 << 20


def write(folder: Path, format: str) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    paths, start = [], 0
    for source, size in enumerate(SIZES):
        path = folder / f"{source}.{format}"
        rows = ({"prompt": f"question {i}", "completion": f" answer {i}"} for i in range(start, start + size))
        if format == "jsonl":
            with open(path, "w") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=100_000)
        paths.append(str(path))
        start += size
    return paths


def private(process: psutil.Process) -> int:
    """Returns the bytes that no other process shares. Mapped files and Ray's object store do not count."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private"))


def prepare(folder: str, format: str) -> None:
    """Runs in a separate process. Prints the rows read, its peak private memory and that of its largest data worker."""
    import threading
    import time

    import ray
    from toy_data import make

    paths = [os.path.join(folder, f"{source}.{format}") for source in range(len(SIZES))]
    train = [{"path": path, "weight": weight} for path, weight in zip(paths, WEIGHTS, strict=True)]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    own, peaks, done = psutil.Process(), Counter(), threading.Event()
    before = private(own)

    def watch():
        while not done.is_set():
            peaks["driver"] = max(peaks["driver"], private(own) - before)
            for child in own.children(recursive=True):
                if child.name().startswith("ray::"):
                    peaks["worker"] = max(peaks["worker"], private(child))
            time.sleep(0.2)

    watcher = threading.Thread(target=watch)
    watcher.start()
    made = make(Path(folder), train=train, on_ray=True)
    done.set()
    watcher.join()
    sources = [[one.read, one.kept, one.drawn] for one in made.report.sources["train"]]
    parts = sorted(str(path) for path in Path(folder, "cache").rglob("*.arrow"))
    print(json.dumps({"sources": sources, "peaks": dict(peaks), "rows": made.train.count(), "parts": parts}))


def train(folder: str, parts: list[str], draws: list[int], kill: bool) -> None:
    """Runs in a separate process. Trains an epoch with a transformers trainer, which records the rows that it sees."""
    import datasets
    import pyarrow as pa
    import torch
    import transformers

    table = pa.concat_tables([pa.ipc.open_file(pa.memory_map(part)).read_all() for part in parts])
    rows = datasets.Dataset(datasets.table.InMemoryTable(table.append_column("row", [np.arange(len(table))])))
    seen = Path(folder, "killed.bin" if kill else "resumed.bin")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, row):
            with seen.open("ab") as file:
                file.write(row.numpy().tobytes())
            return {"loss": (self.weight * row).mean()}

    class Trainer(ExactBatches, transformers.Trainer):
        mixture = Mixture(SIZES, tuple(draws))

        def training_step(self, *args, **options):
            if kill and self.state.global_step == KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(*args, **options)

    args = transformers.TrainingArguments(
        output_dir=os.path.join(folder, "trainer"), per_device_train_batch_size=BATCH, num_train_epochs=1, save_steps=SAVE,
        logging_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, seed=5,
    )  # fmt: skip
    trainer = Trainer(Model(), args, train_dataset=rows.select_columns(["row"]))
    trainer.train(resume_from_checkpoint=not kill)


def run(call: str, status: int = 0) -> str:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/support"), str(ROOT / "tests")])
    code = f"from data.test_million import prepare, train; {call}"
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == status, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_million_rows_of_two_weighted_sources(tmp_path):
    outcomes = {}
    for format in ("jsonl", "parquet"):
        folder = tmp_path / format
        folder.mkdir()
        write(folder, format)
        outcomes[format] = json.loads(run(f"prepare({str(folder)!r}, {format!r})").splitlines()[-1])
        print(format, {name: f"{size / MIB:.0f} MiB" for name, size in outcomes[format]["peaks"].items()})
    sources = outcomes["parquet"]["sources"]
    assert sources == outcomes["jsonl"]["sources"] and [source[:2] for source in sources] == [
        [size, size] for size in SIZES
    ]
    for name, size in outcomes["parquet"]["peaks"].items():
        assert size < 1.25 * outcomes["jsonl"]["peaks"][name] + 96 * MIB, name
    draws = [drawn for *_, drawn in sources]
    assert all(abs(drawn - sum(draws) * weight) < 1 for drawn, weight in zip(draws, WEIGHTS, strict=True))
    assert sum(draws) == 857_142  # until the 600,000 rows with weight 0.7 are used up

    folder, parts = str(tmp_path / "parquet"), outcomes["parquet"]["parts"]
    run(f"train({folder!r}, {parts!r}, {draws!r}, kill=True)", status=-signal.SIGKILL)
    run(f"train({folder!r}, {parts!r}, {draws!r}, kill=False)")
    saved = KILL // SAVE * SAVE * BATCH
    killed, resumed = (
        np.fromfile(Path(folder, f"{name}.bin"), dtype=np.int64) for name in ("killed", "resumed")
    )
    assert saved < len(killed) <= KILL * BATCH
    epoch = np.concatenate([killed[:saved], resumed])
    assert len(np.unique(epoch)) == len(epoch) == sum(draws)  # no row twice
    assert [int((epoch < SIZES[0]).sum()), int((epoch >= SIZES[0]).sum())] == draws
