"""Code that the TRL stages share in a worker: arguments, progress, checkpoints, and the check that an adapter reloads.

A stage subclasses a TRL trainer only to use tokenized rows, and to sample each row exactly once.
"""

import json
import os
import time
from collections import defaultdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PrinterCallback, TrainerCallback, TrainerState

from pipeline.checks import raise_if_failed
from pipeline.models import adapter_files, probes
from pipeline.models.adapters import as_peft_model, errors_of_peft
from pipeline.models.gpus import model_flops_utilization
from pipeline.planning import plan
from pipeline.run import best
from pipeline.run.best import FIX, Best
from pipeline.run.worker import Outcome, Worker, peak_memory
from pipeline.stages import trl_checks
from pipeline.system.hub import json_object
from pipeline.system.progress import Bar

REFERENCE = "ref"  # TRL's name of a DPOTrainer's frozen reference adapter


def make_arguments(worker: Worker, config: Any, **fixed: Any) -> Any:
    """Returns the section `trainer` as an instance of TRL's config class, with the pipeline's own settings.

    `data.batch_size` is the number of rows in one optimizer step over all workers. This number determines gradient accumulation,
    so a job has the same steps on any number of workers. Call this function before the base is loaded.
    """
    values = worker.work.trainer | {"gradient_checkpointing": plan.recomputes_activations(worker)}
    if values.get("tf32") is None:  # with torch_compile, transformers would turn TF32 on
        values["tf32"] = False
    if worker.work.data.batch_size:
        rows = values.get("per_device_train_batch_size", 8) * worker.world
        values["gradient_accumulation_steps"] = max(1, worker.work.data.batch_size // rows)
    return config(
        output_dir=os.path.join(worker.scratch, "trainer"),
        report_to="none",  # instead, rank 0 logs to the MLflow run that the driver opened
        use_cpu=not worker.work.places.on_gpu,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        **fixed,
        **values,
    )


class Reporter(TrainerCallback):
    """Reports progress, speed, metrics and checkpoints of a transformers Trainer to the worker.

    Speed is measured only during optimizer steps, not during evaluations, checkpoints and waits for rows.
    """

    def __init__(self, worker: Worker, trainer: Any, tracker: Best | None):
        self.worker, self.trainer, self.tracker = worker, trainer, tracker
        self.evaluating: Bar | None = None  # progress of the current evaluation
        self.device = torch.device(worker.device)
        self.start = self.seconds = 0.0  # start of the step; duration of the steps since the last log line
        self.tokens = 0  # number of tokens of all workers up to the last log line

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.worker.resume:
            restore_sums(self.trainer, _sums_file(self.worker, self.worker.resume))
            self.worker.replay(_history(state))
        else:
            raise_if_failed(trl_checks.first_step_checks(self.worker, self.trainer))
        self.tokens = self.trainer._total_train_tokens  # private in TRL 1.16; see save_sums

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.device.type == "cuda":  # waits for the kernels of the step
            torch.cuda.synchronize(self.device)
        self.seconds += time.monotonic() - self.start
        if self.worker.notice.poll(state.global_step):
            control.should_save = True

    def speed(self) -> dict[str, float]:
        """Returns the speed of all workers since the last call, or {} if there was no step."""
        tokens, seconds = self.trainer._total_train_tokens - self.tokens, self.seconds
        if not tokens or not seconds:
            return {}
        self.tokens, self.seconds = self.tokens + tokens, 0.0
        rates = {"train_tokens_per_second": tokens / seconds, "memory/peak": peak_memory(self.device) / 2**30}
        spec = self.worker.work.spec
        passes = 2 + spec.keeps_reference + spec.further_forwards
        base = self.trainer.accelerator.unwrap_model(self.trainer.model).get_base_model()
        return rates | model_flops_utilization(self.device, base, tokens / self.worker.world, passes, seconds)

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any, **_: Any) -> None:
        if self.worker.rank:
            return
        if self.evaluating is None:
            self.evaluating = Bar(total=len(eval_dataloader), desc="evaluating the held-out rows: batch")
        self.evaluating.update()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        self.evaluating = None
        if self.tracker and state.global_step:  # at step 0, the adapter has learned nothing
            self.tracker.compare(metrics, state.global_step)
            control.should_training_stop |= self.tracker.exhausted

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        numbers = _numbers(logs)
        if "loss" in numbers:
            numbers |= self.speed()
        if "train_runtime" not in numbers:  # does not log TRL's summary at the end of training as a step
            self.worker.log(numbers, state.global_step, state.max_steps)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        save_sums(self.trainer, os.path.join(folder, f"sums_{self.worker.rank}.json"))
        if self.tracker and self.worker.rank == 0:
            self.tracker.save(folder)
        self.worker.checkpoint(folder, state.global_step)


