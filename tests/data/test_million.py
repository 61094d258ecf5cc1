"""Tests that reading a million rows of two weighted sources on Ray takes little memory. The test takes minutes."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
from running import ROOT

SIZES, WEIGHTS = (600_000, 400_000), (0.7, 0.3)
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
    """Returns the private memory of a process in bytes. Mapped files and Ray's object store are shared memory."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private"))


def prepare(folder: str, format: str) -> None:
    """Prints the number of rows of each source, and the peak private memory of this process and of the largest Ray worker."""
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
    print(json.dumps({"sources": sources, "peaks": dict(peaks)}))


def run(call: str) -> str:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/support"), str(ROOT / "tests")])
    code = f"from data.test_million import prepare; {call}"
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]
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
    # Parquet files are read by row group, and JSON Lines files by chunk
    for name, size in outcomes["parquet"]["peaks"].items():
        assert size < 1.25 * outcomes["jsonl"]["peaks"][name] + 96 * MIB, name
    draws = [drawn for *_, drawn in sources]
    assert all(abs(drawn - sum(draws) * weight) < 1 for drawn, weight in zip(draws, WEIGHTS, strict=True))
    # The epoch ends when all 600,000 rows of the source with weight 0.7 are drawn.
    assert sum(draws) == 857_142
