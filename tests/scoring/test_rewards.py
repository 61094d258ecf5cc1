"""Tests Python rewards that are invalid or return invalid values, and reward models, also on another base."""

import asyncio
import json
import math
import random
import re
import signal
import sys
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toy_ppo as toy
import transformers

from pipeline.errors import Failure, InputError
from pipeline.scoring.rewards import FunctionReward, ModelReward, Samples
from pipeline.system import process
from pipeline.system.functions import import_function


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import sys\nsys.exit(0)\n", r"cannot be imported from .* \(SystemExit: 0, at .*/mine\.py:2\)"),
        ("x = 1\nraise RuntimeError('not today')\n", r"\(RuntimeError: not today, at .*/mine\.py:2\)"),
        ("def f(:\n", r"\(SyntaxError: invalid syntax \(mine\.py, line 1\)"),
        ("x = 1\n", r"module 'mine' has no attribute 'f'\);"),
        ("f = {}\n", "is not a function"),
        (None, r"No module named 'mine'.*PYTHONPATH"),
    ],
)
def test_a_function_that_does_not_import(text, says, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(InputError, match=rf"^python:mine:f: .*{says}"):
        import_function("python:mine:f")


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


NO_LIST = r"returned {} \(samples: 3\); expected a list of one number for each"
NO_NUMBER = r"returned {} for prompt 'question 1', completion 'completion 1', row \{{.*\}} \(sample 1 of 3\); expected a finite"


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ({"0": 1.0}, NO_LIST.format(r"\{'0': 1\.0\}")),
        (np.ones(4), NO_LIST.format("4 scores")),
        ([1, "well", 1], NO_NUMBER.format("'well'")),
        (
            [1, None, 1],
            r"returned None for prompt 'question 1', .* \(sample 1 of 3\); return a number",
        ),
        ([1, torch.tensor(-math.inf), 1], NO_NUMBER.format(r"tensor\(-inf\)")),
        ([1, 10**400, 1], NO_NUMBER.format(r"1000+\.\.\.")),
        ([1, torch.ones(2), 1], NO_NUMBER.format(r"tensor\(\[1\., 1\.\]\)")),
    ],
    ids=str,
)
def test_the_message_about_an_invalid_score_names_its_sample(returned, says):
    # A score that is infinite or too large is a failure of the run. All other invalid scores are wrong input.
    too_large = "inf" in says or "1000" in says
    with pytest.raises(Failure if too_large else InputError) as caught:
        checked(returned)
    assert re.match(rf"reward 'polite' \({__name__}:.*\) {says}", str(caught.value))


@pytest.mark.parametrize(
    "returned",
    [
        np.full(3, 0.5, np.float32),
        torch.full((3,), 0.5, requires_grad=True),
        (torch.tensor(0.5, requires_grad=True), np.float16(0.5), Decimal("0.5")),
        [1, True, np.int64(1)],
    ],
    ids=str,
)
def test_numbers_of_every_library_are_accepted(returned):
    scores = checked(returned)
    assert set(scores) in ({0.5}, {1.0}) and all(type(score) is float for score in scores)


def test_an_error_of_a_reward_shows_only_frames_of_the_rewards_code(monkeypatch):
    def inside(text):
        return json.loads(text)  # an error that is raised in the code of a library

    def reward(completions):
        return [inside(text) for text in completions if text != "completion 0"]

    asked = []

    async def later(completions):
        asked.append(completions)
        return reward(completions)

    for function in (reward, later):
        with pytest.raises(Failure) as caught:
            FunctionReward(function).checked(samples())
        first, *frames = str(caught.value).splitlines()
        of = "a batch of 3 samples" if function is later else r"prompt 'question 1', .*\(sample 1 of 3\)"
        says = rf"reward '{function.__name__}' \({__name__}:.*\) raised JSONDecodeError: .* for {of}:"
        assert re.fullmatch(says, first)
        assert f", in {function.__name__}" in frames[0] and "return json.loads(text)" in str(caught.value)
        assert all(f'File "{__file__}"' in line for line in frames if "File" in line)
    assert len(asked) == 1, "an async function is not called again, because its requests may cost money"
    with pytest.raises(Failure, match=r"raised SystemExit: 0; expected a list of numbers"):
        FunctionReward(lambda **_: sys.exit(0)).checked(samples())  # SystemExit would end the worker silently
    monkeypatch.setattr(process, "received", signal.SIGTERM)
    with pytest.raises(SystemExit):  # a signal ends the run, and does not count as an error of the reward
        FunctionReward(lambda **_: sys.exit(143)).checked(samples())


