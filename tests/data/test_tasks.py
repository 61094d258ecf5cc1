"""What one Ray Data task does, without Ray."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from running import ROOT
from toy_data import ROWS, write

from pipeline.data import tasks
from pipeline.data.values import RowError


def test_tasks_do_not_import_torch(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    code = f"""
import sys
from pipeline.data import chunks, files, tasks
from pipeline.data.shapes import kind_of
from toy_data import tokenizer
options = tasks.Options("sft", 400, "error", "raise", False, (1,), 0.0, 0, False)
(chunk,) = chunks.plan(files.find({path!r}, "data.train"), "train", kind_of("sft"))
assert tasks.tokenise(chunk, 0, tokenizer(), options, {str(tmp_path)!r}).splits["train"].kept == 50
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_file_of_bad_rows_is_not_read_to_its_end(on_error, monkeypatch):
    monkeypatch.setattr(tasks, "ENOUGH", 100)
    options = SimpleNamespace(on_error=on_error)
    stats = tasks.Stats()
    split = stats.split("train")
    for number in range(101 if on_error == "raise" else 1001):
        assert not tasks.hopeless(stats, options)
        tasks.note_bad(stats, split, number, RowError("null", "prompt", "null", "a value"))
    assert tasks.hopeless(stats, options)
    split.kept = 1  # some rows are good, and the job says to leave the others out
    assert tasks.hopeless(stats, options) == (on_error == "raise")
