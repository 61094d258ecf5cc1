"""`python -m tests.gpu.pretend sft jobs/demo/sft.yaml scaling.use_gpu=true ...`: the command line, on one pretended GPU.

Models are pretended in this process alone, so the job needs `scaling.num_workers=0`. Ends with a line of JSON: the exit status,
what the host waited for, the replays of graphs, and the peak of the memory.
"""

import json
import os
import sys
from unittest import mock

import torch
from ray._private.accelerators import NvidiaGPUAcceleratorManager

from pipeline.__main__ import main
from tests.gpu import pretend

with (
    pretend.cuda(gpus=1),
    mock.patch.object(NvidiaGPUAcceleratorManager, "get_current_node_num_accelerators", lambda: 1),
):
    status = main(sys.argv[1:])
    figures = {
        "status": status,
        "host_reads": dict(pretend.host_reads),
        "replays": pretend.machine.replays,
        "peak": torch.cuda.max_memory_allocated(),
    }
print(json.dumps(figures), flush=True)
os._exit(status)  # without the threads and destructors of libraries, which would look for CUDA
