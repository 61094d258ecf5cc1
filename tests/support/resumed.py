"""A run that something happens to, compared with one that nothing happened to: the adapter's bits, figures and curves."""

import importlib

import dying
from running import client

from tests.chaos.runs import differences


def touched(monkeypatch, verb, step, once, happens):
    """The stage `verb` will have `happens()` after `step`, or after the last one, once; `once` is a file that remembers it."""
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


def assert_equal(storage, expected, result):
    """Two runs, as their result.json, end with the same adapter to the last bit, the same metrics and the same curve."""
    assert differences(client(storage), expected, result) == []
