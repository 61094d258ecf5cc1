"""The only package that uses MLflow, and the trackers that `mlflow.report_to` names.

The driver opens a run before training, registers the adapter, and ends the run. Rank 0 of the workers logs metrics to the same
run by its id. A registered version is the adapter folder as it was saved (adapter, head, tokenizer, lineage.json), with tags
about its origin. Before the registration, the uploaded files are downloaded and compared with the folder.
"""

from pipeline.registry.champion import Champion, Gate, conditions, evaluate_gate, measured_on
from pipeline.registry.curves import Curves, MLflowRun, check_trackers, open_curves
from pipeline.registry.runs import (
    end_finished,
    end_interrupted,
    find_run,
    log_files,
    mlflow_run,
    nested_under,
    read_curves,
    read_run,
)
from pipeline.registry.store import (
    Tracking,
    check_reachable,
    check_store,
    client,
    file_of_uri,
    uri_of,
)
from pipeline.registry.versions import (
    Missing,
    Version,
    fetch,
    pin,
    promote,
    publish,
    read_parameters,
    read_version,
)
