"""The bench runs and writes what it promises. It asserts no time: those are for a quiet machine and a reader."""

import json
import subprocess
import sys

import pytest
from running import ROOT

TRL_PPO = ROOT / ".bench/trl"
FIGURES = {"step", "first_step", "peak"}


def bench(tmp_path, *arguments):
    command = [sys.executable, str(ROOT / "tests/bench"), *arguments]
    command += ["--size", "toy", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "bench.md").read_text() in done.stdout
    return json.loads((tmp_path / "bench.json").read_text())


def complete(result, sides):
    for side in sides:
        assert set(result[side]) == FIGURES
        assert all(figure > 0 for figure in result[side].values())
        assert len(result["runs"][side]) == 1
    if len(sides) == 2:
        assert result["ratios"]["step"] == pytest.approx(result["ours"]["step"] / result["theirs"]["step"])
        assert result["ratios"]["speed"] == pytest.approx(1 / result["ratios"]["step"])
        assert {"peak", "later"} < set(result["ratios"])
    assert set(result["machine"]) == {"cpu", "threads", "load", "date"}


@pytest.mark.slow
def test_ppo_is_measured_beside_the_last_trl_that_had_it(tmp_path):
    sides = ["ours", "theirs"] if TRL_PPO.is_dir() else ["ours"]
    results = bench(tmp_path, "ppo")
    assert [(r["part"], r["size"], r["case"]) for r in results] == [
        ("ppo", "toy", "full"),
        ("ppo", "toy", "own"),
    ]
    for result in results:
        complete(result, sides)
        (run,) = result["runs"]["ours"]
        for update in run["phases"]:
            assert {f"time/{phase}" for phase in ("rollout", "score", "values", "update")} <= set(update)
    full, own = (result["runs"]["ours"][0]["lengths"] for result in results)
    assert set(full) == {6.0}  # the limit of this size
    assert min(own) < 6.0


@pytest.mark.slow
def test_the_scores_of_both_are_read_off_their_curves(tmp_path):
    [result] = bench(tmp_path, "score")
    for runs in result["runs"].values():
        [run] = runs
        assert len(run["curve"]) == 2 and run["updates"] == 1 and run["score"] is not None
    assert "## PPO on a Python reward" in (tmp_path / "bench.md").read_text()


@pytest.mark.slow
def test_a_stage_is_measured_beside_bare_trl_and_earlier_parts_are_kept(tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps(bench(tmp_path, "sft")))
    results = bench(tmp_path, "dpo")
    assert [r["part"] for r in results] == ["sft", "dpo"]
    for result in results:
        complete(result, ["ours", "theirs"])
