"""Reads a job file, the files that it extends, and overrides into a tree that records the line of each key.

Values are read as in YAML 1.2, in which `1e-4` is a number, `eval_strategy: no` is the word "no", and `2026-11-20` is text. A
file with text that looks like a secret is rejected, and this text is never printed.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import InputError, escape_controls, in_brief, shorten, show_value
from pipeline.system.credentials import SECRET, has_credentials

MAX_VALUES = 100_000  # maximum values in a job file; an alias counts as all of its values
NO_SECRETS = (
    "the value looks like a secret, which never belongs in a job file or on a command line; "
    "set it as an environment variable (HF_TOKEN, AWS_*, MLFLOW_TRACKING_*), and revoke the secret if others have seen it"
)


class _Loader(yaml.SafeLoader):
    """Reads scalars as in YAML 1.2. Only true and false are booleans, and a float needs no decimal point.

    The package ruamel.yaml also implements YAML 1.2, but version 0.18 reads 2026-11-20 as a date.
    """


_REPLACED = ("bool", "int", "float", "timestamp", "value")
_Loader.yaml_implicit_resolvers = {
    char: [(tag, regexp) for tag, regexp in resolvers if tag.rpartition(":")[2] not in _REPLACED]
    for char, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    # An integer with more than 18 digits may not fit into 64 bits, and is read as a float.
    ("int", r"^[-+]?(?:0|[1-9][0-9_]{0,17})$", "-+0123456789"),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+."),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


@dataclass
class Tree:
    """The sections of a job file. `where` is {dotted key: origin of the value, e.g. `jobs/x.yaml:12` or `command line`}."""

    source: str
    data: dict[str, Any] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)

    def error(self, key: str, message: str) -> InputError:
        """Returns an InputError with the line of a key, or of the section if the key is not in the file."""
        section = key
        while section and section not in self.where:
            section = section.rpartition(".")[0]
        return InputError(message, key=key, where=self.where.get(section, self.source))

    def section(self, name: str) -> dict[str, Any]:
        """Returns a section as a dict, or {} if the section is missing. Raises InputError if the section is not a mapping."""
        value = self.data.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"found {show_value(value)}, expected a mapping of keys to values")
        return dict(value or {})


def read_tree(path: str | Path, overrides: list[str]) -> Tree:
    """Reads the job file at `path` and applies `section.key=value` overrides. Raises InputError with the file and line."""
    tree = _extended(_tree(Path(path)), Path(path).parent)
    for text in overrides:
        apply_override(tree, text)
    _check_values(tree, tree.data)
    return tree


def _tree(path: Path) -> Tree:
    tree = Tree(escape_controls(str(path), lines=False))
    if path.exists() and not path.is_file():
        raise InputError(f"{tree.source}: is a pipe, a device or a folder; use a job file")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{tree.source}: no such job file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{tree.source}: cannot be read as UTF-8 text ({in_brief(error)})") from None
    tree.data = _parse(text, tree.source, tree.where)
    if not isinstance(tree.data, dict):  # the message does not quote the file, which may contain a secret
        raise InputError(
            f"{tree.source}: is no job file; expected sections such as `stage: sft` and `model: ...`"
        )
    return tree


def _extended(tree: Tree, folder: Path) -> Tree:
    """Merges a job file with the file or the list of files in its key `extends`. Later files override earlier files. The job file
    overrides all files.

    Sections are merged key by key, one level deep. An empty section, such as `gate: {}`, removes the section's earlier keys.
    """
    names = tree.data.pop("extends", None) or []
    names = names if isinstance(names, list) else [names]
    if not all(isinstance(name, str) for name in names):
        raise tree.error(
            "extends", f"found {show_value(names)}, expected job files, for example ../own/rm.yaml"
        )
    merged = Tree(tree.source)
    for name, layer in [*((name, _tree(folder / name)) for name in names), ("", tree)]:
        if "extends" in layer.data:
            raise tree.error(
                "extends", f"found {show_value(name)}, which extends a job; extend that job instead"
            )
        for section, value in layer.data.items():
            earlier = merged.data.get(section)
            if isinstance(earlier, dict) and isinstance(value, dict) and value:
                value = earlier | value
            merged.data[section] = value
        merged.where |= layer.where
    return merged


def _parse(text: str, name: str, where: dict[str, str]) -> Any:
    """Parses a YAML document, and adds the line of each key to `where`. Raises InputError, which does not quote the text."""
    for number, line in enumerate(text.splitlines(), 1):
        if SECRET.search(line) or has_credentials(line):
            raise InputError(f"{name}:{number}: {NO_SECRETS}")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        _record_lines(node, "", name, where, iter(range(MAX_VALUES)))
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise InputError(f"{position}: not valid YAML: {error.problem or error.context}") from None
    # the YAML parser raises errors of all these types
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError):
        problem = "a character, a tag (!!) or an alias that cannot be read"
        raise InputError(f"{name}: not valid YAML: {problem}; remove it") from None


def _record_lines(node: yaml.Node, key: str, name: str, where: dict[str, str], quota: Iterator[int]) -> None:
    """Records the line of every key. Raises InputError for repeated keys, and for keys that are not text.

    `quota` yields one item for each value that the file may still contain. The number of values is limited because nested aliases
    can turn a few lines into billions of values.
    """
    if next(quota, None) is None:
        raise InputError(
            f"{name}: has more than {MAX_VALUES:,} values, because of its aliases (*); remove them"
        )
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _record_lines(item, f"{key}.{index}", name, where, quota)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for child, value in node.value:
        line = child.start_mark.line + 1
        if child.tag == "tag:yaml.org,2002:merge":
            _record_lines(value, key, name, where, quota)
            continue
        if child.tag != "tag:yaml.org,2002:str":
            raise InputError(f"{name}:{line}: {key or 'job'}: a key is not text; put it in quotes")
        path = f"{key}.{child.value}" if key else child.value
        if first := lines.get(child.value):
            raise InputError(f"{name}:{line}: {path}: repeated key, first on line {first}; keep one of them")
        lines[child.value] = line
        where[path] = f"{name}:{line}"
        _record_lines(value, path, name, where, quota)


def apply_override(tree: Tree, text: str) -> None:
    """Applies an override `section.key=value`. The value is YAML, except in `gate`, because `>` starts a block in YAML."""
    key, equals, value = text.partition("=")
    if SECRET.search(text) or has_credentials(text):
        raise InputError(f"command line: {NO_SECRETS}")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.[^.\s]+)*", key):
        expected = "expected section.key=value, for example trainer.learning_rate=1e-4"
        raise InputError(f"command line: {shorten(text)}: {expected}")
    if re.match(r"(\w+\.)?gate\.", key) and value not in ("", "null"):
        parsed: Any = value.strip("'\"")
    else:
        try:
            parsed = _parse(value, "command line", {}) if value.strip() else None
        except InputError as error:
            quoted = f'{shorten(key)}="{shorten(value)}"'
            raise InputError(f"{error} in {show_value(text)}; put the value in quotes: '{quoted}'") from None
    *sections, leaf = key.split(".")
    node = tree.data
    for part in sections:
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise InputError(f"command line: {shorten(key)}: {part} is {show_value(node)}, which has no keys")
    node[leaf] = parsed
    tree.where = {name: place for name, place in tree.where.items() if not name.startswith(f"{key}.")}
    tree.where[key] = "command line"


def _check_values(tree: Tree, value: Any, key: str = "") -> None:
    """Raises InputError if a number is not finite, or a text is empty or blank."""
    if isinstance(value, (dict, list)):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check_values(tree, item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, str) and not value.strip():
        raise tree.error(key, "found empty text, expected a value; remove the key, or use null")
    elif isinstance(value, float) and not math.isfinite(value):
        raise tree.error(key, f"found {value}, expected a finite number")
