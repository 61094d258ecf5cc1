"""What the code relies on in its libraries and what they do not promise: after a version bump, a test here names what broke.

One test for each private name, undocumented behaviour or file format. Its docstring names the file of ours that relies on
it: read that file's comment, then adapt it or drop the workaround. Sections: Ray, TRL and transformers, peft, the others.
"""

import dataclasses
import inspect
import json
import os
import re
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
import toy_ppo as toy
from toy_models import tokenizer

from pipeline.config import gates
from pipeline.errors import InputError
from pipeline.on_ray import placement, session
from pipeline.system import console


def parameters(function):
    return list(inspect.signature(function).parameters)


def takes(function, *positional, **named):
    """Whether a call with these arguments fits the function's signature."""
    try:
        inspect.signature(function).bind(*positional, **named)
    except TypeError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ Ray: settings


@cache
def names_in_ray() -> set[str]:
    """The RAY_ variables that the installed Ray knows: quoted in its sources, or in its binaries."""
    root = Path(ray.__file__).parent
    found: set[bytes] = set()
    for path in root.rglob("*.py"):
        found |= set(re.findall(rb'"(RAY_\w+)"', path.read_bytes()))
    for binary in ("_raylet.so", "core/src/ray/raylet/raylet"):
        found |= set(re.findall(rb"RAY_\w+", (root / binary).read_bytes()))
    return {name.decode() for name in found}


