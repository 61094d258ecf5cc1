"""Reward functions that tests name as `python:bad_rewards:FUNCTION`: one that is right, and several that go wrong."""

import math


def length(completions, **_):
    return [float(len(text)) for text in completions]


def raises(prompts, completions, **_):
    scores = {}
    return [scores[prompt] for prompt in prompts]


def fills_the_gpu(completions, **_):
    """What torch raises where a reward's own model finds no room."""
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def nan(completions, **_):
    return [math.nan] * len(completions)


def needs_weight(prompts, completions, weight):
    return [float(value) for value in weight]


def leaks(completions, **_):
    """An error whose text holds what no error should: the whole environment."""
    import os

    raise RuntimeError(f"no reward with {dict(os.environ)}")


def of_e(completions, **_):
    """Letters e in a completion: something that is learned within a few updates."""
    return [float(text.count("e")) for text in completions]
