"""The process of a command: its terminal, its signals, its exit status.

sys.exit(process.run(main))
"""

import os
import sys
from collections.abc import Callable

from pipeline.system import console, deadline, signals


def run(main: Callable[[], int]) -> int:
    """The exit status of `main`; with a call that was left behind unanswered, the process ends here."""
    console.wrap_streams()
    signals.take_over()
    sys.unraisablehook = signals.deliver_again
    status = main()
    signals.exit_with(status)
    if deadline.left_behind:  # else the exit would wait for it: pyarrow does, for minutes
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
