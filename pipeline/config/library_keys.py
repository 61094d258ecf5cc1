"""Facts that the config classes of TRL, peft and Ray lack: useful numbers and words, and keys that the pipeline sets."""

from __future__ import annotations

from pipeline.intervals import table

_DATA = "the `data` section reads, templates and tokenizes rows once, before training"
_HUB = "models go to the MLflow registry (mlflow.registered_model)"
_MODEL = "the `model` section decides how the base is loaded"
_ORDER = (
    "the pipeline draws the batches, so that an epoch has each row once and a resumed run continues exactly"
)
_REPORT = "metrics go to MLflow, and to what mlflow.also names"
_SHARD = "adapters train data-parallel over scaling.num_workers; model.fsdp shards the frozen base"
_INIT = (
    "an initialization from data rewrites base weights that all adapters share; see lora.init_lora_weights"
)
_VARIANT = "an experimental kind of LoRA, which the shared base does not support"
# Keys of the libraries that would break guarantees of the pipeline.
REFUSED: dict[str, dict[str, str]] = {
    "trainer": {
        "output_dir": "checkpoints go to <run.storage_path>/<run.name>",
        "run_name": "use run.name",
        "report_to": "metrics go to MLflow; use mlflow.also=[wandb] or [tensorboard] for more",
        "resume_from_checkpoint": "the same command with the same run.name continues; run.fresh=true starts over",
        "save_total_limit": "use run.num_to_keep",
        "save_only_model": "a checkpoint without optimizer and random state cannot be resumed exactly",
        "load_best_model_at_end": "use run.keep=best",
        "metric_for_best_model": "use run.metric_for_best_model with run.keep=best",
        "greater_is_better": "use run.greater_is_better with run.keep=best",
        "remove_unused_columns": "the trainer needs all of the tokenized columns",
        "max_length": "use data.max_length and data.too_long, which count and report rows that are cut or dropped",
        "auto_find_batch_size": "it would change the global batch; set trainer.per_device_train_batch_size",
        "model_init_kwargs": _MODEL,
        "trust_remote_code": "use model.trust_remote_code",
        "chat_template_path": "use model.chat_template",
        "eos_token": "the end-of-sequence token is the tokenizer's own",
        "pad_token": "the pad token follows from the tokenizer and is never its end-of-sequence token",
        "truncation_mode": "use data.too_long",
        "packing_strategy": "packed rows contain complete conversations, best fit first",
        "use_cache": "training needs no cache, and with one, packed rows would attend to each other",
        "enable_jit_checkpoint": "preemption notices write a checkpoint anyway",
        "batch_eval_metrics": "metrics are TRL's",
        "eval_packing": "evaluation rows are packed as training rows are",
        "disable_tqdm": "progress is printed once for all workers",
        "ddp_find_unused_parameters": "an adapter's parameters are all used",
        **table(
            {
                _ORDER: """ignore_data_skip train_sampling_strategy length_column_name shuffle_dataset
                    dataloader_drop_last accelerator_config""",
                _DATA: "dataset_text_field dataset_kwargs dataset_num_proc label_names",
                "only the completions are trained; the labels are made with the data": "completion_only_loss assistant_only_loss",
                _REPORT: "project trackio_space_id trackio_bucket_id trackio_static_space_id",
                _SHARD: "deepspeed fsdp fsdp_config parallelism_config",
                "Ray Train sets it for each worker": "local_rank ddp_backend",
                "the stage decides it": "do_train do_eval do_predict",
                _HUB: """push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision""",
            }
        ),
    },
    "lora": {
        "modules_to_save": "the base stays frozen and shared; the score head of a reward is always trained and saved",
        "layer_replication": "it changes the base, which all adapters share",
        "trainable_token_indices": "it trains rows of the base's embedding, which all adapters share",
        **table(
            {
                "the stage sets it": "task_type peft_type peft_version auto_mapping inference_mode",
                _MODEL: "base_model_name_or_path revision",
                "the base is a transformers model": "megatron_config megatron_core",
                _INIT: "loftq_config eva_config corda_config lora_ga_config",
                _VARIANT: """arrow_config kasa_config velora_config monteclora_config use_bdlora runtime_config
                    alora_invocation_tokens use_qalora qalora_group_size target_parameters ensure_weight_tying""",
            }
        ),
    },
    "scaling": {
        "trainer_resources": "Ray Train 2 no longer has it; the driver takes no CPU",
        **table(
            {
                "workers train on CPUs or on NVIDIA GPUs": "use_tpu topology",
            }
        ),
    },
}

SEED = "[0, 4294967295]"  # numpy's
LARGEST_BATCH = 1 << 20
ROWS = f"[1, {LARGEST_BATCH}]"
STEPS = "(0, 1) or whole [1, 1000000000]"  # a share of the run, or a count
# Allowed numbers. The libraries accept others, and fail an hour later or learn nothing.
LIMITS: dict[str, dict[str, str]] = {
    "lora": table(
        {
            "[1, 8192]": "r",
            "[1, 1000000]": "lora_alpha",
            "[0, 0.99]": "lora_dropout",
            "[0, 100000]": "layers_to_transform",
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
            "0 or [0.000001, 1000000]": "max_grad_norm",  # less underflows
            "[0, 1000000]": """neftune_noise_alpha center_rewards_coefficient router_aux_loss_coef
                loss_weights""",
            "[0, 1000]": "desirable_weight undesirable_weight",
            "[0, 1000000000]": "eval_delay",
            "(0, 100]": "learning_rate",
            "[0, 100]": "weight_decay",
            "[0, 1)": "adam_beta1 adam_beta2 label_smoothing_factor f_alpha_divergence_coef",
            "[0, 0.5)": "label_smoothing",  # the share of swapped pairs
            "[0, 1]": "ld_alpha",
            "[1e-30, 1]": "adam_epsilon",
            "[0, 256]": "dataloader_num_workers",
            "[1, 1000000]": "ddp_timeout",
        }
    ),
}
LEVELS = "debug info warning error critical passive"
# Text keys with a few allowed words, which the libraries check late.
WORDS = {
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
KTO_LOSSES = "kto apo_zero_unpaired"


def words(section: str, key: str, name: str) -> list[str]:
    """Returns the words that a text key of the library's class `name` may have; none if it may have any text."""
    losses = {"SFTConfig": WORDS["trainer.loss_type"], "DPOConfig": DPO_LOSSES, "KTOConfig": KTO_LOSSES}
    found = (
        losses.get(name, "")
        if f"{section}.{key}" == "trainer.loss_type"
        else WORDS.get(f"{section}.{key}", "")
    )
    return found.split()
