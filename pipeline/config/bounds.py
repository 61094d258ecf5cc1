"""The values that a key may have beyond its type, in three tables: ranges of numbers, words, lengths of names.

The libraries accept most of what is refused here, and fail an hour later or learn nothing. What depends on two keys is in
rules.py; PPOConfig's own ranges are in pipeline/ppo/config.py.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pipeline.config.fields import fields_of, show
from pipeline.config.jobfile import Tree
from pipeline.config.keys import class_of
from pipeline.config.stages import STAGE
from pipeline.intervals import outside, table

if TYPE_CHECKING:
    from pipeline.config import Job

SEED = "[0, 4294967295]"  # numpy's
LARGEST_BATCH = 1 << 20
ROWS = f"[1, {LARGEST_BATCH}]"
STEPS = "(0, 1) or whole [1, 1000000000]"  # a share of the run, or a count
RANGES: dict[str, dict[str, str]] = {
    "data": table(
        {SEED: "seed", "[0, 1)": "eval_fraction", "[2, 1048576]": "max_length", ROWS: "batch_size"}
    ),
    "run": table(
        {
            "-1 or [0, 1000000]": "max_failures",
            "-1 or (0, 31536000]": "placement_timeout_s",
            "[1, 1000]": "num_to_keep",
            "[1, 1000000]": "early_stopping_patience",
        }
    ),
    "lora": table(
        {
            "[1, 8192]": "r",
            "[1, 1000000]": "lora_alpha",
            "[0, 0.99]": "lora_dropout",
            "[0, 100000]": "layers_to_transform",
        }
    ),
    "serve": table(
        {
            "[0, 65535]": "port",
            "[1, 1000000]": "max_queue",
            "[1, 128]": "max_choices",
            "[1024, 1073741824]": "max_body_bytes",
            "(0, 86400]": "timeout_s poll_s",
            "[16, 1000000000000]": "cache_tokens",
            "[4096, 1000000000000]": "feedback_bytes",
        }
    ),
    "scaling": table({"[0, 86400]": "elastic_resize_monitor_interval_s"}),
    "trainer": table(
        {
            SEED: "seed data_seed",
            ROWS: """per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps
                eval_accumulation_steps precompute_ref_batch_size torch_empty_cache_steps ddp_bucket_cap_mb""",
            "[1, 1024]": "pad_to_multiple_of dataloader_prefetch_factor",
            STEPS: "logging_steps save_steps eval_steps",
            "0 or (0, 1) or whole [1, 1000000000]": "warmup_steps",
            "-1 or [1, 1000000000]": "max_steps",
            "(0, 1000000]": "num_train_epochs",
            "[0.000001, 1000000]": "beta discopop_tau",
            "0 or [0.000001, 1000000]": "max_grad_norm",  # of less, nothing is left of a step
            "[0, 1000000]": """neftune_noise_alpha center_rewards_coefficient router_aux_loss_coef
                loss_weights""",
            "[0, 1000]": "desirable_weight undesirable_weight",
            "[0, 1000000000]": "eval_delay",
            "(0, 100]": "learning_rate",
            "[0, 100]": "weight_decay",
            "[0, 1)": "adam_beta1 adam_beta2 label_smoothing_factor f_alpha_divergence_coef",
            "[0, 0.5)": "label_smoothing",  # the share of pairs that are the wrong way round
            "[0, 1]": "ld_alpha",
            "[1e-30, 1]": "adam_epsilon",
            "[0, 256]": "dataloader_num_workers",
            "[1, 1000000]": "ddp_timeout",
        }
    ),
}
INFERENCE = table(
    {
        SEED: "seed",
        "[1, 1048576]": "response_length local_rollout_forward_batch_size",
        "[0, inf)": "min_new_tokens temperature min_margin",
        "[1, 1024]": "num_generations reward_threads",
        "(0, 31536000]": "reward_timeout_s",
        "[1, 1000000000]": "num_prompts",
        "[0, 1000000000]": "skip_prompts",
    }
)
LEVELS = "debug info warning error critical passive"
# Text keys for which the libraries know a few words, and check them late.
WORDS: dict[str, str] = {
    "trainer.loss_type": "nll dft chunked_nll",  # of sft
    "trainer.f_divergence_type": "reverse_kl forward_kl js_divergence alpha_divergence",
    "trainer.include_num_input_tokens_seen": "all non_padding no",
    "trainer.log_level": LEVELS,
    "trainer.log_level_replica": LEVELS,
    "trainer.pad_to_multiple_of": "auto",
    "trainer.torch_compile_mode": "default reduce-overhead max-autotune max-autotune-no-cudagraphs",
    "trainer.dataloader_multiprocessing_context": "fork spawn forkserver",
    "trainer.include_for_metrics": "inputs loss",
    "scaling.placement_strategy": "PACK SPREAD STRICT_PACK STRICT_SPREAD",
}
DPO_LOSSES = """sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop sft
    sigmoid_norm"""
LOSSES = {"dpo": DPO_LOSSES, "kto": "kto apo_zero_unpaired"}
# Names become folders, tags and columns: bytes.
NAMES = {
    "run.name": 128, "run.storage_path": 1024, "data.cache_dir": 1024,
    "mlflow.experiment": 200, "mlflow.registered_model": 200, "mlflow.alias": 200,
    "serve.host": 255,
}  # fmt: skip
PATHS = """model.name_or_path model.chat_template data.train data.eval data.pairs data.train.path data.eval.path
    data.pairs.path data.cache_dir run.storage_path serve.feedback_path policy reward baseline judge""".split()


def check(tree: Tree, job: Job) -> None:
    """Refuses values that no run can mean: seeds below 0, a dropout of 1, unknown words, blank text, impossible names."""
    for key, value in _leaves(job):
        if isinstance(value, str):
            check_text(tree, job.stage, key, value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_number(tree, job.stage, key, value)


def _leaves(job: Job) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all texts and numbers; an item of a list has the key of the list."""
    for section, value in job.to_dict().items():
        if section not in ("stage", "source", "gate"):
            yield from _inside(section, value)


