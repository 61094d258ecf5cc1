"""Runs `python -m tools.gpu`. The experiments are in another module, because spawned processes import no `__main__`."""

import sys

from tools.gpu.experiments import main

sys.exit(main())
