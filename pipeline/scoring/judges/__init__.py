"""Judges: models behind an endpoint that score completions. No answer is paid twice; no failure is a score.

forms.py   questions about completions, and what an answer to one means
store.py   answers on disk, which all runs of a storage path share
client.py  asks the endpoint, within limits and a budget, and again after what can pass
reward.py  a judge as a reward
"""
