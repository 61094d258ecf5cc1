"""The fields of a dataclass, read from its source with `ast`, without importing torch, trl or ray.

Importing trl takes seconds; a typing mistake in a job file is answered in a fraction of one. Inherited fields are followed
through the imports of each module; annotations become checks of values that came out of YAML.
"""

import ast
import difflib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import InputError

Check = tuple[str, Callable[[Any], bool]]  # (what a message calls it, the test of a value)


def _is(*types: type) -> Callable[[Any], bool]:
    """An instance test in which a bool is no number (in Python it is an int)."""
    return lambda value: isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _list_of(count: int) -> Check:
    return f"a list of {count}", lambda value: isinstance(value, (list, tuple)) and len(value) == count


NULL: Check = ("null", _is(type(None)))
SIMPLE: dict[str, Check] = {
    "None": NULL,
    "bool": ("true or false", _is(bool)),
    "int": ("a whole number", _is(int)),
    "float": ("a number", _is(int, float)),
    "str": ("text", _is(str)),
    **dict.fromkeys(("dict", "Dict", "Mapping"), ("a mapping", _is(dict))),
    **dict.fromkeys(("list", "List", "Sequence", "tuple", "Tuple"), ("a list", _is(list, tuple))),
}


@dataclass(frozen=True)
class Field:
    """One field. Its checks are alternatives; without any the annotation is not understood, and every value is accepted."""

    name: str
    required: bool
    default: Any  # None where it is not a literal
    checks: tuple[Check, ...]
    choices: tuple[Any, ...]  # of a Literal or an Enum, for the nearest one

    def problem(self, value: Any) -> str | None:
        """Why `value` cannot stand here, or None."""
        if not self.checks or any(test(value) for _, test in self.checks):
            return None
        near = difflib.get_close_matches(str(value), [str(choice) for choice in self.choices], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        if isinstance(value, (int, float)) and any(label == "text" for label, _ in self.checks):
            hint = "; put it in quotes"
        return f"found {show(value)}, expected {' or '.join(label for label, _ in self.checks)}{hint}"


def show(value: Any) -> str:
    """A value as a message shows it: short, on one line, with its type where that is the trouble."""
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return short("null" if value is None else text)


def short(text: str) -> str:
    """A text as a message quotes it: what is long is cut."""
    return printable(text if len(text) <= 80 else text[:77] + "...")


def printable(text: str) -> str:
    """What a terminal would obey, or could not show, is escaped."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


@cache
def fields_of(dotted: str) -> dict[str, Field]:
    """Fields, inherited ones first, of the dataclass `package.module.Class`."""
    module, _, name = dotted.rpartition(".")
    definition = _find_class(module, name)
    if definition is None:
        raise InputError(f"{dotted} is not installed here: type `make setup`")
    module, node = definition
    fields: dict[str, Field] = {}
    for base in reversed(node.bases):
        parent = _find_class(module, _last_name(base))
        if parent is not None:
            fields |= fields_of(f"{parent[0]}.{parent[1].name}")
    if any(_last_name(d.func if isinstance(d, ast.Call) else d) == "dataclass" for d in node.decorator_list):
        fields |= _declared_fields(node, module)
    return fields


def _declared_fields(node: ast.ClassDef, module: str) -> dict[str, Field]:
    fields = {}
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        options = _field_options(item.value)
        if "ClassVar" in ast.dump(item.annotation) or _literal(options.get("init")) is False:
            continue
        name = item.target.id
        default = item.value if not _is_field_call(item.value) else options.get("default")
        required = default is None and "default_factory" not in options
        checks, choices = _checks(item.annotation, module) or ((), ())
        fields[name] = Field(name, required, _literal(default), tuple(checks), tuple(choices))
    return fields


def _is_field_call(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and _last_name(value.func) == "field"


def _field_options(value: ast.expr | None) -> dict[str, ast.expr]:
    if not isinstance(value, ast.Call) or not _is_field_call(value):
        return {}
    return {keyword.arg: keyword.value for keyword in value.keywords if keyword.arg}


def _literal(node: ast.expr | None) -> Any:
    """The value of a plain literal; None for anything that would have to be run."""
    if (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
    ):
        return ast.literal_eval(node)
    return node.value if isinstance(node, ast.Constant) else None


def _last_name(node: ast.expr) -> str:
    """`Optional` of both `Optional` and `typing.Optional`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


# ---------------------------------------------------------------- annotations -> checks
def _checks(node: ast.expr, module: str) -> tuple[list[Check], list[Any]] | None:
    """Checks and choices of an annotation; None if it is not understood."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # a forward reference
        return _checks(ast.parse(node.value, mode="eval").body, module)
    if isinstance(node, ast.Constant) and node.value is None:
        return [NULL], []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([node.left, node.right], module)
    if isinstance(node, ast.Subscript):
        return _subscript(_last_name(node.value), node.slice, module)
    name = _last_name(node)
    if name in SIMPLE:
        return [SIMPLE[name]], []
    definition = _find_class(module, name)
    return _enum(definition[1]) if definition else None


def _subscript(outer: str, inner: ast.expr, module: str) -> tuple[list[Check], list[Any]] | None:
    parts = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
    if outer == "Optional":
        return _union([inner, ast.Constant(None)], module)
    if outer == "Union":
        return _union(parts, module)
    if outer == "Literal":
        return _one_of([_literal(part) for part in parts])
    if outer not in SIMPLE:
        return None
    label, is_outer = SIMPLE[outer]
    if outer in ("tuple", "Tuple") and len(parts) > 1 and not any(_literal(part) is ... for part in parts):
        label, is_outer = _list_of(len(parts))
    item = _checks(parts[-1] if outer in ("dict", "Dict", "Mapping") else parts[0], module)
    if item is None:
        return [(label, is_outer)], []
    tests = [test for _, test in item[0]]

    def each(value: Any) -> bool:
        items = value.values() if isinstance(value, dict) else value
        return is_outer(value) and all(any(test(one) for test in tests) for one in items)

    return [(f"{label} of {' or '.join(name for name, _ in item[0])}", each)], []


def _union(parts: list[ast.expr], module: str) -> tuple[list[Check], list[Any]] | None:
    """A member that is not understood is a class, which YAML cannot write: the others decide, if there are more than null."""
    known = [result for part in parts if (result := _checks(part, module)) is not None]
    checks = [check for result in known for check in result[0]]
    choices = [choice for result in known for choice in result[1]]
    if len(known) < len(parts) and all(check is NULL for check in checks):
        return None
    if any(isinstance(choice, str) for choice in choices):  # `SchedulerType | str` means one of SchedulerType
        checks = [check for check in checks if check is not SIMPLE["str"]]
    return checks, choices


def _enum(node: ast.ClassDef) -> tuple[list[Check], list[Any]] | None:
    if not any(_last_name(base) in ("Enum", "StrEnum", "ExplicitEnum") for base in node.bases):
        return None
    return _one_of([_literal(item.value) for item in node.body if isinstance(item, ast.Assign)])


def _one_of(choices: list[Any]) -> tuple[list[Check], list[Any]]:
    names = ", ".join(show(choice).strip("'") for choice in choices[:12]) + (
        ", ..." if len(choices) > 12 else ""
    )
    label = f"one of {names}" if len(choices) > 1 else names
    return [(label, lambda value: any(type(value) is type(c) and value == c for c in choices))], choices


# ---------------------------------------------------------------- modules
@cache
def _module(dotted: str) -> tuple[dict[str, ast.ClassDef], dict[str, tuple[str, str]]]:
    """Classes and `from x import y` of a module: ({name: node}, {name: (module, original name)})."""
    path = _path(dotted)
    if path is None:
        return {}, {}
    package = dotted if path.name == "__init__.py" else dotted.rpartition(".")[0]
    classes: dict[str, ast.ClassDef] = {}
    imports: dict[str, tuple[str, str]] = {}
    for node in _statements(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.ClassDef):
            classes[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            start = (
                ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            )
            origin = ".".join(part for part in (start, node.module) if part)
            imports |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names}
    return classes, imports


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Module-level statements, those under `if` and `try` too (lazy packages import under TYPE_CHECKING)."""
    flat: list[ast.stmt] = []
    for node in body:
        flat.append(node)
        if isinstance(node, (ast.If, ast.Try)):
            flat += _statements(node.body) + _statements(node.orelse)
    return flat


def _path(dotted: str) -> Path | None:
    """The source file of a module. find_spec looks up the top package only: of a submodule it would import the parents."""
    top, *rest = dotted.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return None
    base = Path(spec.submodule_search_locations[0], *rest)
    candidates = [base / "__init__.py", base.with_name(base.name + ".py")]
    return next((path for path in candidates if path.is_file()), None)


def _find_class(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """The class that `name` means in `module`, followed through imports: (its module, its node)."""
    classes, imports = _module(module)
    if name in classes:
        return module, classes[name]
    if name in imports and imports[name] != (module, name):
        return _find_class(*imports[name])
    return None