SETTINGS = {
    **dict.fromkeys(
        (key for key in session.ENVIRONMENT if key.startswith("RAY_")), "pipeline/on_ray/session.py"
    ),
    **dict.fromkeys(session.EMBEDDED, "pipeline/on_ray/session.py"),
    **dict.fromkeys(
        (key for key in session.secured() if key.startswith("RAY_")), "pipeline/on_ray/session.py"
    ),
    "RAY_AUTH_TOKEN_PATH": "pipeline/cloud/submit.py",
    "RAY_UP_enable_autoscaler_v2": "pipeline/cloud/clusterfile.py",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_ray_still_reads_the_environment_variable(name):
    assert name in names_in_ray(), f"{SETTINGS[name]} sets {name}, which this Ray ignores"


@pytest.mark.parametrize("name", [name for name in SETTINGS if name.startswith("RAY_TRAIN_")])
def test_ray_train_still_hands_the_setting_to_its_controller(name):
    """pipeline/on_ray/session.py set it in the driver; it takes effect in Ray Train's controller and workers."""
    from ray.train.v2._internal.constants import ENV_VARS_TO_PROPAGATE

    assert name in ENV_VARS_TO_PROPAGATE


def test_an_imported_ray_still_reads_its_security_settings_again():
    """pipeline/on_ray/session.py, _read_by_ray: ENABLE_RAY_CLUSTER, Config.initialize, AuthenticationTokenLoader.reset_cache.

    If this fails, the Ray of a notebook may listen on every interface, or want no token.
    """
    from ray._private import ray_constants, services
    from ray._raylet import AuthenticationMode, AuthenticationTokenLoader, get_authentication_mode

    with session._environment():
        assert get_authentication_mode() == AuthenticationMode.TOKEN
        assert AuthenticationTokenLoader.instance().get_raw_token() == os.environ["RAY_AUTH_TOKEN"]
        assert ray_constants.ENABLE_RAY_CLUSTER is False
        assert services.get_node_ip_address() == "127.0.0.1"


# ------------------------------------------------------------------------------------------------ Ray: its parts


def wait_until(there, patience=20.0):
    give_up = time.monotonic() + patience
    while not (found := there()) and time.monotonic() < give_up:
        time.sleep(0.05)
    return found


@pytest.fixture
def a_worker_of_ray_train(monkeypatch):
    """This process, as Ray Train's functions see a worker of a group of one."""
    ranks = dict.fromkeys(("get_local_rank", "get_node_rank", "get_world_rank"), lambda: 0)
    sizes = dict.fromkeys(("get_local_world_size", "get_world_size"), lambda: 1)
    monkeypatch.setattr("ray.train.get_context", lambda: SimpleNamespace(**ranks, **sizes))
    monkeypatch.setattr("ray.train.torch.get_device", lambda: torch.device("cpu"))
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_a_torch_group_still_forms_through_a_file_and_a_group_of_one_is_still_torn_down(
    a_worker_of_ray_train, tmp_path
):
    """pipeline/on_ray/fit.py calls both private functions of ray.train.torch.config; pipeline/runtime/worker.py,
    leave_group_of_one, undoes them. If this fails, torch's store listens on every interface, or a single worker is in DDP.
    """
    from pipeline.on_ray.fit import _set_torch_distributed_env_vars, _setup_torch_process_group
    from pipeline.runtime.worker import leave_group_of_one

    before = set(os.environ)
    _set_torch_distributed_env_vars()
    assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= set(os.environ) - before
    _setup_torch_process_group(
        backend="gloo", world_rank=0, world_size=1, init_method=f"file://{tmp_path}/store", timeout_s=60
    )
    assert torch.distributed.get_world_size() == 1
    leave_group_of_one(1, use_gpu=False)
    assert not torch.distributed.is_initialized()
    assert "WORLD_SIZE" not in os.environ


def test_ray_train_still_asks_the_torch_config_for_its_backend():
    """pipeline/on_ray/fit.py: FileRendezvous.backend_cls and the worker group that on_start is given."""
    from ray.train._internal.base_worker_group import BaseWorkerGroup
    from ray.train.v2._internal.callbacks.backend_setup import BackendSetupCallback

    from pipeline.on_ray.fit import FileRendezvous, _Backend, _TorchBackend

    assert isinstance(BackendSetupCallback(FileRendezvous())._backend, _Backend)
    assert parameters(_Backend.on_start) == parameters(_TorchBackend.on_start)
    assert takes(BaseWorkerGroup.execute, None, print)
    assert takes(BaseWorkerGroup.execute_single_async, None, 0, print, world_rank=0)
    assert takes(BaseWorkerGroup.get_resources_per_worker, None)
    assert takes(BaseWorkerGroup.__len__, None)


def wrapped_by_a_task():
    from ray.exceptions import RayTaskError

    return RayTaskError("f", "traceback", InputError("job.yaml:3")).as_instanceof_cause()


def wrapped_by_ray_train():
    from ray.train import WorkerGroupError
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

    return WorkerGroupError("failed", {0: UserExceptionWithTraceback(InputError("job.yaml:3"), "traceback")})


@pytest.mark.parametrize("wrapped", [wrapped_by_a_task, wrapped_by_ray_train])
def test_a_workers_error_is_still_found_inside_what_ray_wraps_around_it(wrapped):
    """pipeline/errors.py, causes: `cause`, `worker_failures`, `_base_exc`. If this fails, bad input ends with status 1."""
    from ray import cloudpickle

    from pipeline.__main__ import input_error

    found = input_error(cloudpickle.loads(cloudpickle.dumps(wrapped())))
    assert type(found) is InputError and str(found) == "job.yaml:3"


def test_the_printer_of_worker_logs_is_still_replaced(monkeypatch, capsys):
    """pipeline/system/console.py, attach. If this fails, every line of a worker comes twice, or with Ray's prefix."""
    from ray._private import worker
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    assert re.search(r'add_handler\(\s*"ray_print_logs"', inspect.getsource(worker))
    monkeypatch.setattr(dispatcher, "handlers", [("ray_print_logs", lambda data: print("Ray's own"))])
    console.attach(["sft"])
    dispatcher.emit({"lines": ["step 1"], "is_err": False, "pid": 1, "actor_name": "sft", "task_name": None})
    assert capsys.readouterr().out == "step 1\n"


def test_the_autoscalers_events_are_still_told_from_its_log(monkeypatch):
    """pipeline/system/console.py, show: filter_autoscaler_events."""
    from ray._private.worker import filter_autoscaler_events

    monkeypatch.setattr("ray.autoscaler.v2.utils.is_autoscaler_v2", lambda: False)
    lines = ["INFO a line of its log", "INFO :event_summary:Adding 1 node(s)"]
    assert list(filter_autoscaler_events(lines))[-1] == "Adding 1 node(s)"


def test_what_the_console_silences_is_still_said():
    """pipeline/system/console.py: NOISE. What a library no longer says can be taken out of it."""
    import bitsandbytes
    from ray.train.v2._internal.execution import context

    kernels = Path(bitsandbytes.__file__).parent / "backends/cpu/ops.py"
    assert console.NOISE[0].encode() in (Path(ray.__file__).parent / "_raylet.so").read_bytes()
    assert console.NOISE[1] in inspect.getsource(context)
    assert console.NOISE[2] in kernels.read_text(encoding="utf-8")


def test_ray_trains_cleaner_is_still_where_it_is_left_out():
    """pipeline/on_ray/fit.py, _trainer. If this fails, an embedded run may end 12 s late, in a traceback."""
    from ray.train.v2._internal.callbacks import placement_group_callback
    from ray.train.v2._internal.state import util
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    callbacks = inspect.getsource(DataParallelTrainer._create_default_callbacks)
    assert "PlacementGroupCleanerCallback()" in callbacks
    assert "_create_default_callbacks()" in inspect.getsource(DataParallelTrainer.fit)
    assert "timeout=self._stop_timeout" in inspect.getsource(placement_group_callback)
    assert "get_actor(actor_id" in inspect.getsource(util.is_actor_alive)


def test_the_settings_of_ray_data_still_exist():
    """pipeline/data/read.py, set_up_ray_data: a setting that is gone would be set in vain, and rows may lose their order."""
    context = ray.data.DataContext()
    assert context.execution_options.preserve_order is False
    assert hasattr(context, "print_on_execution_start") and hasattr(context, "enable_progress_bars")


def test_ray_trains_handler_of_ctrl_c_is_still_set_where_it_is_replaced():
    """pipeline/on_ray/fit.py, fit: _register_sigint_handler. If this fails, Ctrl-C ends a run with status 1, workers left."""
    from ray.train.v2._internal.execution.controller.controller import TrainController
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    assert parameters(DataParallelTrainer._register_sigint_handler) == ["self", "controller"]
    assert "self._register_sigint_handler(controller)" in inspect.getsource(DataParallelTrainer)
    assert callable(TrainController.abort)


def test_the_states_in_which_workers_are_waited_for_still_have_these_names():
    """pipeline/on_ray/placement.py, callback. An unknown name counts as placed: a run would wait for ever."""
    from ray.train.v2._internal.execution.callback import ControllerCallback
    from ray.train.v2._internal.execution.controller import state

    names = {name for name, value in vars(state).items() if inspect.isclass(value)}
    assert names >= set(placement.WAITING)
    assert callable(ControllerCallback.after_controller_start)
    changed = ControllerCallback.after_controller_state_update
    assert parameters(changed) == ["self", "previous_state", "current_state"]


def test_ray_still_says_how_far_a_cluster_may_grow():
    """pipeline/on_ray/placement.py, _autoscaler_limits."""
    from ray._private.state import state

    assert parameters(state.get_max_resources_from_cluster_config) == []


def test_the_gpus_of_a_machine_are_still_counted_without_torch():
    """pipeline/on_ray/placement.py, _limits."""
    assert isinstance(placement._limits()["GPU"], int)


def test_the_files_that_are_checked_are_still_those_that_ray_uploads(tmp_path):
    """pipeline/cloud/preflight.py, upload_files: _dir_travel."""
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
    """pipeline/cloud/spot.py and tests/chaos/faults.py: `ray drain-node`."""
    from ray.scripts.scripts import cli

    options = {option for one in cli.commands["drain-node"].params for option in one.opts}
    assert {
        "--address",
        "--node-id",
        "--reason",
        "--reason-message",
        "--deadline-remaining-seconds",
    } <= options


def test_the_jobs_api_still_says_what_a_submission_is_followed_by():
    """pipeline/cloud/submit.py: the fields of JobDetails, the async log, and the words of a head without an agent."""
    from ray.dashboard.modules.job import job_head
    from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

    read = {"submission_id", "status", "metadata", "start_time", "entrypoint", "message", "driver_exit_code"}
    assert read <= set(JobDetails.model_fields)
    assert JobStatus.FAILED.is_terminal() and not JobStatus.RUNNING.is_terminal()
    assert inspect.isasyncgenfunction(inspect.unwrap(JobSubmissionClient.tail_job_logs))
    assert "No available agent" in inspect.getsource(job_head)


# ------------------------------------------------------------------------------------------------ TRL and transformers


ROWS = [{"input_ids": [5, 6, 7, 8 + i], "labels": [-100, 6, 7, 8 + i]} for i in range(8)]
THUMBS = [
    {"prompt_ids": [5, 6], "completion_ids": [7, 8 + i], "KL_completion_ids": [9, 8 + i], "label": i % 2 == 0}
    for i in range(4)
]
PAIRS = [{"prompt_ids": [5, 6], "chosen_ids": [7, 8 + i], "rejected_ids": [9, 7]} for i in range(4)]
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


def rows_of(content):
    import datasets

    return datasets.Dataset.from_list(content)


def tiny(kind="AutoModelForCausalLM", **changes):
    import transformers

    torch.manual_seed(0)
    config = toy.config(vocab_size=len(tokenizer()), **changes)
    return getattr(transformers, kind).from_config(config)


def settings(kind, folder, **more):
    return kind(
        output_dir=str(folder), report_to="none", disable_tqdm=True, use_cpu=True, bf16=False, max_length=None,
        per_device_train_batch_size=2, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def sft(tmp_path_factory):
    """An SFTTrainer after two steps of two micro-batches; `order`: the calls of the methods that we override."""
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from pipeline.runtime.training import save_sums

    folder, order, saved = tmp_path_factory.mktemp("sft"), [], []

    class Noting(SFTTrainer):
        def _prepare_dataset(self, dataset, *more):
            order.append("prepare")
            return super()._prepare_dataset(dataset, *more)

        def get_batch_samples(self, epoch_iterator, num_batches, device):
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
            order.append(f"{len(batches)} batches")
            return batches, items

        def training_step(self, model, inputs, num_items_in_batch=None):
            order.append("step")
            return super().training_step(model, inputs, num_items_in_batch)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            order.append("loss")
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    class Saved(TrainerCallback):
        def on_save(self, args, state, control, **_):
            at = Path(args.output_dir, f"checkpoint-{state.global_step}")
            saved.append({path.name for path in at.iterdir()})
            save_sums(trainer, str(folder / "sums.json"))

    args = settings(
        SFTConfig, folder, max_steps=3, logging_steps=2, save_steps=3, gradient_accumulation_steps=2,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    rows = rows_of(ROWS)
    trainer = Noting(
        tiny(), args, train_dataset=rows, processing_class=tokenizer(), peft_config=LoraConfig(**LORA)
    )
    trainer.add_callback(Saved())
    trainer.train()
    return SimpleNamespace(trainer=trainer, rows=rows, order=order, saved=saved, folder=folder)


def test_sft_still_leaves_tokenised_rows_as_they_are(sft):
    """pipeline/stages/sft.py: dataset_kwargs={"skip_prepare_dataset": True}."""
    assert "prepare" not in sft.order
    assert sft.trainer.train_dataset is sft.rows


def test_a_step_still_fetches_its_micro_batches_and_then_trains_each_in_order(sft):
    """pipeline/data/feed.py, ExactBatches: get_batch_samples puts aside a weight for each training_step to come.

    If this fails, gradients of several workers are weighted wrongly.
    """
    assert sft.order == ["2 batches", *["step", "loss"] * 2] * 3


def test_the_sums_between_two_lines_of_the_log_are_still_where_they_are_saved_from(sft, tmp_path):
    """pipeline/runtime/training.py, save_sums and restore_sums. If this fails, curves break where a run is resumed."""
    from pipeline.runtime.training import restore_sums, save_sums

    trainer, log = sft.trainer, sft.trainer.state.log_history
    saved = json.loads((sft.folder / "sums.json").read_text())
    (logged,) = (entry for entry in log if "loss" in entry)
    assert logged["step"] == saved["last_logged"] == 2
    assert saved["total_loss"] == pytest.approx(2 * logged["loss"], rel=1e-3)
    assert saved["tr_loss"] > 0, "the third step's loss, not logged yet"
    assert saved["total_loss"] + saved["tr_loss"] == pytest.approx(3 * log[-1]["train_loss"])
    assert saved["tokens"] == 3 * 2 * 2 * 4
    assert len(saved["metrics"]["train"]["mean_token_accuracy"]) == 2, "of the third step's micro-batches"
    assert trainer._total_loss_scalar == pytest.approx(3 * log[-1]["train_loss"]), "of all steps, at the end"
    restore_sums(trainer, str(sft.folder / "sums.json"))
    save_sums(trainer, str(tmp_path / "again.json"))
    assert json.loads((tmp_path / "again.json").read_text()) == saved


def test_a_checkpoint_of_a_trainer_still_has_its_files_when_on_save_is_called(sft):
    """pipeline/runtime/training.py, Reporter.on_save, commits the folder; tests/test_security.py names its files."""
    needed = {"trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", "adapter_model.safetensors", "adapter_config.json"}  # fmt: skip
    assert len(sft.saved) == 1 and needed <= sft.saved[0]


def test_the_ranks_of_a_checkpoint_still_have_random_states_of_their_own(sft, tmp_path, monkeypatch):
    """pipeline/runtime/worker.py: every rank of a node writes into one folder."""
    monkeypatch.setattr(type(sft.trainer.args), "world_size", property(lambda _: 2))
    monkeypatch.setattr(type(sft.trainer.args), "process_index", property(lambda _: 1))
    sft.trainer._save_rng_state(str(tmp_path))
    assert os.listdir(tmp_path) == ["rng_state_1.pth"]


def test_trainer_state_json_still_holds_the_curve_and_the_last_step(sft):
    """pipeline/runtime/training.py, _train and _history: a run killed after its last step ends without another one."""
    from transformers import TrainerState

    from pipeline.runtime.training import _history

    state = TrainerState.load_from_json(str(sft.folder / "checkpoint-3/trainer_state.json"))
    assert state.global_step == state.max_steps == 3 and state.epoch
    assert [step for step, numbers in _history(state) if "loss" in numbers] == [2]


def test_an_adapter_is_still_loaded_into_a_trainer_without_training(sft):
    """pipeline/runtime/training.py, _train: _load_from_checkpoint."""
    head = next(p for name, p in sft.trainer.model.named_parameters() if "lora_B" in name)
    trained = head.detach().clone()
    with torch.no_grad():
        head.zero_()
    sft.trainer._load_from_checkpoint(str(sft.folder / "checkpoint-3"))
    assert trained.any() and torch.equal(head, trained)


def test_dpo_still_takes_tokenised_rows_and_copies_the_adapter_to_its_reference(tmp_path):
    """pipeline/stages/dpo.py: the overridden _prepare_dataset, and the frozen adapter `ref`.

    If this fails, dpo tokenises again or its reference is not the sft adapter.
    """
    from peft import LoraConfig, get_peft_model
    from trl import DPOConfig, DPOTrainer

    class Trainer(DPOTrainer):
        def _prepare_dataset(self, dataset, *_):
            return dataset

    rows, model = rows_of(PAIRS), get_peft_model(tiny(), LoraConfig(task_type="CAUSAL_LM", **LORA))
    trainer = Trainer(
        model, args=settings(DPOConfig, tmp_path), train_dataset=rows, processing_class=tokenizer()
    )
    assert trainer.train_dataset is rows
    reference = [p for name, p in trainer.model.named_parameters() if ".ref." in name]
    assert reference and not any(p.requires_grad for p in reference)
    assert set(trainer.data_collator(list(rows))) >= {"input_ids", "attention_mask"}


def test_kto_still_takes_tokenised_rows_and_asks_for_its_kl_term_twice(tmp_path):
    """pipeline/data/kl_pairs.py: the columns of a row, and `_compute_kl_logps`, first for the policy, then for the reference.

    If this fails, kto tokenises again, its reference is not the sft adapter, or z0 has the wrong sign.
    """
    from peft import LoraConfig, get_peft_model
    from trl import KTOConfig, KTOTrainer

    asked = []

    class Trainer(KTOTrainer):
        def _prepare_dataset(self, dataset, *_):
            return dataset

        def _compute_kl_logps(self, model, batch):
            adapter = self.model.active_adapter
            asked.append(adapter)
            return torch.tensor(3.0 if adapter == "default" else 1.0)

    rows, model = rows_of(THUMBS), get_peft_model(tiny(), LoraConfig(task_type="CAUSAL_LM", **LORA))
    trainer = Trainer(
        model, args=settings(KTOConfig, tmp_path), train_dataset=rows, processing_class=tokenizer()
    )
    assert trainer.train_dataset is rows and trainer.calculate_KL
    reference = [p for name, p in trainer.model.named_parameters() if ".ref." in name]
    assert reference and not any(p.requires_grad for p in reference)
    trainer.model.eval()
    trainer.compute_loss(trainer.model, trainer.data_collator(list(rows)))
    assert asked == ["default", "ref"] and trainer._metrics["eval"]["kl"] == [2.0]


def test_the_reward_trainer_still_takes_tokenised_pairs_and_puts_the_chosen_first(tmp_path):
    """pipeline/stages/rm.py, score_pairs: scores.chunk(2) is (chosen, rejected). If this fails, accuracies are upside down."""
    from peft import LoraConfig
    from trl import RewardConfig, RewardTrainer

    rows = rows_of([{key: row[key] for key in ("chosen_ids", "rejected_ids")} for row in PAIRS])
    model = tiny("AutoModelForSequenceClassification", num_labels=1)
    trainer = RewardTrainer(
        model, settings(RewardConfig, tmp_path), train_dataset=rows, processing_class=tokenizer(),
        peft_config=LoraConfig(task_type="SEQ_CLS", **LORA),
    )  # fmt: skip
    assert trainer.train_dataset[:] == rows[:]
    ids = trainer.data_collator(list(rows))["input_ids"].tolist()
    assert ids == [*rows["chosen_ids"][:], *rows["rejected_ids"][:]]


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "kto"])
def test_the_trainers_still_log_the_metrics_that_a_gate_may_name(stage, tmp_path):
    """pipeline/config/gates.py: HELD_OUT and TRAINED. If it fails, a gate on a metric that exists is refused, or never holds."""
    import transformers
    import trl
    from peft import LoraConfig

    config, kind, rows = {
        "sft": (trl.SFTConfig, trl.SFTTrainer, ROWS),
        "rm": (trl.RewardConfig, trl.RewardTrainer, [{k: row[k] for k in ("chosen_ids", "rejected_ids")} for row in PAIRS]),
        "dpo": (trl.DPOConfig, trl.DPOTrainer, PAIRS),
        "kto": (trl.KTOConfig, trl.KTOTrainer, THUMBS),
    }[stage]  # fmt: skip
    own = {"dataset_kwargs": {"skip_prepare_dataset": True}} if stage == "sft" else {}
    head = {"num_labels": 1} if stage == "rm" else {}

    class Trainer(kind):
        def _prepare_dataset(self, dataset, *_):
            return dataset

    trainer = Trainer(
        tiny("AutoModelForSequenceClassification" if head else "AutoModelForCausalLM", **head),
        args=settings(config, tmp_path, max_steps=2, logging_steps=1, **own),
        train_dataset=rows_of(rows),
        eval_dataset=rows_of(rows),
        processing_class=tokenizer(),
        peft_config=LoraConfig(task_type="SEQ_CLS" if head else "CAUSAL_LM", **LORA),
    )
    trainer.remove_callback(transformers.PrinterCallback)  # it takes total_flos out
    if_counted = {"train_tokens_per_second"}  # with include_num_input_tokens_seen
    trained = set(gates.TRAINED.split()) - if_counted
    assert {
        name for name in trainer.train().metrics if name.startswith("train_") or name in trained
    } == trained
    not_here = {"eval_aux_loss", "eval_eos_accuracy"}  # of experts; our own
    held_out = {f"eval_{name}" for name in gates.HELD_OUT[stage].split()}
    assert set(trainer.evaluate()) == held_out - not_here | {"epoch"}


@pytest.mark.parametrize("name", ["SFTTrainer", "RewardTrainer", "DPOTrainer", "KTOTrainer"])
def test_the_trainers_still_have_the_methods_that_are_overridden(name):
    """pipeline/data/feed.py, ExactBatches. If this fails, rows are seen twice or not at all with several workers."""
    import trl

    trainer = getattr(trl, name)
    assert takes(trainer.get_train_dataloader, None)
    assert takes(trainer.get_batch_samples, None, [], 1, "cpu")
    assert takes(trainer.training_step, None, None, {}, None)
    assert takes(trainer.compute_loss, None, None, {}, False, None)
    assert takes(trainer._remove_unused_columns, None, [], description="Training")
    assert takes(trainer.compute_loss_context_manager, None)
    assert "_train_batch_size" in inspect.getsource(inspect.getmodule(trainer._remove_unused_columns))


def test_the_seed_of_a_data_loaders_processes_still_needs_what_is_bound():
    """pipeline/data/feed.py, get_train_dataloader: seed_worker."""
    from transformers.trainer_utils import seed_worker

    assert takes(seed_worker, 0, num_workers=1, rank=0)


def test_a_chat_template_is_still_compiled_as_it_is_applied():
    """pipeline/models/tokenizer.py, _template_file: _compile_jinja_template, with transformers' own tags."""
    import jinja2
    from transformers.utils.chat_template_utils import _compile_jinja_template

    _compile_jinja_template(
        "{% for m in x %}{% generation %}{{ strftime_now(m) }}{% endgeneration %}{% break %}{% endfor %}"
    )
    with pytest.raises(jinja2.TemplateSyntaxError) as error:
        _compile_jinja_template("{{ bos_token }}\n{% if %}")
    assert error.value.lineno == 2 and error.value.message


def test_the_spans_of_generation_blocks_are_still_characters_of_the_text():
    """pipeline/data/template.py, _marked: render_jinja_template. If this fails, other tokens than the completions are trained."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = "{% for m in messages %}<{% generation %}{{ m.content }}{% endgeneration %}>{% endfor %}"
    (text,), (spans,) = render_jinja_template(
        conversations=[[{"role": "assistant", "content": "abc"}]],
        chat_template=template,
        return_assistant_tokens_mask=True,
    )
    assert (text, [tuple(span) for span in spans]) == ("<abc>", [(1, 4)])


def test_packed_rows_are_still_looked_for_where_plan_turns_it_off(monkeypatch):
    """pipeline/planning/shape.py, saved: patches transformers.masking_utils.find_packed_sequence_indices."""
    asked = []
    monkeypatch.setattr(
        "transformers.masking_utils.find_packed_sequence_indices", lambda *_, **__: asked.append(1)
    )
    tiny()(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    assert asked


def test_rows_that_share_a_packed_row_still_do_not_see_each_other(tmp_path):
    """pipeline/data/tasks.py, `seq_lengths`: TRL's collator makes position_ids of it, from which transformers makes the mask."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    first, second = [5, 6, 7], [8, 9, 10, 11, 12]
    packed = {"input_ids": [first + second], "labels": [first + second], "seq_lengths": [[3, 5]]}
    args = settings(SFTConfig, tmp_path, packing=True, dataset_kwargs={"skip_prepare_dataset": True})
    model = tiny()
    trainer = SFTTrainer(model, args, train_dataset=Dataset.from_dict(packed), processing_class=tokenizer())
    (batch,) = trainer.get_train_dataloader()
    batch.pop("labels")
    model.eval()
    with torch.no_grad():
        together = model(**batch).logits[0]
        alone = [model(torch.tensor([ids])).logits[0] for ids in (first, second)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)


def test_a_cache_of_slots_is_still_transformers_own():
    """pipeline/inference/slots.py, Slots(DynamicLayer) and DynamicCache.layers. If this fails, sampling is wrong or slow."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    from pipeline.inference.slots import SlotCache, Slots

    model, ids = tiny().eval(), torch.tensor([[5, 6, 7], [8, 9, 10]])
    own, slots = DynamicCache(config=model.config), SlotCache(model.config, 2, 8, model.device)
    assert [type(layer) for layer in own.layers] == [DynamicLayer] * 2
    assert [type(layer) for layer in slots.layers] == [Slots] * 2
    slots.joining, slots.lengths[:] = (torch.arange(2), torch.arange(2)), 3
    with torch.no_grad():
        for part in (ids, ids[:, :1]):
            logits = [model(part, past_key_values=cache, use_cache=True).logits for cache in (own, slots)]
            torch.testing.assert_close(*logits)
            slots.joining, slots.seen = None, 4
    for theirs, ours in zip(own.layers, slots.layers, strict=True):
        torch.testing.assert_close(theirs.keys, ours.keys[:, :, :4])
        torch.testing.assert_close(theirs.values, ours.values[:, :, :4])


def test_what_a_weight_file_lacks_is_still_told(tmp_path):
    """pipeline/models/base.py, check_loaded. If this fails, missing weights are random numbers and nobody says so."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    tiny().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert list(info["missing_keys"]) == ["model.norm.weight"] and not info["mismatched_keys"]


def test_a_tokenizer_still_writes_the_state_that_is_no_part_of_its_digest():
    """pipeline/models/tokenizer.py, tokenizer_digest. If this fails, adapters are refused for a tokenizer they fit to."""
    assert {"padding", "truncation", "model"} <= json.loads(tokenizer().backend_tokenizer.to_str()).keys()


def test_fake_tensors_still_have_storages_that_can_be_told_apart():
    """pipeline/planning/shape.py: torch._subclasses.fake_tensor and _cdata. If this fails, `plan` counts wrong bytes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        one, other = torch.empty(4), torch.empty(4)
        assert one.untyped_storage()._cdata == one.view(2, 2).untyped_storage()._cdata
        assert one.untyped_storage()._cdata != other.untyped_storage()._cdata
        assert one.untyped_storage().nbytes() == 16


# ------------------------------------------------------------------------------------------------ peft


@pytest.fixture
def shared():
    """Two trainable adapters that say different things, on one tiny base; `by_hand(x, role)` is what they should say."""
    from pipeline.models.adapters import SharedBase

    shared = SharedBase(tiny())
    for seed, role in enumerate(("policy", "critic")):
        torch.manual_seed(seed)
        shared.add(role, lora={"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}, trainable=True)
        for parameter in shared.parameters_of(role):
            parameter.data.normal_()
    return shared


def test_the_role_in_use_is_still_the_adapter_that_answers(shared):
    """pipeline/models/adapters.py, _inject and _switch: LoraModel.inject_adapter, _active_adapter, _disable_adapters.

    If this fails, SILENTLY THE WRONG ADAPTER answers, is trained, or is evaluated.
    """
    layer = shared.base.model.layers[0].self_attn.q_proj
    x = torch.randn(3, layer.in_features)

    def by_hand(role):
        y = x @ layer.get_base_layer().weight.T
        if role is None:
            return y
        return y + (x @ layer.lora_A[role].weight.T @ layer.lora_B[role].weight.T) * (6 / 2)

    answers = {}
    for role in ("policy", "critic", None, "policy"):
        with shared.use(role):
            assert layer.active_adapters == ([role] if role else layer.active_adapters)
            assert layer.disable_adapters == (role is None)
            answers[role] = layer(x)
            torch.testing.assert_close(answers[role], by_hand(role))
    assert len({round(answer.sum().item(), 3) for answer in answers.values()}) == 3
    assert all(
        parameter.requires_grad for role in ("policy", "critic") for parameter in shared.parameters_of(role)
    )


def test_a_checkpointed_layer_still_runs_again_in_the_role_it_was_made_in(shared):
    """pipeline/models/adapters.py, enable_gradient_checkpointing: context_fn.

    If this fails, gradient checkpointing gives the policy the gradients of the critic's adapter, without a word.
    """
    ids = torch.tensor([[5, 6, 7, 8]])

    def gradients():
        shared.zero_grad()
        mine, theirs = shared.hidden("policy", ids), shared.hidden("critic", ids)
        (mine.square().sum() + theirs.sum()).backward()
        return [p.grad.clone() for role in ("policy", "critic") for p in shared.parameters_of(role)]

    expected = gradients()
    shared.enable_gradient_checkpointing()
    reruns, use = [], shared.use
    shared.use = lambda role: (reruns.append(role), use(role))[1]
    for one, other in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert reruns.count("policy") > 1 and reruns.count("critic") > 1, "nothing was run again"


def test_pefts_lora_layer_can_still_be_fused():
    """pipeline/models/lora.py: the __class__ swap and what FusedLinear reads. If it fails, numbers change or nothing is fused."""
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    from pipeline.models import lora

    model = torch.nn.Sequential(torch.nn.Linear(6, 4))
    LoraModel(model, LoraConfig(r=2, target_modules=["0"]), "one").requires_grad_(False)
    model[0].lora_B["one"].weight.data.normal_()
    x = torch.randn(3, 6)
    own = model[0](x)
    lora.fuse(model)
    assert type(model[0]) is lora.FusedLinear
    assert model[0]._plain(x, None), "peft's plain layer is no longer seen as one"
    torch.testing.assert_close(model[0](x), own)
    for name in ("merged", "disable_adapters", "lora_variant", "scaling", "lora_dropout"):
        assert name in inspect.getsource(lora.FusedLinear) and hasattr(model[0], name)


def test_an_adapter_folder_is_still_pefts(shared, tmp_path):
    """pipeline/models/adapters.py, save and _read_config; pipeline/registry/lineage.py reads task_type of adapter_config.json.

    If this fails, what is registered does not load elsewhere, or loads without its head.
    """
    from peft import PeftModel

    from pipeline.registry.lineage import adapter_config

    shared.add("reward", copy_of="critic", head=True)
    shared.save("reward", tmp_path)
    kept = adapter_config(str(tmp_path))
    assert (kept["peft_type"], kept["task_type"], kept["modules_to_save"]) == ("LORA", "SEQ_CLS", ["score"])
    model = PeftModel.from_pretrained(tiny("AutoModelForSequenceClassification", num_labels=1), tmp_path)
    model.save_pretrained(tmp_path / "again")
    from safetensors.torch import load_file

    ours, theirs = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, tmp_path / "again")
    )
    assert ours.keys() == theirs.keys() and len(ours) == 2 * 2 + 1
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_layer_is_still_merged_by_itself():
    """pipeline/commands/export.py, merge: layer.merge(safe_merge=True), then model.unload() without merging again."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 4)), LoraConfig(r=2, target_modules=["0"]))
    layer, x = model.base_model.model[0], torch.randn(3, 6)
    layer.lora_B["default"].weight.data.normal_()
    expected = model(x)
    layer.merge(safe_merge=True)
    plain = model.unload()
    assert type(plain[0]) is torch.nn.Linear
    torch.testing.assert_close(plain(x), expected)


# ------------------------------------------------------------------------------------------------ the others


def test_a_prepared_loader_still_keeps_its_last_batch_whole():
    """pipeline/data/feed.py, get_train_dataloader: prepare_data_loader for one process, and _drop_last.

    If this fails, metrics of the last batch of an epoch are cut off.
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


def test_metrics_are_still_gathered_through_the_accelerators_gather(monkeypatch):
    """pipeline/data/feed.py, uneven_gather replaces it. If this fails, ranks with fewer rows hang."""
    from accelerate import Accelerator

    accelerator, seen = Accelerator(cpu=True), []
    monkeypatch.setattr(type(accelerator.state), "num_processes", 2, raising=False)
    accelerator.gather = lambda tensor: (seen.append(tensor), tensor)[1]
    accelerator.gather_for_metrics(torch.ones(2))
    assert len(seen) == 1


def test_the_order_of_an_epoch_is_still_that_of_accelerate():
    """pipeline/data/feed.py, ExactBatchSampler. If this fails, one worker sees other batches than two."""
    from accelerate.data_loader import SeedableRandomSampler

    from pipeline.data.feed import ExactBatchSampler

    sampler = SeedableRandomSampler(range(20), data_seed=7)
    sampler.set_epoch(3)
    ours = ExactBatchSampler(20, 4, rank=0, world=1, seed=7)
    ours.set_epoch(3)
    assert list(sampler) == ours.order().tolist()


def test_bitsandbytes_still_has_the_flag_that_keeps_one_form_of_nf4():
    """pipeline/models/base.py, _one_nf4_path. If this fails, sampling and training round the base's weights differently."""
    from bitsandbytes.nn import Linear4bit

    assert hasattr(Linear4bit(64, 64), "support_avx512bf16_for_cpu")
    assert "self.support_avx512bf16_for_cpu" in inspect.getsource(Linear4bit.forward)


def test_a_table_still_becomes_a_dataset_without_a_copy():
    """pipeline/data/feed.py, to_hf: datasets.table.InMemoryTable and `fingerprint`."""
    import datasets
    import pyarrow as pa

    table = pa.table({"input_ids": [[1, 2], [3]]})
    rows = datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="abc")
    assert rows._fingerprint == "abc"
    address = [t["input_ids"].chunk(0).values.buffers()[1].address for t in (table, rows.data)]
    assert address[0] == address[1]


