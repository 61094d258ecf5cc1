"""Judges: models behind an endpoint that score completions. No answer is paid for twice, and no failure becomes a score.

forms.py   makes questions about completions, and converts answers to scores
store.py   stores answers on disk, for all runs of a storage path
client.py  sends questions to the endpoint, within limits and a budget, and repeats them after temporary failures
reward.py  makes a reward of a judge
"""
