"""`trainer.bf16: true` on a CPU: a base in bfloat16 under adapters in float32, and the checks of every stage hold.

In this process, on a few steps of the demo. Each stage's own checks end it if they fail.
"""

import alone
import pytest
import torch
from safetensors.torch import load_file

BF16 = ["trainer.bf16=true", "model.dtype=float32"]
STEPS = ["trainer.max_steps=3", "trainer.warmup_steps=0", "trainer.logging_steps=1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """{stage: what its `train` returns}."""
    folder = tmp_path_factory.mktemp("bf16")
    made = {stage: alone.train(stage, folder, *BF16, *STEPS) for stage in ("sft", "rm")}
    for stage in ("dpo", "kto"):
        made[stage] = alone.train(stage, folder, *BF16, *STEPS, inputs={"policy": made["sft"]["adapter"]})
    return made


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "kto"])
def test_adapters_are_trained_in_fp32(stage, trained):
    tensors = load_file(f"{trained[stage]['adapter']}/adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    moved = [tensor for key, tensor in tensors.items() if "lora_B" in key]  # zeros at first
    assert all(tensor.any() for tensor in moved)
    # Not what rounding to bf16 would have left.
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in moved)
