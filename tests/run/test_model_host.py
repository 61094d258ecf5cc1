"""Tests on which device and in which dtype a process loads the base of a job."""

import importlib

import pytest
import toy_models
import transformers
from settled import work_of

from pipeline.job import load_job
from pipeline.run.model_host import ModelHost


class Loaded(BaseException):
    """Raised in place of loading the base, to end the stage."""


@pytest.fixture
def asked(monkeypatch):
    """Replaces from_pretrained, so that no model is loaded. Returns a list of the arguments of each call."""
    seen = []

    def from_pretrained(*_, **options):
        seen.append(options)
        raise Loaded

    for name in ("AutoModelForCausalLM", "AutoModelForSequenceClassification"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", from_pretrained)
    return seen


class OnThirdGpu(ModelHost):
    """A worker on the third GPU, with only the attributes that a stage needs before it loads its base."""

    device, rank, world, resume, companion = "cuda:2", 0, 1, None, None

    def rows(self, name):
        return [{"input_ids": [5, 6, 7]}]


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "kto", "ppo", "evaluate"])
def test_every_stage_loads_its_base_onto_the_workers_gpu(stage, tmp_path, asked, in_root):
    """On the CPU, one thread would quantize the base, and the node would need memory for a full base per worker."""
    job = load_job(f"jobs/demo/{stage}.yaml", ["model.load_in_4bit=true"], stage)
    worker = OnThirdGpu(work_of(job, toy_models.tokenizer()))
    worker.scratch = str(tmp_path)
    with pytest.raises(Loaded):
        importlib.import_module(f"pipeline.stages.{stage}").train(worker)
    (options,) = asked
    assert options["device_map"] == {"": "cuda:2"}
    assert options["quantization_config"]


@pytest.mark.parametrize(
    ("stage", "settings", "expected"),
    [
        ("ppo", ["trainer.bf16=true"], "bfloat16"),
        ("ppo", ["trainer.bf16=false"], "float32"),
        ("sft", ["trainer.bf16=null"], "bfloat16"),  # TRL enables bf16 by default
        ("export", ["trainer.bf16=true"], "float32"),  # export merges into the base, in model.dtype
        # The value of model.dtype in the job.
        ("ppo", ["trainer.bf16=true", "scaling.use_gpu=true"], "float32"),
    ],
)
def test_on_a_cpu_the_base_has_the_dtype_of_its_matrix_products(stage, settings, expected, asked, in_root):
    job = load_job(f"jobs/demo/{stage}.yaml", ["model.dtype=float32", *settings], stage)
    with pytest.raises(Loaded):
        ModelHost(work_of(job, toy_models.tokenizer())).load_base()
    assert str(asked[0]["dtype"]) == f"torch.{expected}"
