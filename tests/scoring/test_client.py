"""Tests that each judge answer is paid for once, even if the endpoint or the process fails, and that no failure gives a score."""

import errno
import json
import os
import subprocess
import sys
import time

import pytest
from judging import FAULTS, MODEL, chat, judging, liking
from running import ROOT

from pipeline.errors import Failure, InputError
from pipeline.job.judge import Definition
from pipeline.scoring.judges import client
from pipeline.scoring.judges.reward import JudgeReward
from pipeline.scoring.judges.store import Store, answers_folder
from pipeline.scoring.rewards import Samples


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(client, "PAUSES_S", (0.01, 0.05))


class Tokenizer:
    def decode(self, ids, skip_special_tokens=True):
        return f"answer {ids[0]}"


def samples(count, each=1, first=0):
    rows = [{"prompt": f"question {i // each}"} for i in range(count)]
    groups = [i // each for i in range(count)]
    return Samples(
        [[0]] * count, [[first + i] for i in range(count)], [True] * count, rows, Tokenizer(), groups=groups
    )


def given(server, form="score", **settings):
    return Definition(model=MODEL, form=form, endpoint=f"{server.address}/v1", **settings)


def reward(server, storage, run="run", reward_timeout_s=5.0, **settings):
    return JudgeReward(given(server, **settings), str(storage), run, reward_timeout_s)


def expected(definition, several):
    from pipeline.scoring.judges import forms

    asked = forms.make_questions(
        definition, several.prompts, several.completions, several.rows, several.groups
    )
    return [(liking(one.messages[-1]["content"]) - 1) / 9 for one in asked]


def test_every_answer_is_paid_for_once_despite_faults_of_the_endpoint(tmp_path):
    with judging() as server:
        judge = reward(server, tmp_path, timeout_s=0.5, concurrency=4)
        judge.checked(samples(1))
        server.faults = list(FAULTS)
        found = judge.checked(samples(20))
        assert found == expected(judge.definition, samples(20))
        assert set(server.paid.values()) == {1} and len(server.paid) == 20
        assert judge.client.counts["failed"] == len(FAULTS)
        again = reward(server, tmp_path, run="another")
        assert again.checked(samples(20)) == found and len(server.paid) == 20
        assert again.client.counts == {**again.client.counts, "judged": 0, "from_store": 20, "failed": 0}
        # An identical question is answered from the store, and is not paid for again.
        assert judge.checked(samples(1)) == found[:1]
        assert server.paid.total() == 20


def test_an_answer_of_another_model_ends_the_run(tmp_path):
    with judging(faults=["other model"] * 500, delay=0.2) as server:
        judge = reward(server, tmp_path, concurrency=3)
        with pytest.raises(
            InputError, match=r"^reward .* answers as cheap; write `model: cheap` into the judge's file$"
        ):
            judge.checked(samples(20))
        assert len(server.requests) <= 3, "only open requests are answered"
        assert judge.client.store.totals["run"]["calls"] == len(server.requests), "their answers cost money"


@pytest.mark.parametrize(("fault", "says"), [("other model", "answers as cheap"), ("hangs", "TimeoutError")])
def test_the_run_ends_after_the_timeout_and_can_continue(fault, says, tmp_path):
    with judging(faults=[None, None, *[fault] * 500]) as server:
        judge = reward(server, tmp_path, reward_timeout_s=0.3, timeout_s=0.1, concurrency=1)
        with pytest.raises(
            Failure,
            match=rf"^reward 'judge' \(judge wise\): no usable answer for 0\.3 s .*({says}).* repeat the command with the same run\.name",
        ):
            judge.checked(samples(4))
        server.faults.clear()
        server.never.set()
        assert reward(server, tmp_path).checked(samples(4)) == expected(judge.definition, samples(4))
        assert set(server.paid.values()) == {1} and len(server.paid) == 4


def cut():
    said = chat("Score: 1")  # a truncated answer, which may be the start of `Score: 10`
    said["choices"][0]["finish_reason"] = "length"
    return said


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("I cannot say.", r"found 'I cannot say\.'"),
        (cut(), r"truncated; raise max_tokens"),
    ],
)
def test_five_unusable_answers_to_a_question_end_the_run(said, says, tmp_path):
    with judging(lambda asked: said) as server:
        judge = reward(server, tmp_path, reward_timeout_s=-1)
        with pytest.raises(Failure, match=rf"no usable answer in 5 answers to one question; .*{says}"):
            judge.checked(samples(1))
        assert len(server.requests) == judge.client.store.totals["run"]["calls"] == 5