def _inside(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _inside(f"{key}.{name}", item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _inside(key, item)
    else:
        yield key, value


def _check_number(tree: Tree, stage: str, key: str, value: float) -> None:
    section, _, name = key.partition(".")
    ranges = RANGES.get(section, {})
    if section == "trainer" and not STAGE[stage].trl:
        ranges = {} if stage == "ppo" else INFERENCE  # PPOConfig looks at its own
    expected = outside(value, ranges[name]) if name in ranges else None
    if expected is None:
        return
    default = _default(stage, section, name)
    usual = f", for example {default}" if default and not outside(default, ranges[name]) else ""
    raise tree.error(key, f"found {show(value)}, expected {expected}{usual}")


def _default(stage: str, section: str, name: str) -> Any:
    field = fields_of(class_of(section, stage)).get(name)
    return field.default if field and type(field.default) in (int, float) else None


def check_text(tree: Tree, stage: str, key: str, value: str) -> None:
    if not value.strip() and not key.startswith(("trainer.", "scaling.")):
        raise tree.error(key, "found empty text, expected a value; leave the key out, or type null")
    of_stage = LOSSES.get(stage) if key == "trainer.loss_type" else None
    words = (of_stage or WORDS.get(key, value)).split()
    if key in WORDS and value not in words:
        near = difflib.get_close_matches(value, words, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise tree.error(key, f"found {show(value)}, expected one of {', '.join(words)}{hint}")
    if len(value.encode()) > NAMES.get(key, 1 << 20):
        raise tree.error(key, f"found {len(value.encode())} bytes, expected at most {NAMES[key]}")
    longest = max(re.split(r"[/:]", value), key=lambda part: len(part.encode()))
    if key in PATHS and len(longest.encode()) > 240:  # a file system's 255, less what is appended
        size = len(longest.encode())
        raise tree.error(key, f"found {show(longest)} of {size} bytes in a path, expected at most 240")
