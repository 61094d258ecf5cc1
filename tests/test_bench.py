"""Tests that `make bench` runs and writes its results. No test checks the measured times."""

import json
import subprocess
import sys

import pytest
from running import ROOT

sys.path.append(str(ROOT / "tools/bench"))
from sizes import PHASES, TRL_PPO


def bench(tmp_path, *arguments):
    """Returns the results of `make bench`. Asserts that the ratios follow from the measured numbers."""
    command = [sys.executable, str(ROOT / "tools/bench"), *arguments]
    command += ["--size", "toy", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert (tmp_path / "bench.md").read_text() in process.stdout
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


@pytest.mark.slow
def test_ppo_is_compared_with_trl(tmp_path):
    """Also compares shared prompts with repeated prompts, which must have the same episodes."""
    full, own = bench(tmp_path, "ppo", "--variant", "head", "adapter", "bf16-head", "shared-long")
    theirs = [
        f"TRL 1.12, {precision}" if TRL_PPO.is_dir() else None for precision in ("fp32", "fp32", "bf16")
    ]
    for result in (full, own):
        assert [row["other"] for row in result["rows"]] == [
            *theirs,
            "ours, fp32, critic head, repeated prompts",
        ]
        assert len(result["runs"]) == 5 + 2 * TRL_PPO.is_dir()  # one run of TRL is compared with both critics
        for (run,) in result["runs"].values():
            for update in run.get("phases", []):
                assert set(update) == set(PHASES) and all(seconds > 0 for seconds in update.values())
                assert sum(update.values()) == pytest.approx(run["step"], rel=0.1)
        (shared,), (separate,) = (result["runs"][result["rows"][-1][side]] for side in ("ours", "other"))
        assert shared["lengths"] == separate["lengths"]
    lengths = [[run["lengths"] for (run,) in result["runs"].values()] for result in (full, own)]
    assert all(set(x) == {6.0} for x in lengths[0])  # 6 tokens is the length limit of the size `toy`
    assert all(min(x) < 6.0 for x in lengths[1])


@pytest.mark.slow
def test_other_parts_are_compared_with_plain_programs_and_earlier_results_are_kept(tmp_path):
    bench(tmp_path, "sft")
    results = bench(tmp_path, "dpo", "evaluate", "serve", "judge")
    comparisons = [(result["part"], result["rows"][0]["other"]) for result in results]
    plain = [("evaluate", "plain forwards"), ("serve", "plain loop"), ("judge", "plain asyncio loop")]
    assert comparisons == [("sft", "bare TRL"), ("dpo", "bare TRL"), *plain]
    assert results[-1]["runs"]["ours"][0]["answers"] > 64
    assert "| evaluate | toy | ours | plain forwards |" in (tmp_path / "bench.md").read_text()
