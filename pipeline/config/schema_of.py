"""Generates schema.json, the JSON Schema of job files, from our dataclasses and the config classes of TRL, peft and Ray."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import json
import re
import runpy
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from io import StringIO
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pipeline.config import library_keys
from pipeline.config.schema import FILE, LIBRARIES, SECTIONS, TYPES, class_of, document
from pipeline.config.stages import STAGE

JOB = class_of("job", "")
OTHERS = (JOB, class_of("source", ""), "pipeline.sweep.space.Settings", "pipeline.iteration.plan.Settings")  # fmt: skip


def text() -> str:
    """Returns the content of schema.json, a line for each key."""
    classes = dict.fromkeys(class_of(section, stage) for stage in STAGE for section in SECTIONS)
    sections = {one: name for name, one in LIBRARIES.items()}
    sections |= {facts.trainer: "trainer" for facts in STAGE.values() if facts.trl}
    made = {dotted: of_class(dotted, sections.get(dotted, "")) for dotted in (*classes, *OTHERS)}
    lines = [
        f'  "{dotted}": {{"type": "object", "additionalProperties": false, "properties": {{\n'
        + ",\n".join(f"   {json.dumps(key)}: {json.dumps(schema)}" for key, schema in keys.items())
        + "\n  }}"
        for dotted, keys in made.items()
    ]
    head = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "job file",
        "versions": {name: version(name) for name in ("trl", "transformers", "peft", "ray")},
        "type": "object",
        "properties": {"stage": {"enum": [*STAGE, "iterate"]}},
        "allOf": [_of_stage(stage, made) for stage in STAGE],
    }
    start = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    return f'{{\n{start},\n "$defs": {{\n' + ",\n".join(lines) + "\n }\n}\n"


def _of_stage(stage: str, made: Mapping[str, Any]) -> dict[str, Any]:
    sections: dict[str, Any] = {name: {"$ref": f"#/$defs/{class_of(name, stage)}"} for name in SECTIONS}
    inputs = {name: made[JOB][name] for name in STAGE[stage].inputs}
    others = {
        "stage": {},
        "extends": {"type": ["string", "array"], "items": {"type": "string"}},
        "gate": {"type": "object"},
    }
    return {
        "if": {"required": ["stage"], "properties": {"stage": {"const": stage}}},
        "then": {"properties": others | inputs | sections, "additionalProperties": False},
    }


def of_class(dotted: str, section: str) -> dict[str, Any]:
    """Returns {key: schema} of the fields of a dataclass.

    Args:
        section: the section whose keys it has, if it is a library's class.
    """
    module, _, name = dotted.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    hints = _hints(cls)
    ranges = {**getattr(sys.modules[module], "RANGES", {}), **library_keys.LIMITS.get(section, {})}
    help_of = comments(cls) if module.startswith("pipeline.") else _documented(cls)
    keys = {}
    for field in dataclasses.fields(cls):
        if not field.init or (dotted == JOB and field.name in ("source", "overridden")):
            continue
        if field.name in library_keys.REFUSED.get(section, {}):
            keys[field.name] = {"description": library_keys.REFUSED[section][field.name], "not": {}}
            continue
        hint, allowed = hints[field.name], ranges.get(field.name)
        if get_origin(hint) is Annotated:
            hint, allowed = get_args(hint)
        schema = of_type(hint) or {}
        # null: planning/recompute.py decides
        if section == "trainer" and field.name == "gradient_checkpointing":
            schema = {"anyOf": [schema, {"type": "null"}]}
        if words := library_keys.words(section, field.name, name):
            schema = _with_words(schema, words)
        keys[field.name] = schema | _facts(field, allowed, help_of.get(field.name, ""))
    return keys


def _hints(cls: type) -> dict[str, Any]:
    """Returns the annotations of a class. YAML cannot write the types that only type checkers import."""
    unknown: dict[str, Any] = {}
    while True:
        try:
            return get_type_hints(cls, localns=unknown or None, include_extras=True)
        except NameError as error:
            unknown[str(error.name)] = object


def of_type(hint: Any) -> dict[str, Any] | None:
    """Returns the schema of an annotation, or None if YAML cannot write such a value."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint == typing.Dict[str, typing.List]:  # noqa: UP006 - {"grid_search": [...]}, Ray Tune's, for any key
        return None
    if hint in TYPES:
        return {"type": TYPES[hint]}
    if origin is Literal:
        return {"enum": [*parts]}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [one.value for one in hint]}
    if origin in (Union, types.UnionType):
        return _of_union(parts)
    kind = origin or hint
    if not isinstance(kind, type):
        return None
    if issubclass(kind, Mapping):
        inside = of_type(parts[1]) if parts else None
        return {"type": "object"} | ({"additionalProperties": inside} if inside else {})
    if issubclass(kind, Sequence):
        inside = of_type(parts[0]) if parts else None
        pair = issubclass(kind, tuple) and len(parts) > 1 and ... not in parts
        count = {"minItems": len(parts), "maxItems": len(parts)} if pair else {}
        return {"type": "array"} | count | ({"items": inside} if inside else {})
    return None


