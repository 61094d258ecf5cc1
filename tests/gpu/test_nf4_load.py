"""Is nf4 made on the GPU, how long does it take, and does no whole base pass through the CPU's memory?"""

import resource
import time
from types import SimpleNamespace

import gpu_models
import pytest
import torch

from pipeline.models.base import load_base


def test_nf4_is_made_on_the_device_in_seconds(device, tmp_path, capsys):
    pytest.importorskip("bitsandbytes")
    gpu_models.base(layers=4, device="cpu").save_pretrained(tmp_path)
    settings = SimpleNamespace(
        name_or_path=str(tmp_path), revision=None, dtype="bfloat16", load_in_4bit=True, attn_implementation=None,
        trust_remote_code=False, allow_pickle=False,
    )  # fmt: skip
    seconds = {}
    for where in (device, "cpu"):
        begin = time.perf_counter()
        model = load_base(settings, device=where)
        seconds[str(where)] = time.perf_counter() - begin
        assert {p.device.type for p in model.parameters()} == {torch.device(where).type}
        del model
    with capsys.disabled():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"\nnf4, four layers of 8B: {seconds} s; peak of the process {peak:.1f} GiB")
    assert seconds[str(device)] < seconds["cpu"]
