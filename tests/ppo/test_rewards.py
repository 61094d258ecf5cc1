"""Rewards: Python functions that do not import, are none, or return no numbers; adapters and other models as rewards."""

import asyncio
import json
import math
import random
import re
import sys
import threading
from decimal import Decimal

import numpy as np
import pytest
import torch
import toy_ppo as toy
import transformers

from pipeline.errors import Failure, InputError
from pipeline.ppo.rewards import FunctionReward, ModelReward, Samples
from pipeline.system.functions import imported


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import sys\nsys.exit(0)\n", r"cannot be imported from .* \(SystemExit: 0, at .*/mine\.py:2\)"),
        ("x = 1\nraise RuntimeError('not today')\n", r"\(RuntimeError: not today, at .*/mine\.py:2\)"),
        ("def f(:\n", r"\(SyntaxError: invalid syntax \(mine\.py, line 1\)"),
        ("x = 1\n", r"module 'mine' has no attribute 'f'"),
        ("f = {}\n", "is no function"),
        (None, r"No module named 'mine'.*PYTHONPATH"),
    ],
)
def test_a_function_that_does_not_import(text, says, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(InputError, match=rf"^python:mine:f: .*{says}"):
        imported("python:mine:f")


# ------------------------------------------------------------------------------------------- what they return


def samples(count: int = 3, first: int = 0) -> Samples:
    class Tokenizer:
        def decode(self, ids, skip_special_tokens=True):
            return f"completion {ids[0]}"

    rows = [{"prompt": f"question {i}", "answer": i} for i in range(count)]
    completions = [[first + i] for i in range(count)]
    return Samples([[i] for i in range(count)], completions, [True] * count, rows, Tokenizer())


def checked(returned):
    return FunctionReward(lambda prompts: returned, name="polite").checked(samples())


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ({"0": 1.0}, r"returned \{'0': 1\.0"),
        (None, "returned None"),
        ("111", "returned '111'"),
        (1.0, r"returned 1\.0"),
        ([1.0] * 2, "returned 2 scores"),
        (np.ones(4), "returned 4 scores"),
    ],
    ids=str,
)
def test_what_is_no_list_of_one_number_for_each_sample(returned, says):
    says = rf"^reward 'polite' \(.*\) {says}.* for 3 samples; expected a list of one number for each"
    with pytest.raises(Failure, match=says):
        checked(returned)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([1.0], r"\[1\.0\]"),
        ("well", "'well'"),
        (None, "None"),
        (torch.tensor(-math.inf), r"tensor\(-inf\)"),
        (10**400, "1000"),
        (1j, "1j"),
        ({"score": 1.0}, r"\{'score': 1\.0\}"),
        (torch.ones(2), r"tensor\(\[1\., 1\.\]\)"),
    ],
    ids=str,
)
def test_what_is_no_finite_number_is_named_with_its_sample(wrong, says):
    says = rf"returned {says}.* for prompt 'question 1', completion 'completion 1', row \{{.*\}} \(sample 1 of 3\); expected a finite"
    with pytest.raises(Failure, match=rf"^reward 'polite' \({__name__}:.*\) {says}") as caught:
        checked([1.0, wrong, 1.0])
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "returned",
    [
        (0.5,) * 3,
        np.full(3, 0.5, np.float32),
        torch.full((3,), 0.5, requires_grad=True),
        [torch.tensor(0.5, requires_grad=True), np.float16(0.5), Decimal("0.5")],
        [1, True, np.int64(1)],
    ],
    ids=str,
)
def test_numbers_of_every_library_are_scores(returned):
    scores = checked(returned)
    assert set(scores) in ({0.5}, {1.0}) and all(type(score) is float for score in scores)


def test_a_reward_that_exits_does_not_end_the_worker_in_silence():
    with pytest.raises(Failure, match=r"raised SystemExit: 0; expected a list of numbers"):
        FunctionReward(lambda **_: sys.exit(0)).checked(samples())


def test_what_a_reward_raises_is_shown_with_its_own_frames_only():
    def inside(text):
        return json.loads(text)  # raises in a library

    def reward(completions):
        return [inside(text) for text in completions if text != "completion 0"]

    async def later(completions):
        return reward(completions)

    for function in (reward, later):
        with pytest.raises(Failure) as caught:
            FunctionReward(function).checked(samples())
        first, *frames = str(caught.value).splitlines()
        says = rf"reward '{function.__name__}' \({__name__}:.*\) raised JSONDecodeError: .* for prompt 'question 1', .*\(sample 1 of 3\):"
        assert re.fullmatch(says, first)
        assert f", in {function.__name__}" in frames[0] and "return json.loads(text)" in str(caught.value)
        assert all(f'File "{__file__}"' in line for line in frames if "File" in line)


# ----------------------------------------------------------------------------------------------- in a trainer