def _sums_file(worker: Worker, folder: str) -> str:
    """Returns this rank's file of metric sums, or the file of rank 0 if the checkpoint has no file of this rank."""
    path = os.path.join(folder, f"sums_{worker.rank}.json")
    return path if os.path.exists(path) else os.path.join(folder, "sums_0.json")


def _numbers(entry: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in entry.items() if isinstance(v, int | float) and k != "step"}


def _history(state: Any) -> list[tuple[int, dict[str, float]]]:
    return [(e["step"], _numbers(e)) for e in state.log_history if "train_runtime" not in e]


# transformers 5.23 and TRL 1.16 sum metrics between two lines of the log, but their checkpoints lack the sums. The first log line
# after a resume would contain a mean over fewer steps, and tokens would be counted from 0. These attributes of transformers and
# TRL are private. Remove these functions when trainer_state.json has the sums.
def save_sums(trainer: Any, path: str) -> None:
    sums = {
        "tr_loss": trainer._tr_loss.item(),
        "total_loss": trainer._total_loss_scalar,
        "last_logged": trainer._globalstep_last_logged,
        "tokens": trainer._total_train_tokens,
        "metrics": trainer._metrics,
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(sums, file)


def restore_sums(trainer: Any, path: str) -> None:
    sums = json_object(path, FIX)
    trainer._tr_loss.fill_(sums["tr_loss"])
    trainer._total_loss_scalar = sums["total_loss"]
    trainer._globalstep_last_logged = sums["last_logged"]
    trainer._total_train_tokens = sums["tokens"]
    trainer._metrics = {mode: defaultdict(list, values) for mode, values in sums["metrics"].items()}


class TokenizedRows:
    """Mixin that lets TRL's preference trainers use rows that are already tokenized."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        # TRL 1.16 would tokenize text columns. Remove this class when TRL accepts rows with `prompt_ids`, as its RewardTrainer
        # accepts rows with `chosen_ids`.
        return dataset


def continue_policy(worker: Worker, trainer_class: Any, args: Any) -> Any:
    """Returns a TRL trainer that continues the `policy` adapter, with the frozen `policy` adapter as its reference.

    Without `policy`, the trainer starts a new adapter, and its reference is the base. If the job names a `reference`, that
    adapter is the reference. TRL's reference is the adapter called `ref`, or the bare base if no adapter has this name (trl 1.16,
    DPOTrainer).
    """
    base, adapter = worker.load_base(), None
    if "policy" in worker.work.inputs:
        # TRL makes a frozen copy of this adapter, and calls the copy `ref`.
        base = as_peft_model(base, worker.input("policy"), trainable=True)
    else:
        adapter = worker.work.lora
    trainer = make_trainer(
        trainer_class,
        adapter,
        model=base,
        args=args,
        train_dataset=worker.rows("train"),
        eval_dataset=worker.rows("eval"),
        processing_class=worker.tokenizer,
    )
    if adapter is None:
        # On a 4-bit base, TRL rounds the adapter to bf16 after it has copied the adapter to `ref`. Restores the values from `ref`
        # (trl 1.16, DPOTrainer and KTOTrainer). Remove this code together with the cast in `train_trl`.
        parameters = dict(trainer.model.named_parameters())
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                parameter.data = parameters[name.replace(".default.", ".ref.")].data.float().clone()
    if "reference" in worker.work.named:  # `reference` is a key of dpo: another adapter, or `base`
        if REFERENCE in trainer.model.peft_config:
            trainer.model.delete_adapter(REFERENCE)
        if "reference" in worker.work.inputs:
            as_peft_model(trainer.model, worker.input("reference"), REFERENCE)
    for layer in trainer.model.modules():
        # Removes the reference's dropout. TRL turns dropout off before the reference is loaded, or not at all.
        if REFERENCE in getattr(layer, "lora_dropout", {}):
            layer.lora_dropout[REFERENCE] = torch.nn.Identity()
    return trainer


def make_trainer(
    trainer_class: Any, lora: dict[str, Any] | None, task_type: str = "CAUSAL_LM", **options: Any
) -> Any:
    """Returns a TRL trainer, with a new adapter unless `lora` is None. Raises InputError if peft rejects `lora`."""
    from peft import LoraConfig

    with errors_of_peft("lora"):
        adapter = None if lora is None else LoraConfig(task_type=task_type, **lora)
        return trainer_class(peft_config=adapter, **options)


def train_trl(worker: Worker, trainer: Any) -> Outcome:
    """Trains from the start, or from the worker's checkpoint. Returns the final metrics, the kept step, and the number of tokens.

    After training, the model has the weights of the kept step. `eval_*` are metrics of the kept step. `initial_*` are metrics of
    step 0, if the job sets `eval_on_start`.
    """
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            # On a 4-bit base, TRL casts adapters and the head of a reward to bf16, where small updates vanish (trl 1.16,
            # RewardTrainer.__init__; for DoRA: https://github.com/huggingface/trl/issues/7268). Here, adapters and head are fp32
            # on any base. Remove the cast when TRL keeps adapters in fp32.
            parameter.data = parameter.data.float()
    # DDP would send the shards of rank 0 to the other ranks, which hold different shards of the base. This method is private in
    # torch 2.13 (https://github.com/pytorch/pytorch/issues/43690). Remove this code when DDP has a public list of parameters to
    # ignore.
    shards = [name for name, parameter in trainer.model.named_parameters() if isinstance(parameter, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(trainer.model, shards)
    trainer.mixture = worker.work.mixture
    parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    tracker = best.make_tracker(worker.work.run, worker.work.gate, parameters, worker.report)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Reporter(worker, trainer, tracker))
    if worker.rank == 0:
        evaluates = trainer.args.eval_on_start and not worker.resume
        count = len(trainer.eval_dataset) if trainer.eval_dataset is not None else 0
        print(f"evaluating {count} held-out rows, then training" if evaluates else "training", flush=True)
    metrics = _train(worker, trainer, tracker)
    last = trainer.state.global_step
    if trainer.eval_dataset is not None and last not in _evaluations(trainer):
        trainer.evaluate()
    best_step = tracker.restore() if tracker else None
    end = best.describe_end(tracker, best_step, last, trainer.state.max_steps)
    if trainer.eval_dataset is not None:
        evaluations = _evaluations(trainer)
        for prefix, step in (("eval_", end["kept"]["step"]), ("initial_", 0)):
            for key, value in evaluations.get(step, {}).items():
                if key.startswith("eval_"):
                    metrics[prefix + key.removeprefix("eval_")] = float(value)
    return Outcome(metrics, end, {"tokens": int(trainer._total_train_tokens)})


def _evaluations(trainer: Any) -> dict[int, dict[str, Any]]:
    """Returns {step: metrics of its last evaluation}."""
    return {entry["step"]: entry for entry in trainer.state.log_history if "eval_loss" in entry}


def _train(worker: Worker, trainer: Any, tracker: Best | None) -> dict[str, float]:
    """Trains. Returns TRL's summary, with the mean `train_loss` over all steps, including steps before a resume."""
    if worker.resume:
        # The run was evaluated at step 0 already.
        trainer.args.eval_on_start = False
        state = TrainerState(**json_object(os.path.join(worker.resume, "trainer_state.json"), FIX))
        if tracker:
            tracker.load(worker.resume)
        if state.global_step >= state.max_steps > 0 or (tracker and tracker.exhausted):
            # Training is complete, but transformers 5.23 would make one more step. Remove this code when train() makes no further
            # step.
            trainer._load_from_checkpoint(worker.resume)
            trainer.state = state
            worker.replay(_history(state))
            sums = json_object(_sums_file(worker, worker.resume), FIX)
            trainer._total_train_tokens = sums["tokens"]
            train_loss = (sums["total_loss"] + sums["tr_loss"]) / state.global_step
            return {"train_loss": train_loss, "epoch": float(state.epoch)}
    summary = trainer.train(resume_from_checkpoint=worker.resume).metrics
    # TRL's RewardTrainer adds means over the last few steps, which do not describe the run.
    keys = {key for key in summary if key.startswith("train_")} | {"epoch", "total_flos"}
    metrics = {key: float(value) for key, value in summary.items() if key in keys}
    total = trainer._total_loss_scalar
    if worker.world > 1:  # transformers 5.23 sums only this rank's losses since the last log line
        loss = trainer._tr_loss
        total += (trainer.accelerator.gather(loss).mean() - loss).item()
    metrics["train_loss"] = total / max(1, trainer.state.global_step)
    return metrics


