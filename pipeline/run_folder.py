"""Names of the files in the folder of a run, and the entries of result.json. Comments name the code that uses a file."""

from typing import Any, TypedDict

# run/resume.py saves the job before training starts, so that the run can resume with it. report/ reads the job, too.
JOB = "job.json"
# run/launch.py writes the result last. report/, sweep/, `run` and a later start of the same run read it.
RESULT = "result.json"
FAILED = "failed.json"  # run/launch.py writes why a run failed, for report/
EVALUATION = "evaluation.json"  # stages/evaluate.py writes tables, for report/ and for a resumed evaluation
LOG = "log.txt"  # system/terminal.py writes every line of all attempts, for the user
REPORT = "report.html"  # report/ writes the page, for the user and for MLflow
PARTS = "parts"  # run/parts.py writes the results of finished chunks of inference, to resume from them
DAMAGED = "damaged"  # run/checkpoints.py moves damaged checkpoints into this folder, for the user
SWEEP = "sweep.json"  # commands/sweep.py writes the state of a sweep, to resume from it

# Files of a checkpoint.
DIGESTS = "digests.json"  # run/checkpoints.py writes the digests of the other files last, and verifies them
OUTCOME = "outcome.json"  # run/worker.py writes the entries of result.json into the last checkpoint
PAIRS, DOUBTFUL = "pairs.json", "doubtful.json"  # stages/rm.py writes eval pairs, for report/
BEST = "best.json"  # run/best.py writes and reads the best evaluation so far


class Result(TypedDict, total=False):
    """The content of result.json. A stage that runs in Ray Train's workers writes all entries, except those with a condition."""

    stage: str
    name: str
    folder: str
    inputs: dict[str, str]  # {policy, reward.0, ...: pinned version}
    metrics: dict[str, float]  # final metrics, which the gate checked
    samples: list[dict[str, Any]]  # prompts with completions before and after training
    # the step whose weights were kept, and the metric that chose it; only if the stage trains
    kept: dict[str, Any]
    ended: dict[str, Any]  # the last step, and the reason for an early stop; only if the stage trains
    checkpoint: str  # folder of the last checkpoint
    adapter: str | None  # folder of the trained adapter, or None if the stage trains nothing
    # The next five entries describe the version that the run registered or promoted. They are None if there is no version.
    registered_model: Any  # name of the registered model
    version: Any  # number of the version, as text
    alias: Any  # the alias, or None if it did not move
    gate: Any  # `passed`, or `failed` and the reason
    champion: Any  # the version that the gate compared with
    mlflow_run_id: Any  # as text
    tracking_uri: str
    versions: dict[str, str]  # {library: its version}
    cost: dict[str, Any]  # GPU hours and dollars
    judges: dict[str, dict[str, float]]  # {input: answers and dollars}; only with LLM judges
    peak_memory_bytes: int
    # GPUs, tokens and completions, until the driver has computed `cost`; not in the file
    usage: dict[str, Any]
    train_seconds: float  # time in the workers
    seconds: float  # time of the command
    data: dict[str, Any]  # digests of the rows, and the report on them; only if the job reads rows
    job: dict[str, Any]  # the resolved job
    output: str  # the file that generate, collect or score has written, and three entries about its rows
    rows: int
    rows_done_now: int
    counts: dict[str, int]
    exported: dict[str, Any]  # what export has written
    hub: dict[str, Any]  # repository and commit to which export has pushed
