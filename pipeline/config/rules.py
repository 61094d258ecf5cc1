"""Which keys and combinations of keys a job may not have, and why: each check raises the InputError that says what to do instead."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.fields import fields_of, show
from pipeline.config.jobfile import Tree

if TYPE_CHECKING:
    from pipeline.config import Job

# Which models a stage takes in: True where it cannot run without.
INPUTS: dict[str, dict[str, bool]] = {
    "sft": {},
    "rm": {},
    "dpo": {"policy": True, "judge": False},
    "ppo": {"policy": True, "reward": True, "judge": False},
    "evaluate": {"policy": False, "baseline": False, "reward": False, "judge": False},
    "generate": {"policy": True, "reward": False},
    "score": {"reward": True},
    "export": {"policy": False, "reward": False},
}
TRAINERS = {
    "sft": "trl.trainer.sft_config.SFTConfig",
    "rm": "trl.trainer.reward_config.RewardConfig",
    "dpo": "trl.trainer.dpo_config.DPOConfig",
    "ppo": "pipeline.ppo.config.PPOConfig",
    "evaluate": "pipeline.ppo.config.PPOConfig",  # sampling, lengths and batch size keep their names
    **dict.fromkeys(("generate", "score", "export"), "pipeline.config.Inference"),
}


_DATA = "rows are read, templated and tokenised once, before training, by the `data` section"
_HUB = "models go to the MLflow registry (mlflow.registered_model)"
_MODEL = "how the base is loaded is said in the `model` section"
_ORDER = "the pipeline draws the batches, so that every row is seen exactly once an epoch and a resumed run continues where it stopped"
_SHARD = "adapters train data-parallel over scaling.num_workers; the frozen base is not sharded"
# Keys that the libraries know and that would break what the pipeline promises.
REFUSED: dict[str, dict[str, str]] = {
    "trainer": {
        "output_dir": "checkpoints go to <run.storage_path>/<run.name>",
        "run_name": "use run.name",
        "report_to": "metrics go to MLflow; see the `mlflow` section",
        "resume_from_checkpoint": "the same command with the same run.name continues; run.fresh=true starts anew",
        "save_total_limit": "use run.num_to_keep",
        "save_only_model": "a checkpoint without optimizer and random state cannot be resumed exactly",
        "load_best_model_at_end": "the last adapter is registered and the `gate` judges it; the best checkpoint may lie on another node",
        "ignore_data_skip": _ORDER,
        "remove_unused_columns": "the tokenised columns are exactly those that the trainer needs",
        "max_length": "use data.max_length and data.too_long, so that what is cut or dropped is counted and reported",
        "auto_find_batch_size": "it would change the global batch; set trainer.per_device_train_batch_size",
        "train_sampling_strategy": _ORDER,
        "length_column_name": _ORDER,
        "shuffle_dataset": _ORDER,
        "dataloader_drop_last": _ORDER,
        "accelerator_config": _ORDER,
        "model_init_kwargs": _MODEL,
        "trust_remote_code": "use model.trust_remote_code",
        "chat_template_path": "use model.chat_template",
        "eos_token": "the end-of-sequence token is the tokenizer's own",
        "pad_token": "the pad token follows from the tokenizer and is never its end-of-sequence token",
        "dataset_text_field": _DATA,
        "dataset_kwargs": _DATA,
        "dataset_num_proc": _DATA,
        "truncation_mode": "use data.too_long",
        "completion_only_loss": "only the replies are trained; the labels are made with the data",
        "assistant_only_loss": "only the replies are trained; the labels are made with the data",
        "label_names": _DATA,
        "packing_strategy": "packed rows hold whole conversations, best fit first",
        "use_cache": "training needs no cache, and with one packed rows would see each other",
        "eval_packing": "evaluation rows are packed as the training rows are",
        "disable_tqdm": "progress is printed once for all workers",
        "ddp_find_unused_parameters": "an adapter's parameters are all used",
        **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "parallelism_config"), _SHARD),
        **dict.fromkeys(("local_rank", "ddp_backend"), "Ray Train sets it for each worker"),
        **dict.fromkeys(("do_train", "do_eval", "do_predict"), "the stage says what is done"),
        **dict.fromkeys(
            (
                "push_to_hub",
                "hub_token",
                "hub_private_repo",
                "hub_model_id",
                "hub_strategy",
                "hub_always_push",
                "hub_revision",
            ),
            _HUB,
        ),
    },
    "lora": {
        **dict.fromkeys(
            ("task_type", "peft_type", "peft_version", "auto_mapping", "inference_mode"), "the stage sets it"
        ),
        **dict.fromkeys(("base_model_name_or_path", "revision"), _MODEL),
        "modules_to_save": "the base stays frozen and shared; the reward's score head is trained and saved without being named",
        "layer_replication": "it changes the base, which all adapters share",
        "trainable_token_indices": "it trains rows of the base's embedding, which all adapters share",
    },
    "scaling": {"trainer_resources": "Ray Train 2 no longer has it; the driver takes no CPU"},
}


# ---------------------------------------------------------------- combinations
def _check_model(tree: Tree, job: Job) -> None:
    template = job.model.chat_template
    if template not in (None, "plain") and not Path(str(template)).is_file():
        raise tree.error(
            "model.chat_template",
            f"found {show(template)}, expected an existing Jinja file, `plain`, or null",
        )
    if not job.model.name_or_path.strip():
        raise tree.error("model.name_or_path", "found empty text, expected a hub id or a folder")
    if job.lora.get("bias", "none") != "none":
        raise tree.error(
            "lora.bias",
            "found a bias of the base to be trained, expected none: the base stays frozen and shared",
        )
    init = job.lora.get("init_lora_weights", True)
    if isinstance(init, str) and init not in ("gaussian", "orthogonal"):
        raise tree.error(
            "lora.init_lora_weights",
            f"found {init}, which rewrites base weights that all adapters share; expected true or gaussian",
        )
    for key, least in (("r", 1), ("lora_alpha", 1)):
        if job.lora.get(key, least) < least:
            raise tree.error(f"lora.{key}", f"found {job.lora[key]}, expected at least {least}")


def _check_data(tree: Tree, job: Job) -> None:
    data = job.data
    if job.stage not in ("evaluate", "export") and not data.train:
        what = "to work on" if job.stage in ("generate", "score") else "to learn from"
        raise tree.error(
            "data.train",
            f"missing; `{job.stage}` needs rows {what}, for example data.train=jobs/demo/data/*.jsonl",
        )
    if job.stage in ("generate", "score") and (data.eval or data.eval_fraction):
        key = "eval" if data.eval else "eval_fraction"
        raise tree.error(f"data.{key}", f"`{job.stage}` holds nothing out: all its rows are data.train")
    if job.stage == "evaluate" and not data.eval and not (data.pairs and not job.policy):
        raise tree.error(
            "data.eval",
            "missing; `evaluate` needs prompts, for example data.eval=jobs/demo/data/prompts_eval.jsonl (or, for a reward "
            "model alone, data.pairs and policy=null)",
        )
    if job.stage == "evaluate" and data.eval and not job.policy:
        raise tree.error(
            "policy",
            "missing; `evaluate` needs it to answer data.eval: models:/rlhf-ppo@champion (or `base`: no adapter); for a "
            "reward model alone type data.eval=null",
        )
    if data.subset and not data.pairs:
        raise tree.error("data.subset", "names a column of data.pairs, and there are none")
    if job.stage == "evaluate" and data.train:
        raise tree.error("data.train", "`evaluate` trains nothing; put the prompts under data.eval")
    if data.pairs and job.stage != "evaluate":
        raise tree.error(
            "data.pairs", f"belongs to `evaluate`; `{job.stage}` takes its held-out rows as data.eval"
        )
    if data.pairs and not job.reward:
        raise tree.error(
            "data.pairs", "there is no reward model to judge: give reward, e.g. models:/rlhf-rm@champion"
        )
    if not 0 <= data.eval_fraction < 1:
        raise tree.error(
            "data.eval_fraction",
            f"found {data.eval_fraction}, expected 0 <= eval_fraction < 1, for example 0.05",
        )
    if data.eval and data.eval_fraction:
        raise tree.error(
            "data.eval_fraction",
            "given together with data.eval; keep one: a file of its own, or a share of data.train",
        )
    for key in ("max_length", "batch_size"):
        if (getattr(data, key) or 1) < 1 or getattr(data, key) == 0:
            raise tree.error(f"data.{key}", f"found {getattr(data, key)}, expected at least 1")
    if job.trainer.get("eval_strategy", "no") != "no" and not (data.eval or data.eval_fraction):
        raise tree.error(
            "trainer.eval_strategy",
            "there is nothing to evaluate on: give data.eval or data.eval_fraction, or eval_strategy=no",
        )


def _check_batches(tree: Tree, job: Job) -> None:
    """batch_size = per_device_train_batch_size x workers x accumulation, exactly, for every worker count that can occur."""
    low, high = _worker_range(tree, job)
    size = job.data.batch_size
    if job.stage not in ("sft", "rm", "dpo"):
        if size is not None:
            raise tree.error(
                "data.batch_size",
                f"not for `{job.stage}`; use "
                + (
                    "trainer.batch_size, the episodes of one update over all workers"
                    if job.stage == "ppo"
                    else "trainer.local_rollout_forward_batch_size, the rows of one forward"
                ),
            )
        return
    if low != high and size is None:
        raise tree.error(
            "data.batch_size",
            "missing; with elastic scaling.num_workers it keeps the global batch fixed, for example 64",
        )
    if size is None:
        return
    if "gradient_accumulation_steps" in job.trainer:
        raise tree.error(
            "trainer.gradient_accumulation_steps", "follows from data.batch_size; keep only one of the two"
        )
    device = job.trainer.get(
        "per_device_train_batch_size", fields_of(TRAINERS[job.stage])["per_device_train_batch_size"].default
    )
    step = math.lcm(*(device * workers for workers in range(low, high + 1)))
    if size % step:
        workers = (
            f"{low} to {high} workers, each count of them"
            if low < high
            else f"{low} worker{'s' if low > 1 else ''}"
        )
        raise tree.error(
            "data.batch_size",
            f"found {size}, expected a multiple of {step}, so that trainer.per_device_train_batch_size={device} on {workers} comes out even; "
            f"try data.batch_size={math.ceil(size / step) * step} or a smaller trainer.per_device_train_batch_size",
        )


def _worker_range(tree: Tree, job: Job) -> tuple[int, int]:
    low, high = job.workers
    if not 1 <= low <= high:
        raise tree.error(
            "scaling.num_workers",
            f"found {show(job.scaling['num_workers'])}, expected at least 1, or [min, max] with 1 <= min <= max",
        )
    return low, high


def _check_trainer(tree: Tree, job: Job) -> None:
    trainer = job.trainer
    if trainer.get("bf16") and trainer.get("fp16"):
        raise tree.error(
            "trainer.fp16", "given together with trainer.bf16; keep one (bf16 where the GPU has it)"
        )
    if trainer.get("use_cpu") and job.scaling.get("use_gpu"):
        raise tree.error("trainer.use_cpu", "given together with scaling.use_gpu=true; keep one")
    for key in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if trainer.get(key) is not None and trainer[key] < 1:
            raise tree.error(f"trainer.{key}", f"found {trainer[key]}, expected at least 1")
    for key in ("learning_rate", "num_train_epochs", "warmup_steps", "weight_decay", "max_grad_norm"):
        if trainer.get(key) is not None and trainer[key] < 0:
            raise tree.error(
                f"trainer.{key}", f"found {trainer[key]}, expected a number that is not negative"
            )
    if job.stage in ("ppo", "evaluate"):
        from pipeline.ppo.config import PPOConfig

        try:
            PPOConfig(**trainer)
        except ValueError as error:
            key, _, message = str(error).partition(": ")
            raise tree.error(key, message) from None
    elif job.stage in ("generate", "score", "export"):
        _check_inference(tree, trainer)


def _check_inference(tree: Tree, trainer: dict[str, Any]) -> None:
    for key, least in (
        ("response_length", 1),
        ("local_rollout_forward_batch_size", 1),
        ("min_new_tokens", 0),
        ("temperature", 0),
        ("seed", 0),
    ):
        if trainer.get(key, least) < least:
            raise tree.error(f"trainer.{key}", f"found {trainer[key]}, expected {least} or more")
    if (fewest := trainer.get("min_new_tokens", 0)) >= trainer.get("response_length", fewest + 1):
        raise tree.error("trainer.min_new_tokens", f"found {fewest}, expected less than response_length")


def _check_run(tree: Tree, job: Job) -> None:
    run = job.run
    if run.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run.name):
        raise tree.error(
            "run.name",
            f"found {show(run.name)}, expected letters, digits, `.`, `_` and `-`: it names a folder below run.storage_path",
        )
    if run.name in ("data", "artifacts", "report", "mlflow.db"):
        raise tree.error(
            "run.name",
            f"found {show(run.name)}, where run.storage_path keeps things of all runs; expected another name, "
            f"for example {job.stage}-{run.name}",
        )
    if not run.storage_path.strip():
        raise tree.error(
            "run.storage_path",
            "found empty text, expected a folder or s3://bucket/folder that every node reaches",
        )
    if run.max_failures < -1:
        raise tree.error(
            "run.max_failures", f"found {run.max_failures}, expected a count, or -1 for no limit"
        )
    if not 0 <= run.port < 65536:
        raise tree.error("run.port", f"found {run.port}, expected 0 (any free one) to 65535")
    if run.num_to_keep < 1:
        raise tree.error("run.num_to_keep", f"found {run.num_to_keep}, expected at least 1 checkpoint")


def _check_mlflow(tree: Tree, job: Job) -> None:
    mlflow = job.mlflow
    name = mlflow.registered_model
    if name is not None and not re.fullmatch(r"[^/:@.\s][^/:@]*", name):
        raise tree.error(
            "mlflow.registered_model",
            f"found {show(name)}, expected a name without `/`, `:` and `@`, for example rlhf-{job.stage}",
        )
    if mlflow.alias == "latest" or re.fullmatch(r"v\d+", mlflow.alias, re.IGNORECASE):
        raise tree.error(
            "mlflow.alias", f"`{mlflow.alias}` is reserved by MLflow; take another word, for example champion"
        )
    if not re.fullmatch(r"[\w-]{1,255}", mlflow.alias):
        raise tree.error(
            "mlflow.alias",
            f"found {show(mlflow.alias)}, expected letters, digits, `_` and `-`, for example champion",
        )
    if not mlflow.experiment.strip():
        raise tree.error("mlflow.experiment", "found empty text, expected a name, for example rlhf")
    if (mlflow.tracking_uri or "").startswith("file:"):
        raise tree.error(
            "mlflow.tracking_uri",
            "MLflow no longer writes to file: stores; use sqlite:///runs/mlflow.db or http://host:5000",
        )


def _check_gate(tree: Tree, job: Job) -> None:
    for metric, rule in job.gate.items():
        try:
            parse_gate(rule)
        except ValueError as error:
            raise tree.error(f"gate.{metric}", str(error)) from None
    judged = job.policy or job.reward
    if job.stage == "evaluate" and job.gate and not str(judged).startswith("models:/"):
        raise tree.error(
            "gate",
            f"found one, but {show(judged)} is no registered version that it could let pass; take it out",
        )
    if job.stage in ("generate", "score", "export") and job.gate:
        raise tree.error("gate", f"`{job.stage}` registers nothing that a gate could hold back; take it out")


def _check_inputs(tree: Tree, job: Job) -> None:
    names = [("policy", job.policy), ("baseline", job.baseline), ("judge", job.judge)]
    for index, item in enumerate(
        job.reward if isinstance(job.reward, list) else [job.reward] if job.reward else []
    ):
        place = f"reward.{index}" if isinstance(job.reward, list) else "reward"
        if isinstance(item, dict):
            weight = item.get("weight", 1.0)
            if (
                set(item) - {"reward", "weight"}
                or isinstance(weight, bool)
                or not isinstance(weight, (int, float))
            ):
                raise tree.error(place, f"found {show(item)}, expected {{reward: NAME, weight: NUMBER}}")
            item = item.get("reward")
        if not isinstance(item, str) or not item:
            raise tree.error(
                place,
                f"found {show(item)}, expected a name such as models:/rlhf-rm@champion, or {{reward: NAME, weight: NUMBER}}",
            )
        names.append((place, item))
    for key, name in names:
        if name is None:
            continue
        if name.startswith("models:") and not re.fullmatch(r"models:/[^/:@]+(@[\w-]+|/\d+)", name):
            raise tree.error(
                key,
                f"found {show(name)}, expected models:/NAME@ALIAS or models:/NAME/VERSION, for example models:/rlhf-sft@champion",
            )
        if name.startswith("python:") and not re.fullmatch(r"python:[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
            raise tree.error(
                key,
                f"found {show(name)}, expected python:MODULE:FUNCTION, for example python:pipeline.models.demo:gold",
            )
        if name.startswith("python:") and key in ("policy", "baseline"):
            raise tree.error(
                key, f"found {show(name)}, expected an adapter: models:/NAME@ALIAS, a folder, or base"
            )
    if job.stage == "export":
        _check_export(tree, job)


def _check_export(tree: Tree, job: Job) -> None:
    if not job.policy and not job.reward:
        raise tree.error(
            "policy", "missing; `export` needs it, or a reward: policy=models:/rlhf-ppo@champion"
        )
    if job.policy == "base":
        raise tree.error(
            "policy", "found 'base', expected an adapter to merge: models:/rlhf-ppo@champion, or its folder"
        )
    if job.reward and (not isinstance(job.reward, str) or job.reward.startswith("python:")):
        raise tree.error(
            "reward",
            f"found {show(job.reward)}, expected one reward adapter: models:/rlhf-rm@champion, or its folder",
        )
    if job.model.load_in_4bit:
        raise tree.error(
            "model.load_in_4bit",
            "an adapter is never merged into nf4 weights: take it out, or type model.load_in_4bit=false; the adapter is "
            "merged into the base as it is stored, in model.dtype",
        )


OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


def parse_gate(rule: Any) -> tuple[str, float]:
    """`">= 0.95"` -> (">=", 0.95); the operator is a key of OPERATORS. Raises ValueError."""
    match = (
        re.fullmatch(r"\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*", rule)
        if isinstance(rule, str)
        else None
    )
    if match is None:
        raise ValueError(
            f'found {show(rule)}, expected a comparison in quotes: ">= 0.95" (operators >= <= > <)'
        )
    return match[1], float(match[2])


CHECKS = (
    _check_model,
    _check_data,
    _check_trainer,
    _check_batches,
    _check_run,
    _check_mlflow,
    _check_gate,
    _check_inputs,
)
