"""Scores completions: forward passes, rewards, judges."""
