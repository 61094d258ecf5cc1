"""Self-checks of PPO: the first rollout and the first update of every run, compared with their definitions."""
