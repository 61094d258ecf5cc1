"""Sweeps: a job with several values of some keys, each combination a run of its own, side by side on Ray Tune.

    space.py     from `key=a,b` to jobs that have all been checked
    trials.py    the trials on Ray Tune, and what a killed driver left of them
    rungs.py     which trials stop early (ASHA), and how far each is
    table.py     what came out: a table on the terminal, as files, and a plot

A trial is an ordinary run in a folder below the sweep's: it has its own result.json, checkpoints and MLflow run, and the
stages know of the sweep only that somebody hears of their evaluations.
"""
