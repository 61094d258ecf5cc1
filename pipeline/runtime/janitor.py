"""A process that outlives the driver of an embedded Ray, however it ends, and then kills what Ray leaves running.

Ray's agents outlive a killed driver by a minute, while they try to report that to a server which is gone, and its workers
by some seconds. (https://github.com/ray-project/ray, _private/process_watcher.py: report_raylet_error_logs waits 60 s.
Remove this file when that no longer waits for a GCS that is gone.)

embedded.py starts this file as a script; it imports nothing of the pipeline.
"""

import contextlib
import os
import re
import subprocess
import sys


def start(sessions: str) -> subprocess.Popen[bytes]:
    """Starts it; it begins when the pipe to it is closed, by the driver or with it. `sessions`: Ray's temporary folder."""
    # -P: the folder of this file is no place to import from. A session of its own: a Ctrl-C is for the driver.
    command = [sys.executable, "-P", os.path.abspath(__file__), sessions, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def main(sessions: str, driver: str) -> None:
    """Waits for the driver's end, then kills the Ray processes of its session, which are known by their open logs."""
    import psutil

    sys.stdin.buffer.read()
    for process in psutil.process_iter():
        # It may have ended meanwhile, or belong to somebody else.
        with contextlib.suppress(psutil.Error, IndexError):
            if process.cmdline()[0].startswith("ray::"):
                files = (os.path.relpath(file.path, sessions) for file in process.open_files())
                if any(re.match(rf"session_[^/]*_{driver}/", file) for file in files):
                    process.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
