"""Iterations: rounds of collect, training and evaluate, each on completions of the newest policy.

plan.py      from a job file to the jobs of each round
table.py     what came out of the rounds
"""
