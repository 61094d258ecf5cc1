"""Self-checks of PPO. The checks compare the first rollout and the first update of every run with independent definitions.

A failed check ends the run. PPOTrainer calls the checks, on every rank:

| when | function | called by |
| --- | --- | --- |
| first update, after the rollout and before any learning | rollout.check_first_rollout | run_update |
| first update of the policy, before its first optimizer step | rollout.first_ratio | learn |
| after the first update | rollout.ranks_learned_equally | run_update |
| every update, if rollout workers sample | rollout.check_rollout_workers | rollout |
"""
