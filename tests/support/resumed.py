"""Interrupts runs, and compares an interrupted run with an uninterrupted run: adapter bits, metrics and curves."""

import importlib
from dataclasses import replace

import dying
from running import client

from tools.chaos.runs import differences


def patched(monkeypatch, verb, train):
    """Makes the stage `verb` execute `train` in its workers."""
    module = importlib.import_module(f"pipeline.stages.{verb}")
    monkeypatch.setattr(module, "RECIPE", replace(module.RECIPE, train=train))


def touched(monkeypatch, verb, step, once, fault):
    """Makes the stage `verb` call `fault()` once, after `step` or after the last step. The file `once` records the call."""
    patched(monkeypatch, verb, dying.at_step(verb, step, str(once), fault))


class Interrupted(Exception):
    """Raised to end a run without ending the process."""


def interrupted(monkeypatch, verb, step):
    """Makes the stage `verb` fail after its first checkpoint at `step` or later."""
    train = dying.train_of(verb)

    def cut(worker):
        commit = worker.checkpoint

        def checkpoint(source, number):
            commit(source, number)
            if number >= step:
                raise Interrupted

        worker.checkpoint = checkpoint
        return train(worker)

    patched(monkeypatch, verb, cut)


def assert_equal(storage, expected, result):
    """Asserts that the runs with these result.json have bit-identical adapters, equal metrics and equal curves."""
    assert differences(client(storage), expected, result) == []
