"""Tests which trials are stopped early, even after a restart of the driver, and the table of results."""

import json

import pytest

from pipeline.sweep import table, trials
from pipeline.sweep.space import SweepSettings, read_sweep

STOPS = "ASHA: not among the best 1/2 at 25 % of the steps"


def rungs(greater=False, factor=2, known=None):
    return trials.Rungs("loss", greater, SweepSettings(reduction_factor=factor), known or {}, [])


@pytest.mark.parametrize("greater", [False, True])
def test_the_worse_trial_stops_and_every_worker_gets_the_same_decision(greater):
    judge = rungs(greater)
    good, bad = (0.6, 0.3) if greater else (0.3, 0.6)
    assert judge.report("good", 25, 100, good) is None
    assert judge.report("bad", 25, 100, bad) == STOPS
    # Another rank or the restarted trial may report the same step again.
    assert judge.report("bad", 25, 100, good) == STOPS
    assert len(judge.state()["reports"]["bad"]) == 1


def test_no_trial_stops_before_the_grace_period_or_at_its_end():
    judge = rungs()
    for trial, figure in (("good", 0.3), ("bad", 0.6)):
        assert judge.report(trial, 24, 100, figure) is None
        assert judge.report(trial, 100, 100, figure) is None
    off = rungs(factor=1)  # with a factor of 1, no trial is stopped early
    assert off.report("good", 25, 100, 0.3) is None and off.report("bad", 25, 100, 0.6) is None


def test_trials_of_unequal_length_are_compared_at_the_same_share_of_their_steps():
    judge = rungs()
    assert judge.report("long", 250, 1000, 0.3) is None
    assert judge.report("short", 24, 100, 0.6) is None and judge.report("short", 25, 100, 0.6) == STOPS


def test_a_new_driver_continues_from_the_recorded_reports():
    first = rungs()
    first.report("good", 25, 100, 0.3)
    first.report("bad", 25, 100, 0.6)
    left = json.loads(json.dumps(first.state()["reports"]))
    again = rungs(known=left)
    assert again.state()["reports"] == left
    assert again.report("bad", 25, 100, 0.6) == STOPS
    assert again.report("late", 30, 100, 0.5).endswith("at 30 % of the steps"), (
        "it is compared with the reports of the earlier driver"
    )
    assert rungs().report("late", 30, 100, 0.5) is None, "nothing to compare with"


def test_each_event_is_a_line_and_failures_are_kept():
    judge = rungs()
    judge.begin("a")
    judge.begin("a")  # the process of the trial died, and a new process runs the trial again
    judge.begin("b")
    judge.report("a", 25, 100, 0.3)
    judge.report("b", 25, 100, 0.6)
    assert judge.state()["running"] == ["a", "b"]
    judge.end("a", "out of memory")
    judge.end("b", None)
    state = judge.state()
    assert (state["failures"], state["running"], state["ended"]) == ({"a": "out of memory"}, [], ["a", "b"])
    assert state["lines"] == [
        "a  begins", "b  begins", "a  step 25/100  loss 0.3", "b  step 25/100  loss 0.6", f"b  stops: {STOPS}",
        "a  failed: out of memory", "b  ended",
    ]  # fmt: skip
    judge.begin("a")
    assert judge.state()["failures"] == {}, "a restarted trial has not failed yet"


@pytest.fixture
def sweep(in_root, tmp_path):
    return read_sweep("jobs/demo/rm.yaml", ["lora.r=4,8,16,32", f"run.storage_path={tmp_path}", "run.name=s"])


def ended(trial, figure, early=None, of=10):
    how = {"step": of, "of": 10, "early": early}
    result = {"metrics": {"eval_loss": figure}, "ended": how, "seconds": 3.0, "mlflow_run_id": "x"}
    table.storage.write_json(f"{trial.job.folder}/result.json", result)


def state(**reports):
    return {"reports": reports, "failures": {"r-16": "out of memory"}}


def test_the_table_begins_with_the_best_trial_and_ends_with_failed_ones(sweep):
    ended(sweep.trials[0], 0.5, "ASHA", of=5)
    ended(sweep.trials[1], 0.25)
    report = {"step": 5, "of": 10, "figure": 0.1, "stop": None}
    rows = table.trial_rows(sweep, state(**{"r-16": [report]}), {"r-32": "ActorDiedError: gone"})
    lines = table.table_text(sweep, rows).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["8", "4", "16", "32"]
    assert lines[2].endswith("stopped: ASHA") and "5/10" in lines[2]
    assert lines[3].endswith("failed: out of memory") and lines[4].endswith("failed: ActorDiedError: gone")
    assert table.best_row(sweep, rows)["trial"] == "r-8"  # trial r-16 has a better value, but failed


def test_a_nan_is_not_the_best(sweep):
    for trial, figure in zip(sweep.trials, (float("nan"), 0.5, 0.5, 0.7), strict=True):
        ended(trial, figure)
    rows = table.trial_rows(sweep, state() | {"failures": {}}, {})
    assert table.best_row(sweep, rows)["trial"] == "r-8"
    assert table.best_row(sweep, rows[:1]) is None
