"""Tests undocumented details of libraries that the pipeline uses. A test fails if a new version of a library
changes a detail. Each test names the file of the pipeline that relies on a detail. If a test fails, read the comment in this
file, and adapt the file or remove the workaround.
"""

import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import ray
import torch

from pipeline.errors import InputError
from pipeline.run import session
from pipeline.settle import placement
from pipeline.system import console

FUNCTION = "ray.train.v2.api.data_parallel_trainer.DataParallelTrainer"
# (object, a text that its source code contains, the file that needs the text)
SOURCES = [
    # If Ray changed the next two details, an embedded run could end 12 s late, with a traceback.
    (f"{FUNCTION}._create_default_callbacks", "PlacementGroupCleanerCallback()", "pipeline/run/fit.py"),
    (f"{FUNCTION}.fit", "_create_default_callbacks()", "pipeline/run/fit.py"),
    # If Ray renamed `_register_sigint_handler`, Ctrl-C would end a run with status 1, and workers would keep running.
    (FUNCTION, "self._register_sigint_handler(controller)", "pipeline/run/fit.py"),
    ("ray.dashboard.modules.job.job_head", "No available agent", "pipeline/cloud/submit.py"),
    (
        "ray.dashboard.modules.job.job_manager.JobManager.submit_job",
        "already exists",
        "pipeline/cloud/submit.py",
    ),
    ("ray._private.worker", '"ray_print_logs"', "pipeline/system/console.py"),
    # If bitsandbytes renamed `support_avx512bf16_for_cpu`, sampling and training would round the base's weights differently.
    ("bitsandbytes.nn.Linear4bit.forward", "self.support_avx512bf16_for_cpu", "pipeline/models/base.py"),
    # If a library no longer prints a message, remove the message from NOISE.
    ("ray.train.v2._internal.execution.context", console.NOISE[1], "pipeline/system/console.py"),
    ("bitsandbytes.backends.cpu.ops", console.NOISE[2], "pipeline/system/console.py"),
]
# (function, parameters that the pipeline passes or overrides, the file that does so)
PARAMETERS = [
    (f"{FUNCTION}._register_sigint_handler", "self controller", "pipeline/run/fit.py"),
    ("ray._private.state.state.get_max_resources_from_cluster_config", "", "pipeline/settle/placement.py"),
    ("ray.cluster_utils.Cluster", "initialize_head head_node_args", "tools/chaos/faults.py"),
    ("transformers.trainer_utils.seed_worker", "num_workers rank", "pipeline/stages/exact_batches.py"),
]


@pytest.mark.parametrize(("name", "text", "file"), SOURCES)
def test_the_source_still_has_the_text(name, text, file):
    assert text in inspect.getsource(pkgutil.resolve_name(name)), f"{file} needs it"


@pytest.mark.parametrize(("name", "parameters", "file"), PARAMETERS)
def test_the_function_still_takes_the_parameters(name, parameters, file):
    accepted = inspect.signature(pkgutil.resolve_name(name)).parameters
    assert set(parameters.split()) <= set(accepted), f"{file} needs them"


def test_the_environment_variables_are_still_read():
    """Ray silently ignores unknown variables, so Ray's sources or binaries must contain the names of the pipeline's variables."""
    from mlflow import environment_variables
    from ray.train.v2._internal.constants import ENV_VARS_TO_PROPAGATE

    root, names = Path(ray.__file__).parent, set()
    for path in root.rglob("*.py"):
        names |= set(re.findall(rb'"(RAY_\w+)"', path.read_bytes()))
    for binary in ("_raylet.so", "core/src/ray/raylet/raylet"):
        names |= set(re.findall(rb"RAY_\w+", (root / binary).read_bytes()))
    # pipeline/run/session.py
    variables = {
        *session.ENVIRONMENT,
        *session.EMBEDDED,
        *session.secured_environment(),
    }
    needed = {name for name in variables if name.startswith("RAY_")}
    needed |= {"RAY_AUTH_TOKEN_PATH", "RAY_UP_enable_autoscaler_v2"}  # cloud/submit.py, cloud/clusterfile.py
    assert needed <= {name.decode() for name in names}
    # Ray Train must pass these variables on to its controller and workers.
    assert {name for name in needed if name.startswith("RAY_TRAIN_")} <= set(ENV_VARS_TO_PROPAGATE)
    # pipeline/registry/store.py, client
    for name in "DISABLE_TELEMETRY LOGGING_LEVEL HTTP_REQUEST_MAX_RETRIES HTTP_REQUEST_TIMEOUT ENABLE_ARTIFACTS_PROGRESS_BAR".split():
        assert getattr(environment_variables, f"MLFLOW_{name}").name == f"MLFLOW_{name}"


