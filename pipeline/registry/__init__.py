"""Records runs and registers models in MLflow, and sends metrics to the other trackers that `mlflow.report_to` names.

No other package imports MLflow. The driver opens an MLflow run before training, registers the adapter, and ends the MLflow run.
The worker with rank 0 logs metrics to the same MLflow run. A registered version is a copy of the adapter folder (adapter, head,
tokenizer, lineage.json), with tags that describe how it was trained. Before the registration, the driver downloads the uploaded
files and compares them with the folder.
"""

from pipeline.registry.champion import Champion, Gate, check_conditions, evaluate_gate, measured_on
from pipeline.registry.curves import Curves, MLflowRun, check_trackers, open_curves
from pipeline.registry.runs import (
    end_finished,
    end_interrupted,
    find_run,
    log_files,
    mlflow_run,
    nested_under,
    read_curves,
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
