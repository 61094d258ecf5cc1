"""Tests that the driver reports errors of TRL and peft with the name of the wrong key, before a worker starts."""

import os
from dataclasses import replace

import pytest
from running import ROOT

from pipeline.errors import InputError
from pipeline.job import ALL_STAGES, load_job
from pipeline.job.libraries import check_with_libraries
from pipeline.job.stages import STAGE_SPECS

SHIPPED = [path for path in sorted((ROOT / "jobs").glob("*/*.yaml")) if path.stem in ALL_STAGES]
REJECTED = [
    ("sft", ["trainer.optim_args=foo"], r"trainer\.optim_args: found 'foo'; SFTConfig says: not enough values"),
    ("sft", ["trainer.lr_scheduler_type=warmup_stable_decay"], r"trainer\.lr_scheduler_type: found 'warmup_stable_decay'"),
    ("sft", ["trainer.use_liger_kernel=true"], r"trainer\.use_liger_kernel: found true; SFTConfig says: the package liger_kernel"),
    ("ppo", ["lora.layers_pattern=h", "lora.target_modules=[q_proj]"], r"lora\.layers_pattern: found 'h'; peft\.LoraConfig says: When `layers_pattern`"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "overrides", "says"), REJECTED, ids=[case[1][0] for case in REJECTED])
def test_an_error_of_a_library_has_the_key(stage, overrides, says):
    path = ROOT / f"jobs/demo/{stage}.yaml"
    with pytest.raises(InputError, match=says) as caught:
        check_with_libraries(load_job(path, overrides, stage))
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_the_libraries_accept_all_shipped_jobs_on_a_machine_without_gpus(in_root):
    for path in SHIPPED:
        shipped = load_job(path)
        tf32 = {"tf32": True} if STAGE_SPECS[path.stem].trl and shipped.scaling.get("use_gpu") else {}
        check_with_libraries(replace(shipped, trainer=shipped.trainer | tf32))


def test_the_check_of_a_job_does_not_change_the_environment_of_later_jobs(in_root):
    before = dict(os.environ)
    check_with_libraries(load_job("jobs/demo/sft.yaml", ["trainer.torch_compile=true"], "sft"))
    changed = {key for key in os.environ.keys() | before.keys() if os.environ.get(key) != before.get(key)}
    assert not {key for key in changed if key.startswith("ACCELERATE")}