def test_reward_functions_get_text_and_the_datas_columns():
    seen = {}

    def reward(prompts, completions, answer, **columns):
        seen.update(prompts=prompts, completions=completions, answer=answer, columns=columns)
        return [float(a) for a in answer]

    async def slow(completions):
        await asyncio.sleep(0.01)
        return [float(len(text)) for text in completions]

    trainer = toy.trainer(reward=[FunctionReward(reward, weight=3.0), FunctionReward(slow, weight=0.5)])
    rollout = trainer.make_experience()
    episodes, samples = rollout.episodes, toy.samples_of(trainer, rollout)
    assert seen["prompts"] == [f"question {a}" for a in seen["answer"]]
    assert set(seen["columns"]) == {"completion_ids", "seeds"}
    assert seen["completions"][0] == toy.Tokenizer().decode(samples.completion_ids[0])
    expected = [3.0 * a + 0.5 * len(c) for a, c in zip(seen["answer"], seen["completions"], strict=True)]
    assert episodes.scores.tolist() == pytest.approx(expected)


def test_a_reward_in_a_running_event_loop():
    async def reward(completions):
        return [1.0 for _ in completions]

    async def notebook():
        return toy.trainer(reward=reward).run_update()["objective/scores"]

    assert asyncio.run(notebook()) == 1.0


def test_a_reward_model_that_is_not_on_this_base():
    torch.manual_seed(2)
    model = transformers.AutoModelForSequenceClassification.from_config(
        toy.config("gpt2", num_labels=1)
    ).eval()
    texts = Samples(
        [[5, 6], [7]],
        [[8, 2], [9, 10, 11]],
        [True, False],
        [{"prompt": "a"}, {"prompt": "bc"}],
        toy.Tokenizer(),
    )
    own = [model(input_ids=torch.tensor([ids])).logits.item() for ids in ([5, 6, 8, 2], [7, 9, 10, 11])]
    assert ModelReward(model).score(texts) == pytest.approx(own, abs=1e-5)

    class Letters:  # a tokenizer of its own: one id a character
        eos_token_id, chat_template = 3, None

        def __call__(self, text):
            return transformers.BatchEncoding({"input_ids": [ord(c) % 50 + 5 for c in text]})

    other = ModelReward(model, tokenizer=Letters()).score(texts)
    spelled = [[ord(c) % 50 + 5 for c in "a8"] + [3], [ord(c) % 50 + 5 for c in "bc9 10 11"]]
    assert other == pytest.approx(
        [model(input_ids=torch.tensor([ids])).logits.item() for ids in spelled], abs=1e-5
    )
    toy.trainer(reward=ModelReward(model)).run_update()
    assert not any(p.requires_grad for p in model.parameters())


def test_rows_that_are_scored_side_by_side_keep_their_order():
    """The first two wait until both are there."""
    two, called = threading.Barrier(2, timeout=20), []

    def slow(completions, completion_ids):
        called.append(completion_ids[0][0])
        if completion_ids[0][0] in (60, 61):
            two.wait()
        return [float(completion_ids[0][0])]

    asked = samples(6, first=60)
    row_by_row = FunctionReward(slow, timeout_s=30, threads=2, name="slow").checked(asked)
    assert row_by_row == [60.0, 61.0, 62.0, 63.0, 64.0, 65.0] and sorted(called) == [60, 61, 62, 63, 64, 65]


def test_a_row_whose_reward_hangs_ends_the_run_and_is_named():
    never, begun = threading.Event(), []

    def hangs(completion_ids):
        begun.append(completion_ids[0][0])
        if completion_ids[0][0] == 61:
            never.wait(60)
        return [0.0]

    asked = samples(5, first=60)
    says = r"reward 'hung' \(.*hangs\) took more than 0\.3 s \(trainer\.reward_timeout_s\) for prompt .* \(sample 1 of 5\)"
    with pytest.raises(Failure, match=says):
        FunctionReward(hangs, timeout_s=0.3, threads=1, name="hung").checked(asked)
    assert begun == [60, 61]  # nobody is asked any more
    never.set()


def test_a_row_whose_reward_raises_is_named_without_being_asked_again():
    asked_for = []

    def picky(completion_ids):
        asked_for.append(completion_ids[0][0])
        if completion_ids[0][0] == 62:
            raise KeyError("no such place")
        return [0.0]

    asked = samples(3, first=60)
    with pytest.raises(Failure, match=r"raised KeyError: 'no such place' for prompt .* \(sample 2 of 3\)"):
        FunctionReward(picky, timeout_s=30, threads=1).checked(asked)
    assert asked_for == [60, 61, 62]
    with pytest.raises(Failure, match=r"returned \[1, 2\] for one row, expected a list of one number"):
        FunctionReward(lambda **_: [1, 2], timeout_s=30).checked(asked)


def test_random_numbers_are_drawn_by_one_row_at_a_time(capsys):
    """... and a function that draws for several rows in one call is told how to be independent of the split, once."""

    def noisy(completions):
        return [random.random() for _ in completions]

    with pytest.raises(Failure, match=r"draws random numbers.*trainer\.reward_threads=1"):
        FunctionReward(noisy, timeout_s=30).checked(samples())
    asked = samples()
    asked.seeds = [7, 8, 9]
    state = random.getstate()
    reward = FunctionReward(noisy)
    once, again = reward.checked(asked), reward.checked(asked)
    assert once == again
    alone = FunctionReward(noisy, timeout_s=30, threads=1).checked(asked)
    assert alone == [random.Random(seed).random() for seed in asked.seeds] and alone[0] == once[0]
    assert random.getstate() == state
    said = capsys.readouterr().out
    assert (
        said.count("draws random numbers from a global generator") == 1 and "take a parameter seeds" in said
    )
