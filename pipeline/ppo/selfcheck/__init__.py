"""Self-checks of PPO: the first rollout and the first update, compared with their definitions.

rollout.py runs in every job, on its first update; doctor.py adds checks that cost extra passes.
"""
