"""How a CPU multiplies fp32 matrices: what is measured, and what is decided from it."""

import pytest
import torch

from pipeline.models import matmul
from pipeline.models.matmul import DEFAULT, MEDIUM

AMD, INTEL, AMX = 9e-7, 4e-7, 2.7e-3  # errors of "medium"; AMX rounds to bf16


@pytest.mark.parametrize(
    ("measured", "begun_with", "expected", "says"),
    [
        ([AMD], None, MEDIUM, 'precision "medium", by oneDNN (error 9.0e-07 here)'),
        ([AMX], None, DEFAULT, "error of 2.7e-03 here, above 1e-05"),
        ([float("nan")], None, DEFAULT, "error of nan"),
        ([AMD, float("nan")], None, DEFAULT, "error of nan"),
        ([AMD, AMX], None, DEFAULT, "error of 2.7e-03"),  # exact where rank 0 is, and not everywhere
        ([INTEL, AMD], None, MEDIUM, "error 9.0e-07"),
        ([INTEL], MEDIUM, MEDIUM, 'precision "medium", as this run began'),  # exact, and so the bits stay
        ([AMD], DEFAULT, DEFAULT, 'precision "highest", as this run began'),
        ([AMX], MEDIUM, DEFAULT, "up to rounding, no longer to the bit"),
        ([AMD, AMX], MEDIUM, DEFAULT, "up to rounding, no longer to the bit"),
    ],
)
def test_the_precision_of_a_run(measured, begun_with, expected, says):
    precision, why = matmul.decide(measured, begun_with)
    assert precision == expected and says in why


def test_products_rounded_to_bf16_are_far_above_the_limit_and_fp32_far_below():
    torch.manual_seed(0)
    a, b = torch.randn(64, 256), torch.randn(256, 96)
    assert matmul._error(a, b) < matmul.LARGEST_ERROR / 5
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul._error(a, b) > matmul.LARGEST_ERROR * 10


def test_nothing_that_is_timed_decides(monkeypatch):
    """A run on a busy machine would have other bits than the same run on an idle one."""
    monkeypatch.setattr(matmul, "time", None)
    assert matmul.medium_error() == matmul.medium_error()


def test_measuring_changes_no_setting():
    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    assert matmul.medium_error() > 0
    assert matmul.bf16_speedup() > 0
    assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == before
