"""Tests that notebooks run from top to bottom in a new kernel, and that their committed outputs are from such a run."""

import ast
import re
import sys
from types import SimpleNamespace

import nbformat
import pytest
from execute import NOTEBOOKS, execute, main
from running import ROOT
from s3 import mock_s3

from pipeline.job import load_job
from pipeline.system.storage import exists
from tools.chaos.runs import Server

QUICK = ["gate={}", "trainer.max_steps=2", "data.batch_size=16", "trainer.per_device_train_batch_size=8"]
PAPERS = {"llama3_reward_model.ipynb": "2106.09685", "ppo.ipynb": "1707.06347"}


def read(name):
    return nbformat.read(ROOT / "notebooks" / name, as_version=4)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def printed(notebook):
    """Returns the printed output of all cells of a notebook."""
    return "".join(output.text for output in outputs(notebook) if output.output_type == "stream")


def pictures(notebook):
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def assert_clean(notebook, folder=""):
    """Asserts that a notebook has no errors, no warnings and no absolute paths except `folder`."""
    assert not [out for out in outputs(notebook) if out.output_type == "error" or out.get("name") == "stderr"]
    text = printed(notebook).replace(str(folder) or "\0", "FOLDER")
    assert not re.search(r"(?<!\w)/(tmp|home|root|Users)/", text)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_first_cell_installs_in_colab_and_picks_the_device(name, monkeypatch, in_root):
    """Simulates Colab. No cell has been run in the real Colab."""
    from IPython.core.inputtransformer2 import TransformerManager

    notebook = read(name)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    commands = []
    shell = SimpleNamespace(system=commands.append)
    variables = {"get_ipython": lambda: shell}
    source = TransformerManager().transform_cell(first.source)
    exec(source, variables)
    assert not commands, "outside of Colab, the cell installs nothing"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    monkeypatch.setattr("sys.path", [*sys.path])
    exec(source, variables)
    assert commands[0].startswith("git clone") and commands[1].endswith("-c constraints.txt -e .")
    for stage in ("sft", "rm", "ppo"):
        assert load_job(f"jobs/demo/{stage}.yaml", variables["device"](), stage).scaling["use_gpu"]
    assert (
        f"colab.research.google.com/github/OWNER/rlhf/blob/main/notebooks/{name}" in notebook.cells[0].source
    )


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_committed_notebook_was_executed_in_order(name):
    notebook = read(name)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert_clean(notebook)
    assert pictures(notebook) >= 3 and PAPERS[name] in notebook.cells[-1].source
    assert all(cell.source.count("\n") < 30 for cell in cells), "logic in a cell"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_cells_use_only_names_that_pipeline_has(name):
    """Finds names that were renamed in pipeline/. Only the slow tests run the cells."""
    cells = [cell.source for cell in read(name).cells if cell.cell_type == "code"]
    nodes = list(ast.walk(ast.parse("\n".join(cells).replace("    !", "    0  # "))))
    found = {}
    for node in (node for node in nodes if isinstance(node, ast.ImportFrom)):
        if node.module.startswith("pipeline"):
            for one in node.names:
                exec(f"from {node.module} import {one.name}", found)
    used = [n for n in nodes if isinstance(n, ast.Attribute) and getattr(n.value, "id", None) in found]
    assert used and not [ast.unparse(n) for n in used if not hasattr(found[n.value.id], n.attr)]


def test_the_committed_runs_learned_something():
    rm, ppo = map(read, NOTEBOOKS)
    before, after = re.search(r"held-out accuracy +([\d.]+) +-> +([\d.]+)", printed(rm)).groups()
    assert float(before) < 0.6 and float(after) > 0.95
    rows = re.findall(r"^ +[\d.]+ +\S+ -> \S+ +\S+ -> \S+ +\S+% +(\S+) +\S+$", printed(ppo), re.MULTILINE)
    kl = [float(value) for value in rows]
    assert len(kl) == 3 and kl == sorted(kl, reverse=True), "a higher KL coefficient leads to less KL"


def test_the_formulas_give_the_committed_output(capsys):
    """Runs only the cells that call PPO's functions. The slow tests run all cells."""
    cells, variables = [cell for cell in read("ppo.ipynb").cells if cell.cell_type == "code"], {}
    start = next(i for i, cell in enumerate(cells) if "pipeline.ppo.functional" in cell.source)
    for cell in cells[start : start + 2]:
        exec(cell.source, variables)
        assert capsys.readouterr().out == cell.outputs[0].text and len(cell.outputs) == 1


@pytest.fixture(params=["folder", "bucket"])
def storage(request, tmp_path, monkeypatch):
    """Returns the parameters of a notebook: a folder for its runs, or a mock of S3 and an MLflow server."""
    if request.param == "folder":
        yield {"RUNS": str(tmp_path / "runs")}
        return
    pytest.importorskip("moto", reason="needs the extra `mock`")
    with mock_s3(monkeypatch), Server(tmp_path) as server:
        yield {"RUNS": "s3://bucket/runs", "TRACKING_URI": server.uri}


@pytest.mark.slow
def test_the_reward_model_notebook_runs(tmp_path, storage):
    """Runs every cell, with two steps of training. The notebook kills a worker after the first step."""
    file = ROOT / "notebooks/llama3_reward_model.ipynb"
    overrides = [*QUICK, "trainer.save_strategy=steps", "trainer.save_steps=1"]
    notebook = execute(file, **storage, OVERRIDES=overrides, timeout=900)
    assert_clean(notebook, tmp_path)
    text = printed(notebook)
    assert pictures(notebook) == 5 and "rlhf-rm v1 @champion" in text
    assert "run lost-worker failed" in text and "continuing from checkpoint_00000001" in text
    assert "continuing from checkpoint_00000002" in text, "run.max_failures restarts the workers"
    assert "of adapter and head; equal: True" in text
    assert exists(f"{storage['RUNS']}/reward-model/report.html")
    source = "".join(cell.source for cell in notebook.cells)
    assert "OVERRIDES = []" in source, "parameters are not written back"


@pytest.mark.slow
def test_the_ppo_notebook_runs(tmp_path, storage):
    quick = {"sft": QUICK, "rm": QUICK, "ppo": ["trainer.total_episodes=32", "trainer.batch_size=16"]}
    file = ROOT / "notebooks/ppo.ipynb"
    notebook = execute(file, **storage, QUICK=quick, KL_COEFS=[0.0, 0.5], timeout=600)
    assert_clean(notebook, tmp_path)
    assert pictures(notebook) == 3 and "rlhf-ppo v2 @champion" in printed(notebook)


def test_executing_a_notebook_does_not_change_its_file(tmp_path, capsys):
    """`make notebook` executes copies, because changed notebooks in the working tree would block `git pull`."""
    cells = [
        nbformat.v4.new_markdown_cell("# A title\n\nand text"),
        nbformat.v4.new_code_cell("X = 1", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("print(X + 1)"),
    ]
    source = tmp_path / "one.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), source)
    before = source.read_bytes()
    main([str(source)], executed=tmp_path / "executed")
    assert source.read_bytes() == before
    assert printed(nbformat.read(tmp_path / "executed/one.ipynb", as_version=4)) == "2\n"
    assert "\n  A title\n" in capsys.readouterr().out
