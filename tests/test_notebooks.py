"""The notebooks: they run from top to bottom in a kernel of their own, and what is committed is such a run."""

import re
import sys
from types import SimpleNamespace

import nbformat
import pytest
from execute import NOTEBOOKS, execute, main
from running import ROOT

from pipeline.config import load_job

QUICK = ["gate={}", "trainer.max_steps=2", "data.batch_size=16", "trainer.per_device_train_batch_size=8"]
PAPERS = {"llama3_reward_model.ipynb": "2106.09685", "ppo.ipynb": "1707.06347"}


def printed(notebook):
    """All that the cells printed."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def pictures(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def clean(notebook):
    """No error, no warning, nothing about the machine."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            assert output.get("name") != "stderr", f"{cell.source[:80]}: {output.text[:300]}"
    assert not re.search(r"(?<!\w)/(tmp|home|root|Users)/", printed(notebook))
    return True


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_first_cell_installs_in_colab_and_picks_the_device(name, monkeypatch, in_root):
    """On a stand-in: no cell has run in Colab."""
    from IPython.core.inputtransformer2 import TransformerManager

    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    said = []
    shell = SimpleNamespace(system=said.append)
    space = {"get_ipython": lambda: shell}
    source = TransformerManager().transform_cell(first.source)
    exec(source, space)
    assert not said, "elsewhere it installs nothing"
    monkeypatch.setattr("shutil.which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    monkeypatch.setattr("sys.path", [*sys.path])
    exec(source, space)
    assert said[0].startswith("git clone") and said[1].endswith("-c constraints.txt -e .")
    for stage in ("sft", "rm", "ppo"):
        assert load_job(f"jobs/demo/{stage}.yaml", space["device_of"](stage), stage).scaling["use_gpu"]
    assert (
        f"colab.research.google.com/github/OWNER/rlhf/blob/main/notebooks/{name}" in notebook.cells[0].source
    )


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_is_committed_was_executed_in_order(name):
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert clean(notebook) and pictures(notebook) >= 3
    assert PAPERS[name] in notebook.cells[-1].source
    assert all(cell.source.count("\n") < 30 for cell in notebook.cells if cell.cell_type == "code"), (
        "logic in a cell"
    )


def test_the_committed_runs_learned_something():
    first, second = (nbformat.read(ROOT / "notebooks" / name, as_version=4) for name in NOTEBOOKS)
    before, after = re.search(r"held-out accuracy +([\d.]+) +-> +([\d.]+)", printed(first)).groups()
    assert float(before) < 0.6 and float(after) > 0.95
    rows = re.findall(
        r"^ +([\d.]+) +\S+ -> (\S+) +\S+ -> \S+ +\S+% +(\S+) +\S+$", printed(second), re.MULTILINE
    )
    kl = [float(found) for _, _, found in rows]
    assert len(kl) == 3 and kl == sorted(kl, reverse=True), "a higher price of KL buys less of it"


@pytest.mark.slow
def test_the_reward_model_notebook_runs(tmp_path):
    """Every cell, with two steps of training."""
    notebook = execute(
        ROOT / "notebooks/llama3_reward_model.ipynb",
        RUNS=str(tmp_path / "runs"),
        OVERRIDES=QUICK,
        timeout=300,
    )
    assert clean_but_for(notebook, tmp_path) and pictures(notebook) == 4
    assert "rlhf-rm v1 @champion" in printed(notebook)
    assert (tmp_path / "runs/reward-model/report.html").exists()
    assert "OVERRIDES = []" in "".join(cell.source for cell in notebook.cells), (
        "parameters are not written back"
    )


@pytest.mark.slow
def test_the_ppo_notebook_runs(tmp_path):
    quick = {"sft": QUICK, "rm": QUICK, "ppo": ["trainer.total_episodes=32", "trainer.batch_size=16"]}
    notebook = execute(
        ROOT / "notebooks/ppo.ipynb",
        RUNS=str(tmp_path / "runs"),
        QUICK=quick,
        KL_COEFS=[0.0, 0.5],
        timeout=600,
    )
    assert clean_but_for(notebook, tmp_path) and pictures(notebook) == 3
    assert "rlhf-ppo v2 @champion" in printed(notebook)


def test_the_notebooks_of_the_repository_stay_as_they_are(tmp_path, capsys):
    """`make notebook` writes executed copies: a tree that it changed could not be pulled into."""
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


def clean_but_for(notebook, folder):
    """Clean, when the folder that the test chose is left out."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                output.text = output.text.replace(str(folder), "FOLDER")
    return clean(notebook)
