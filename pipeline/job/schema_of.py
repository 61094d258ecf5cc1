"""Generates schema.json, the JSON Schema of job files, from our dataclasses and the config classes of TRL, peft and Ray.

Classes in this module restrict the types of the libraries' keys. The table REFUSED lists keys that a job cannot set.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import re
import runpy
from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Gt, Le, Len, Lt, MultipleOf
from pydantic import TypeAdapter, with_config
from pydantic.json_schema import GenerateJsonSchema
from transformers.trainer_utils import IntervalStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from pipeline.job.ranges import Count, Factor, Fraction, Norm, Rate, Rows, Seed, Share, Weight
from pipeline.job.schema import FILE, SECTIONS, class_of, schema_document
from pipeline.job.stages import STAGE_SPECS

JOB = class_of("job", "")
OTHERS = (
    JOB,
    class_of("source", ""),
    "pipeline.job.judge.Definition",
    "pipeline.sweep.space.SweepSettings",
)


def _by_key(reasons: dict[str, str]) -> dict[str, str]:
    """Converts {reason: "key key ..."} to {key: reason}."""
    return {key: reason for reason, keys in reasons.items() for key in keys.split()}


_MODEL = "the `model` section decides how base and tokenizer are loaded"
# {section: {key of a library that a job cannot set: reason}}
REFUSED: dict[str, dict[str, str]] = {
    "trainer": _by_key(
        {
            "checkpoints are saved to <run.storage_path>/<run.name>": "output_dir",
            "use run.name": "run_name",
            "metrics are logged to MLflow, and to the trackers in mlflow.report_to": """report_to project trackio_space_id trackio_bucket_id
                trackio_static_space_id""",
            "the same command with the same run.name resumes the run; run.overwrite=true starts from scratch": "resume_from_checkpoint",
            "use run.num_to_keep": "save_total_limit",
            "use run.load_best_model_at_end=true, run.metric_for_best_model and run.greater_is_better": """load_best_model_at_end
                metric_for_best_model greater_is_better""",
            "use data.max_length and data.overlong": "max_length truncation_mode",
            "this key would change the global batch; set trainer.per_device_train_batch_size": "auto_find_batch_size",
            _MODEL: "model_init_kwargs trust_remote_code chat_template_path eos_token pad_token use_cache",
            "the reference is a frozen adapter on the shared base": """sync_ref_model precompute_ref_log_probs
                precompute_ref_batch_size""",
            "the `data` section reads and tokenizes rows once, and each epoch has each row once": """dataset_text_field
                dataset_kwargs dataset_num_proc label_names remove_unused_columns completion_only_loss assistant_only_loss
                packing_strategy eval_packing ignore_data_skip train_sampling_strategy length_column_name shuffle_dataset
                dataloader_drop_last accelerator_config""",
            "adapters train data-parallel over scaling.num_workers; model.fsdp shards the frozen base": """deepspeed fsdp
                fsdp_config parallelism_config ddp_find_unused_parameters local_rank ddp_backend""",
            "scaling.use_gpu sets the device": "use_cpu",
            "the stage sets this key": """do_train do_eval do_predict batch_eval_metrics disable_tqdm enable_jit_checkpoint
                save_only_model""",
            "models are registered in MLflow (mlflow.registered_model)": """push_to_hub hub_token hub_private_repo hub_model_id
                hub_strategy hub_always_push hub_revision""",
        }
    ),
    "lora": _by_key(
        {
            "the base is frozen, and shared by all adapters": """modules_to_save layer_replication trainable_token_indices loftq_config
                eva_config corda_config lora_ga_config""",
            "the stage sets this key": "task_type peft_type peft_version auto_mapping inference_mode",
            _MODEL: "base_model_name_or_path revision megatron_config megatron_core",
            "an experimental kind of LoRA, which the shared base does not support": """arrow_config kasa_config velora_config
                monteclora_config use_bdlora runtime_config alora_invocation_tokens use_qalora qalora_group_size target_parameters
                ensure_weight_tying""",
        }
    ),
    "scaling": _by_key({"workers train on CPUs or on NVIDIA GPUs": "trainer_resources use_tpu topology"}),
}

# Types of the libraries' keys, which exclude values with which a run would fail late or learn nothing.
Whole = Annotated[float, Ge(1), Le(10**9), MultipleOf(1)]
Interval = Annotated[float, Gt(0), Lt(1)] | Whole  # a fraction of the run, or a number of steps


class TrainerKeys:
    seed: Seed
    data_seed: Seed | None
    per_device_train_batch_size: Rows
    per_device_eval_batch_size: Rows
    gradient_accumulation_steps: Rows
    eval_accumulation_steps: Rows | None
    torch_empty_cache_steps: Rows | None
    ddp_bucket_cap_mb: Rows | None
    dataloader_num_workers: Annotated[int, Ge(0), Le(256)]
    max_steps: Literal[-1] | Count
    num_train_epochs: Factor
    logging_strategy: IntervalStrategy
    logging_steps: Interval
    eval_strategy: IntervalStrategy
    eval_steps: Interval | None
    save_strategy: IntervalStrategy  # `best` is not allowed; set run.load_best_model_at_end=true instead
    save_steps: Interval
    optim: OptimizerNames
    learning_rate: Rate
    lr_scheduler_type: SchedulerType
    lr_scheduler_kwargs: dict[str, Any] | None  # TRL also accepts a JSON string
    warmup_steps: Literal[0] | Interval
    weight_decay: Annotated[float, Ge(0), Le(100)]
    max_grad_norm: Norm
    adam_beta1: Fraction
    adam_beta2: Fraction
    adam_epsilon: Annotated[float, Ge(1e-30), Le(1)]
    label_smoothing_factor: Fraction
    neftune_noise_alpha: Weight | None
    router_aux_loss_coef: Weight | None
    gradient_checkpointing: bool | None  # planning/plan.py chooses a value for null
    gradient_checkpointing_kwargs: dict[str, Any] | None
    activation_checkpointing_kwargs: dict[str, Any] | None
    debug: str | list[Literal["underflow_overflow", "tpu_metrics_debug"]]


class SFTKeys(TrainerKeys):
    loss_type: Literal["nll", "dft", "chunked_nll"]


class RewardKeys(TrainerKeys):
    center_rewards_coefficient: Weight | None


class DPOKeys(TrainerKeys):
    beta: Annotated[float, Ge(1e-6), Le(10**6)]
    loss_type: list[
        Literal[
            "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
            "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
        ]
    ]  # fmt: skip
    loss_weights: list[Weight] | None
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)]  # assumed share of pairs with wrong labels
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
    f_alpha_divergence_coef: Fraction
    ld_alpha: Share | None
    discopop_tau: Annotated[float, Ge(1e-6), Le(10**6)]


class KTOKeys(TrainerKeys):
    per_device_train_batch_size: Annotated[int, Ge(2), Le(2**20)]  # the KL term needs at least two rows
    beta: Annotated[float, Ge(1e-6), Le(10**6)]
    loss_type: Literal["kto", "apo_zero_unpaired"]
    desirable_weight: Annotated[float, Ge(0), Le(1000)]
    undesirable_weight: Annotated[float, Ge(0), Le(1000)]


class LoraKeys:
    r: Annotated[int, Ge(1), Le(8192)]
    rank_pattern: dict[str, Annotated[float, Ge(1), Le(8192), MultipleOf(1)]]
    lora_alpha: Annotated[int, Ge(1), Le(10**6)]
    alpha_pattern: dict[str, Factor]
    lora_dropout: Annotated[float, Ge(0), Le(0.99)]
    bias: Literal["none"]  # other values would train biases of the base, which all adapters share
    init_lora_weights: bool | Literal["gaussian", "orthogonal"]
    layers_to_transform: Annotated[int, Ge(0), Le(10**5)] | list[Annotated[int, Ge(0), Le(10**5)]] | None


class ScalingKeys:
    num_workers: Annotated[int, Ge(0), Le(1000)] | Annotated[list[Annotated[int, Ge(1), Le(1000)]], Len(2, 2)]
    use_gpu: bool
    resources_per_worker: dict[str, Annotated[float, Ge(0)]] | None
    label_selector: dict[str, str] | None  # Ray also accepts a list with one selector per worker
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
    elastic_resize_monitor_interval_s: Annotated[float, Ge(0), Le(86_400)]


# {config class of a library: (section of a job, class with our types)}
LIBRARIES: dict[str, tuple[str, type]] = {
    "SFTConfig": ("trainer", SFTKeys),
    "RewardConfig": ("trainer", RewardKeys),
    "DPOConfig": ("trainer", DPOKeys),
    "KTOConfig": ("trainer", KTOKeys),
    "LoraConfig": ("lora", LoraKeys),
    "ScalingConfig": ("scaling", ScalingKeys),
}


def schema_text() -> str:
    """Returns the content of schema.json. Each key has one line."""
    classes = dict.fromkeys(class_of(section, stage) for stage in STAGE_SPECS for section in SECTIONS)
    definitions = {dotted: of_class(dotted) for dotted in (*classes, *OTHERS)}
    del definitions[JOB]["source"], definitions[JOB]["overridden"]  # fields that a job file cannot set
    lines = [
        f'  "{dotted}": {{"type": "object", "additionalProperties": false, "properties": {{\n'
        + ",\n".join(f"   {json.dumps(key)}: {json.dumps(schema)}" for key, schema in keys.items())
        + "\n  }}"
        for dotted, keys in definitions.items()
    ]
    head = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "job file",
        "versions": {name: version(name) for name in ("trl", "transformers", "peft", "ray")},
        "type": "object",
        "properties": {"stage": {"enum": [*STAGE_SPECS]}},
        "allOf": [_of_stage(stage, definitions) for stage in STAGE_SPECS],
    }
    start = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    return f'{{\n{start},\n "$defs": {{\n' + ",\n".join(lines) + "\n }\n}\n"


def _of_stage(stage: str, definitions: Mapping[str, Any]) -> dict[str, Any]:
    sections: dict[str, Any] = {name: {"$ref": f"#/$defs/{class_of(name, stage)}"} for name in SECTIONS}
    inputs = {name: definitions[JOB][name] for name in STAGE_SPECS[stage].inputs}
    files = {"type": ["string", "array"], "items": {"type": "string"}}
    others = {"stage": {}, "extends": files, "gate": {"type": "object"}}
    return {
        "if": {"required": ["stage"], "properties": {"stage": {"const": stage}}},
        "then": {"properties": others | inputs | sections, "additionalProperties": False},
    }


class Plain(GenerateJsonSchema):
    """Generates JSON Schema without titles. A literal becomes an `enum` without a type, so that Literal[0] also accepts 0.0."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def literal_schema(self, schema: Any) -> dict[str, Any]:
        return {"enum": schema["expected"]}


