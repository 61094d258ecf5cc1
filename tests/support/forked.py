"""Runs a function in several processes. The processes are forks of one process, so that libraries are imported only once."""

import pickle
import subprocess
import sys

PROGRAM = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from torch.multiprocessing import start_processes
work, args, processes = pickle.load(sys.stdin.buffer)
start_processes(work, args, nprocs=processes, start_method="fork")
"""


def in_processes(work, *args, processes=2):
    """Calls work(rank, *args) in separate processes. Returns the (stdout, stderr) of all processes together."""
    payload = pickle.dumps(sys.path) + pickle.dumps((work, args, processes))
    result = subprocess.run([sys.executable, "-c", PROGRAM], input=payload, capture_output=True, timeout=300)
    assert result.returncode == 0, result.stderr.decode()[-3000:]
    return result.stdout.decode(), result.stderr.decode()
