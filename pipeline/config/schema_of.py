"""Generates schema.json, the JSON Schema of job files, from our dataclasses and the config classes of TRL, peft and Ray.

The tables have what those classes lack: useful numbers and words, and keys that the pipeline sets.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import math
import re
import runpy
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pipeline.config.schema import FILE, SECTIONS, TYPES, class_of, document
from pipeline.config.stages import STAGE
from pipeline.intervals import bounds, table

JOB = class_of("job", "")
OTHERS = (
    JOB,
    class_of("source", ""),
    "pipeline.config.judge.Definition",
    "pipeline.sweep.space.SweepSettings",
)

_MODEL = "the `model` section decides how base and tokenizer are loaded"
# Keys of the libraries that would break guarantees of the pipeline.
REFUSED: dict[str, dict[str, str]] = {
    "trainer": table(
        {
            "checkpoints go to <run.storage_path>/<run.name>": "output_dir",
            "use run.name": "run_name",
            "metrics go to MLflow, and to what mlflow.report_to names": """report_to project trackio_space_id trackio_bucket_id
                trackio_static_space_id""",
            "the same command with the same run.name continues; run.overwrite=true starts over": "resume_from_checkpoint",
            "use run.num_to_keep": "save_total_limit",
            "use run.load_best_model_at_end=true, run.metric_for_best_model and run.greater_is_better": """load_best_model_at_end
                metric_for_best_model greater_is_better""",
            "use data.max_length and data.too_long": "max_length truncation_mode",
            "it would change the global batch; set trainer.per_device_train_batch_size": "auto_find_batch_size",
            _MODEL: "model_init_kwargs trust_remote_code chat_template_path eos_token pad_token use_cache",
            "the reference is the frozen sft adapter, which never changes": "sync_ref_model",
            "the `data` section reads and tokenizes rows once, and each epoch has each row once": """dataset_text_field
                dataset_kwargs dataset_num_proc label_names remove_unused_columns completion_only_loss assistant_only_loss
                packing_strategy eval_packing ignore_data_skip train_sampling_strategy length_column_name shuffle_dataset
                dataloader_drop_last accelerator_config""",
            "adapters train data-parallel over scaling.num_workers; model.fsdp shards the frozen base": """deepspeed fsdp
                fsdp_config parallelism_config ddp_find_unused_parameters local_rank ddp_backend""",
            "the stage decides it": """do_train do_eval do_predict batch_eval_metrics disable_tqdm enable_jit_checkpoint
                save_only_model""",
            "models go to the MLflow registry (mlflow.registered_model)": """push_to_hub hub_token hub_private_repo hub_model_id
                hub_strategy hub_always_push hub_revision""",
        }
    ),
    "lora": table(
        {
            "the base stays frozen and shared": """modules_to_save layer_replication trainable_token_indices loftq_config
                eva_config corda_config lora_ga_config""",
            "the stage sets it": "task_type peft_type peft_version auto_mapping inference_mode",
            _MODEL: "base_model_name_or_path revision megatron_config megatron_core",
            "an experimental kind of LoRA, which the shared base does not support": """arrow_config kasa_config velora_config
                monteclora_config use_bdlora runtime_config alora_invocation_tokens use_qalora qalora_group_size target_parameters
                ensure_weight_tying""",
        }
    ),
    "scaling": table({"workers train on CPUs or on NVIDIA GPUs": "trainer_resources use_tpu topology"}),
}

SEED = "[0, 4294967295]"  # numpy's
ROWS = "[1, 1048576]"
STEPS = "(0, 1) or whole [1, 1000000000]"  # a share of the run, or a count
# Allowed numbers. The libraries accept others, and fail an hour later or learn nothing.
LIMITS: dict[str, dict[str, str]] = {
    "lora": table(
        {
            "[1, 8192]": "r",
            "[1, 1000000]": "lora_alpha",
            "whole [1, 8192]": "rank_pattern",
            "(0, 1000000]": "alpha_pattern",
            "[0, 0.99]": "lora_dropout",
            "[0, 100000]": "layers_to_transform",
        }
    ),
    "scaling": table({"[0, 86400]": "elastic_resize_monitor_interval_s", "[0, inf)": "resources_per_worker"}),
    "trainer": table(
        {
            SEED: "seed data_seed",
            ROWS: """per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps
                eval_accumulation_steps precompute_ref_batch_size torch_empty_cache_steps ddp_bucket_cap_mb""",
            STEPS: "logging_steps save_steps eval_steps",
            "0 or (0, 1) or whole [1, 1000000000]": "warmup_steps",
            "-1 or [1, 1000000000]": "max_steps",
            "(0, 1000000]": "num_train_epochs",
            "[0.000001, 1000000]": "beta discopop_tau",
            "0 or [0.000001, 1000000]": "max_grad_norm",  # less underflows
            "[0, 1000000]": """neftune_noise_alpha center_rewards_coefficient router_aux_loss_coef
                loss_weights""",
            "[0, 1000]": "desirable_weight undesirable_weight",
            "(0, 100]": "learning_rate",
            "[0, 100]": "weight_decay",
            "[0, 1)": "adam_beta1 adam_beta2 label_smoothing_factor f_alpha_divergence_coef",
            "[0, 0.5)": "label_smoothing",  # the share of swapped pairs
            "[0, 1]": "ld_alpha",
            "[1e-30, 1]": "adam_epsilon",
            "[0, 256]": "dataloader_num_workers",
        }
    ),
}
NUMBERS = {"type": "object", "additionalProperties": {"type": "number"}}
_JUDGE = [{"type": "string"}, {"type": "object"}, {"type": "null"}]
# Schemas of keys, of a class or of a section, where the libraries take more or check late.
KINDS: dict[str, dict[str, Any]] = {
    "Job.judge": {"anyOf": _JUDGE},
    "Job.reward": {"anyOf": [*_JUDGE, {"type": "array", "items": {"anyOf": _JUDGE[:2]}}]},
    "SFTConfig.loss_type": {"enum": "nll dft chunked_nll".split()},
    "DPOConfig.loss_type": {
        "type": "array",
        "items": {
            "enum": """sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop
                sft sigmoid_norm""".split()
        },
    },
    "KTOConfig.loss_type": {"enum": "kto apo_zero_unpaired".split()},
    "trainer.f_divergence_type": {"enum": "reverse_kl forward_kl js_divergence alpha_divergence".split()},
    # by default, planning/plan.py decides
    "trainer.gradient_checkpointing": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "trainer.save_strategy": {
        "enum": "no steps epoch".split()
    },  # instead of `best`, run.load_best_model_at_end=true
    "lora.alpha_pattern": NUMBERS,
    "lora.bias": {"enum": ["none"]},  # others train biases of the base, which all adapters share
    "lora.init_lora_weights": {"anyOf": [{"type": "boolean"}, {"enum": ["gaussian", "orthogonal"]}]},
    "lora.rank_pattern": NUMBERS,
    "scaling.placement_strategy": {"enum": "PACK SPREAD STRICT_PACK STRICT_SPREAD".split()},
    "scaling.resources_per_worker": {"anyOf": [NUMBERS, {"type": "null"}]},
}


def text() -> str:
    """Returns the content of schema.json, a line for each key."""
    classes = dict.fromkeys(class_of(section, stage) for stage in STAGE for section in SECTIONS)
    sections = {class_of(name, ""): name for name in ("lora", "scaling")}
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
        "properties": {"stage": {"enum": [*STAGE]}},
        "allOf": [_of_stage(stage, made) for stage in STAGE],
    }
    start = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    return f'{{\n{start},\n "$defs": {{\n' + ",\n".join(lines) + "\n }\n}\n"


def _of_stage(stage: str, made: Mapping[str, Any]) -> dict[str, Any]:
    sections: dict[str, Any] = {name: {"$ref": f"#/$defs/{class_of(name, stage)}"} for name in SECTIONS}
    inputs = {name: made[JOB][name] for name in STAGE[stage].inputs}
    files = {"type": ["string", "array"], "items": {"type": "string"}}
    others = {"stage": {}, "extends": files, "gate": {"type": "object"}}
    return {
        "if": {"required": ["stage"], "properties": {"stage": {"const": stage}}},
        "then": {"properties": others | inputs | sections, "additionalProperties": False},
    }


def of_class(dotted: str, section: str) -> dict[str, Any]:
    """Returns {key: schema} of the fields of a dataclass. `section` has them as its keys, if it is a library's class."""
    module, _, name = dotted.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    hints = _hints(cls)
    ranges = {**getattr(sys.modules[module], "RANGES", {}), **LIMITS.get(section, {})}
    if module.startswith("pipeline."):
        help_of = comments(cls)
    else:  # the section Args of the docstring
        argument = r"^ {4,8}(\w+):(.+?)(?=^ {4,8}\w+:|\n\n|\Z)"
        help_of = dict(re.findall(argument, cls.__doc__ or "", re.MULTILINE | re.DOTALL))
    keys = {}
    for field in dataclasses.fields(cls):
        if not field.init or (dotted == JOB and field.name in ("source", "overridden")):
            continue
        if field.name in REFUSED.get(section, {}):
            keys[field.name] = {"description": REFUSED[section][field.name], "not": {}}
            continue
        hint, allowed = hints[field.name], ranges.get(field.name)
        if get_origin(hint) is Annotated:
            hint, allowed = get_args(hint)
        own = KINDS.get(f"{name}.{field.name}") or KINDS.get(f"{section}.{field.name}")
        schema = own or of_type(hint) or {}
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
        if allowed[0] in "[(" and " or " not in allowed:
            left, low, high, right = bounds(allowed)
            facts["minimum" if left == "[" else "exclusiveMinimum"] = low
            if high < math.inf:
                facts["maximum" if right == "]" else "exclusiveMaximum"] = high
    text = field.metadata.get("help", text)
    return facts | ({"description": " ".join(str(text).split()).replace("%%", "%")} if text else {})


# Comments above a field of a dataclass, its name, the comment behind it, and the docstring below it
FIELD = re.compile(
    r'((?:^    #.*\n)*)^    (\w+): .*?(?:  # (.*))?\n(?: {8}.*\n)*(?:    [\])].*\n)?(?:    """([^"]*)""")?',
    re.MULTILINE,
)


def comments(cls: type) -> dict[str, str]:
    """Returns {field: meaning} from the docstring below a field, or from the comments above and behind it."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        for above, name, behind, below in FIELD.findall(inspect.getsource(base)):
            lines = [line.lstrip("# ") for line in above.splitlines() if "# ---" not in line]
            found[name] = below or " ".join([*lines, behind]).strip()
    return found


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(f"wrote {FILE}: {len(document()['$defs'])} classes")
    if (page := FILE.parents[2] / "docs/reference.py").exists():  # docs/configuration.md shows the schema
        runpy.run_path(str(page), run_name="__main__")
