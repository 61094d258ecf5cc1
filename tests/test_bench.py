"""The bench runs and writes what it promises. It asserts no time: those are for a quiet machine and a reader."""

import json
import subprocess
import sys

import pytest
from running import ROOT

sys.path.append(str(ROOT / "tests/bench"))
from ppo_ours import repeated
from report import ratios, render
from sizes import SEED, TRL_PPO
from variants import LEARNERS, PHASES, VARIANTS, chosen

from pipeline.ppo.episodes import prompt_order


def bench(tmp_path, *arguments):
    """Returns the results of `make bench`; of each row the figures are there, and the ratios are those of its sides."""
    command = [sys.executable, str(ROOT / "tests/bench"), *arguments]
    command += ["--size", "toy", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "bench.md").read_text() in done.stdout
    results = json.loads((tmp_path / "bench.json").read_text())
    for result in results:
        assert {"cpu", "threads", "load", "date"} <= set(result["machine"])
        runs = {name: run for name, (run,) in result["runs"].items()}
        for row in result["rows"]:
            assert result["part"] == "score" or (row["beside"] is None) == (row["ratios"] == {})
            if row["ratios"]:
                ours, beside = runs[row["ours"]], runs[row["beside"]]
                assert all(
                    run[figure] > 0 for run in (ours, beside) for figure in ("step", "first_step", "peak")
                )
                assert row["ratios"]["step"] == pytest.approx(ours["step"] / beside["step"])
                assert row["ratios"]["speed"] == pytest.approx(1 / row["ratios"]["step"])
                assert row["ratios"]["peak"] == pytest.approx(ours["peak"] / beside["peak"])
    return results


def beside(result):
    """Returns what each variant was measured beside, as far as it was."""
    return {row["variant"]: row["beside"] for row in result["rows"]}


def trl(text):
    return text if TRL_PPO.is_dir() else None


def test_prompts_repeated_give_the_episodes_of_prompts_shared():
    distinct = [[1], [2], [3]]
    rows = repeated(distinct, 4)
    episodes = [rows[i] for i in prompt_order(0, 12, 12, SEED)]
    assert episodes == [distinct[i] for i in prompt_order(0, 3, 3, SEED) for _ in range(4)]


def test_variants_without_a_meaning_are_left_out():
    amd, intel = ({"precision": p, "bf16": b} for p, b in (("medium", False), ("highest", True)))
    assert chosen(None, "large", "own", amd).keys() == {"head", "adapter", "matmul-head", "matmul-adapter"}
    assert chosen(None, "large", "own", intel).keys() == {"head", "adapter", "bf16-head"}
    assert chosen(["shared", "shared-long"], "large", "own", intel).keys() == {"shared", "shared-long"}
    assert chosen(["shared", "shared-long"], "demo", "own", intel).keys() == {"shared"}


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    """Of rounds whose load differed: the quotients of the medians would be 2 and 1."""
    seconds = {"head": [2.0, 3.0, 1.0], "adapter": [4.0, 6.0, 2.0]}
    names = {name: str(VARIANTS[name].ours) for name in seconds}
    theirs = "TRL 1.12, fp32"
    runs = {theirs: [measured(s) for s in (8.0, 4.0, 3.0)]}
    runs |= {names[name]: [measured(s) for s in all_] for name, all_ in seconds.items()}
    rows = [
        {"variant": name, "ours": ours, "beside": theirs, "ratios": ratios(runs, ours, theirs)}
        for name, ours in names.items()
    ]
    assert [row["ratios"]["speed"] for row in rows] == [3.0, 1.5]
    machine = {"cpu": "a CPU", "threads": 2, "load": [0.1, 0.2], "date": "2026-11-22"}
    machine["matmul"] = {"precision": "highest", "why": "torch's default"}
    result = {"part": "ppo", "size": "large", "case": "own", "samples": 16, "rows": rows, "runs": runs}
    text = render([result | {"machine": machine}])
    assert "a CPU, 2 threads, 3 rounds, load average 0.1 to 0.2" in text
    assert "| `head` | ours, fp32, critic head | TRL 1.12, fp32 | 8 | 4 | 3.00 |" in text


def measured(seconds):
    phases = dict.fromkeys(PHASES, seconds / 4)
    return {"step": seconds, "first_step": 1.0, "peak": 2**30, "phases": [phases], "lengths": [38.0, 38.0]}


@pytest.mark.slow
def test_ppo_is_measured_beside_the_last_trl_that_had_it(tmp_path):
    results = bench(tmp_path, "ppo", "--variant", "head", "adapter")
    assert [(r["part"], r["case"]) for r in results] == [("ppo", "full"), ("ppo", "own")]
    for result in results:
        assert beside(result) == dict.fromkeys(["head", "adapter"], trl("TRL 1.12, fp32"))
        assert len(result["runs"]) == 2 + TRL_PPO.is_dir()  # TRL's once for both
        for (run,) in result["runs"].values():
            for update in run["phases"]:
                assert set(update) == set(PHASES) and all(seconds > 0 for seconds in update.values())
                assert sum(update.values()) == pytest.approx(run["step"], rel=0.1)
    full, own = ([runs[0]["lengths"] for runs in result["runs"].values()] for result in results)
    assert all(set(lengths) == {6.0} for lengths in full)  # the limit of this size
    assert all(min(lengths) < 6.0 for lengths in own)


@pytest.mark.slow
def test_ppo_is_measured_in_bf16_with_trls_settings_and_with_shared_prompts(tmp_path):
    variants = ["like-trl", "bf16-head", "shared", "shared-long"]
    [result] = bench(tmp_path, "ppo", "--variant", *variants, "--length", "own")
    found = beside(result)
    assert found["like-trl"] == trl("TRL 1.12, fp32") and found["bf16-head"] == trl("TRL 1.12, bf16")
    for row in result["rows"][-2:]:  # the same episodes, and so the same work but for what is shared
        (shared,), (repeated,) = (result["runs"][row[side]] for side in ("ours", "beside"))
        assert shared["lengths"] == repeated["lengths"]


@pytest.mark.slow
def test_the_scores_of_both_critics_and_of_trl_are_read_off_their_curves(tmp_path):
    [result] = bench(tmp_path, "score")
    for (run,) in result["runs"].values():
        assert len(run["curve"]) == 2 and run["updates"] == 1 and run["score"] is not None
    assert [row["ours"] for row in result["rows"]] == [str(ours) for ours in LEARNERS]
    assert "## PPO on a Python reward" in (tmp_path / "bench.md").read_text()


@pytest.mark.slow
def test_stages_and_serve_are_measured_beside_plain_programs_and_earlier_parts_are_kept(tmp_path):
    bench(tmp_path, "sft")
    results = bench(tmp_path, "dpo", "evaluate", "serve")
    found = [(result["part"], result["rows"][0]["beside"]) for result in results]
    plain = [("evaluate", "plain forwards"), ("serve", "plain loop")]
    assert found == [("sft", "bare TRL"), ("dpo", "bare TRL"), *plain]
    [served] = results[-1]["runs"]["ours"]
    assert served["errors"] == 0 and served["answers"] > 64
    assert "| toy |" in (tmp_path / "bench.md").read_text().partition("## evaluate")[2]
