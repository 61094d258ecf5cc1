"""Tests the jobs of jobs/examples on small files in the formats of public datasets (tests/data/shapes)."""

import pytest
from running import ROOT

from pipeline.commands import validate
from pipeline.job import load_job

EXAMPLES = sorted(path.stem for path in (ROOT / "jobs/examples").glob("*.yaml"))
# {job: (number of kept rows, {reason: number of dropped rows})}
KEPT = {
    "alpaca": (6, {}),
    "sharegpt": (6, {}),
    "tool_calls": (4, {}),
    "llmbar": (8, {}),
    "pandalm": (5, {"tie": 3}),
    "alpaca_eval": (6, {"tie": 2, "unlabeled": 1}),
    "shp": (6, {}),
    "stack_exchange": (6, {}),
    "ultrafeedback": (6, {}),
    "hh": (6, {}),
    "kto": (8, {}),
    "imdb": (4, {"left_out": 4}),
    "oasst": (9, {"left_out": 1}),
    "oasst_flat": (12, {}),
    "ultrafeedback_raw": (5, {"left_out": 2}),
    "nectar": (8, {}),
    "helpsteer": (6, {"left_out": 1}),
    "helpsteer_preferences": (5, {"tie": 1}),
    "red_team": (5, {"tie": 1}),
    "capybara": (4, {}),
    "glaive": (4, {}),
    "xlam": (4, {}),
    "webgpt": (5, {"tie": 1}),
    "argilla": (4, {"tie": 1, "unlabeled": 1}),
    "label_studio": (4, {"tie": 1, "unlabeled": 1}),
}

TOOLS = """\
{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}\
{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def small(name: str) -> list[str]:
    """Returns overrides with which an example job uses the model of the demo and the rows in tests/data/shapes."""
    (path,) = (ROOT / "tests/data/shapes").glob(f"{name}.*")
    settings = ["model.name_or_path=jobs/demo/model", "data.max_length=256", "data.eval_fraction=0"]
    return [f"data.train={path}", *settings, "data.on_error=raise"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_reads_its_format(name, tmp_path, capsys, in_root):
    overrides = [*small(name), f"run.storage_path={tmp_path}"]
    if name in ("tool_calls", "glaive", "xlam"):  # the chat template of the demo ignores tool calls
        (tmp_path / "tools.jinja").write_text(TOOLS)
        overrides.append(f"model.chat_template={tmp_path / 'tools.jinja'}")
    job = load_job(f"jobs/examples/{name}.yaml", overrides)
    split = validate.run(job)["splits"]["train"]
    assert (split["kept"], split["dropped"]) == KEPT[name]
    if job.stage == "rm":  # in these rows, only chosen completions contain the word "is"
        samples = capsys.readouterr().out
        assert samples.count("chosen   ⟦") == 3
        assert all(" is " in line for line in samples.splitlines() if line.startswith("  chosen "))
