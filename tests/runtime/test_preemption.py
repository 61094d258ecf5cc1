"""When a worker asks whether its node is about to go, and what SIGTERM means to it. No Ray runs here."""

import signal
import subprocess
import sys
import textwrap

import pytest
from running import ROOT

from pipeline.runtime import preemption


@pytest.fixture
def asked(monkeypatch):
    """The steps at which Ray was asked; `asked.answer` is what it says, `asked.clock` the time in seconds."""
    import ray.train

    class Asked(list):
        answer, clock, step = None, 100.0, 0

        def __call__(self):
            self.append(self.step)
            return self.answer

    found = Asked()
    monkeypatch.setattr(ray.train, "get_preemption_info", found)
    monkeypatch.setattr(preemption.time, "monotonic", lambda: found.clock)
    monkeypatch.setattr(preemption, "EVERY", 5.0)
    monkeypatch.setattr(preemption, "_got_sigterm", False)
    return found


def walk(notice, asked, steps, seconds):
    """Makes `steps` steps of `seconds` each; the answers."""
    answers = []
    for _ in range(steps):
        asked.step += 1
        asked.clock += seconds
        answers.append(notice.arrived(asked.step))
    return answers


def test_short_steps_are_not_burdened_with_a_barrier_each(asked):
    assert walk(preemption.Notice(1), asked, 500, 0.1) == [False] * 500
    assert asked[:4] == [1, 2, 52, 102] and len(asked) < 13


def test_long_steps_ask_every_time(asked):
    walk(preemption.Notice(1), asked, 6, 60.0)
    assert list(asked) == [1, 2, 3, 4, 5, 6]


def test_a_notice_is_known_within_the_interval_and_is_not_asked_for_again(asked):
    notice = preemption.Notice(1)
    walk(notice, asked, 60, 0.1)
    asked.answer = "this node will be gone"
    answers = walk(notice, asked, 60, 0.1)
    assert answers.index(True) < 50 and all(answers[answers.index(True) :])
    assert notice.given and not notice.terminated
    before = len(asked)
    walk(notice, asked, 200, 0.1)
    assert len(asked) == before


def test_sigterm_of_this_worker_is_a_notice(asked, monkeypatch):
    notice = preemption.Notice(1)
    monkeypatch.setattr(preemption, "_got_sigterm", True)
    assert walk(notice, asked, 1, 0.1) == [True] and notice.terminated


def test_the_first_sigterm_asks_and_the_second_ends(tmp_path):
    program = """
        import os, signal, sys
        from pipeline.runtime import preemption
        preemption.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        print("asked" if preemption._got_sigterm else "not asked", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("still there", flush=True)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "asked\n"), done.stderr


def test_sigterm_after_a_drain_notice_is_still_obeyed(asked, monkeypatch):
    notice = preemption.Notice(1)
    asked.answer = "this node will be gone"
    assert any(walk(notice, asked, 200, 0.1)) and not notice.terminated
    monkeypatch.setattr(preemption, "_got_sigterm", True)
    assert all(walk(notice, asked, 200, 0.1)) and notice.terminated