def test_the_hub_cache_still_keeps_files_under_their_commit(tmp_path):
    """pipeline/models/base.py, base_identity: the folder's name is the digest. If this fails, lineage names another base."""
    from huggingface_hub import hf_hub_download

    repo, commit = tmp_path / "models--a--b", "c" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text(commit)
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "snapshots" / commit / "config.json").write_text("{}")
    found = hf_hub_download("a/b", "config.json", cache_dir=tmp_path, local_files_only=True)
    assert Path(found).parent.name == commit


@pytest.mark.parametrize(
    "name",
    ["DISABLE_TELEMETRY", "LOGGING_LEVEL", "HTTP_REQUEST_MAX_RETRIES", "HTTP_REQUEST_TIMEOUT", "ENABLE_ARTIFACTS_PROGRESS_BAR"],
)  # fmt: skip
def test_mlflow_still_reads_the_environment_variable(name):
    """pipeline/registry/store.py, client."""
    from mlflow import environment_variables

    assert getattr(environment_variables, f"MLFLOW_{name}").name == f"MLFLOW_{name}"


@pytest.mark.filterwarnings("ignore:The specified dataset source can be interpreted in multiple ways")
def test_a_data_set_is_still_described_to_mlflow_by_its_digest():
    """pipeline/registry/runs.py, _log_inputs: dataset_source_registry, MetaDataset.to_dict -> entities.Dataset."""
    import mlflow
    from mlflow.data.meta_dataset import MetaDataset
    from mlflow.entities import Dataset

    source = mlflow.data.dataset_source_registry.resolve_dataset_source("rows.jsonl")
    described = Dataset(**MetaDataset(source, name="train", digest="ab" * 18).to_dict())
    assert (described.name, described.digest) == ("train", "ab" * 18)
    assert "rows.jsonl" in described.source


