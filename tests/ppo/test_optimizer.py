"""`trainer.optim`: every kind of AdamW learns what torch's own does, and a resumed run goes on with its moments."""

import pytest
import torch
import toy_ppo as toy

from pipeline.ppo.config import PPOConfig
from pipeline.ppo.trainer import adamw

KINDS = ["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"]


def wide():
    """Adapters of 4096 numbers and more, which bitsandbytes' moments of 8 bits begin with."""
    shared = toy.SharedBase(toy.base())
    shared.add("policy", lora={**toy.LORA, "r": 128}, trainable=True)
    return shared


def trained(kind, updates=2):
    trainer = toy.trainer(
        wide(), optim=kind, advantage_estimator="rloo", num_generations=2, check_reference=False
    )
    for _ in range(updates):
        trainer.run_update()
    return trainer


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_steps_as_adamw_does_and_resumes(kind, tmp_path):
    trainer = trained(kind)
    states = [state for state in trainer.optimizer.state.values() if state]
    eight = any(
        value.dtype == torch.uint8 for state in states for value in state.values() if torch.is_tensor(value)
    )
    assert eight == ("8bit" in kind)
    trainer.save(tmp_path)
    trainer.run_update()
    again = trained(kind, updates=0)
    again.restore(tmp_path)
    again.run_update()
    assert torch.equal(toy.weights(again, ["policy"]), toy.weights(trainer, ["policy"]))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_one_step_is_torchs(kind):
    moved = []
    for name in ("adamw_torch", kind):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(64, 128))
        args = PPOConfig(optim=name, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-3, weight_decay=0.1)
        before, optimizer = parameter.detach().clone(), adamw(args, [([parameter], 0.01)])
        for _ in range(3):
            parameter.grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
            optimizer.step()
        moved.append(parameter.detach() - before)
    assert (moved[1] - moved[0]).norm() < 0.05 * moved[0].norm()
