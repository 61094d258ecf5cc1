"""The only package that knows MLflow, and the trackers that `mlflow.report_to` names.

The driver owns a run: it opens it before training, registers what came out, and ends it. Rank 0 of the workers logs metrics
to the same run by its id. A registered version is the adapter folder as it was saved (adapter, head, tokenizer, lineage.json),
with tags that name its origin. Before registration the files are downloaded again and compared.
"""

from pipeline.registry.champion import Champion, Gate, conditions, evaluate_gate, measured_on
from pipeline.registry.curves import Curves, MLflowRun, check_trackers, open_curves
from pipeline.registry.runs import (
    end_finished,
    end_interrupted,
    find_run,
    history,
    log_files,
    mlflow_run,
    nested_under,
    recorded,
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
    other_base,
    parameters,
    pin,
    promote,
    publish,
    version,
)
