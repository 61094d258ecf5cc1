"""Code that executes a run, in the driver and in its workers: checks, checkpoints, resuming, logging and the result."""
