"""A process that holds the models of a job: where it loads them to."""

import importlib

import pytest
import toy_models
import transformers

from pipeline.config import load_job
from pipeline.runtime.host import Host, Work


class Loaded(BaseException):
    """Ends a stage where it loads the base."""


class OnThirdGpu(Host):
    """As much of a worker as a stage needs before it loads its base."""

    device, rank, world, resume = "cuda:2", 0, 1, None

    def rows(self, name):
        return [{"input_ids": [5, 6, 7]}]


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "ppo", "evaluate"])
def test_every_stage_loads_its_base_onto_the_workers_gpu(stage, quantised, tmp_path, monkeypatch, in_root):
    """Loaded to the CPU first, nf4 is made by one thread of it, and each worker holds a whole base in the node's memory."""
    seen = []

    def from_pretrained(*_, **options):
        seen.append(options)
        raise Loaded

    for name in ("AutoModelForCausalLM", "AutoModelForSequenceClassification"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", from_pretrained)
    job = load_job(f"jobs/demo/{stage}.yaml", [f"model.load_in_4bit={str(quantised).lower()}"], stage)
    worker = OnThirdGpu(Work(job, toy_models.tokenizer(), {}, {}, {}, None))
    worker.scratch = str(tmp_path)
    with pytest.raises(Loaded):
        importlib.import_module(f"pipeline.stages.{stage}").train(worker)
    (options,) = seen
    assert options["device_map"] == {"": "cuda:2"}
    assert bool(options.get("quantization_config")) == quantised
