"""RLHF as a cloud job template: SFT, reward model, DPO and PPO with LoRA on Ray."""
