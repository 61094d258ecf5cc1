"""JSON values that no row may hold."""

import gzip

import pytest
from toy_data import (
    parsed,
    read_rows,
)

from pipeline.data.values import RowError

PAIR = '"prompt": "a", "chosen": "b", "rejected": "c"'


VALUES = [
    (f'{{{PAIR}, "x": NaN}}', "not_finite", "x"),
    (f'{{{PAIR}, "x": [-Infinity]}}', "not_finite", "x[0]"),
    (f'{{{PAIR}, "margin": 1e400}}', "not_finite", "margin"),
    (f'{{{PAIR}, "margin": {"9" * 5000}}}', "not_finite", "margin"),
    (f'{{{PAIR}, "x": {{"y": -{"9" * 5000}}}}}', "not_finite", "x.y"),
    (f'{{{PAIR}, "x": "\\ud83d"}}', "not_utf8", "x"),
    (f'{{{PAIR}, "\\udc00": 1}}', "not_utf8", ""),
    (f'{{{PAIR}, "x": {"[" * 100}{"]" * 100}}}', "nested", "x" + 20 * "[0]"),
    (f'{{{PAIR}, "x": {"[" * 100_000}{"]" * 100_000}}}', "nested", ""),
    (f'{{{PAIR}, "x": {"[" * 100_000}', "nested", ""),
]


@pytest.mark.parametrize(
    ("text", "kind", "field"), VALUES, ids=[f"{kind}-{i}" for i, (_, kind, _) in enumerate(VALUES)]
)
@pytest.mark.parametrize("form", ["lines", "array", "gzip"])
def test_values_that_no_row_may_hold(tmp_path, form, text, kind, field):
    good = f'{{{PAIR}, "x": 1e308, "z": "\\u0000\\ud83d\\ude00", "": [{"7" * 300}]}}'
    name, content = {
        "lines": ("rows.jsonl", f"{good}\n{text}\n"),
        "array": ("rows.json", f"[{good}, {text}]"),
        "gzip": ("rows.jsonl.gz", f"{good}\n{text}\n"),
    }[form]
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if form == "gzip" else data)
    (_, first), (line, second) = read_rows(tmp_path / name, stage="rm")
    parsed(first, "rm")
    with pytest.raises(RowError) as caught:
        raise second if isinstance(second, RowError) else parsed(second, "rm")
    assert (line, caught.value.kind) == (2, kind)
    assert caught.value.field.startswith(field) and len(str(caught.value)) < 400
