"""Reward functions that tests name as `python:bad_rewards:FUNCTION`. Most of these functions fail."""

import math


def length(completions, **_):
    return [float(len(text)) for text in completions]


def raises(prompts, completions, **_):
    scores = {}
    return [scores[prompt] for prompt in prompts]


def fills_the_gpu(completions, **_):
    """Raises an out-of-memory error, like a reward whose own model does not fit into GPU memory."""
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def nan(completions, **_):
    return [math.nan] * len(completions)


def needs_weight(prompts, completions, weight):
    return [float(value) for value in weight]


def leaks(completions, **_):
    """Raises an error whose text contains all environment variables, including secrets."""
    import os

    raise RuntimeError(f"no reward with {dict(os.environ)}")


def of_e(completions, **_):
    """Counts the letter e in each completion. A policy learns to write the letter e within a few updates."""
    return [float(text.count("e")) for text in completions]
