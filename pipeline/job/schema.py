"""Provides the schema of job files, with the types, defaults, ranges and meanings of all keys.

schema.json is generated from our dataclasses and from the config classes of TRL, peft and Ray, because importing these takes
seconds. Validation, `rlhf help KEY`, and editors read schema.json. Regenerate schema.json after you change a key or a pinned
version: python -m pipeline.job.schema_of
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import shorten, show_value
from pipeline.job.stages import INPUTS, STAGE_SPECS
from pipeline.job.yaml_tree import Tree

FILE = Path(__file__).with_name("schema.json")
SECTIONS = ("model", "data", "run", "mlflow", "trainer", "lora", "scaling", "rollout", "serve")
CLASSES = {
    "lora": "peft.tuners.lora.config.LoraConfig",
    "scaling": "ray.train.v2.api.config.ScalingConfig",
    "rollout": "pipeline.job.rollout.RolloutConfig",
}
NAMES = {  # {type in JSON Schema: its name in messages}
    "null": "null", "boolean": "true or false", "integer": "a whole number", "number": "a number", "string": "text",
    "array": "a list", "object": "a mapping",
}  # fmt: skip

# {key in TRL's scripts, LLaMA-Factory, Axolotl or OpenRLHF: our key}, for keys whose names differ
ELSEWHERE = {
    "lr": "trainer.learning_rate",
    "epochs": "trainer.num_train_epochs",
    "base_model": "model.name_or_path",
    "rank": "lora.r",
    "lora_r": "lora.r",
    "alpha": "lora.lora_alpha",
    "cutoff_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "dataset": "data.train",
    "model_name_or_path": "model.name_or_path",
}


# ---------------------------------------------------------------- which keys there are
@cache
def schema_document() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def keys(dotted: str) -> dict[str, dict[str, Any]]:
    """Returns {key: schema} for the fields of the dataclass `package.module.Class`."""
    return schema_document()["$defs"][dotted]["properties"]  # type: ignore[no-any-return]


def class_of(section: str, stage: str) -> str:
    """Returns the name (package.module.Class) of the dataclass whose fields are the keys of a section."""
    if section == "trainer":
        return STAGE_SPECS[stage].trainer
    default = f"pipeline.job.job.{'MLflow' if section == 'mlflow' else section.title()}"
    return CLASSES.get(section, default)


def keys_of(stage: str) -> dict[str, str]:
    """Returns {section.key: key} for all keys that a job of this stage can set."""
    groups = ((section, keys(class_of(section, stage)).items()) for section in SECTIONS)
    return {f"{section}.{key}": key for section, items in groups for key, spec in items if "not" not in spec}


def meant_key(key: str, stage: str) -> str | None:
    """Returns the key that the user probably meant by an unknown key, or None.

    Compares the unknown key with key names of other tools, with similar names, and with keys in other sections.
    """
    section, _, name = key.rpartition(".")
    key_names = keys_of(stage)
    if (full_key := ELSEWHERE.get(name)) in {*key_names, *STAGE_SPECS[stage].inputs}:
        return full_key
    siblings = [short for full, short in key_names.items() if full == f"{section}.{short}"]
    similar = [f"{section}.{match}" for match in difflib.get_close_matches(name, siblings, 1, 0.7)]
    namesakes = [full for full, short in key_names.items() if short == name]
    return next(iter(similar + namesakes), None)


# ---------------------------------------------------------------- values
@cache
def _validator() -> Any:
    """Returns the validator class. The number 7.0 is not an integer, as in JSON Schema Draft 4."""
    from jsonschema import Draft4Validator, Draft7Validator, validators

    return validators.extend(Draft7Validator, type_checker=Draft4Validator.TYPE_CHECKER)


def find_mismatch(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Returns why a value does not match a schema, or None if the value matches."""
    validator = _validator()(schema)
    if (error := next(validator.iter_errors(value), None)) is None:
        return None
    part = "".join(f"{shorten(str(key))}: " for key in error.absolute_path)
    # the mismatched part of the value, and the schema of this part
    instance, expected = error.instance, error.schema
    similar = difflib.get_close_matches(str(instance), list(map(str, _choices(expected))), n=1)
    hint = f"; did you mean {similar[0]}?" if similar else ""
    if isinstance(instance, (int, float)):
        default = schema.get("default")
        if validator.evolve(schema=expected).is_valid(""):
            hint = "; put it in quotes"
        elif type(default) in (int, float) and default:
            hint = f", for example {default}"
    return f"{part}found {show_value(instance)}, expected {expected_in_words(expected)}{hint}"


