"""Reward functions that tests name as `python:bad_rewards:FUNCTION`. One is right, the others fail."""

import math


def length(completions, **_):
    return [float(len(text)) for text in completions]


def raises(prompts, completions, **_):
    scores = {}
    return [scores[prompt] for prompt in prompts]


def fills_the_gpu(completions, **_):
    """Raises torch's error for a reward whose own model runs out of memory."""
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def nan(completions, **_):
    return [math.nan] * len(completions)


def needs_weight(prompts, completions, weight):
    return [float(value) for value in weight]


def leaks(completions, **_):
    """Raises an error whose text contains the whole environment, which no error should."""
    import os

    raise RuntimeError(f"no reward with {dict(os.environ)}")


def of_e(completions, **_):
    """Counts the letter e in each completion, which a policy learns within a few updates."""
    return [float(text.count("e")) for text in completions]
