"""When a worker asks whether its node is about to go. No Ray runs here."""

import pytest

from pipeline.runtime import worker


@pytest.fixture
def asked(monkeypatch):
    """The steps at which Ray was asked; `asked.answer` is what it says, `asked.clock` the time in seconds."""
    import ray.train.collective

    class Asked(list):
        answer, clock, step = None, 100.0, 0

        def __call__(self):
            self.append(self.step)
            return self.answer

    found = Asked()
    monkeypatch.setattr(ray.train, "get_preemption_info", found)
    monkeypatch.setattr(ray.train.collective, "broadcast_from_rank_zero", lambda data: data)
    monkeypatch.setattr(worker.time, "monotonic", lambda: found.clock)
    monkeypatch.setattr(worker, "NOTICE_INTERVAL_S", 5.0)
    return found


def walk(notice, asked, steps, seconds):
    """Makes `steps` steps of `seconds` each; the answers."""
    answers = []
    for _ in range(steps):
        asked.step += 1
        asked.clock += seconds
        answers.append(notice.poll(asked.step))
    return answers


def test_ray_is_asked_about_every_interval_and_each_long_step(asked):
    """Asking is a barrier, with which short steps are not burdened."""
    assert walk(worker.PreemptionNotice(), asked, 500, 0.1) == [False] * 500
    assert asked[:4] == [1, 2, 52, 102] and len(asked) < 13
    asked.clear()
    walk(worker.PreemptionNotice(), asked, 6, 60.0)
    assert list(asked) == [501, 502, 503, 504, 505, 506]


def test_a_notice_is_known_within_the_interval_and_asks_for_one_checkpoint(asked):
    notice = worker.PreemptionNotice()
    walk(notice, asked, 60, 0.1)
    asked.answer = "this node will be gone"
    answers = walk(notice, asked, 60, 0.1)
    assert answers.index(True) < 50 and answers.count(True) == 1 and notice.active
    before = len(asked)
    assert walk(notice, asked, 200, 0.1) == [False] * 200 and len(asked) == before
