"""Turns a job into the values that a run needs: resolves and checks its base, inputs, placement and rows once, on the driver."""