def finish_trl(worker: Worker, trainer: Any, outcome: Outcome) -> dict[str, Any]:
    """Saves the trained adapter, and checks on a few training rows that it reloads unchanged."""
    rows = trainer.train_dataset
    samples = [dict(row) for row in rows.select(range(min(4, len(rows))))]
    # A row has one sequence, a prompt with a completion, or a pair. The chosen completion of a pair may include the prompt.
    keys = ("input_ids", "prompt_ids", "completion_ids", "chosen_ids")
    probe = [[token for key in keys for token in row.get(key, ())] for row in samples]
    return worker.finish(
        outcome,
        save=lambda folder: save_adapter(trainer, folder),
        outputs=lambda folder: adapter_outputs(trainer, probe, folder),
    )


def save_adapter(trainer: Any, folder: str) -> dict[str, Any]:
    """Writes the trained adapter, with its head if it has one, and its probes. Returns the digest of its tensors.

    peft's save_pretrained would also write the base's weights if the adapter adapts the LM head or the embedding, and would query
    the Hub about the base.
    """
    from peft import get_peft_model_state_dict

    model = trainer.accelerator.unwrap_model(trainer.model)
    tensors = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    digest = adapter_files.write_adapter(folder, model.peft_config["default"], tensors)

    def output(ids: list[int]) -> float:
        """Returns the score of a reward model, or else the mean log-prob of the tokens after the first."""
        logits = row_logits(model.eval(), ids)
        if logits.ndim == 2:
            return float(logits)
        actions = torch.tensor(ids[1:]).unsqueeze(-1)
        return float(logits[0, :-1].log_softmax(-1).gather(-1, actions).mean())

    vocab_size = model.config.get_text_config().vocab_size
    precision = trl_checks.trainer_precision(trainer, model)
    probes.write_probes(folder, vocab_size, trainer.processing_class.pad_token_id, output, precision)
    return digest


def adapter_outputs(trainer: Any, rows: list[list[int]], folder: str | None = None) -> list[torch.Tensor]:
    """Returns the logits of rows of token ids, with the adapter in memory or, if `folder` is set, the adapter in `folder`."""
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    if folder:
        model.load_adapter(folder, adapter_name="reloaded", is_trainable=False)
        model.set_adapter("reloaded")
    outputs = [row_logits(model, row) for row in rows]
    if folder:
        model.set_adapter("default")
        model.delete_adapter("reloaded")
    return outputs


@torch.no_grad()
def row_logits(model: Any, row: list[int]) -> torch.Tensor:
    """Returns the logits of one sequence in fp32 on the CPU: (1, T, V), or (1, 1) for a reward model."""
    ids = torch.tensor([row], device=model.device)
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().cpu()
