"""Runs a job with several values of some keys (a sweep). Ray runs several combinations of values in parallel.

    space.py     makes a checked job for each combination of `key=a,b`
    trials.py    runs the trials on Ray Tune, prints their progress, and decides which of them stop early (ASHA)
    table.py     makes the table of results for the terminal and sweep.json

A trial is an ordinary run in a subfolder of the sweep's folder, with its own result.json, checkpoints and MLflow run. The trial
also reports its evaluations to the sweep.
"""
