"""Compares an interrupted run with an uninterrupted one: adapter bits, metrics and curves."""

import importlib

import dying
from running import client

from tools.chaos.runs import differences


def touched(monkeypatch, verb, step, once, happens):
    """Makes the stage `verb` call `happens()` once, after `step`. The file `once` records the call, see dying.at_step."""
    module = importlib.import_module(f"pipeline.stages.{verb}")
    monkeypatch.setattr(module, "train", dying.at_step(verb, step, str(once), happens))


class Interrupted(Exception):
    """Ends a run without ending the process."""


def interrupted(monkeypatch, verb, step):
    """Makes the stage `verb` fail after it has committed a checkpoint of `step` or later."""
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
    """Asserts that the runs with these result.json have bit-identical adapters, equal metrics and equal curves."""
    assert differences(client(storage), expected, result) == []
