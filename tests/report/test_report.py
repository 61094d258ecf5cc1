"""Tests the report page of finished, failed and interrupted runs. All runs but one exist only as records in MLflow."""

import json
import math
import re
import shutil
from collections import Counter
from dataclasses import replace
from functools import cache
from html import unescape

import pandas
import pytest
from registered import published
from running import ROOT, client, stage

from pipeline import registry, report
from pipeline.__main__ import main
from pipeline.job import load_job
from pipeline.report import gather, page, panels, plots, preferences
from pipeline.run import launch as run
from pipeline.settle.identity import tracking_of

SCRIPT = "<script>alert('x')</script> & \"quotes\" $x^2$"
PPO_CURVES = {
    "objective/kl": [0.0, 1.0, 2.5],
    "objective/scores": [-1.0, 0.0, 0.9],
    "rewards/reward/mean": [0.1, 1.0, 3.0],
    "val/explained_variance": [-0.5, 0.1, 0.4],
    "policy/clipfrac_avg": [0.1, 0.05, 0.02],
    "time/rollout": [3.0, 1.0, 1.1],
    "time/update": [2.0, 2.0, 2.1],
    "memory/peak": [0.8, 0.9, 0.9],
    "lr": [1e-3, 1e-3, 1e-3],
}
LINEAGE = {
    "stage": "?",
    "base": {"name_or_path": "jobs/demo/model", "digest": "sha256:0123456789abcdef"},
    "data": {},
    "versions": {"torch": "2.13.0"},
}
SPLIT = {
    "read": 12, "kept": 9, "truncated": 1, "dropped": {"equal_pair": 2}, "tokens": 321,
    "prompt_tokens": {"p5": 1, "p50": 2, "p95": 3, "max": 4}, "completion_tokens": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Returns a storage path with an empty MLflow store."""
    folder = tmp_path_factory.mktemp("reported")
    registry.client(f"sqlite:///{folder}/mlflow.db").search_experiments()
    return folder


def begin(store, name, verb="ppo", *changed):
    given = [f"run.storage_path={store}", f"run.name={name}", *changed]
    job = load_job(ROOT / f"jobs/demo/{verb}.yaml", given, verb)
    (store / name).mkdir()
    (store / name / "job.json").write_text(json.dumps(job.to_dict()))
    return job


def log(job, run_id, curves):
    metrics = registry.Curves(registry.MLflowRun(tracking_of(job).uri, run_id))
    for step in range(len(next(iter(curves.values())))):
        metrics.log({key: values[step] for key, values in curves.items()}, step + 1)
    metrics.close()


def finish(store, job, curves, metrics, inputs=None, samples=(), publish=True, rows_from=None):
    """Creates what a finished run leaves behind: an MLflow run, a model version and result.json."""
    with registry.mlflow_run(tracking_of(job), {"train": "d" * 64}) as run_id:
        if curves:
            log(job, run_id, curves)
        version = None
        if publish:
            adapter = store / job.run.name / "adapter"
            adapter.mkdir()
            (adapter / "adapter_model.safetensors").write_bytes(b"weights")
            facts = {**LINEAGE, "parents": inputs or {}, "rows_from": rows_from or {}}
            version = published(job, run_id, str(adapter), metrics, facts)
    counts = {"read": 10, "kept": 9, "rows": 9, "drawn": None}
    sources = {"train": [{**counts, "path": "a.jsonl"}, {**counts, "path": "b.parquet", "drawn": 3}]}
    splits = {"train": {**SPLIT, "versions": rows_from or {}}}
    read = {"splits": splits, "sources": sources, "samples": [f"{SCRIPT}⟦a <b>⟧"]}
    result = run.version_entries(version) | {
        "stage": job.stage, "name": job.run.name, "folder": job.folder, "metrics": metrics, "samples": list(samples),
        "checkpoint": str(store / job.run.name / "final"), "mlflow_run_id": run_id,
        "tracking_uri": tracking_of(job).uri, "adapter": str(store / job.run.name / "adapter") if publish else None,
        "inputs": inputs or {}, "data": {"digests": {"train": "d" * 64}, "report": read}, "seconds": 75.4,
        "train_seconds": 60.0, "peak_memory_bytes": 2**30, "versions": {"python": "3.11.9", "torch": "2.13.0"},
        "job": job.to_dict(),
    }  # fmt: skip
    (store / job.run.name / "result.json").write_text(json.dumps(result))
    return result


@pytest.fixture(scope="module")
def runs(store):
    """Returns the results of four runs: sft, rm, ppo with the sft policy and the reward model, and evaluate."""
    curves = {"loss": [0.6, 0.5], "eval_loss": [0.6, 0.55]}
    sft = finish(store, begin(store, "one-sft", "sft"), curves, {"eval_loss": 0.5, "initial_loss": 0.7})
    rm = finish(store, begin(store, "one-rm", "rm"), {"accuracy": [0.5, 0.9]}, {"eval_accuracy": 0.975})
    inputs = {"policy": "models:/rlhf-sft/1", "reward.0": "models:/rlhf-rm/1"}
    sample = {
        "prompt": SCRIPT,
        "before": {"completion": "Oslo.", "reward": 0.25, "judge": 0.5},
        "after": {
            "completion": "Oslo & <b>thanks</b>",
            "reward": 3.5,
            "judge": 1.0,
            "words": "<i>Fine.\nScore: 10",
        },
    }
    judged = {"initial_judge": 0.25, "eval_judge": 0.915}
    figures = judged | {"eval_win_rate": 0.9, "eval_kl": 2.5, "eval_eos_rate": 0.5}
    ppo = finish(store, begin(store, "one-ppo"), PPO_CURVES, figures, inputs, [sample])
    inputs |= {"policy": "models:/rlhf-ppo/1", "baseline": "models:/rlhf-sft/1"}
    job = begin(store, "one-evaluate", "evaluate")
    evaluate = finish(store, job, {}, {"eval_judge_win_rate": 0.8}, inputs, publish=False)
    return {"sft": sft, "rm": rm, "ppo": ppo, "evaluate": evaluate}


def test_an_evaluation_shows_probes_benchmarks_and_the_best_of_n(store, runs):
    """For each failed probe, the page shows only the worst example."""
    sides = {"completion": "Oslo", "score": 1.0}, {"completion": "Sure! <b>Oslo</b>", "score": 4.25}
    example = {"prompt": SCRIPT, "before": sides[0], "after": sides[1]}
    failed = {"verdict": "raises the score", "effect": 0.5, "low": 0.4, "high": 0.6, "worst": [example]}
    sound = {"verdict": "ok", "effect": 0.0, "low": -0.1, "high": 0.1, "worst": [example]}
    score = {"rows": 7, "score": 0.625}
    levels, subsets = (
        {name: {**score, "low": low, "high": low + 0.25}} for name, low in (("all", 0.25), ("chat", 0.5))
    )
    written = {
        "probes": {"polite_opening": failed, "order": sound},
        "benchmarks": {"rm_bench": {**score, "levels": levels, "subsets": subsets}},
        "best_of_n": [{"n": n, "proxy": n, "gold": 2 / n, "kl_bound": 0} for n in (1, 2, 4)],
    }  # fmt: skip
    run = report.read_run(str(store / "one-evaluate"))
    html = page.render_page([replace(run, evaluation=written)])
    assert html.count("score 4.25") == 1 and "polite opening" in html and "<b>Oslo" not in html
    assert "rm_bench / chat" in html and "0.500 to 0.750" in html and "0.250 to 0.500" in html
    assert html.count("<svg") >= 2 and "Best of n" in html


@cache
def page_of(store, *names):
    return page.render_page([report.read_run(str(store / name)) for name in names])


def text_of(html):
    return " ".join(unescape(re.sub(r"<style.*?</style>|<[^>]*>", " ", html, flags=re.DOTALL)).split())


# --------------------------------------------------------------------------------------------------- the page


def test_the_page_is_valid_self_contained_and_reproducible(runs, store):
    names = ("one-sft", "one-rm", "one-ppo", "one-evaluate")
    html = page_of(store, *names)
    opened, closed = (Counter(re.findall(tag, html)) for tag in (r"<(\w+)\b[^>]*(?<!/)>", r"</(\w+)>"))
    assert opened - closed == Counter(meta=opened["meta"], br=opened["br"]) and not closed - opened
    assert not re.search(r"<(script|link|img|iframe|object)\b|\son\w+=|@import", html)
    assert not re.findall(r'(?:src|href)="(?!#|data:image/png)', html)
    assert "http" not in re.sub(r"http://www\.w3\.org\S*", "", html)
    ids = re.findall(r'\sid="([^"]+)"', html)
    assert len(ids) == len(set(ids)), "ids of different drawings collide"
    assert set(re.findall(r'(?:href="|url\()#([\w.-]+)', html)) <= set(ids)
    assert page_of.__wrapped__(store, *names) == html


def test_the_page_has_metrics_curves_samples_gate_and_data(runs, store):
    text = text_of(page_of(store, "one-ppo"))
    for words in (
        "one-ppo gate failed PPO", "0.25 → 0.915 held-out judge", "90.0%", "1 min 15 s", "KL from the reference",
        "Explained variance of the values", "Seconds per update", "Oslo.", "reward 3.50",
        "2 chosen equal to rejected", "eval_eos_rate 0.5 >= 0.9 failed", "torch 2.13.0",
        "train 2 sources · dddddddddddd a.jsonl: 9 of 10 kept b.parquet: 9 of 10 kept, 3 of 9 drawn per epoch 12",
    ):  # fmt: skip
        assert words in text, words
    assert ">update</text>" in page_of(store, "one-ppo") and ">step</text>" in page_of(store, "one-sft")
    assert "Implicit rewards" not in text, "PPO has no such metric"
    assert "Learning rate" not in text, "a constant is not worth a panel"


@pytest.mark.parametrize(("reward", "judge", "marked"), [(2.0, 0.25, 1), (2.0, 1.0, 0), (2.0, None, 0)])
def test_a_judge_that_falls_while_the_reward_rises_is_colored(reward, judge, marked, runs, store):
    run = report.read_run(str(store / "one-ppo"))
    before, after = {"completion": "a", "reward": 1.0}, {"completion": "b", "reward": reward}
    if judge is not None:
        before["judge"], after["judge"] = 0.5, judge
    sample = {"prompt": "?", "before": before, "after": after}
    html = page.render_page([replace(run, result=run.result | {"samples": [sample]})])
    assert html.count('class="falls"') == marked


def lines_of(store, name):
    """Returns the page's list of a run's ancestors as text."""
    html = page_of(store, name)
    there = html[html.index("<h3>Lineage") :].partition("</ul>")[0]
    return [text_of(line) for line in re.findall("<li>.*?</li>", there, re.DOTALL)]


def test_the_lineage_leads_from_the_policy_to_the_base(runs, store):
    assert lines_of(store, "one-evaluate") == [
        # The PPO version has no alias, because its eval_eos_rate failed the gate.
        "policy: rlhf-ppo v1 (gate failed: eval_eos_rate = 0.5, required >= 0.9), from policy: rlhf-sft v1, reward: rlhf-rm v1",
        "reward: rlhf-rm v1 (@champion, gate passed), from base: jobs/demo/model",
        "baseline: rlhf-sft v1 (@champion, gate passed), from base: jobs/demo/model",
        "base: jobs/demo/model",
    ]
    assert '<a href="#r0">rlhf-sft v1</a>' in page_of(store, "one-sft", "one-ppo"), "it is on the same page"
    there = "http://server:5000/#/models/rlhf-rm/versions/1"
    assert gather.version_url("models:/rlhf-rm/1", "http://me:secret@server:5000") == there
    assert gather.version_url("models:/rlhf-rm/1", "sqlite:///mlflow.db") is None


def test_the_lineage_has_the_versions_that_wrote_rows(migrated, tmp_path):
    """dpo v1 learns from rows of sft v1, and dpo v2 mostly from rows of dpo v1 and sft v1.

    dpo v1 and dpo v2 start from the policy sft v1.
    """
    shutil.copy(migrated, tmp_path / "mlflow.db")
    sft, first, second = "models:/rlhf-sft/1", "models:/rlhf-dpo/1", "models:/rlhf-dpo/2"
    finish(tmp_path, begin(tmp_path, "sft", "sft"), {}, {})
    rare = {f"models:/rare/{number}": 1 for number in (1, 2)}
    counts = {first: 200, sft: 100, second: 5, "models:/gone/1": 3, **rare}
    for name, rows_from in (("one", {sft: 300}), ("two", counts)):
        finish(tmp_path, begin(tmp_path, name, "dpo"), {}, {}, {"policy": sft}, rows_from=rows_from)
    lines = lines_of(tmp_path, "two")
    assert [line.partition(" (")[0] for line in lines] == [
        "policy: rlhf-sft v1", "200 rows: rlhf-dpo v1", "5 rows: rlhf-dpo v2", "3 rows: gone v1", "2 rows: others",
        "base: jobs/demo/model",
    ]  # fmt: skip
    assert "unreadable" in lines[3] and lines[1].endswith("from policy: rlhf-sft v1, 300 rows: rlhf-sft v1")


def test_the_page_of_several_runs_begins_with_their_metrics(runs, store):
    html = page_of(store, "one-sft", "one-rm", "one-ppo")
    assert html.count("Completions to held-out prompts") == 1, "only the last run's samples are shown"
    text = text_of(html)
    assert "97.5% rm: held-out accuracy" in text and "0.25 → 0.915 ppo: held-out judge" in text
    assert "3 min 46 s wall clock" in text


def test_runs_of_one_stage_are_drawn_over_each_other(runs, store):
    """The legend has numbers, because names of runs may be long or equal. A table lists the keys in which the runs differ."""
    for name, *changed in (("other-ppo", "trainer.kl_coef=0.5"), ("third-ppo", "data.eval=null")):
        finish(store, begin(store, name, "ppo", *changed), PPO_CURVES, {"eval_kl": 0.5}, publish=False)
    shutil.copytree(store / "one-ppo", store / "elsewhere/one-ppo")
    html = page_of(store, "one-ppo", "other-ppo", "third-ppo", "elsewhere/one-ppo")
    kl = re.search(r'<svg[^>]*aria-label="KL from the reference.*?</svg>', html, re.DOTALL)[0]
    assert sorted(re.findall(r"fill: var\(--c\d\)[^<]*>(\d)</text>", kl)) == ["1", "2", "3", "4"]
    assert "#0072b2" not in kl.lower(), "colors are variables of the page"
    text = text_of(html)
    assert "PPO: 4 runs compared run data.eval trainer.kl_coef held-out judge" in text
    assert re.search(r"2 other-ppo \S+ 0\.5", text)


# ------------------------------------------------------------------------------------- runs that did not finish


def test_the_page_of_a_failed_run_has_the_error_and_the_step(store):
    job = begin(store, "failed-ppo")
    with pytest.raises(ZeroDivisionError), registry.mlflow_run(tracking_of(job), {}) as run_id:
        log(job, run_id, {"objective/kl": [0.0, 0.5]})
        failure = {"error": f"ZeroDivisionError: {SCRIPT}", "mlflow_run_id": run_id}
        (store / "failed-ppo" / "failed.json").write_text(json.dumps(failure))
        raise ZeroDivisionError
    html = page_of(store, "failed-ppo")
    assert "It failed after step 2." in html and "ZeroDivisionError: <script>" in text_of(html)
    assert "<script" not in html and "KL from the reference" in html, "the curves up to there are shown"


def test_an_unfinished_run_is_found_in_mlflow_by_its_folder(store):
    job = begin(store, "cut-off")
    run = registry.mlflow_run(tracking_of(job), {})
    log(job, run.__enter__(), {"objective/kl": [0.0, 0.5, 0.75]})
    found = report.read_run(str(store / "cut-off"))
    assert found.state == "unfinished" and found.last_step == 3 and found.metrics["objective/kl"] == 0.75
    assert "the newest figures are of step 3" in page_of(store, "cut-off")
    run.__exit__(None, None, None)


def test_the_page_marks_the_kept_step_and_names_the_early_stop(store):
    job = begin(store, "kept-rm", "rm")
    curves = {"loss": [0.6, 0.5, 0.4], "eval_loss": [0.6, 0.5, 0.7], "margin": [1.0, 2.0, 3.0]}
    result = finish(store, job, curves, {"eval_loss": 0.5}, publish=False)
    file = store / "kept-rm/result.json"
    last = {"kept": {"step": 3, "by": None}, "ended": {"step": 3, "of": 3, "early": None}}
    file.write_text(json.dumps(result | last))
    text = page.render_page([report.read_run(str(store / "kept-rm"))])
    assert "kept: step" not in text and "<dt>ended</dt>" not in text
    best = {"step": 2, "by": "eval_loss", "value": 0.5}
    early = {"step": 3, "of": 9, "early": "eval_loss has not improved for 1 evaluation"}
    file.write_text(json.dumps(result | {"kept": best, "ended": early}))
    run = report.read_run(str(store / "kept-rm"))
    text = page.render_page([run])
    said = "kept step 2 of 3: the best eval_loss, 0.5; stopped at step 3 of 9: eval_loss has not improved for 1 evaluation"
    assert f"<dt>ended</dt><dd>{said}</dd>" in text
    assert text.count("kept: step 2") == 1, "only the panel with a held-out line marks the step"


def test_without_an_mlflow_server_the_page_has_a_note_instead_of_curves(runs, store, tmp_path):
    shutil.copytree(store / "one-rm", tmp_path / "moved")
    result = json.loads((tmp_path / "moved/result.json").read_text())
    result["tracking_uri"] = f"sqlite:///{tmp_path}/nowhere/mlflow.db"
    (tmp_path / "moved/result.json").write_text(json.dumps(result))
    html = page_of(tmp_path, "moved")
    assert "No curves, because sqlite:///" in html and "97.5%" in html


def test_markup_in_values_is_escaped(runs, store, tmp_path):
    html = page_of(store, "one-ppo")
    # text of a sample, with markup
    assert "&lt;script&gt;alert(&#39;x&#39;)" in html and "<b>thanks" not in html
    assert html.count("what the judge said") == 1 and "&lt;i&gt;Fine.\nScore: 10" in html
    assert "<mark>a &lt;b&gt;</mark>" in html  # the trained tokens of a row are highlighted
    shutil.copytree(store / "one-rm", tmp_path / "run")
    for name, change in (
        ("result.json", {"gate": SCRIPT, "alias": SCRIPT, "version": SCRIPT, "name": SCRIPT}),
        ("job.json", {"run": {"name": SCRIPT, "storage_path": SCRIPT}, "model": {"name_or_path": SCRIPT}}),
    ):
        value = json.loads((tmp_path / "run" / name).read_text())
        (tmp_path / "run" / name).write_text(json.dumps(value | change))
    assert "<script" not in (html + page_of(tmp_path, "run")).lower()


def test_a_run_that_cannot_be_found_or_drawn_is_one_message(runs, store, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").symlink_to(store)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(store / "one-rm", tmp_path / "damaged")
    (tmp_path / "damaged/result.json").write_text('{"metrics": 3}')
    given = dict.fromkeys(
        [".", "no\nrun", "models:/a@b", "/dev/null"],
        "no run; expected a folder with job.json, or a name under runs/; the newest runs are runs/",
    )
    given["memory:///no/run"] = "memory:///no/run: no run; expected a folder with job.json"
    given["damaged"] = "damaged: cannot draw a report ("
    given[""] = "no run given; use make report RUN=runs/NAME. The newest runs: runs/"
    for reference, says in given.items():
        assert main(["report", *filter(None, [reference])]) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("error: ") and says in errors and "Traceback" not in errors


# -------------------------------------------------------------------------------------------- command and files


def test_the_command_writes_a_page(runs, store, capsys):
    assert main(["report", str(store / "one-ppo")]) == 0
    assert f"{store}/one-ppo/report.html" in capsys.readouterr().out
    assert main(["report", str(store / "one-sft"), str(store / "one-ppo")]) == 0
    # The page of several runs is in the folder of the last run, so that no other page overwrites it.
    assert (store / "one-ppo/report/report.html").exists()


def test_a_run_is_found_by_name_and_by_a_file(runs, store, monkeypatch):
    monkeypatch.chdir(store.parent)
    for reference in ("one-ppo", "one-ppo/", "one-ppo/report.html"):
        assert gather.read_run(reference, runs=store.name).folder == str(store / "one-ppo")


def test_a_finished_run_has_its_page_and_samples_in_mlflow(runs, store):
    result = runs["ppo"]
    (store / "one-ppo/report.html").unlink(missing_ok=True)
    report.of_run(result)
    run_id = result["mlflow_run_id"]
    api = client(store)
    logged = {file.path for file in api.list_artifacts(run_id)}
    assert logged >= {"report.html", "result.json", "samples.json"} and "plots" not in logged
    # MlflowClient.load_table and MLflow's page of a run read the tag mlflow.loggedArtifacts.
    tag = json.loads(api.get_run(run_id).data.tags["mlflow.loggedArtifacts"])
    assert tag == [{"path": "samples.json", "type": "table"}]
    table = pandas.read_json(api.download_artifacts(run_id, "samples.json"), orient="split")
    assert table["after_judge"].tolist() == [1.0] and table["prompt"].tolist() == [SCRIPT]


def test_a_report_that_cannot_be_drawn_does_not_fail_the_run(runs, store, capsys):
    broken = {**runs["ppo"], "name": "never-was", "folder": f"{store}/never-was"}
    report.of_run(broken)
    assert not (store / "never-was/report.html").exists()
    assert "try again with: python -m pipeline report" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------- pairs and panels


def pair(margin, longer=0):
    return {"chosen": margin, "rejected": 0.0, "chosen_tokens": 10 + longer, "rejected_tokens": 10}


def test_accuracy_calibration_and_length_bias_of_pairs():
    # Ten pairs have a confidence of 0.9, and nine of them are right.
    sure = [pair(math.log(9) * (-1 if i == 0 else 1), longer=2) for i in range(10)]
    summary = preferences.preference_numbers(sure)
    assert (summary["accuracy"], summary["calibration error"]) == (0.9, pytest.approx(0.0, abs=1e-9))
    # The correlation is undefined, because each chosen completion is longer by exactly two tokens.
    assert summary["margin to length, correlation"] is None
    assert summary["accuracy where the chosen completion is longer"] == 0.9
    assert summary["accuracy where the chosen completion is shorter"] is None
    boasting = [pair(math.log(9) * (-1) ** i, longer=(-1) ** i) for i in range(10)]
    summary = preferences.preference_numbers(boasting)
    assert summary["calibration error"] == pytest.approx(0.4)
    assert summary["margin to length, correlation"] == pytest.approx(1.0)
    assert summary["accuracy where the chosen completion is shorter"] == 0.0


def test_a_pair_of_token_rows_becomes_prompt_and_completions():
    from pipeline.models.tokenizer import load_tokenizer
    from pipeline.stages.rm import as_text

    tokenizer = load_tokenizer(str(ROOT / "jobs/demo/model"))
    texts = ("The capital of Peru is Lima.", "The capital of Peru is Oslo.")
    asked = {"role": "user", "content": "What is the capital of Peru?"}
    chats = [[asked, {"role": "assistant", "content": text}] for text in texts]
    sides = tokenizer.apply_chat_template(chats, return_dict=False)
    # The page shows both completions in full, although they begin with the same words.
    assert as_text(tokenizer, *sides) == (asked["content"], *texts)
    assert as_text(tokenizer, *map(tokenizer.encode, texts))[1:] == (" Lima.", " Oslo.")


def test_every_panel_can_be_drawn():
    """Draws each panel with many points, and the first panel also with a single point. Panels without points are not drawn."""
    every = [panel for _, group in panels.GROUPS.values() for panel in group]
    for panel in every:
        metrics = [m.replace("*", name) for m in panel.lines for name in ("reward", "other")]
        shown = [("ab", plots.SMOOTH_FROM)]
        if panel is every[0]:
            shown += [("a", 1), ("a", plots.SMOOTH_FROM), ("ab", 1)]
        for names, count in shown:
            history = {m: [(i, math.sin(i / 9)) for i in range(count)] for m in metrics}
            draw = plots.curve_drawer(panel, dict.fromkeys(names, history), "step")
            if draw is not None:
                assert plots.draw_figure([draw]).axes
        assert plots.curve_drawer(panel, {"": {}}, "step") is None


# ------------------------------------------------------------------------------------------------ a real stage


@pytest.mark.slow  # quick tests in test_stages.py draw a page without panels
def test_a_stage_leaves_its_report(tmp_path):
    quick = ["trainer.max_steps=2", "data.batch_size=16", "trainer.per_device_train_batch_size=8"]
    result = stage("rm", tmp_path, "real-rm", *quick, "trainer.logging_steps=1", "run.report=true")
    html = (tmp_path / "real-rm/report.html").read_text()
    scores = json.loads((tmp_path / "real-rm/final/pairs.json").read_text())
    assert len(scores) == result["data"]["report"]["splits"]["eval"]["kept"]
    assert preferences.preference_numbers(scores)["accuracy"] == result["metrics"]["eval_accuracy"]
    drawn = ("Margins of the held-out pairs", "Calibration", "Length bias", "Accuracy on pairs")
    assert all(words in html for words in (*drawn, "the lowest margins"))
    assert "report.html" in {f.path for f in client(tmp_path).list_artifacts(result["mlflow_run_id"])}
