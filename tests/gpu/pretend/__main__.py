"""`python -m tests.gpu.pretend sft jobs/demo/sft.yaml scaling.use_gpu=true ...`: the command line, on one pretended GPU.

Models are pretended in this process alone, so the job needs `scaling.num_workers=0`. Ends with a line of JSON: the exit status,
what the host waited for, the replays of graphs, and the peak of the memory.
"""

import json
import os
import sys

from tests.gpu.pretend import command

with command.machine():
    figures = command.run(sys.argv[1:])
print(json.dumps(figures), flush=True)
os._exit(figures["status"])  # without the threads and destructors of libraries, which would look for CUDA
