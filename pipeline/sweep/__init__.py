"""Sweeps: a job with several values of some keys; each combination is a separate run, several at a time on Ray Tune.

    space.py     from `key=a,b` to checked jobs
    trials.py    the trials on Ray Tune, the progress of each, and which of them stop early (ASHA)
    table.py     the results: a table on the terminal, and sweep.json

A trial is an ordinary run in a folder below the sweep's, with its own result.json, checkpoints and MLflow run. The stages
only report their evaluations.
"""
