"""Models: the frozen base, the tokenizer's rules, the adapters on the base, and the embedded demo model."""