def check_section(
    tree: Tree, section: str, schemas: Mapping[str, dict[str, Any]], hint: Callable[[str], str] | None = None
) -> dict[str, Any]:
    """Returns the checked values of a section. If a key expects a list and has a single value, the value becomes a list."""
    values = tree.section(section)
    for key, value in values.items():
        single = key in schemas and isinstance(value, (str, int, float)) and not isinstance(value, bool)
        if single and find_mismatch(value, schemas[key]) and not find_mismatch([value], schemas[key]):
            values[key] = [value]  # for example trainer.loss_type=ipo
    for key, message in wrong_keys(values, schemas, hint):
        raise tree.error(f"{section}.{key}", message)
    return values


def wrong_keys(
    values: Mapping[str, Any], schemas: Mapping[str, dict[str, Any]], hint: Callable[[str], str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yields (key, problem) for unknown and missing keys, keys that a job cannot set, and invalid values.

    Args:
        schemas: {key: its schema}.
        hint: function that returns advice about an unknown key. The default is `suggest_known_key`.
    """
    for key in values:
        if "not" in schemas.get(key, ()):
            yield key, f"is set by the pipeline: {schemas[key]['description']}"
    for key, value in values.items():
        if key not in schemas:
            yield key, f"unknown key; {hint(key) if hint else suggest_known_key(key, schemas)}"
        elif problem := find_mismatch(value, schemas[key]):
            yield key, problem
    for key, schema in schemas.items():
        if schema.get("needed") and key not in values:
            yield key, f"missing, expected {expected_in_words(schema)}"


def suggest_known_key(key: str, names: Iterable[str]) -> str:
    """Returns advice about an unknown key: a known key with a similar name, or a list of all known keys."""
    similar = difflib.get_close_matches(key, names := list(names), 1, 0.7)
    return f"did you mean {similar[0]}?" if similar else f"expected one of {', '.join(names)}"


def expected_in_words(schema: Mapping[str, Any]) -> str:
    """Returns the type and range that a schema expects, in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(expected_in_words, schema["anyOf"])))
    if choices := schema.get("enum"):
        words = ", ".join(show_value(c).strip("'") for c in choices[:12]) + ", ..." * (len(choices) > 12)
        return f"one of {words}" if len(choices) > 1 else words
    if "type" not in schema:
        return "any value"
    name = NAMES["integer" if "multipleOf" in schema else schema["type"]]
    count = f" of {schema['minItems']}" if "minItems" in schema else ""
    items = schema.get("items") or schema.get("additionalProperties")
    return (
        name + _range(schema) + count + (f" of {expected_in_words(items)}" if isinstance(items, dict) else "")
    )


def _range(schema: Mapping[str, Any]) -> str:
    if "minimum" in schema and "maximum" in schema:
        return f" between {_number(schema['minimum'])} and {_number(schema['maximum'])}"
    words = {"minimum": "of at least", "exclusiveMinimum": "above"}
    words |= {"maximum": "at most", "exclusiveMaximum": "below"}
    return " and".join(f" {word} {_number(schema[key])}" for key, word in words.items() if key in schema)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"  # {:g} would round large seeds


def _choices(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the values that a schema's `enum` lists, for the value itself or for the items of a list."""
    yield from schema.get("enum", ())
    for part in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())):
        yield from _choices(part)


def describe_key(name: str) -> list[str]:
    """Returns what `rlhf help KEY` prints about a key. Stages with the same text share one entry."""
    section, _, key = name.partition(".")
    entries: dict[str, list[str]] = {}
    for stage in STAGE_SPECS:
        schema = keys(class_of("job", stage)).get(section, {}) if not key else {}
        if key and section in SECTIONS:
            schema = keys(class_of(section, stage)).get(key, {})
        elif section in INPUTS and section not in STAGE_SPECS[stage].inputs:
            continue
        if schema and "not" not in schema:
            entries.setdefault("\n".join(_described(schema)), []).append(stage)
    return [f"{name}   ({', '.join(stages)})\n{text}" for text, stages in entries.items()]


def _described(schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"  type     {expected_in_words(schema)}"
    if not schema.get("needed"):
        yield f"  default  {show_value(schema.get('default'))}"
    if text := schema.get("description"):
        yield f"  {text}"
