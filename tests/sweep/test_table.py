"""The table of a sweep: best first, what failed last with its reason."""

import pytest

from pipeline.sweep import table
from pipeline.sweep.space import read


@pytest.fixture
def sweep(in_root, tmp_path):
    return read("jobs/demo/rm.yaml", ["lora.r=4,8,16,32", f"run.storage_path={tmp_path}", "run.name=s"])


def ended(trial, figure, early=None, of=10):
    folder = trial.job.folder
    result = {
        "metrics": {"eval_loss": figure},
        "ended": {"step": of, "of": 10, "early": early},
        "seconds": 3.0,
    }
    table.storage.write_json(f"{folder}/result.json", result | {"mlflow_run_id": "x"})


def state(**reports):
    return {"reports": reports, "failures": {"r-16": "out of memory"}, "running": [], "ended": []}


def test_best_first_and_what_failed_last_with_its_reason(sweep):
    ended(sweep.trials[0], 0.5, "ASHA", of=5)
    ended(sweep.trials[1], 0.25)
    report = {"step": 5, "of": 10, "figure": 0.1, "stop": None}
    rows = table.rows(sweep, state(**{"r-16": [report]}), {"r-32": "ActorDiedError: gone"})
    lines = table.text(sweep, rows).splitlines()
    assert [line.split()[0] for line in lines[3:-1]] == ["8", "4", "16", "32"]
    assert lines[4].endswith("stopped: ASHA") and "5/10" in lines[4]
    assert lines[5].endswith("failed: out of memory") and lines[6].endswith("failed: ActorDiedError: gone")
    assert table.best(sweep, rows)["trial"] == "r-8"  # not the one that failed with a better figure


def test_a_figure_that_is_no_number_is_not_the_best(sweep):
    for trial, figure in zip(sweep.trials, (float("nan"), 0.5, 0.5, 0.7), strict=True):
        ended(trial, figure)
    rows = table.rows(sweep, state() | {"failures": {}}, {})
    assert table.best(sweep, rows)["trial"] == "r-8"
    assert table.best(sweep, rows[:1]) is None