def test_a_pause_is_not_longer_than_the_timeout(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "PAUSES_S", (9.0, 9.0))
    with judging(faults=[500]) as server:
        judge = reward(server, tmp_path, reward_timeout_s=0.2)
        begin = time.monotonic()
        assert judge.checked(samples(1)) == expected(judge.definition, samples(1))
        assert time.monotonic() - begin < 4


def test_the_cost_of_unusable_answers_is_counted(tmp_path):
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    said = [
        {"model": MODEL, "choices": [], "usage": usage},
        {"model": "cheap", "choices": [], "usage": usage},
        chat("Score: 5", tokens=(-1, 10)),
    ]
    with judging(lambda asked: said.pop(0)) as server:
        judge = reward(server, tmp_path)
        judge.client.confirmed = True
        judge.checked(samples(1))
        totals = judge.client.store.totals["run"]
        assert totals["calls"] == 3 and totals["answered"] == 20 + len("Score: 5") // 4
        assert totals["sent"] == 200 + len(server.requests[0][1]["messages"][0]["content"]) // 4


def test_a_judges_file_changes_fields_of_requests_and_the_address(tmp_path):
    parts = [{"type": "text", "text": "Score: "}, {"type": "text", "text": "10"}]
    with judging(lambda asked: chat(parts)) as server:
        body = {"max_tokens": None, "max_completion_tokens": 2000, "temperature": None, "top_k": 3}
        endpoint = f"{server.address}/v1/?api-version=1"
        definition = Definition(MODEL, "score", endpoint, body=body)
        judge = JudgeReward(definition, str(tmp_path), "run", 5.0)
        assert judge.checked(samples(1)) == [1.0]
        assert judge.client.url == f"{server.address}/v1/chat/completions?api-version=1"
        [(_, asked)] = server.requests
        assert set(asked) == {"model", "messages", "max_completion_tokens", "top_k"}
        assert definition.longest == 2000


