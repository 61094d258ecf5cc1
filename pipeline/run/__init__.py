"""The life of a run, in the driver and in its workers."""
