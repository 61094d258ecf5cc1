"""What TRL, peft and Ray do not say of their keys: the numbers and words that make sense, and keys that a job may not have."""

from __future__ import annotations

from pipeline.intervals import table

_DATA = "rows are read, templated and tokenised once, before training, by the `data` section"
_HUB = "models go to the MLflow registry (mlflow.registered_model)"
_MODEL = "how the base is loaded is said in the `model` section"
_ORDER = "the pipeline draws the batches, so that every row is seen exactly once an epoch and a resumed run continues where it stopped"
_REPORT = "metrics go to MLflow, and to what mlflow.also names"
_SHARD = "adapters train data-parallel over scaling.num_workers; model.fsdp puts the frozen base in shards"
_INIT = (
    "an initialisation from data rewrites base weights that all adapters share; see lora.init_lora_weights"
)
_VARIANT = "an experimental kind of LoRA, which the shared base and its adapters' files do not know"
# Keys that the libraries know and that would break what the pipeline promises.
REFUSED: dict[str, dict[str, str]] = {
    "trainer": {
        "output_dir": "checkpoints go to <run.storage_path>/<run.name>",
        "run_name": "use run.name",
        "report_to": "metrics go to MLflow; use mlflow.also=[wandb] or [tensorboard] for more",
        "resume_from_checkpoint": "the same command with the same run.name continues; run.fresh=true starts anew",
        "save_total_limit": "use run.num_to_keep",
        "save_only_model": "a checkpoint without optimizer and random state cannot be resumed exactly",
        "load_best_model_at_end": "use run.keep=best",
        "metric_for_best_model": "use run.metric_for_best_model with run.keep=best",
        "greater_is_better": "use run.greater_is_better with run.keep=best",
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
        "completion_only_loss": "only the completions are trained; the labels are made with the data",
        "assistant_only_loss": "only the completions are trained; the labels are made with the data",
        "label_names": _DATA,
        "packing_strategy": "packed rows hold whole conversations, best fit first",
        "use_cache": "training needs no cache, and with one packed rows would see each other",
        "enable_jit_checkpoint": "a preemption notice commits a checkpoint anyway",
        "batch_eval_metrics": "the metrics are TRL's own",
        **dict.fromkeys(
            ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), _REPORT
        ),
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
        **dict.fromkeys(("megatron_config", "megatron_core"), "the base is a transformers model"),
        **dict.fromkeys(("loftq_config", "eva_config", "corda_config", "lora_ga_config"), _INIT),
        **dict.fromkeys(
            (
                "arrow_config",
                "kasa_config",
                "velora_config",
                "monteclora_config",
                "use_bdlora",
                "runtime_config",
                "alora_invocation_tokens",
                "use_qalora",
                "qalora_group_size",
                "target_parameters",
                "ensure_weight_tying",
            ),
            _VARIANT,
        ),
    },
    "scaling": {
        "trainer_resources": "Ray Train 2 no longer has it; the driver takes no CPU",
        **dict.fromkeys(("use_tpu", "topology"), "workers train on CPUs or on NVIDIA GPUs"),
    },
}

SEED = "[0, 4294967295]"  # numpy's
LARGEST_BATCH = 1 << 20
ROWS = f"[1, {LARGEST_BATCH}]"
STEPS = "(0, 1) or whole [1, 1000000000]"  # a share of the run, or a count
# Allowed numbers, of values that the libraries accept, and then fail an hour later or learn nothing.
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
LEVELS = "debug info warning error critical passive"
# Text keys for which the libraries know a few words, and check them late.
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
