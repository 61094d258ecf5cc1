"""Does a full GPU end in a message that names the phase?"""

import pytest
import torch

from pipeline.errors import OutOfMemory
from pipeline.ppo.phases import Phases


def test_a_phase_names_itself(device):
    with pytest.raises(OutOfMemory, match=r"out of memory in phase 'update'.*CUDA out of memory"):
        with Phases(device)("update"):
            torch.empty(1 << 45, dtype=torch.uint8, device=device)
    torch.ones(3, device=device).sum()  # the device goes on
