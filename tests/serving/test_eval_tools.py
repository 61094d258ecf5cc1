"""Tests the commands of docs/evaluate.md for lm_eval and inspect on a served version. Needs both tools."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from running import ROOT
from served import served
from toy_models import registered

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("embedded_ray")]
ROWS = [
    {"question": f"What is the capital of {place}?", "answer": answer}
    for place, answer in (("Peru", "Lima."), ("Norway", "Oslo."), ("Atlantis", "I am not sure, sorry."))
]


@pytest.fixture(scope="module")
def server(storage):
    models = registered(storage)
    with served(storage) as running:
        running.folder = models["toy-policy"]
        yield running


def command(server, model):
    """Returns the documented command for a kind of model, with the address and the model version of the test's server."""
    page = (ROOT / "docs/evaluate.md").read_text()
    [line] = re.findall(rf"^.*?(?=lm_eval|inspect)((?:lm_eval|inspect) .*--model {model}.*)$", page, re.M)
    line = line.replace("http://127.0.0.1:8000", server.url).replace("runs/exported/policy", server.folder)
    line = line.replace("jobs/demo/model", str(ROOT / "jobs/demo/model")).replace("rlhf-ppo", "toy")
    return line.split()


def test_lm_eval_gets_equal_completions_from_the_server_and_from_the_folder(server, tmp_path):
    pytest.importorskip("lm_eval")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = {
        "task": "capitals",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(tmp_path / "rows.jsonl")},
        "test_split": "train",
        "output_type": "generate_until",
        "doc_to_text": "question",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    }
    (tmp_path / "capitals.yaml").write_text(yaml.safe_dump(task))
    served, local = [_written(tmp_path, command(server, start)) for start in ("local-completions", "hf")]
    assert served == local and len(served[1]) == 3 and any(served[1])


def _written(folder, words):
    """Runs lm_eval. Returns lm_eval's metric and the completions that it recorded."""
    out = folder / words[2]
    words += ["--include_path", str(folder), "--output_path", str(out), "--log_samples"]
    words = [sys.executable, "-m", *words]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    [results], [samples] = out.rglob("results_*.json"), out.rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    rows.sort(key=lambda row: row["doc_id"])
    texts = [row["filtered_resps"][0] for row in rows]
    return json.loads(results.read_text())["results"]["capitals"]["exact_match,none"], texts


def test_inspect_evaluates_the_served_version(server, tmp_path):
    pytest.importorskip("inspect_ai")
    (tmp_path / "capitals.py").write_text(
        "from inspect_ai import Task, task\n"
        "from inspect_ai.dataset import Sample\n"
        "from inspect_ai.scorer import includes\n"
        "from inspect_ai.solver import generate\n"
        "@task\n"
        "def capitals():\n"
        "    rows = [Sample(input='What is the capital of Peru?', target='Lima')]\n"
        "    return Task(dataset=rows, solver=generate(), scorer=includes())\n"
    )
    words = [*command(server, "openai-api"), "--log-format", "json", "--display", "plain"]
    done = subprocess.run(
        [sys.executable, "-m", "inspect_ai", *words[1:]], capture_output=True, text=True, cwd=tmp_path,
        timeout=300, env={**os.environ, "RLHF_BASE_URL": f"{server.url}/v1", "RLHF_API_KEY": "none"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [log] = tmp_path.glob("logs/*.json")
    log = json.loads(log.read_text())
    assert log["status"] == "success" and log["results"]["completed_samples"] == 1
