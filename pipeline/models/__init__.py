"""Loads the frozen base model and its tokenizer, and manages the LoRA adapters on the base."""