# ----------------------------------------------------------------------------------------------- in a trainer


def test_reward_functions_get_text_and_the_columns_of_the_data():
    seen = {}

    def reward(prompts, completions, answer, **columns):
        seen.update(prompts=prompts, completions=completions, answer=answer, columns=columns)
        return [float(a) for a in answer]

    async def slow(completions):
        await asyncio.sleep(0.01)
        return [float(len(text)) for text in completions]

    async def notebook():  # a notebook already runs an event loop
        return trainer.make_experience()

    rewards = [FunctionReward(reward, weight=3.0), FunctionReward(slow, weight=0.5)]
    trainer = toy.trainer(reward=rewards, num_generations=2)
    rollout = asyncio.run(notebook())
    ids = toy.samples_of(trainer, rollout).completion_ids
    assert seen["prompts"] == [f"question {a}" for a in seen["answer"]]
    assert set(seen["columns"]) == {"completion_ids", "seeds", "groups"}
    assert seen["columns"]["groups"] == [i // 2 for i in range(16)]  # completions to the same prompt
    assert seen["completions"][0] == toy.Tokenizer().decode(ids[0])
    expected = [3.0 * a + 0.5 * len(c) for a, c in zip(seen["answer"], seen["completions"], strict=True)]
    assert rollout.episodes.scores.tolist() == pytest.approx(expected)


def test_a_reward_model_on_another_base():
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

    class Letters:  # a different tokenizer: one id per character
        eos_token_id, eos_token, chat_template = 3, None, None
        backend_tokenizer = SimpleNamespace(get_added_tokens_decoder=dict)

        def __call__(self, text):
            return transformers.BatchEncoding({"input_ids": [ord(c) % 50 + 5 for c in text]})

    other = ModelReward(model, tokenizer=Letters()).score(texts)
    spelled = [[ord(c) % 50 + 5 for c in "a8"] + [3], [ord(c) % 50 + 5 for c in "bc9 10 11"]]
    assert other == pytest.approx(
        [model(input_ids=torch.tensor([ids])).logits.item() for ids in spelled], abs=1e-5
    )
    toy.trainer(reward=ModelReward(model)).run_update()
    assert not any(p.requires_grad for p in model.parameters())


def test_an_async_reward_has_all_rows_at_once_and_a_limit():
    """Two calls of the reward wait for each other, so all calls must run concurrently.

    A call that never returns and a TimeoutError end the run.
    """
    asked = samples(2)
    asked.groups = [7, 7]

    async def together(completions, groups):
        both, there = asyncio.Event(), []

        async def one(text):
            there.append(text)
            if len(there) == 2:
                both.set()
            await both.wait()
            return float(text.split()[1])

        assert groups == [7, 7]
        return await asyncio.gather(*map(one, completions))

    assert FunctionReward(together, reward_timeout_s=30).checked(asked) == [0.0, 1.0]

    async def hangs(completions):
        await asyncio.sleep(60)

    with pytest.raises(
        Failure, match=r"'hangs' .* took more than 0\.1 s \(trainer\.reward_timeout_s\); to continue the run"
    ):
        FunctionReward(hangs, reward_timeout_s=0.1).checked(asked)

    async def gives_up(completions):
        raise TimeoutError("no answer")

    with pytest.raises(Failure, match=r"raised TimeoutError: no answer for a batch of 2 samples"):
        FunctionReward(gives_up, reward_timeout_s=30).checked(asked)


def test_the_global_generators_are_seeded_by_the_first_completion_and_restored():
    several = samples()
    several.seeds = [7, 8, 9]
    state = random.getstate()
    scores = FunctionReward(lambda completions: [random.random() for _ in completions]).checked(several)
    draw = random.Random(7)
    assert scores == [draw.random() for _ in range(3)] and random.getstate() == state


def test_changes_of_torchs_settings_by_a_reward_are_undone():
    def half(completions):
        torch.set_default_dtype(torch.float16)
        torch.set_grad_enabled(False)
        return [1.0] * len(completions)

    FunctionReward(half).checked(samples())
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
