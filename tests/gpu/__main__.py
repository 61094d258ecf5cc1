"""Runs `python -m tests.gpu`. The experiments are in another module, because spawned processes import no `__main__`."""

import sys

from tests.gpu.experiments import main

sys.exit(main())
