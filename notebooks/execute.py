"""Runs notebooks from top to bottom, each in a new kernel, and writes executed copies to runs/notebooks.

    make notebook    or    python notebooks/execute.py [NOTEBOOK.ipynb ...]
    python notebooks/execute.py --in-place      writes the outputs into the notebooks, before a commit

In the outputs, paths are relative to the repository.
"""

import re
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXECUTED = ROOT / "runs/notebooks"
NOTEBOOKS = ("llama3_reward_model.ipynb", "ppo.ipynb")  # the second uses the reward model of the first


def execute(path: Path, timeout: int = 1800, **parameters: Any) -> Any:
    """Executes a notebook. Returns it with its outputs.

    Args:
        path: file of the notebook.
        timeout: maximum seconds of a cell.
        parameters: new values for the variables in the cell with the tag `parameters`.

    Raises:
        nbclient.exceptions.CellExecutionError: with the cell, its traceback and its output.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    [cell] = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    before = cell.source
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    settings = {
        "timeout": timeout,
        "kernel_name": "python3",
        "resources": {"metadata": {"path": str(path.parent)}},  # working directory, as in JupyterLab
        "record_timing": False,  # times would change the file in each run
        # Only errors. Otherwise the kernel warns that its ports on loopback are not encrypted.
        "extra_arguments": ["--IPKernelApp.log_level=40"],
    }
    NotebookClient(notebook, on_cell_start=_announce, **settings).execute()
    cell.source = before
    for cell in notebook.cells:
        cell.get("outputs", [])[:] = list(_tidy(cell.get("outputs", [])))
    return notebook


def _announce(cell: Any, **_: Any) -> None:
    """Prints the heading of a section before the section runs."""
    if cell.cell_type == "markdown" and cell.source.startswith("#"):
        print(f"  {cell.source.partition(chr(10))[0].lstrip('# ')}", flush=True)


def _tidy(outputs: list[Any]) -> list[Any]:
    """Joins consecutive writes to the same stream, and removes this machine's paths."""
    found: list[Any] = []
    for output in outputs:
        if output.output_type == "stream":
            output.text = re.sub(re.escape(f"{ROOT}/"), "", output.text)
            if found and found[-1].output_type == "stream" and found[-1].name == output.name:
                found[-1].text += output.text
                continue
        found.append(output)
    return found


def main(arguments: list[str], executed: Path = EXECUTED) -> None:
    import nbformat

    names = [name for name in arguments if name != "--in-place"]
    for path in [Path(name) for name in names] or [ROOT / "notebooks" / name for name in NOTEBOOKS]:
        started = time.monotonic()
        print(f"{path.name}: starting a kernel", flush=True)
        notebook = execute(path)
        target = path if "--in-place" in arguments else executed / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, target)
        print(f"{path.name} executed in {time.monotonic() - started:.0f} s, with its outputs in {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
