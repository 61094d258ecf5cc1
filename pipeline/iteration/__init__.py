"""Iterations: rounds of collect, training and evaluate, each on what the policy before it wrote.

plan.py      from a job file to the jobs of each round
table.py     what came out of the rounds
"""
