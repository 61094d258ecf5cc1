"""Finds the statements of pipeline/ that are executed only with a GPU, and records which of them have been executed.

Import this module before the modules of pipeline/.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
# environment variable with the file to which processes add the statements that they execute
FILE = "PRETEND_STATEMENTS"
NOTE = "_note_statement_of_cuda"


@cache
def statements() -> dict[str, str]:
    """Returns {"path:line": text} of statements that call torch.cuda, or are in a branch whose condition names CUDA."""
    found = {}
    for path in sorted((ROOT / "pipeline").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for block, place in _of_cuda(ast.parse(text)) if "cuda" in text else ():
            found[f"{path.relative_to(ROOT)}:{block[place].lineno}"] = lines[block[place].lineno - 1].strip()
    return found


def _of_cuda(tree: ast.AST) -> Iterator[tuple[list[ast.stmt], int]]:
    """Yields (block of statements, index in the block) for each CUDA-only statement."""
    inside = set[ast.stmt]()
    for node in ast.walk(tree):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            for place, one in enumerate(block if isinstance(block, list) else ()):
                if isinstance(one, ast.If) and "cuda" in ast.unparse(one.test):
                    otherwise = any(isinstance(x, ast.NotEq | ast.Not) for x in ast.walk(one.test))
                    branch = [*one.orelse, *block[place + 1 :]] if otherwise else one.body
                    inside |= {x for part in branch for x in ast.walk(part) if isinstance(x, ast.stmt)}
                compound = isinstance(one, ast.FunctionDef | ast.ClassDef | ast.If)
                if one in inside or not (compound or "torch.cuda." not in ast.unparse(one)):
                    yield block, place


class _Noting(SourceFileLoader):
    """A module loader that inserts a recording call before each CUDA-only statement."""

    def get_code(self, fullname: str) -> Any:
        text = Path(self.path).read_text(encoding="utf-8")
        tree = ast.parse(text)
        path = Path(self.path).relative_to(ROOT)
        for block, place in sorted(_of_cuda(tree), key=lambda found: -found[1]):
            line = block[place].lineno
            call = ast.parse(f"{NOTE}('{path}:{line}')").body[0]
            block.insert(place, ast.copy_location(call, block[place]))
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        spec = PathFinder.find_spec(fullname, path) if fullname.startswith("pipeline.") else None
        if spec and spec.origin and spec.origin.endswith(".py") and "cuda" in Path(spec.origin).read_text():
            spec.loader = _Noting(fullname, spec.origin)
            return spec
        return None


_noted: set[tuple[str, str]] = set()


def _note(statement: str) -> None:
    file = os.environ.get(FILE)
    if file and (file, statement) not in _noted:
        _noted.add((file, statement))
        with open(file, "a", encoding="utf-8") as notes:
            notes.write(statement + "\n")


if not hasattr(builtins, NOTE):
    setattr(builtins, NOTE, _note)
    sys.meta_path.insert(0, _Finder())
