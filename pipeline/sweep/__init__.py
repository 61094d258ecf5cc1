"""Sweeps: runs a job with several values of some keys, several combinations at a time on Ray.

    space.py     makes checked jobs of `key=a,b`
    trials.py    runs the trials on Ray Tune, prints their progress, and decides which of them stop early (ASHA)
    table.py     makes the table of results for the terminal and sweep.json

A trial is an ordinary run in a folder below the sweep's, with its own result.json, checkpoints and MLflow run. The stages
only report their evaluations.
"""
