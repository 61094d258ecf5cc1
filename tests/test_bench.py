"""Tests that `make bench` runs and writes its results. No test checks times, which need a quiet machine."""

import json
import subprocess
import sys

import pytest
from running import ROOT

sys.path.append(str(ROOT / "tools/bench"))
from report import ratios, render
from sizes import PHASES, TRL_PPO


def bench(tmp_path, *arguments):
    """Returns the results of `make bench`. Asserts that the ratios are those of the measured numbers."""
    command = [sys.executable, str(ROOT / "tools/bench"), *arguments]
    command += ["--size", "toy", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "bench.md").read_text() in done.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    for result in results:
        runs = {name: run for name, (run,) in result["runs"].items()}
        assert all(run[figure] > 0 for run in runs.values() for figure in ("step", "first_step", "peak"))
        for row in result["rows"]:
            if row["other"]:
                ours, other = runs[row["ours"]], runs[row["other"]]
                assert row["ratios"]["speed"] == pytest.approx(other["step"] / ours["step"])
                assert row["ratios"]["peak"] == pytest.approx(ours["peak"] / other["peak"])
    return results


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    """If the load differs between rounds, the ratio of the medians would be 2."""
    seconds = {"TRL 1.12, fp32": (8.0, 4.0, 3.0), "ours, fp32": (2.0, 3.0, 1.0)}
    phases = [dict.fromkeys(PHASES, 0.5)]
    measured = {"first_step": 1.0, "peak": 2**30, "phases": phases, "lengths": [38.0, 38.0]}
    runs = {name: [{"step": one, **measured} for one in some] for name, some in seconds.items()}
    theirs, ours = seconds
    rows = [{"ours": ours, "other": theirs, "ratios": ratios(runs, ours, theirs)}]
    machine = {"cpu": "a CPU", "threads": 2, "load": [0.1, 0.2], "date": "2026-11-22"}
    result = {"part": "ppo", "size": "large", "case": "own", "units": 16, "rows": rows, "runs": runs}
    text = render([result | {"machine": machine}])
    assert "a CPU, 2 threads, 3 rounds, load average 0.1 to 0.2" in text
    assert f"| ppo own | large | {ours} | {theirs} | 8 | 4 | 3.00 |" in text


@pytest.mark.slow
def test_ppo_is_compared_with_trl(tmp_path):
    full, own = bench(tmp_path, "ppo", "--variant", "head", "adapter", "bf16-head")
    theirs = [
        f"TRL 1.12, {precision}" if TRL_PPO.is_dir() else None for precision in ("fp32", "fp32", "bf16")
    ]
    for result in (full, own):
        assert [row["other"] for row in result["rows"]] == theirs
        assert len(result["runs"]) == 3 + 2 * TRL_PPO.is_dir()  # TRL runs once for both critics
        for (run,) in result["runs"].values():
            for update in run.get("phases", []):
                assert set(update) == set(PHASES) and all(seconds > 0 for seconds in update.values())
                assert sum(update.values()) == pytest.approx(run["step"], rel=0.1)
    lengths = [[run["lengths"] for (run,) in result["runs"].values()] for result in (full, own)]
    assert all(set(each) == {6.0} for each in lengths[0])  # the length limit of this size
    assert all(min(each) < 6.0 for each in lengths[1])


@pytest.mark.slow
def test_serve_is_compared_with_a_plain_loop(tmp_path):
    [result] = bench(tmp_path, "serve")
    assert result["rows"][0]["other"] == "plain loop" and result["runs"]["ours"][0]["answers"] > 64
    assert "| serve | toy | ours | plain loop |" in (tmp_path / "bench.md").read_text()
