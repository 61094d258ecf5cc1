"""Does a run go on with its random numbers, on a node with other GPUs too?"""

import torch

from pipeline.ppo.state import rng_state, set_rng_state


def test_the_state_is_this_devices_and_none_others(device, tmp_path):
    torch.rand(5, device=device)
    torch.save(rng_state(), tmp_path / "rng.pt")
    expected = torch.rand(5, device=device)
    others = [torch.cuda.get_rng_state(i) for i in range(1, torch.cuda.device_count())]
    state = torch.load(tmp_path / "rng.pt", weights_only=True)
    set_rng_state(state)
    assert torch.equal(torch.rand(5, device=device), expected)
    assert isinstance(state["cuda"], torch.Tensor)
    for index, before in enumerate(others, start=1):
        assert torch.equal(torch.cuda.get_rng_state(index), before)