def of_class(dotted: str) -> dict[str, Any]:
    """Returns {key: schema} for the fields of one of our dataclasses or of a library's config class."""
    module, _, name = dotted.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    keys = _of_ours(cls) if module.startswith("pipeline.") else _of_library(cls)
    for schema in keys.values():
        if text := schema.get("description"):
            schema["description"] = " ".join(text.split()).replace("%%", "%")
    return keys


def _of_ours(cls: type) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):  # pydantic 2.14 does not read the docstrings of inherited fields
        adapter = TypeAdapter[Any](with_config(use_attribute_docstrings=True)(base))
        schemas = adapter.json_schema(schema_generator=Plain, ref_template="#/$defs/pipeline.job.job.{model}")
        for key, schema in schemas["properties"].items():
            keys[key] = keys.get(key, {}) | schema
        for key in schemas.get("required", ()):
            keys[key]["needed"] = True
    return keys


def _of_library(cls: type) -> dict[str, Any]:
    section, types = LIBRARIES[cls.__name__]
    # Ray imports Domain only for type checkers, so that get_type_hints needs a substitute.
    hints = get_type_hints(cls, localns={"Domain": object}) | get_type_hints(types, include_extras=True)
    argument = r"^ {4,8}(\w+):(.+?)(?=^ {4,8}\w+:|\n\n|\Z)"  # matches a field in a docstring's Args
    help_of = dict(re.findall(argument, cls.__doc__ or "", re.MULTILINE | re.DOTALL))
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if reason := REFUSED[section].get(field.name):
            keys[field.name] = {"description": reason, "not": {}}
        elif field.init:
            schema = TypeAdapter(hints[field.name]).json_schema(schema_generator=Plain)
            default = field.default.value if isinstance(field.default, enum.Enum) else field.default
            if isinstance(default, str | int | float):
                schema["default"] = default
            meaning = field.metadata.get("help", help_of.get(field.name))
            keys[field.name] = schema | ({"description": meaning} if meaning else {})
    return keys


if __name__ == "__main__":
    FILE.write_text(schema_text(), encoding="utf-8")
    print(f"wrote {FILE}: {len(schema_document()['$defs'])} classes")
    if (page := FILE.parents[2] / "docs/reference.py").exists():  # generates docs/configuration.md
        runpy.run_path(str(page), run_name="__main__")
