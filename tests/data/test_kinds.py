"""The table of kinds: each stage that reads rows has its kind, and no entry is unused."""

import pytest

from pipeline.config.stages import STAGE
from pipeline.data.shapes import KIND, kind_of


def test_every_stage_with_rows_has_a_kind():
    used = {stage.rows for stage in STAGE.values() if stage.rows}
    assert used | {"pairs", "benchmarks"} == set(KIND)
    assert {name for name, stage in STAGE.items() if not stage.rows} == {"export", "serve"}


@pytest.mark.parametrize(
    "stage", [*(name for name, stage in STAGE.items() if stage.rows), "pairs", "benchmarks"]
)
def test_a_kind_knows_whose_rows_it_describes(stage):
    kind = kind_of(stage)
    assert kind.stage == stage and kind.shapes and kind.columns
    assert (kind.completions == "written") == ("input_ids" in kind.columns and "labels" not in kind.columns)