def _of_union(parts: tuple[Any, ...]) -> dict[str, Any] | None:
    """Returns the alternatives that YAML can write.

    `SchedulerType | str` means one of SchedulerType. `dict | str | None` means a mapping: the text is its JSON, for a
    command line.
    """
    known = [schema for part in parts if (schema := of_type(part))]
    if len(known) < len(parts) and all(one == {"type": "null"} for one in known):
        return None
    flat = [one for schema in known for one in schema.get("anyOf", [schema])]
    words = any(isinstance(choice, str) for one in flat for choice in one.get("enum", ()))
    if words or ({"type": "object"} in flat and {"type": "null"} in flat):
        flat = [one for one in flat if one != {"type": "string"}]
    return {"anyOf": flat} if len(flat) > 1 else flat[0]


def _with_words(schema: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """Returns the schema with these words instead of any text."""
    if schema == {"type": "string"}:
        return {"enum": words}
    return {
        key: [_with_words(one, words) for one in value] if key == "anyOf"
        else _with_words(value, words) if key == "items" else value
        for key, value in schema.items()
    }  # fmt: skip


def _facts(field: Any, allowed: str | None, text: str) -> dict[str, Any]:
    """Returns default, range and meaning of a field."""
    facts: dict[str, Any] = {}
    default = field.default.value if isinstance(field.default, enum.Enum) else field.default
    if field.default is field.default_factory is dataclasses.MISSING:
        facts["needed"] = True
    elif isinstance(default, str | int | float):
        facts["default"] = default
    if allowed:
        facts["range"] = allowed
        if interval := re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", allowed):
            left, low, high, right = interval.groups()
            facts["minimum" if left == "[" else "exclusiveMinimum"] = float(low)
            if high != "inf":
                facts["maximum" if right == "]" else "exclusiveMaximum"] = float(high)
    text = field.metadata.get("help", text)
    return facts | ({"description": " ".join(str(text).split()).replace("%%", "%")} if text else {})


def _documented(cls: type) -> dict[str, str]:
    """Returns {field: meaning} from the section Args of a docstring."""
    found = re.findall(
        r"^ {4,8}(\w+):(.+?)(?=^ {4,8}\w+:|\n\n|\Z)", cls.__doc__ or "", re.MULTILINE | re.DOTALL
    )
    return dict(found)


def comments(cls: type) -> dict[str, str]:
    """Returns {field: meaning} from the docstring below a field, or from the comments above and behind it."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(base))
        noted = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(StringIO(source).readline)
            if token.type == tokenize.COMMENT and not token.string.startswith("# ---")
        }
        lines = source.splitlines()
        body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
        for node, after in zip(body, [*body[1:], None], strict=True):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[node.target.id] = str(after.value.value)
                continue
            first = node.lineno
            while first - 1 in noted and lines[first - 2].lstrip().startswith("#"):
                first -= 1
            span = range(first, (node.end_lineno or node.lineno) + 1)
            found[node.target.id] = " ".join(noted[line] for line in span if line in noted)
    return found


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(f"wrote {FILE}: {len(document()['$defs'])} classes")
    if (page := FILE.parents[2] / "docs/reference.py").exists():  # docs/configuration.md shows the schema
        runpy.run_path(str(page), run_name="__main__")
