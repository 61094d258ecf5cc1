"""What a kto run says about its labels: the weights that the paper advises for unequal numbers of them."""

import re
from types import SimpleNamespace

import pytest

from pipeline.runtime.inputs import check_labels


@pytest.mark.parametrize(
    ("weights", "desirable", "undesirable", "warned"),
    [
        ({}, 100, 100, ""),
        ({}, 133, 100, ""),
        ({"desirable_weight": 2.5}, 584, 1216, ""),
        ({}, 100, 300, r"is 0\.33 of .*desirable_weight=3 to 4, or trainer\.undesirable_weight=0\.25 to 0\.333"),
        ({}, 300, 100, r"is 3\.00 of .*desirable_weight=0\.333 to 0\.444, or trainer\.undesirable_weight=2\.25 to 3"),
        ({"desirable_weight": 2.0, "undesirable_weight": 4.0}, 100, 100, r"is 0\.50 of .*desirable_weight=4 to 5\.33"),
        ({}, 100, 0, "only one of the labels has rows and a weight"),
        ({"undesirable_weight": 0.0}, 100, 100, "only one of the labels has rows and a weight"),
    ],
)  # fmt: skip
def test_unbalanced_labels_are_named_with_the_weights_that_balance_them(
    weights, desirable, undesirable, warned, capsys
):
    check_labels(SimpleNamespace(trainer=weights), desirable, undesirable)
    said = capsys.readouterr().out
    assert f"labels: {desirable:,} desirable, {undesirable:,} undesirable rows" in said
    assert re.search(warned, said) if warned else "warning" not in said
