"""PPO on one frozen base: pure functions, configuration, rollout engines, rewards, and the trainer.

Imports torch, transformers and peft, but not Ray, MLflow or TRL.
"""
