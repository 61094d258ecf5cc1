"""Runs a stage with its real trainer on rows of the demo, in this process and without Ray and MLflow."""

import contextlib
import importlib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import torch
from running import ROOT
from settled import work_of

from pipeline.data.read import prepare_rows, to_hf
from pipeline.job import load_job
from pipeline.models.base import base_identity
from pipeline.models.tokenizer import load_tokenizer
from pipeline.registry import lineage
from pipeline.run.model_host import ModelHost
from pipeline.run.worker import require_reload
from pipeline.settle.work import Input

ONE_STEP = [
    *("trainer.max_steps=1", "data.batch_size=8", "trainer.per_device_train_batch_size=8"),
    *("trainer.eval_strategy=no", "trainer.eval_on_start=false", "trainer.save_strategy=no"),
]
QUICK = {
    **dict.fromkeys(("sft", "rm", "dpo", "kto"), ONE_STEP),
    "ppo": ["trainer.total_episodes=64", "trainer.batch_size=64", "trainer.response_length=16"],
}
ROWS = 24  # number of rows to use from each data file of the demo


class Alone(ModelHost):
    """The only worker of a stage, which runs in this process."""

    rank, world, local_rank, resume, companion, report = 0, 1, 0, None, None, None

    def __init__(self, work, sets, folder):
        super().__init__(work)
        self.sets, self.scratch, self.lines = sets, str(folder / "scratch"), []
        self.notice = SimpleNamespace(poll=lambda step: False)
        os.makedirs(self.scratch, exist_ok=True)

    def rows(self, name):
        return self.sets.get(name)

    def gather(self, value):
        return [value]

    def log(self, metrics, step, total):
        self.lines.append((step, metrics))

    def checkpoint(self, source, step):
        shutil.rmtree(source, ignore_errors=True)

    def finish(self, outcome, save=None, outputs=None):
        adapter = os.path.join(self.scratch, "adapter")
        shutil.rmtree(adapter, ignore_errors=True)
        os.makedirs(adapter)
        if save is not None:
            save(adapter)
            parents = {name: version for name, version in self.work.versions.items() if name == "policy"}
            record = lineage.describe(
                self.work.identity.stage, self.work.base, self.tokenizer, parents, {}, **outcome.lineage
            )
            lineage.write(adapter, record)
            require_reload(outputs(None), outputs(adapter), adapter)
        return {"metrics": outcome.metrics, "adapter": adapter, "samples": outcome.samples}


def worker(stage, folder, *settings, inputs=MappingProxyType({})):
    """Returns a worker of `stage` with the first ROWS rows of each demo file, tokenized."""
    os.chdir(ROOT)
    path = Path(tempfile.mkdtemp(dir=folder))
    job = load_job(f"jobs/demo/{stage}.yaml", [*QUICK[stage], "trainer.seed=1", *settings], stage)
    rows, model = path / f"{stage}.jsonl", job.model
    rows.write_text("".join(Path(job.data.train).read_text().splitlines(True)[:ROWS]))
    data = replace(job.data, train=str(rows), eval=None, overlong="truncate")
    tokenizer = load_tokenizer(model.name_or_path, model.revision, model.chat_template)
    packing = bool(job.trainer.get("packing"))
    prepared = prepare_rows(stage, data, tokenizer, 256, str(path / "cache"), packing, contextlib.nullcontext)
    sets = {"train": to_hf(prepared.train, prepared.fingerprints["train"])}
    ready = {name: Input(v, "function") for name, v in inputs.items() if v.startswith("python:")}
    ready |= {n: Input(v, "adapter", v, lineage.read(v, n)) for n, v in inputs.items() if n not in ready}
    work = work_of(job, tokenizer, base_identity(model.name_or_path), inputs=ready)
    return Alone(work, sets, path)


def train(stage, folder, *settings, inputs=MappingProxyType({})):
    """Runs the stage's `train` for one step or update. Returns its result."""
    torch.manual_seed(0)
    module = importlib.import_module(f"pipeline.stages.{stage}")
    return module.train(worker(stage, folder, *settings, inputs=inputs))
