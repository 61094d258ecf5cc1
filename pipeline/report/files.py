"""The JSON files that a run leaves, read as what they should be: a damaged one is named instead of drawn."""

import json
from typing import Any

from pipeline.config import JOBS
from pipeline.errors import InputError
from pipeline.system import storage

LARGEST = 256 << 20  # bytes; a result.json has a few thousand
NUMBER = (int, float)
MOST = 1e12  # seconds
# What the report takes from each file: {dotted key: its type}. Those that are not NEEDED may be missing, or null.
JOB = {
    "stage": str, "model": dict, "model.name_or_path": str, "data": dict, "scaling": dict, "gate": dict, "run": dict,
    "run.name": str, "run.storage_path": str, "mlflow": dict, "mlflow.tracking_uri": str,
}  # fmt: skip
RESULT = {
    "stage": str, "metrics": dict, "metrics.*": NUMBER, "samples": list, "samples.*": dict, "inputs": dict, "inputs.*": str,
    "kept": dict, "kept.step": NUMBER, "kept.by": str,
    "kept.value": NUMBER, "ended": dict, "ended.early": str, "data": dict, "data.report": dict, "versions": dict, "seconds": NUMBER, "train_seconds": NUMBER,
    "peak_memory_bytes": NUMBER, "tracking_uri": str, "mlflow_run_id": str, "checkpoint": str, "adapter": str,
    "registered_model": str, "version": str, "alias": str, "gate": str, "timeline": dict, "timeline.update": NUMBER,
    "timeline.seconds": NUMBER, "timeline.spans": list, "timeline.spans.*.who": str, "timeline.spans.*.what": str,
    "timeline.spans.*.begin": NUMBER, "timeline.spans.*.end": NUMBER,
}  # fmt: skip
FAILED = {"error": str, "traceback": str, "seconds": NUMBER, "tracking_uri": str, "mlflow_run_id": str}
NEEDED = (
    "stage",
    "model.name_or_path",
    "run.name",
    "run.storage_path",
    "mlflow",
    "metrics",
    "error",
    "samples.*",
    "inputs.*",
    "timeline.spans.*.who",
    "timeline.spans.*.what",
    "timeline.spans.*.begin",
    "timeline.spans.*.end",
)


def read(folder: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """job.json, result.json and failed.json of a run's folder; {} for one that is not there.

    Raises:
        InputError: naming the file that is damaged, and what in it.
    """
    job, result, failed = (
        as_shape(content(path), shape, path) if storage.exists(path := storage.join(folder, name)) else {}
        for name, shape in (("job.json", JOB), ("result.json", RESULT), ("failed.json", FAILED))
    )
    if result and result["stage"] != job["stage"]:
        raise InputError(
            f"{folder}: result.json is of a {result['stage']} run, but job.json of a {job['stage']} run; bring back the one "
            "that belongs here"
        )
    return job, result, failed


def content(path: str) -> Any:
    """The value of a JSON file. Raises InputError when it is none."""
    try:
        fs, inner = storage.filesystem(path)
        if (size := fs.get_file_info(inner).size or 0) > LARGEST:
            raise ValueError(f"{size >> 20} MiB")
        return storage.read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: found no JSON ({type(error).__name__}: {error}); expected what a run leaves there. Bring the file back, "
            "or run the job again with run.fresh=true"
        ) from error


def as_shape(value: Any, shape: dict[str, Any], path: str) -> dict[str, Any]:
    """The value, proved to have the keys and types of `shape`. Raises InputError naming file and key."""

    def wrong(key: str, value: Any, expected: str) -> InputError:
        shown = "nothing" if value is None else json.dumps(value, default=str)[:80]
        return InputError(
            f"{path}: {key!r}: found {shown}, expected {expected}; bring the file back, as the run left it"
        )

    if not isinstance(value, dict):
        raise wrong("content", value, "a JSON object")
    for key, kind in shape.items():
        for item in _values(value, key.split(".")):
            if not isinstance(item, kind) and (item is not None or key in NEEDED):
                raise wrong(key, item, "a number" if kind is NUMBER else f"a {kind.__name__}")
            if (
                kind is NUMBER
                and item is not None
                and not abs(item) < MOST
                and key.endswith(("seconds", ".begin", ".end"))
            ):
                raise wrong(key, item, "a number of seconds")
    if value.get("stage", JOBS[0]) not in JOBS:
        raise wrong("stage", value["stage"], f"one of {', '.join(JOBS)}")
    return value


def _values(value: Any, parts: list[str]) -> list[Any]:
    """What stands at a dotted key, `*` being any: [None] where nothing does."""
    if not parts:
        return [value]
    if parts[0] == "*":
        items = value.values() if isinstance(value, dict) else value or []
        return [found for item in items for found in _values(item, parts[1:])]
    return _values(value.get(parts[0]) if isinstance(value, dict) else None, parts[1:])
