"""Tests what a worker does about notices that its node will be terminated, and about an adapter that another program replaces."""

import os

import pytest
from running import NO_EVAL, client, stage
from safetensors.torch import load_file, save_file

from pipeline.run import checkpoints, worker


@pytest.fixture
def asked(monkeypatch):
    """Returns a list of the steps at which Ray was queried for notices. `answer` is Ray's answer, `clock` the time in seconds."""
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
    """Runs `steps` steps that take `seconds` each. Returns the answers at each step."""
    answers = []
    for _ in range(steps):
        asked.step += 1
        asked.clock += seconds
        answers.append(notice.poll(asked.step))
    return answers


def test_ray_is_queried_once_per_interval_and_at_each_long_step(asked):
    """A query is a barrier, which would slow down short steps."""
    assert walk(worker.PreemptionNotice(), asked, 500, 0.1) == [False] * 500
    assert asked[:4] == [1, 2, 52, 102] and len(asked) < 13
    asked.clear()
    walk(worker.PreemptionNotice(), asked, 6, 60.0)
    assert list(asked) == [501, 502, 503, 504, 505, 506]


def test_a_notice_is_seen_within_the_interval_and_triggers_one_checkpoint(asked):
    notice = worker.PreemptionNotice()
    walk(notice, asked, 60, 0.1)
    asked.answer = "this node will be gone"
    answers = walk(notice, asked, 60, 0.1)
    assert answers.index(True) < 50 and answers.count(True) == 1 and notice.active
    before = len(asked)
    assert walk(notice, asked, 200, 0.1) == [False] * 200 and len(asked) == before


@pytest.mark.parametrize(
    "moment", ["before it is stored", pytest.param("after it is stored", marks=pytest.mark.slow)]
)
def test_the_registered_adapter_is_the_one_that_was_checked(moment, tmp_path, monkeypatch, capsys):
    """If the adapter's file is replaced after the self-check, the run ends with an error."""
    at, file = (
        (worker, "require_reload") if moment.startswith("before") else (checkpoints, "store_checkpoint")
    )
    done = getattr(at, file)

    def exchanged(*arguments):
        found = done(*arguments)
        if at is checkpoints and not arguments[2].startswith("final"):
            return found
        folder = arguments[2] if at is worker else os.path.join(*arguments[1:], "adapter")
        path = os.path.join(folder, "adapter_model.safetensors")
        save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
        return found

    quick = ["scaling.num_workers=0", "trainer.max_steps=1", *NO_EVAL]
    with monkeypatch.context() as patch:
        patch.setattr(at, file, exchanged)
        stage("sft", tmp_path, "one", *quick, status=1)
    says = (
        "failed: the last checkpoint differs from the trained weights (adapter/adapter_model.safetensors has"
    )
    assert says in capsys.readouterr().err
    assert client(tmp_path).search_registered_models() == []
    assert stage("sft", tmp_path, "one", *quick)["version"] == "1", "the same command trains again"
