"""Reward functions that tests name as `python:odd_rewards:NAME`, and that are none, or return no list of numbers."""

import sys
from decimal import Decimal
from functools import partial

import numpy as np
import torch

half = partial(lambda completions, by: [len(text) / by for text in completions], by=2)


async def later(completions, **_):
    return [1.0] * len(completions)


RETURNS = {
    "dict": lambda n: {str(i): 1.0 for i in range(n)},
    "none": lambda n: None,
    "text": lambda n: "1" * n,
    "unordered": lambda n: set(range(n)),
    "iterator": lambda n: (1.0 for _ in range(n)),
    "number": lambda n: 1.0,
    "one_less": lambda n: [1.0] * (n - 1),
    "one_more": lambda n: np.ones(n + 1),
    "matrix": lambda n: np.ones((n, 1)),
    "nested": lambda n: [[1.0]] * n,
    "texts": lambda n: ["1.0"] * n,
    "nones": lambda n: [None] * n,
    "nan": lambda n: [float("nan")] * n,
    "infinity": lambda n: torch.full((n,), float("-inf")),
    "huge": lambda n: [10**400] * n,
    "endless": lambda n: [10**5000] * n,
    "complex": lambda n: [1j] * n,
    "objects": lambda n: np.array([{"score": 1.0}] * n, dtype=object),
    "dicts": lambda n: [{"score": 1.0}] * n,
    "pairs": lambda n: [torch.ones(2)] * n,
    "decimal_nan": lambda n: [Decimal("sNaN")] * n,
    "leaves": lambda n: sys.exit(0),
}
RIGHT = {
    "tuple": lambda n: (0.5,) * n,
    "ints": lambda n: [1] * n,
    "array": lambda n: np.full(n, 0.5, np.float32),
    "tensor": lambda n: torch.full((n,), 0.5, requires_grad=True),
    "tensors": lambda n: [torch.tensor(0.5, requires_grad=True)] * n,
    "numpy_numbers": lambda n: [np.float16(0.5), np.int64(1), np.bool_(True)],
    "decimals": lambda n: [Decimal("0.5")] * n,
    "booleans": lambda n: [True] * n,
}


def _returns(make):
    return lambda prompts, **_: make(len(prompts))


globals().update({name: _returns(make) for name, make in RETURNS.items()})
