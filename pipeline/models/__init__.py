"""Models: the frozen base, its tokenizer, and the adapters on it."""
