"""One measurement of the pipeline: `python tests/bench/stage_ours.py STAGE SIZE`, started by `make bench`.

The command line as a user types it, in this process, on an embedded Ray. When a step ended is read from MLflow; the
memory is the worker's, which holds the model.
"""

import json
import shutil
import sys

from sizes import LORA, ROOT, SIZES, WORK, Clock, arguments, model_folder


def main(stage: str, name: str) -> None:
    clock, storage = Clock(), WORK / name / "runs"
    shutil.rmtree(storage, ignore_errors=True)  # no cached rows: preparing them is part of the start
    rows = "demonstrations" if stage == "sft" else "preferences"
    settings = [
        f"model.name_or_path={model_folder(name)}",
        f"data.train={WORK / name / rows}.jsonl",
        "data.eval=null",
        "data.max_length=null",
        "data.batch_size=null",
        f"lora={json.dumps(LORA)}",
        f"run.storage_path={storage}",
        f"run.name={stage}",
        "gate={}",
        f"mlflow.registered_model=bench-{stage}",
        "mlflow.tracking_uri=null",
        f"trainer={json.dumps(arguments(stage, name))}",  # all of it: TRL's defaults for the rest, as on the other side
        *(["policy=base"] if stage == "dpo" else []),
    ]
    from pipeline.__main__ import main as command

    status = command([stage, str(ROOT / f"jobs/demo/{stage}.yaml"), *settings])
    if status:
        sys.exit(status)
    from mlflow import MlflowClient

    result = json.loads((storage / stage / "result.json").read_text())
    client = MlflowClient(tracking_uri=result["tracking_uri"])
    for point in sorted(client.get_metric_history(result["mlflow_run_id"], "loss"), key=lambda p: p.step):
        clock.step(point.step, point.timestamp / 1000)
    clock.write(result["peak_memory_bytes"], SIZES[name].warmup)


if __name__ == "__main__":
    main(*sys.argv[1:])