def test_mlflows_client_still_registers_an_adapter_folder():
    """pipeline/registry/versions.py and runs.py: LoggedModels, and the tag that shows samples as a table."""
    from mlflow import MlflowClient, artifacts
    from mlflow.utils import mlflow_tags

    assert takes(
        MlflowClient.create_logged_model, None, "1", name="a", source_run_id="r", model_type="t", tags={}
    )
    assert takes(MlflowClient.log_model_artifacts, None, "m", "folder")
    assert takes(MlflowClient.finalize_logged_model, None, "m", "READY")
    assert takes(MlflowClient.create_model_version, None, "a", source="s", run_id="r", model_id="m", tags={})
    assert takes(artifacts.download_artifacts, "location", dst_path=None, tracking_uri="sqlite://")
    assert mlflow_tags.MLFLOW_LOGGED_ARTIFACTS == "mlflow.loggedArtifacts"


def test_mlflows_own_asynchronous_log_still_drops_a_batch_that_failed():
    """pipeline/registry/curves.py. If this fails, MLflow sends again what a server missed: MetricLog may not be needed."""
    from mlflow.entities import Metric
    from mlflow.utils.async_logging.async_logging_queue import AsyncLoggingQueue

    calls = []

    def away(**batch):
        calls.append(batch)
        raise ConnectionError("refused")

    log = AsyncLoggingQueue(away)
    log.activate()
    sent = log.log_batch_async("run", params=[], tags=[], metrics=[Metric("loss", 1.0, 0, 1)])
    log.flush()
    log.shut_down_async_logging()
    with pytest.raises(Exception, match="refused"):
        sent.wait()
    assert len(calls) == 1


