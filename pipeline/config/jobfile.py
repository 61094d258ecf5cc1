"""A job file as a plain tree: YAML in, overrides applied, each key remembering where it was written.

YAML is read by the rules of YAML 1.2, because those of 1.1 trap people here: `1e-4` is a number, `eval_strategy: no` is the word "no",
`2026-11-20` is text. Keys are text and stand once. A value that looks like a secret is refused and never printed.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipeline.credentials import has_credentials
from pipeline.errors import InputError

# Tokens and keys of the services this pipeline talks to, and private keys.
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bsk-[\w-]{20,}"
    r"|\bdapi[0-9a-f]{32}|\bxox[abp]-[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY"
)


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: true/false, decimal integers, floats with or without a point, null, text."""


_REPLACED = ("bool", "int", "float", "timestamp", "value")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag.rpartition(":")[2] not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+."),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


@dataclass
class Tree:
    """The sections of a job file. `where` maps a dotted key to the place that set it: `jobs/x.yaml:12` or `command line`."""

    source: str
    data: dict[str, Any] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)

    def error(self, key: str, message: str) -> InputError:
        """The error about `key`, with the place of the key or of the nearest section around it."""
        place = key
        while place and place not in self.where:
            place = place.rpartition(".")[0]
        return InputError(f"{self.where.get(place, self.source)}: {key}: {message}")


def read_tree(path: str | Path, overrides: list[str]) -> Tree:
    """The job file at `path` with `section.key=value` overrides applied. Raises InputError with file:line."""
    file = Path(path)
    if file.is_dir():
        raise InputError(
            f"{path} is a folder, expected a job file: {', '.join(map(str, sorted(file.glob('*.yaml')))) or 'none in it'}"
        )
    if not file.is_file():
        raise InputError(
            f"{path}: no such job file; those shipped are jobs/PROFILE/STAGE.yaml, for example jobs/demo/sft.yaml"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text: {error}") from None
    tree = Tree(str(path))
    tree.data = _parse(text, str(path), tree.where)
    if not isinstance(tree.data, dict):
        raise InputError(
            f"{path}: the file holds {type(tree.data).__name__}, expected sections such as `stage: sft` and `model: ...`"
        )
    for override in overrides:
        _override(tree, override)
    _refuse_values(tree, tree.data, "")
    return tree


def _parse(text: str, name: str, where: dict[str, str]) -> Any:
    """The value of a YAML document; fills `where`. Errors name the line but never quote it: it may hold a secret."""
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:  # a control character
        raise InputError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        _walk(node, "", name, where, ())
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise InputError(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None
    finally:
        loader.dispose()


def _walk(node: yaml.Node, key: str, name: str, where: dict[str, str], above: tuple[int, ...]) -> None:
    """Note the line of every key; refuse repeated keys, keys that are not text, and a node that contains itself."""
    if id(node) in above:
        raise InputError(f"{name}:{node.start_mark.line + 1}: {key}: an alias refers to the node around it")
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, f"{key}.{index}", name, where, above)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for child, value in node.value:
        line = child.start_mark.line + 1
        if child.tag == "tag:yaml.org,2002:merge":
            _walk(value, key, name, where, above)
            continue
        if not isinstance(child, yaml.ScalarNode) or child.tag != "tag:yaml.org,2002:str":
            raise InputError(f"{name}:{line}: {key or 'job'}: a key is not text; put it in quotes")
        if _is_secret(child.value):
            raise InputError(f"{name}:{line}: {_NO_SECRETS}")
        if child.value in seen:
            raise InputError(
                f"{name}:{line}: {_join(key, child.value)}: repeated key, first on line {seen[child.value]}; keep one of them"
            )
        seen[child.value] = line
        where[_join(key, child.value)] = f"{name}:{line}"
        _walk(value, _join(key, child.value), name, where, above)


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _override(tree: Tree, text: str) -> None:
    """Apply one `section.key=value`; the value is YAML, except in `gate`, whose `>= 0.9` YAML would read as a block."""
    key, equals, value = text.partition("=")
    if _is_secret(text):
        raise InputError(f"command line: {'an override' if _is_secret(key) else key}: {_NO_SECRETS}")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.[^.\s]+)*", key):
        raise InputError(
            f"command line: {text}: expected section.key=value, for example trainer.learning_rate=1e-4"
        )
    where: dict[str, str] = {}
    if key.startswith("gate.") and value not in ("", "null"):
        parsed: Any = value.strip("'\"")
    else:
        try:
            parsed = _parse(value, "command line", where) if value.strip() else None
        except InputError as error:
            raise InputError(f"{error} in {text!r}; put the value in quotes: '{key}=\"{value}\"'") from None
    *sections, last = key.split(".")
    node = tree.data
    for depth, part in enumerate(sections):
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise InputError(
                f"command line: {key}: {'.'.join(sections[: depth + 1])} is {node!r}, which has no keys"
            )
    node[last] = parsed
    for stale in [name for name in tree.where if name.startswith(key + ".")]:
        del tree.where[stale]
    tree.where[key] = "command line"


_NO_SECRETS = (
    "the value looks like a secret, which never belongs in a job file or on a command line; "
    "put it into the environment (HF_TOKEN, AWS_*, MLFLOW_TRACKING_*) and make a new one if this was shared"
)


def _is_secret(text: str) -> bool:
    """Whether a value holds a token or a key, or a URI with a password, a token or a key in it."""
    return bool(SECRET.search(text)) or has_credentials(text)


def _refuse_values(tree: Tree, value: Any, key: str) -> None:
    """Refuse secrets, numbers that are not finite, and anything that JSON does not know."""
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_values(tree, item, _join(key, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_values(tree, item, _join(key, str(index)))
    elif isinstance(value, str) and _is_secret(value):
        raise tree.error(key, _NO_SECRETS)
    elif isinstance(value, float) and not math.isfinite(value):
        raise tree.error(key, f"found {value}, expected a finite number")
    elif not isinstance(value, (str, int, float, type(None))):
        raise tree.error(
            key,
            f"found a {type(value).__name__}, expected text, a number, true, false, null, a list or a mapping",
        )