def test_a_workers_error_is_still_found_inside_what_ray_train_wraps_around_it():
    """`causes_of` in pipeline/errors.py reads `worker_failures` and `_base_exc`.

    If Ray renamed an attribute, wrong input would end with status 1.
    """
    from ray import cloudpickle
    from ray.train import WorkerGroupError
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

    from pipeline.__main__ import input_error

    raised = UserExceptionWithTraceback(InputError("job.yaml:3"), "traceback")
    wrapped = WorkerGroupError("failed", {0: raised})
    error = input_error(cloudpickle.loads(cloudpickle.dumps(wrapped)))
    assert type(error) is InputError and str(error) == "job.yaml:3"


def test_the_autoscalers_events_are_still_marked_in_its_log(monkeypatch):
    """`show_ray_lines` in pipeline/system/console.py uses Ray's filter_autoscaler_events."""
    from ray._private.worker import filter_autoscaler_events

    monkeypatch.setattr("ray.autoscaler.v2.utils.is_autoscaler_v2", lambda: False)
    lines = ["INFO a line of its log", "INFO :event_summary:Adding 1 node(s)"]
    assert list(filter_autoscaler_events(lines))[-1] == "Adding 1 node(s)"


def test_the_states_of_a_run_that_waits_for_workers_still_have_these_names():
    """The callback in pipeline/settle/placement.py treats a worker in an unknown state as placed, so a run could wait forever."""
    from ray.train.v2._internal.execution.controller import state

    assert set(placement.WAITING) <= set(vars(state))


def test_ray_still_uploads_the_files_that_preflight_checks(tmp_path):
    """`upload_files` in pipeline/cloud/preflight.py calls Ray's `_dir_travel`."""
    import zipfile

    from ray._private.runtime_env.packaging import create_package

    from pipeline.cloud.preflight import upload_files

    folder = tmp_path / "work"
    for name in ("a.py", "data/rows.jsonl", "runs/x/big.bin", "left/b.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / ".gitignore").write_text("runs/\n")
    (folder / ".rayignore").write_text("left/\n")
    create_package(str(folder), tmp_path / "package.zip", include_gitignore=True)
    with zipfile.ZipFile(tmp_path / "package.zip") as package:
        uploaded = {name for name in package.namelist() if not name.endswith("/")}
    assert set(upload_files(str(folder))) == uploaded == {"a.py", "data/rows.jsonl", ".gitignore", ".rayignore"}  # fmt: skip


def test_the_hidden_command_that_drains_a_node_still_takes_our_options():
    """jobs/cloud/spot.py and tools/chaos/faults.py use `ray drain-node`."""
    from ray.scripts.scripts import cli

    options = {option for parameter in cli.commands["drain-node"].params for option in parameter.opts}
    ours = "--address --node-id --reason --reason-message --deadline-remaining-seconds"
    assert set(ours.split()) <= options


def test_the_reward_trainer_still_puts_the_chosen_first():
    """`score_pairs` in pipeline/stages/rm.py takes the first half of a batch for the chosen completions."""
    from trl.trainer.reward_trainer import DataCollatorForPreference

    rows = [{"chosen_ids": [7, 8 + i], "rejected_ids": [9, 7]} for i in range(4)]
    ids = DataCollatorForPreference(pad_token_id=0)(rows)["input_ids"].tolist()
    assert ids == [*(row["chosen_ids"] for row in rows), *(row["rejected_ids"] for row in rows)]


def test_a_prepared_loader_still_keeps_its_last_batch():
    """ExactBatches sets `_drop_last` of a prepared dataloader.

    Without `_drop_last`, an epoch's last batch would have no metrics.
    """
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader

    remainders = []
    for drop in (False, True):
        loader = prepare_data_loader(
            DataLoader(range(5), batch_size=2), device=torch.device("cpu"), num_processes=1, process_index=0,
            put_on_device=True,
        )  # fmt: skip
        assert loader._drop_last is False
        loader._drop_last = drop
        for _ in loader:
            remainders.append(loader.remainder)
    assert remainders == [1] * 3 + [-1] * 3