def test_vllm_still_lists_the_ranks_that_it_makes_room_for():
    """pipeline/inference/vllm.py, accepted_rank: MaxLoRARanks."""
    pytest.importorskip("vllm", reason="needs the extra `vllm`")
    from pipeline.inference.vllm import accepted_rank

    assert [accepted_rank(rank) for rank in (1, 9, 64)] == [1, 16, 64]


def test_vllm_still_ends_its_process_when_it_is_told_to():
    """pipeline/inference/vllm.py, close: llm.llm_engine.engine_core.shutdown()."""
    vllm = pytest.importorskip("vllm", reason="needs the extra `vllm`")
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.engine.llm_engine import LLMEngine

    assert callable(EngineCoreClient.shutdown)
    assert "self.engine_core =" in inspect.getsource(LLMEngine)
    assert "self.llm_engine =" in inspect.getsource(vllm.LLM)


def test_vllm_still_takes_the_arguments_of_an_exact_sampler():
    """pipeline/inference/vllm.py. If this fails, completions come from another distribution than is learned from."""
    vllm = pytest.importorskip("vllm", reason="needs the extra `vllm`")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest

    options = {"enable_lora", "max_loras", "max_lora_rank", "max_model_len", "max_logprobs", "logprobs_mode", "generation_config", "disable_log_stats", "use_tqdm_on_load"}  # fmt: skip
    assert options <= {field.name for field in dataclasses.fields(EngineArgs)}
    sampling = dict.fromkeys(("temperature", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "seed", "logprobs", "detokenize"))  # fmt: skip
    assert takes(vllm.SamplingParams, **sampling)
    assert LoRARequest("1", 1, "folder").lora_int_id == 1


