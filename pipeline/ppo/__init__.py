"""PPO on one frozen base: pure functions, configuration, rollout engines, rewards, and the trainer.

Imports torch, transformers and peft only, neither Ray nor MLflow nor TRL.
"""
