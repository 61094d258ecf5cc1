"""docs/serving.md: what it says of keys, and commands that its readers type."""

import re
import shlex

import pytest
from running import ROOT

from pipeline.config import load_job

TEXT = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
OVERRIDES = re.findall(r"make (serve|kto|rm)(?: ARGS=\"(.*?)\")", TEXT)


def test_the_table_of_limits_has_the_defaults(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"stage: serve\nmodel: {{name_or_path: {ROOT}/jobs/demo/model}}\nserve: {{policies: {{a: base}}}}\n"
    )
    job = load_job(file, [], "serve")
    sections = {"serve": job.serve, "trainer": job.args, "data": job.data}
    rows = re.findall(r"^\|[^|]*\| `(\w+)\.(\w+)` \| ([\w.]+)[^|]*\|[^|]*\|$", TEXT, re.M)
    assert len(rows) == 8
    for section, key, default in rows:
        value = getattr(sections[section], key)
        assert default == (
            "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        ), key


@pytest.mark.parametrize(("verb", "overrides"), OVERRIDES)
def test_the_commands_are_ones_that_load(verb, overrides, in_root):
    job = load_job(f"jobs/demo/{verb}.yaml", shlex.split(overrides), verb)
    if verb != "serve":
        assert not job.gate, "a gate on rows that the command does not hold out keeps the alias back"