def test_no_file_and_no_message_contains_the_key(tmp_path, monkeypatch):
    key = "a-key-of-a-judge-0123456789"
    with judging(faults=["refuses"]) as server:
        with pytest.raises(InputError, match=r"\$JUDGE_AUTH is not set"):
            reward(server, tmp_path, api_key_variable="JUDGE_AUTH")
        monkeypatch.setenv("JUDGE_AUTH", f"{key}\nX-Other: 1")
        with pytest.raises(InputError, match=r"\$JUDGE_AUTH has a control character; export"):
            reward(server, tmp_path, api_key_variable="JUDGE_AUTH")
        monkeypatch.setenv("JUDGE_AUTH", f"{key}\n")
        judge = reward(server, tmp_path, api_key_variable="JUDGE_AUTH")
        with pytest.raises(
            InputError,
            match=r"rejected a request \(status 401: .*not .*\*\*\*; ask for another\); is the key in \$JUDGE_AUTH",
        ) as caught:
            judge.checked(samples(1))
        assert key[:9] not in str(caught.value)
        judge.checked(samples(3))
        assert all(headers["Authorization"] == f"Bearer {key}" for headers, _ in server.requests)
        assert not any(key in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_a_budget_ends_the_run_and_can_be_raised(tmp_path):
    with judging() as server:
        with pytest.raises(
            Failure, match=r"budget for this run is spent \(5 answers, \$0; most_calls: 5\); raise most_calls"
        ):
            (judge := reward(server, tmp_path, most_calls=5, concurrency=3)).checked(samples(9))
        assert server.paid.total() == 5 == judge.client.counts["judged"]
        assert judge.client.counts["from_store"] == 0, "four questions have no answer"
        # at these prices, each answer costs a dollar
        prices = dict(dollars_per_million_input=1e4, dollars_per_million_output=0.0, concurrency=3)
        with pytest.raises(Failure, match=r"spent \(7 answers, \$7; most_dollars: 7"):
            reward(server, tmp_path, most_dollars=7, **prices).checked(samples(9))
        assert server.paid.total() == 7
        reward(server, tmp_path, run="next", most_calls=2).checked(samples(9))
        assert server.paid.total() == 9 and set(server.paid.values()) == {1}


def test_limits_of_requests_and_tokens_per_minute(tmp_path):
    with judging() as server:
        begin = time.monotonic()
        reward(server, tmp_path, requests_per_minute=1200, reward_timeout_s=0.01).checked(samples(6))
        assert time.monotonic() - begin >= 5 * 0.05
        begin = time.monotonic()
        judge = reward(server, tmp_path, tokens_per_minute=600_000, max_tokens=900)
        judge.checked(samples(4, first=50))
        assert time.monotonic() - begin >= 3 * 0.09


ASKS = """
import asyncio, json, sys
from pipeline.job.judge import Definition
from pipeline.scoring.judges import forms
from pipeline.scoring.judges.client import JudgeClient
from pipeline.scoring.judges.store import Store
given = Definition(model={model!r}, form="score", endpoint={endpoint!r}, timeout_s=30, concurrency=4)
client = JudgeClient(given, Store({storage!r}, "run"), "judge", 60)
asked = [(forms.JudgeQuestion([{{"role": "user", "content": str(i)}}], ((i,),)), 0) for i in range({count})]
print(json.dumps([one["text"] for one in asyncio.run(client.answers(asked))]), flush=True)
"""


def process(server, storage, count):
    facts = dict(model=MODEL, endpoint=f"{server.address}/v1", storage=str(storage / "answers"), count=count)
    code = [sys.executable, "-c", ASKS.format(**facts)]  # without importing torch, which takes seconds
    return subprocess.Popen(
        code, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


def test_processes_with_the_same_questions_pay_once_even_if_one_is_killed(tmp_path):
    with judging(faults=[None] * 6 + ["hangs"] * 4) as server:
        killed = process(server, tmp_path, 20)
        deadline = time.monotonic() + 60
        while len(server.requests) < 10 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)  # lets the answered requests finish; all other requests hang
        killed.kill()
        killed.wait()
        assert server.paid.total() == 6
        costs = Store(str(tmp_path / "answers"), "run").costs(given(server))
        assert costs["judged"] == 6, "the process was killed before it could write its counts"
        server.delay = 0.02
        two = [process(server, tmp_path, 20) for _ in range(2)]
        said = [json.loads(one.communicate(timeout=60)[0]) for one in two]
        assert said == [[f"It is fine.\nScore: {liking(str(i))}" for i in range(20)]] * 2
        assert set(server.paid.values()) == {1} and len(server.paid) == 20


def test_an_incomplete_line_is_no_answer(tmp_path, capsys):
    with judging() as server:
        judge = reward(server, tmp_path)
        judge.checked(samples(2))
        [file] = (tmp_path / "judges").rglob("*.jsonl")
        content = file.read_bytes().splitlines(keepends=True)
        answers = [line for line in content if b'"key"' in line]
        file.write_bytes(b"".join(answers)[:-5])
        store = Store(answers_folder(str(tmp_path), judge.definition), "other")
        store.refresh()
        assert len(store.answers) == 1
        assert reward(server, tmp_path).checked(samples(2)) == expected(judge.definition, samples(2))
        assert server.paid.total() == 3
        assert "warning" not in capsys.readouterr().out
        file.write_bytes(answers[1][:-5] + answers[1] + answers[0])
        store = Store(answers_folder(str(tmp_path), judge.definition), "other")
        store.refresh()
        assert f"warning: {file}: skipped a line that is no JSON" in capsys.readouterr().out
        assert len(store.answers) == 2, "one line of this file, and one of the other file"


def test_the_store_is_readable_after_a_full_disk(tmp_path, monkeypatch, capsys):
    def full(file):
        os.ftruncate(file, os.fstat(file).st_size - 5)
        raise OSError(errno.ENOSPC, "No space left on device")

    with judging() as server:
        judge = reward(server, tmp_path)
        judge.checked(samples(1))
        with monkeypatch.context() as context, pytest.raises(OSError, match="No space left"):
            context.setattr(os, "fsync", full)
            judge.checked(samples(2))
        found = judge.checked(samples(3))
        asked = len(server.requests)
        assert reward(server, tmp_path).checked(samples(3)) == found and len(server.requests) == asked
        assert "warning" not in capsys.readouterr().out


def test_an_answer_may_be_one_token_and_contain_a_lone_surrogate(tmp_path):
    tops = [{"token": "Yes", "logprob": -0.1}, {"token": "\ud800", "logprob": -9}]
    answer = chat("\ud800", top=tops)
    # The form `yes` requests only one token, so a truncated answer is expected.
    answer["choices"][0]["finish_reason"] = "length"
    with judging(lambda asked: answer) as server:
        judge, several = reward(server, tmp_path, form="yes"), samples(3)
        assert judge.checked(several) == [1.0] * 3
        assert several.notes["judge"][0]["words"] == ["?"]


def test_a_store_in_a_bucket_is_shared(tmp_path):
    with judging() as server:
        first = reward(server, "memory://judges-test")
        found = first.checked(samples(5))
        assert reward(server, "memory://judges-test").checked(samples(5)) == found
        assert server.paid.total() == 5
