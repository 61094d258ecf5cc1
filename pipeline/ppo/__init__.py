"""PPO on one base: pure functions, a configuration, rollout engines, rewards, and the trainer.

Knows torch, transformers and peft; knows neither Ray nor MLflow nor TRL.
"""
