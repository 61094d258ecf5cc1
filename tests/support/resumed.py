"""A run that something happens to, compared with one that nothing happened to: the adapter's bits, figures and curves."""

import importlib
import re
from pathlib import Path

import dying
from running import client

MEASURED = re.compile(r"runtime|per_second|time|memory|flos|rollout/(wait|idle|queue|bytes|workers|lost)")


def touched(monkeypatch, verb, step, once, happens):
    """The stage `verb` will have `happens()` after `step`, once; `once` is a file that remembers it."""
    module = importlib.import_module(f"pipeline.stages.{verb}")
    monkeypatch.setattr(module, "train", dying.at_step(verb, step, str(once), happens))


class Interrupted(Exception):
    """Ends a run in the process of its command."""


def interrupted(monkeypatch, verb, step):
    """The stage `verb` will end with an error when it has committed its first checkpoint at `step` or later."""
    module = importlib.import_module(f"pipeline.stages.{verb}")
    train = module.train

    def cut(worker):
        commit = worker.checkpoint

        def checkpoint(source, at):
            commit(source, at)
            if at >= step:
                raise Interrupted

        worker.checkpoint = checkpoint
        return train(worker)

    monkeypatch.setattr(module, "train", cut)


def numbers(metrics):
    return {key: value for key, value in metrics.items() if not MEASURED.search(key)}


def assert_equal(storage, expected, result):
    """Two runs, as their result.json, end with the same adapter to the last bit, the same metrics and the same curve."""
    weights = [Path(one["adapter"], "adapter_model.safetensors").read_bytes() for one in (expected, result)]
    assert weights[0] == weights[1], "the adapters differ"
    assert numbers(result["metrics"]) == numbers(expected["metrics"])
    assert (result["kept"], result["ended"]) == (expected["kept"], expected["ended"])
    mlflow = client(storage)
    keys = numbers(mlflow.get_run(expected["mlflow_run_id"]).data.metrics)
    assert keys

    def curve(run):
        return {key: [(p.step, p.value) for p in mlflow.get_metric_history(run, key)] for key in keys}

    assert curve(result["mlflow_run_id"]) == curve(expected["mlflow_run_id"])
    runs = mlflow.search_runs(["1"], filter_string=f"attributes.run_name = '{result['name']}'")
    assert [run.info.status for run in runs] == ["FINISHED"]
