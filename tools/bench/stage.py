"""Measures the training speed of sft, rm or dpo. `make bench` runs `python tools/bench/stage.py ours|plain SIZE STAGE`."""

import json
import shutil
import sys
from typing import Any

from sizes import LEARNING_RATE, LORA, ROOT, SIZES, Clock, Size, high_water

ROWS = {"sft": "demonstrations", "rm": "preferences", "dpo": "preferences"}


def arguments(stage: str, size: Size) -> dict[str, Any]:
    """Returns the arguments of TRL's trainer for a stage, which are the same in both programs."""
    return {
        "max_steps": size.steps,
        "per_device_train_batch_size": size.rows if stage == "sft" else size.rows // 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "logging_steps": size.logging_steps,
        "logging_first_step": True,
        "eval_strategy": "no",
        "eval_on_start": False,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "bf16": False,
        "seed": 1,
    }


def ours(name: str, stage: str) -> None:
    """Runs the command line in this process, on an embedded Ray.

    Reads from MLflow when each step ended. Measures the memory of the worker, which holds the model.
    """
    clock, size = Clock(), SIZES[name]
    storage = size.folder / "runs"
    # Deletes cached rows, because the time to the first step includes preparing the rows.
    shutil.rmtree(storage, ignore_errors=True)
    settings = [
        f"model.name_or_path={size.model}",
        f"data.train={size.folder / ROWS[stage]}.jsonl",
        "data.eval=null",
        "data.max_length=null",
        "data.batch_size=null",
        f"lora={json.dumps(LORA)}",
        f"run.storage_path={storage}",
        f"run.name={stage}",
        "gate={}",
        f"mlflow.registered_model=bench-{stage}",
        "mlflow.tracking_uri=null",
        # Replaces the full section `trainer`, so that both programs use TRL's defaults.
        f"trainer={json.dumps(arguments(stage, size))}",
        *(["policy=base"] if stage == "dpo" else []),
    ]
    from pipeline.__main__ import main as command

    if status := command([stage, str(ROOT / f"jobs/demo/{stage}.yaml"), *settings]):
        sys.exit(status)
    from mlflow import MlflowClient

    result = json.loads((storage / stage / "result.json").read_text())
    client = MlflowClient(tracking_uri=result["tracking_uri"])
    for point in sorted(client.get_metric_history(result["mlflow_run_id"], "loss"), key=lambda p: p.step):
        clock.step(point.step, point.timestamp / 1000)
    clock.write(result["peak_memory_bytes"], size.warmup)


def plain(name: str, stage: str) -> None:
    """Trains on the same raw rows and base and with the same arguments as `ours`, in one plain process.

    TRL applies the chat template and tokenizes.
    """
    import datasets
    import trl
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

    clock, size = Clock(), SIZES[name]

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: object) -> None:
            if "loss" in logs:
                clock.step(state.global_step)

    kind, folder = {"sft": "SFT", "rm": "Reward", "dpo": "DPO"}[stage], size.model
    if stage == "rm":
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32", num_labels=1)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(size.folder / "bare"),
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **arguments(stage, size),
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_list(raw_rows(stage, size)),
        processing_class=size.tokenizer(),
        peft_config=LoraConfig(task_type="SEQ_CLS" if stage == "rm" else "CAUSAL_LM", **LORA),
        callbacks=[Watch()],
    )
    trainer.train()
    clock.write(high_water(), size.warmup)


def raw_rows(stage: str, size: Size) -> list[dict[str, Any]]:
    """Returns the rows of a stage's file as lists of messages, for TRL."""
    rows = []
    for line in (size.folder / f"{ROWS[stage]}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if stage == "sft":
            rows.append({"prompt": row["messages"][:-1], "completion": row["messages"][-1:]})
        else:
            say = {key: [{"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")}
            rows.append({"prompt": [{"role": "user", "content": row["prompt"]}], **say})
    return rows


if __name__ == "__main__":
    {"ours": ours, "plain": plain}[sys.argv[1]](*sys.argv[2:])
