"""Tests which packages import which: no import of a higher layer, and no Ray, MLflow or TRL in GPU code."""

import ast
import re
from functools import cache

import pytest
from running import ROOT

# The packages of the core, lowest layer first; each may import itself and the packages before it.
CORE = """errors input_uri text metrics run_folder statistics checks system job models writing data scoring ppo demo penalties
    registry settle planning run rollout stages""".split()
# Packages that a run does not need. The core must not import these packages.
EXTRAS = "report sweep serving".split()
LAYERS = [*CORE, *EXTRAS, "commands", "cloud", "__main__"]
# packages that can be read, tested and profiled without the other packages, with only torch, transformers and peft
ALONE = ("models", "writing", "scoring/forward.py", "scoring/rewards.py", "ppo")


@cache
def tree_of(file):
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(file, type_checking=False):
    """Returns the dotted names that a file imports, even in functions. If `type_checking`, includes imports for type checkers."""
    names, nodes = [], [tree_of(file)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING" and not type_checking:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        nodes += ast.iter_child_nodes(node)
    return names


def name_of(file):
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def layer(dotted):
    return dotted.split(".")[1]


FILES = sorted(p for p in (ROOT / "pipeline").rglob("*.py") if p != ROOT / "pipeline/__init__.py")


def test_no_import_reaches_upward():
    upward = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in FILES
        for name in imports(file)
        if name.startswith("pipeline.")
        if LAYERS.index(layer(name)) > LAYERS.index(layer(name_of(file)))
    ]
    assert not upward


@pytest.mark.parametrize("folder", ALONE)
def test_models_and_ppo_stand_alone(folder):
    path = ROOT / "pipeline" / folder
    packages = {
        name.split(".")[0]
        for file in (path.rglob("*.py") if path.is_dir() else [path])
        for name in imports(file)
    }
    assert "torch" in packages and not packages & {"ray", "mlflow", "trl"}


def test_every_folder_has_its_layer():
    packages = {p.stem for p in (ROOT / "pipeline").iterdir() if p.suffix == ".py" or any(p.glob("*.py"))}
    assert packages - {"__init__"} == set(LAYERS)


def test_no_files_import_each_other_in_a_circle():
    """Removes files that import no remaining file until there are none. Files that remain import each other in a circle."""
    files = {name_of(file): file for file in FILES}
    pending = {}
    for name, file in files.items():
        pairs = [(dotted, dotted.rpartition(".")[0]) for dotted in imports(file, type_checking=True)]
        pending[name] = {next((x for x in pair if x in files), name) for pair in pairs} - {name}
    while ready := {name for name, needs in pending.items() if not needs & pending.keys()}:
        pending = {name: needs for name, needs in pending.items() if name not in ready}
    assert not pending, f"these files import each other, or are imported by such files: {sorted(pending)}"


def test_what_tests_and_tools_import_is_there():
    """Checks all files, including files that few machines run: benchmarks of TRL 1.12, GPU code, tests with several hosts."""
    files = {name_of(file): file for file in FILES}
    defined = {name: names_in(file) for name, file in files.items()}
    missing = [
        f"{file.relative_to(ROOT)}: {name}"
        for folder in ("tests", "tools")
        for file in (ROOT / folder).rglob("*.py")
        for name in imports(file)
        if name.startswith("pipeline.") and name not in files
        if name.rpartition(".")[2] not in defined.get(name.rpartition(".")[0], ())
    ]
    assert not missing


def names_in(file):
    """Returns the names that a file defines or imports."""
    names = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


ABOVE = [file for file in FILES if layer(name_of(file)) not in ("job", "settle")]


def test_few_functions_take_a_whole_job():
    """Most functions take values that settle/ computes from a job.

    Lower the limits of this test if fewer functions take a job.
    """
    taking = {
        f"{file.relative_to(ROOT)}: {node.name}"
        for file in FILES
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(
            "Job"
            in ast.unparse(arg.annotation or ast.Constant("")).replace("[", " ").replace("]", " ").split()
            for arg in (*node.args.args, *node.args.kwonlyargs, node.args.vararg or ast.arg("none"))
        )
    }
    assert len(taking) <= 31, sorted(taking)
    above = [x for x in taking if not x.startswith(("pipeline/job/", "pipeline/settle/"))]
    assert len(above) <= 17, sorted(above)


def test_no_line_outside_of_job_and_settle_asks_for_the_stage():
    """settle/ computes everything that depends on the stage. Only subcommands and reports may use a stage's name."""
    asks = re.compile(r"\bSTAGE_SPECS\[|\.stage (==|!=|in|not in) |\bjob\.args\b")
    lines = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in ABOVE
        for line in file.read_text(encoding="utf-8").splitlines()
        if asks.search(line)
    ]
    assert not lines
