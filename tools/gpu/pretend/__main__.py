"""Runs a command on one pretended GPU: `python -m tools.gpu.pretend sft jobs/demo/sft.yaml scaling.use_gpu=true ...`.

Only this process pretends, so the job needs `scaling.num_workers=0`. The last line is JSON with the exit status, host waits,
graph replays and peak memory.
"""

import json
import os
import sys

from tools.gpu.pretend import command

with command.machine():
    figures = command.run(sys.argv[1:])
print(json.dumps(figures), flush=True)
os._exit(figures["status"])  # skips threads and destructors of libraries, which would look for CUDA
