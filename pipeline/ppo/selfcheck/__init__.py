"""Self-checks of PPO. They compare the first rollout and the first update of every run with their definitions."""
