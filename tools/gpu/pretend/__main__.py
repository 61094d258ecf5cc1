"""Runs a command on one pretended GPU: `python -m tools.gpu.pretend sft jobs/demo/sft.yaml scaling.use_gpu=true ...`.

Only this process pretends to have a GPU, so the job needs `scaling.num_workers=0`. The last line is JSON
with the exit status, the counts of host reads, the number of graph replays, and the peak memory.
"""

import json
import os
import sys

from tools.gpu.pretend import command

with command.machine():
    results = command.run(sys.argv[1:])
print(json.dumps(results), flush=True)
os._exit(results["status"])  # skips threads and destructors of libraries, which would look for CUDA
