"""A job file as a plain tree: YAML in, overrides applied, each key remembering where it was written.

YAML is read by the rules of YAML 1.2, because those of 1.1 trap people here: `1e-4` is a number, `eval_strategy: no` is
the word "no", `2026-11-20` is text. Keys are text and unique. A value that looks like a secret is refused and never
printed. A few lines of YAML can stand for gigabytes, or nest deeper than Python recurses: size and depth are limited while
it is parsed.
"""

import math
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import InputError, printable, short, show
from pipeline.system.credentials import has_credentials

# Tokens and keys of the services this pipeline talks to, and private keys.
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bsk-[\w-]{20,}"
    r"|\bdapi[0-9a-f]{32}|\bxox[abp]-[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY"
)


# Limits of a job file; the largest one shipped has 5 KB.
BYTES = 1 << 17  # PyYAML reads about as much in a second
NODES = 100_000  # with every alias counted as often as it stands
DEPTH = 32
CHARACTERS = 4096  # of a text: the longest path of Linux


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: true/false, decimal integers, floats with or without a point, null, text; within NODES and DEPTH."""

    # Not ruamel.yaml, which speaks 1.2: it reads 2026-11-20 as a date all the same (0.18), and limits neither aliases nor
    # depth, so this class would stay; and PyYAML is here anyway, as Ray's.
    def __init__(self, text: str):
        super().__init__(text)
        self.around = 0  # nodes around the one that is composed
        self.measured: dict[int, tuple[int, int]] = {}  # id of a node -> (nodes, levels), aliases written out

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None) not in (None, "!", "tag:yaml.org,2002:str"):
            raise yaml.MarkedYAMLError(
                problem="found a tag (!...); write the value without it", problem_mark=event.start_mark
            )
        self.around += 1
        self._limit(self.around, DEPTH, "levels", event)
        node = super().compose_node(parent, index)
        self.around -= 1
        # An alias to the node around it has no size yet: `_walk` refuses it.
        inside = [self.measured.get(id(child), (1, 1)) for child in _children(node)]
        size, levels = 1 + sum(n for n, _ in inside), 1 + max((depth for _, depth in inside), default=0)
        self._limit(size, NODES, "values", event)
        self._limit(levels, DEPTH, "levels", event)
        if not isinstance(event, yaml.AliasEvent):
            self.measured[id(node)] = size, levels
        return node

    def _limit(self, count: int, most: int, what: str, event: Any) -> None:
        if count > most:
            problem = f"found more than {most:,} {what}, aliases written out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def _children(node: yaml.Node | None) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


_REPLACED = ("bool", "int", "float", "timestamp", "value")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag.rpartition(":")[2] not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    # What has more than 18 digits does not fit into 64 bits, and is a float as in JSON.
    ("int", r"^[-+]?(?:0|[1-9][0-9_]{0,17})$", "-+0123456789"),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+."),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


@dataclass
class Tree:
    """The sections of a job file. `where` maps a dotted key to what set it: `jobs/x.yaml:12` or `command line`."""

    source: str
    data: dict[str, Any] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)

    def error(self, key: str, message: str) -> InputError:
        """The error about `key`, with the line of the key or of the innermost section around it."""
        section = key
        while section and section not in self.where:
            section = section.rpartition(".")[0]
        return InputError(message, key=key, where=self.where.get(section, self.source))

    def section(self, name: str) -> dict[str, Any]:
        """The keys of a section; none where it is missing. Raises InputError when it is something else."""
        value = self.data.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"found {show(value)}, expected a mapping of keys to values")
        return dict(value or {})


def read_tree(path: str | Path, overrides: list[str]) -> Tree:
    """The job file at `path` with `section.key=value` overrides applied. Raises InputError with file:line."""
    tree = _extended(_tree(Path(path)), Path(path).parent)
    for override in overrides:
        _override(tree, override)
    _refuse_values(tree, tree.data, "")
    return tree


def section_tree(tree: Tree, section: str, folder: Path) -> Tree:
    """A section that is a job by itself, on top of the one that its `extends` names, a path from `folder`.

    Raises:
        InputError: when it is none.
    """
    data = tree.data.get(section)
    if not isinstance(data, dict):
        found = "missing" if data is None else f"found {show(data)}"
        raise tree.error(
            section, f"{found}, expected a job, for example {section}: {{extends: {section}.yaml}}"
        )
    prefix = f"{section}."
    where = {key.removeprefix(prefix): at for key, at in tree.where.items() if key.startswith(prefix)}
    job = _extended(Tree(tree.source, dict(data), where), folder)
    _refuse_values(job, job.data, "")
    return job


def _tree(path: Path) -> Tree:
    name = printable(str(path))
    tree = Tree(name)
    tree.data = _parse(_read(path), name, tree.where)
    if not isinstance(tree.data, dict):
        raise InputError(
            f"{name}: found {show(tree.data)}, expected sections such as `stage: sft` and `model: ...`"
        )
    return tree


def _extended(tree: Tree, folder: Path) -> Tree:
    """A job on top of the one that its `extends` names, a path from its own folder: key by key, and one level deep.

    An empty section, such as `gate: {}`, takes the place of the other's.
    """
    if (name := tree.data.pop("extends", None)) is None:
        return tree
    if not isinstance(name, str):
        raise tree.error("extends", f"found {show(name)}, expected a job file, for example ../own/rm.yaml")
    base = _tree(folder / name)
    if "extends" in base.data:
        raise tree.error("extends", f"found {show(name)}, which extends a job itself: name that one")
    for section, value in tree.data.items():
        below = base.data.get(section)
        base.data[section] = (
            {**below, **value} if isinstance(below, dict) and isinstance(value, dict) and value else value
        )
    return Tree(tree.source, base.data, {**base.where, **tree.where})


def _read(file: Path) -> str:
    """The text of a job file. Never opens what could block or have no end (a pipe, a device)."""
    name = printable(str(file))
    try:
        kind = file.stat().st_mode
        if stat.S_ISDIR(kind):
            jobs = ", ".join(str(job) for job in sorted(file.glob("*.yaml"))[:16])
            raise InputError(f"{name} is a folder, expected a job file: {jobs or 'none in it'}")
        if not stat.S_ISREG(kind):
            raise InputError(f"{name} is a pipe, a socket or a device, expected a job file")
        # Without blocking: some files of /proc are regular and yet wait for something to be written.
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as stream:
            content = stream.read(BYTES + 1) or b""
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"{name}: no such job file; those shipped are jobs/PROFILE/STAGE.yaml, for example jobs/demo/sft.yaml"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(f"{show(str(file))}: cannot be read ({getattr(error, 'strerror', error)})") from None
    if len(content) > BYTES:
        raise InputError(
            f"{name}: found more than {BYTES >> 10} KiB, expected a job file; are these the rows?"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 text: {error}") from None


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
        position = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise InputError(f"{position}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None
    finally:
        loader.dispose()


def _walk(node: yaml.Node, key: str, name: str, where: dict[str, str], above: tuple[int, ...]) -> None:
    """Notes the line of every key; refuses repeated keys, keys that are not text, and a node that contains itself."""
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
    """Applies one `section.key=value`. The value is YAML, except in `gate`, whose `>= 0.9` YAML would read as a block."""
    key, equals, value = text.partition("=")
    if _is_secret(text):
        raise InputError(f"command line: {'an override' if _is_secret(key) else key}: {_NO_SECRETS}")
    known = re.fullmatch(r"[A-Za-z_]\w*(\.[^.\s]+)*", key)
    if not equals or not known or len(key) > CHARACTERS or key.count(".") >= DEPTH or len(text) > BYTES:
        raise InputError(
            f"command line: {short(text)}: expected section.key=value, for example trainer.learning_rate=1e-4"
        )
    where: dict[str, str] = {}
    if re.match(r"(\w+\.)?gate\.", key) and value not in ("", "null"):
        parsed: Any = value.strip("'\"")
    else:
        try:
            parsed = _parse(value, "command line", where) if value.strip() else None
        except InputError as error:
            quoted = f'{short(key)}="{short(value)}"'
            raise InputError(f"{error} in {show(text)}; put the value in quotes: '{quoted}'") from None
    *sections, last = key.split(".")
    node = tree.data
    for depth, part in enumerate(sections):
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise InputError(
                f"command line: {short(key)}: {short('.'.join(sections[: depth + 1]))} is {show(node)}, which has no keys"
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
    """Refuse secrets, numbers that are not finite, text that cannot be stored, and anything that JSON does not know."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not name.strip() or len(name) > CHARACTERS // 16 or _unprintable(name):
                raise tree.error(
                    key or "job", f"found the key {show(name)}, expected a short one on one line"
                )
            _refuse_values(tree, item, _join(key, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_values(tree, item, _join(key, str(index)))
    elif isinstance(value, str) and _is_secret(value):
        raise tree.error(key, _NO_SECRETS)
    elif isinstance(value, str) and len(value) > CHARACTERS:
        raise tree.error(key, f"found a text of {len(value):,} characters, expected at most {CHARACTERS:,}")
    elif isinstance(value, str) and (problem := _unprintable(value)):
        raise tree.error(key, f"found {problem} in {show(value)}; type the value anew, on one line")
    elif isinstance(value, float) and not math.isfinite(value):
        raise tree.error(key, f"found {value}, expected a finite number")
    elif not isinstance(value, (str, int, float, type(None))):
        raise tree.error(
            key,
            f"found a {type(value).__name__}, expected text, a number, true, false, null, a list or a mapping",
        )


def _unprintable(text: str) -> str | None:
    """What keeps a text from being shown, stored or used as a path; None: nothing."""
    if match := re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", text):
        return "a line break" if match[0] in "\r\n" else f"the control character {match[0]!a}"
    if re.search(r"[\ud800-\udfff]", text):
        return "a byte that is not UTF-8"
    return None
