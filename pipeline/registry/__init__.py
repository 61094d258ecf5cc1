"""The only package that knows MLflow, and what `mlflow.also` names beside it.

The driver owns a run: it opens it before training, registers what came out, and ends it. Rank 0 of the workers
logs metrics to the same run by its id. A registered version is the adapter folder as it was saved (adapter, head,
tokenizer, lineage.json), with tags that say where it comes from. Whatever is registered has been downloaded again
first and compared file by file.
"""

from pipeline.registry.database import file_of_uri
from pipeline.registry.metrics import MetricLog, MLflowRun
from pipeline.registry.mirrors import Curves, check_mirrors
from pipeline.registry.runs import (
    end_interrupted,
    find_run,
    history,
    log_figures,
    log_files,
    mlflow_run,
    recorded,
    tag_run,
    under,
)
from pipeline.registry.server import check, client, first_line, look, tracking_uri, uri_of, wait_for_server
from pipeline.registry.versions import (
    Version,
    aliases,
    fetch,
    other_base,
    parameters,
    passes,
    pin,
    promote,
    publish,
    tags,
    version,
)

__all__ = [
    "Curves",
    "MLflowRun",
    "MetricLog",
    "Version",
    "aliases",
    "check",
    "check_mirrors",
    "client",
    "end_interrupted",
    "fetch",
    "file_of_uri",
    "find_run",
    "first_line",
    "history",
    "log_figures",
    "log_files",
    "look",
    "mlflow_run",
    "other_base",
    "parameters",
    "passes",
    "pin",
    "promote",
    "publish",
    "recorded",
    "tag_run",
    "tags",
    "tracking_uri",
    "under",
    "uri_of",
    "version",
    "wait_for_server",
]