# --------------------------------------------------------------------- Ray: a live one, last: it takes some seconds to start


def test_the_folder_of_a_session_still_ends_with_the_drivers_pid(embedded_ray):
    """pipeline/on_ray/session.py deletes and sweeps by it (address_info["session_dir"])."""
    from ray._private.worker import RayContext, global_worker

    folder = RayContext(global_worker.node.address_info).address_info["session_dir"]  # what ray.init returns
    assert re.fullmatch(rf"session_\S+_{os.getpid()}", os.path.basename(folder))
    assert Path(folder).parent == session._session_root()


def test_the_processes_of_a_node_are_still_listed(embedded_ray):
    """tests/chaos/faults.py, Nodes: all_processes["raylet"] and node_id, of nodes of ray.cluster_utils.Cluster."""
    from ray._private.worker import global_worker
    from ray.cluster_utils import Cluster

    node = global_worker.node
    (raylet,) = node.all_processes["raylet"]
    os.kill(raylet.process.pid, 0)
    assert node.node_id == ray.nodes()[0]["NodeID"]
    assert takes(Cluster, initialize_head=True, head_node_args={})


def test_the_actor_name_marker_still_names_log_lines(embedded_ray):
    """pipeline/runtime/worker.py prints `:actor_name:STAGE`; pipeline/system/console.py prints such lines without a prefix."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    def speak():
        print(":actor_name:upstream", flush=True)
        print("a line of it", flush=True)

    batches = []
    dispatcher.add_handler("upstream", batches.append)
    try:
        ray.get(ray.remote(num_cpus=0)(speak).remote())
        wait_until(lambda: any("a line of it" in batch["lines"] for batch in batches))
    finally:
        dispatcher.remove_handler("upstream")
    (batch,) = (batch for batch in batches if "a line of it" in batch["lines"])
    assert batch["actor_name"] == "upstream"
    assert {"lines", "is_err", "pid", "actor_name", "task_name"} <= batch.keys()
