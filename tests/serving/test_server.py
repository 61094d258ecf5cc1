"""Tests the server on a real Ray Serve, with OpenAI's client and plain HTTP requests."""

import json
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import ray
from running import ROOT
from served import POLICIES, REWARDS, ask, chat, served
from sockets import on_loopback, sockets
from toy_models import second, shared_base, tokenizer

from pipeline import registry
from pipeline.__main__ import main
from pipeline.commands.serve import TOKENS, token_digests
from pipeline.errors import InputError
from tools.chaos.runs import until

pytestmark = pytest.mark.usefixtures("embedded_ray")
QUESTION = "What is the capital of Peru?"
COMPLETIONS = [
    "Lima.",
    "The capital of Peru is Lima. Thank you for asking.",
    "Why ask me?",
    "Peru is in Asia.",
]
CHAT, COMPLETE, FEEDBACK = "/v1/chat/completions", "/v1/completions", "/v1/feedback"


def messages(text=QUESTION):
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def server(storage, models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("feedback")
    settings = ("serve.log_prompts=true", "serve.alias_poll_interval_s=0.3", "serve.max_queue=64")
    with served(storage, *settings, f"serve.feedback_path={folder}") as running:
        running.folder, running.uri = folder, running.work.uri
        yield running


@pytest.fixture
def client(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ended(server, text=QUESTION, **settings):
    """Tries increasing seeds. Returns the first answer whose choices all end with EOS."""
    for seed in range(100):
        _, answer = chat(server.url, text, seed=seed, **settings)
        if {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}:
            return answer
    pytest.fail("no answer ends")


@pytest.fixture(scope="module")
def telling(server):
    """Returns a question to which the two policies give different answers. The first policy's answer is long."""
    places = ("Peru", "Chile", "Norway", "Spain", "Cuba", "Nepal", "Ghana", "Kenya", "Japan", "Italy")
    for question in [
        f"{start} {place}" for place in places for start in ("Tell me about", "Write a poem about")
    ]:
        answers = [chat(server.url, question, model, temperature=0)[1] for model in ("toy", "bare")]
        texts = [answer["choices"][0]["message"]["content"] for answer in answers]
        if len(texts[0]) > 12 and texts[0] != texts[1]:
            return question
    pytest.fail("the policies answer every question in the same way")


# ---------------------------------------------------------------------------------------------------- answers


def test_openais_client_sees_the_models(client):
    listed = {model.id: (model.version, model.kind) for model in client.models.list()}
    assert listed == {
        "toy": ("models:/toy-policy/1", "policy"),
        "bare": ("base", "policy"),
        "toy-rm": ("models:/toy-rm/1", "reward"),
    }
    assert client.models.retrieve("toy").id == "toy"


@pytest.mark.parametrize("temperature", [1e-40, 1.0])
def test_answers_equal_those_of_the_engine_of_generate(client, engine, temperature):
    """Compares the server's answers with the inference engine, which tests/commands/test_rows.py compares with `generate`."""
    how = {"temperature": temperature, "seed": 5}
    for place in ("Peru", "Norway"):
        ids = engine.ids(f"Where is {place}?")
        [expected] = engine.sample([ids], 40, **how | {"temperature": round(temperature)})
        answer = client.chat.completions.create(model="toy", messages=messages(f"Where is {place}?"), **how)
        [choice], text = answer.choices, tokenizer().decode(expected.tokens, skip_special_tokens=True)
        assert choice.message.content == text
        assert choice.finish_reason == ("stop" if expected.ended else "length")
        lengths = (len(ids), len(expected.tokens))
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == lengths


def test_a_stream_has_the_same_answer_in_pieces(client):
    asked = {"model": "toy", "messages": messages(), "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**asked)
    pieces, reasons, tokens, usage = ["", ""], [None, None], [0, 0], None
    streamed = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for chunk in streamed:
        assert chunk.system_fingerprint == "models:/toy-policy/1"
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            tokens[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    assert pieces == [choice.message.content for choice in whole.choices] and pieces[0] != pieces[1]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert tokens == [len(choice.logprobs.content) for choice in whole.choices] and usage == whole.usage
    again = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in again.choices] == pieces, "a seed repeats its answer"


def test_the_requests_in_the_documentation_are_answered(server):
    text = (ROOT / "docs/serving.md").read_text()
    asked = re.findall(r"^curl -s http://127\.0\.0\.1:8000(\S+) -d '(.*)'$", text, re.M)
    assert [path for path, _ in asked] == [CHAT, "/score", FEEDBACK]
    answer = ended(server)
    for path, body in asked:
        body = body.replace("rlhf-ppo", "toy").replace("chatcmpl-...", answer["id"])
        status, _, found = ask(server.url, path, body.encode())
        assert status == 200, (path, found)


def test_a_raw_prompt_is_completed_like_a_conversation(server, engine):
    asked = {"model": "toy", "prompt": engine.ids(QUESTION), "seed": 3, "n": 2, "echo": False}
    texts = [choice["text"] for choice in ask(server.url, COMPLETE, asked)[2]["choices"]]
    chosen = chat(server.url, seed=3, n=2)[1]["choices"]
    assert texts == [choice["message"]["content"] for choice in chosen]


def test_a_system_prompt_and_a_second_turn_are_answered_like_by_the_engine(client, engine):
    system = {"role": "system", "content": "You answer in one short sentence."}
    first = client.chat.completions.create(model="toy", messages=[system, *messages()], temperature=0)
    # The message includes the null values that OpenAI's client writes.
    reply = {**first.choices[0].message.model_dump(), "content": "Lima."}
    turns = [system, *messages(), reply, *messages("And of Chile?")]
    answer = client.chat.completions.create(model="toy", messages=turns, temperature=0)
    turns[2] = {"role": "assistant", "content": "Lima."}
    ids = tokenizer().apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    [expected] = engine.sample([ids], 40, temperature=0.0)
    text = tokenizer().decode(expected.tokens, skip_special_tokens=True)
    assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == (text, len(ids))


def test_stop_texts_limits_and_the_most_likely_tokens(client, telling):
    settings = {"model": "toy", "messages": messages(telling), "temperature": 0}
    whole = client.chat.completions.create(**settings, logprobs=True, top_logprobs=2).choices[0]
    text = whole.message.content
    assert all(len(token.top_logprobs) == 2 for token in whole.logprobs.content)
    assert "".join(token.token for token in whole.logprobs.content).startswith(text)
    stopped = client.chat.completions.create(**settings, stop=[text[6:9], "never"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (text[: text.index(text[6:9])], "stop")
    cut = client.chat.completions.create(**settings, max_completion_tokens=2)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 2)


def test_policies_and_a_reward_answer_at_the_same_time(server, telling):
    def one(i):
        if i % 3 == 2:
            completion = COMPLETIONS[i % 4]
            return ask(server.url, "/score", {"prompt": QUESTION, "completion": completion})[2]["score"]
        answer = chat(server.url, telling, ("toy", "bare")[i % 3], temperature=0)[1]
        return answer["choices"][0]["message"]["content"]

    alone = [one(i) for i in range(12)]
    assert alone[0] != alone[1] and len(set(alone[2::3])) == 4
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(one, range(48)))
    for i, found in enumerate(together):
        assert found == (pytest.approx(alone[i % 12], abs=1e-5) if i % 3 == 2 else alone[i % 12])


def test_a_row_a_list_and_a_pair_are_scored(server, engine):
    def scored(body):
        status, headers, found = ask(server.url, "/score?model=toy-rm", body)
        assert status == 200 and headers["x-model-version"] == "models:/toy-rm/1"
        return found

    expected = {completion: engine.score(QUESTION, completion) for completion in COMPLETIONS}
    close = {c: pytest.approx(score, abs=1e-4) for c, score in expected.items()}
    assert scored({"prompt": QUESTION, "completion": "Lima."}) == {"score": close["Lima."]}
    many = scored([{"prompt": QUESTION, "completion": completion} for completion in COMPLETIONS])
    assert [found["score"] for found in many] == [close[c] for c in COMPLETIONS]
    pair = scored({"prompt": QUESTION, "chosen": COMPLETIONS[1], "rejected": COMPLETIONS[2]})
    margin = expected[COMPLETIONS[1]] - expected[COMPLETIONS[2]]
    assert pair["score_margin"] == pytest.approx(margin, abs=1e-4)
    turns = [*messages(), {"role": "assistant", "content": "Lima."}]
    assert scored({"messages": turns})["score"] == close["Lima."]
    assert scored([]) == []


# --------------------------------------------- wrong requests; test_protocol.py has the keys of a request

WRONG = [
    (CHAT, {"model": "gpt-4"}, 404, "^no policy 'gpt-4'; expected one of toy, bare$"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, 400, r"messages\[0\].role: found \"robot\"; expected one of system, "),
    (CHAT, {"messages": messages("word " * 400)}, 400, r"messages: \d+ tokens; expected at most 192"),
    (CHAT, {"n": 17}, 400, "n: found 17; expected at most 16"),
    (COMPLETE, {"prompt": [[]]}, 400, r"^prompt: found '\[\]'; expected token ids below \d+"),
    (COMPLETE, {"prompt": [10**9]}, 400, r"^prompt: found .*; expected token ids below \d+"),
    (COMPLETE, {"prompt": [5] * 193}, 400, "^prompt: 193 tokens; expected at most 192"),
    (COMPLETE, {"prompt": [[5]] * 65}, 400, "^prompt: found 65 prompts; expected at most 64 completions"),
    ("/score", [{"prompt": "a", "completion": "b"}, 7], 400, "request: element 2: found 7; expected a JSON object"),
    ("/score", {"prompt": "a " * 400, "completion": "b"}, 400, r"request: element 1: found \d+ tokens; expected at most"),
    ("/score", {"promt": "a", "completion": "b"}, 400, r"\(is `promt` meant to be `prompt`\?\)"),
    ("/score", [0] * 4097, 413, "found 4097 rows; expected at most 4096"),
    ("/score?model=toy", {"prompt": "a", "completion": "b"}, 404, "^no reward model 'toy'; expected one of toy-rm$"),
    (FEEDBACK, {"id": "x", "label": True}, 404, "no answer with this id"),
    ("/v1/models/x", None, 404, "^no model 'x'; expected one of toy, bare, toy-rm$"),
    (CHAT, b'{"a":' * 100_000, 400, "^the request is not JSON "),
    (CHAT, b"x" * (2 << 20), 413, "the body has more than 1048576 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "sent", "status", "says"), WRONG)
def test_a_wrong_request_gets_an_explanation(server, path, sent, status, says):
    if isinstance(sent, dict) and path in (CHAT, COMPLETE):
        sent = {"model": "toy", **({"messages": messages()} if path == CHAT else {}), **sent}
    code, _, answer = ask(server.url, path, sent)
    assert code == status and re.search(says, answer["error"]["message"]), answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_a_prompt_may_have_all_tokens_that_the_context_leaves(server):
    assert ask(server.url, COMPLETE, {"model": "toy", "prompt": [5] * 192})[0] == 200


def test_requests_of_web_pages_from_other_origins_are_refused(server):
    hosts, origins = ("evil.example", "127.0.0.1.evil.example"), ("https://evil.example", "null")
    for headers in (*({"Host": host} for host in hosts), *({"Origin": origin} for origin in origins)):
        assert ask(server.url, "/v1/models", **headers)[0] == 403
    assert ask(server.url, "/health", Host="evil.example")[0] == 200, "load balancers need no token"


def test_a_client_that_disconnects_does_not_fail_the_server(server, capfd):
    def counted():
        with socket.create_connection(("127.0.0.1", server.work.serve.port)) as one:
            one.sendall(b"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.3)  # waits until the replica reads the request
        page = ask(server.url, "/metrics")[2].decode()
        return re.search(r'rlhf_requests_total{path="/score",.*status="499"}', page)

    until(counted, "a request with status 499")
    printed = capfd.readouterr()
    assert "failed" not in printed.out + printed.err


def test_all_sockets_are_on_loopback(server):
    found = sockets(psutil.Process())
    assert any(name.startswith("ray::ServeReplica") for name in found.values())
    assert all(on_loopback(address) for address, _ in found), found


# ----------------------------------------------------------------------------------------- moving aliases


def test_a_moved_alias_is_followed_under_load_in_both_directions(server, storage):
    mlflow, found, failed, end = registry.client(server.uri), [], [], time.monotonic() + 4
    first, moved = "models:/toy-policy/1", "models:/toy-policy/2"

    def send_requests(_):
        while time.monotonic() < end:
            status, answer = chat(server.url, max_tokens=3)
            (found if status == 200 else failed).append(answer.get("system_fingerprint", answer))

    move = (mlflow.set_registered_model_alias, ("toy-policy", "champion", second(storage)))
    try:
        threading.Timer(0.7, *move).start()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(send_requests, range(8)))
        assert not failed and found[0] == first and found[-1] == moved
    finally:
        # Moves the alias back to an earlier version.
        mlflow.set_registered_model_alias("toy-policy", "champion", "1")
    until(
        lambda: chat(server.url, max_tokens=1)[1].get("system_fingerprint") == first, "the previous version"
    )


def test_feedback_becomes_rows_that_the_stages_read(server, storage, in_root):
    for i in range(4):
        answer = ended(server, f"Question {i}. {QUESTION}", n=2)
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        pair = [{"chosen": 0, "rejected": 1}] if texts[0] != texts[1] else []
        for feedback in ({"label": i % 2 == 0}, {"edit": "It is Lima."}, *pair):
            status, _, found = ask(server.url, FEEDBACK, {"id": answer["id"], **feedback})
            assert status == 200 and found["version"] == answer["system_fingerprint"]
    rows = {}
    for file in server.folder.glob("*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        rows[file.stem] = [row for row in lines if row["prompt"][0]["content"].startswith("Question")]
    assert [len(rows[name]) for name in ("labels", "edits")] == [4, 4] and len(rows["comparisons"]) > 1
    assert {row["version"] for kind in rows.values() for row in kind} == {"models:/toy-policy/1"}
    for kind, name in (("kto", "labels"), ("rm", "comparisons"), ("dpo", "comparisons"), ("sft", "edits")):
        given = [f"data.train={server.folder}/{name}.jsonl", "data.eval=null", f"run.storage_path={storage}"]
        assert main(["validate", f"jobs/demo/{kind}.yaml", *given]) == 0


def test_prometheus_reads_the_metrics(server):
    from prometheus_client.parser import text_string_to_metric_families

    chat(server.url, max_tokens=2)
    status, headers, page = ask(server.url, "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(page.decode())
    samples = {(s.name, s.labels.get("version")): s.value for family in families for s in family.samples}
    assert samples["rlhf_completion_tokens_total", "models:/toy-policy/1"] >= 2
    assert samples["rlhf_answer_seconds_count", None] >= 1


# ------------------------------------------------------------------------------------------------ a full queue, killed processes


def test_a_full_queue_returns_429_and_accepted_requests_are_answered(server):
    with ThreadPoolExecutor(100) as pool:
        codes = list(pool.map(lambda _: chat(server.url, n=4)[0], range(100)))
    assert set(codes) == {200, 429}, set(codes)
    assert chat(server.url, max_tokens=1)[0] == 200


def test_a_killed_replica_is_restarted_and_a_retry_is_answered(server):
    def ask_twice(_):
        try:
            status = chat(server.url, max_tokens=3)[0]
        except OSError:
            status = 0
        return status if status == 200 else chat(server.url, max_tokens=3)[0]

    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(ask_twice, range(48))
        time.sleep(0.1)
        processes = psutil.Process().children(recursive=True)
        [one] = [p for p in processes if "ServeReplica:serve:server" in " ".join(p.cmdline())]
        os.kill(one.pid, signal.SIGKILL)
        assert list(answers) == [200] * 48


@pytest.mark.slow
def test_build_needs_no_resources_of_a_replica(storage, models):
    """Ray Serve calls `build` in a task. The node of this task has neither the labels nor the GPUs that a replica needs."""
    given = [POLICIES, REWARDS, f"run.storage_path={storage}", "scaling.use_gpu=true"]
    given += ["scaling.label_selector={for: servers}", "scaling.num_workers=64"]

    @ray.remote(num_cpus=0, max_calls=1)
    def deployed():
        from pipeline.commands.serve import build

        return build({"job": str(ROOT / "jobs/demo/serve.yaml"), "overrides": given})._bound_deployment.name

    assert ray.get(deployed.remote()) == "server"


# --------------------------------------------------------------------------------------------- before the server starts


def test_requests_need_a_token_and_the_replica_has_only_digests(monkeypatch, server):
    from pipeline.serving.app import Server
    from pipeline.serving.protocol import Refused

    monkeypatch.setenv(TOKENS, f"{'a' * 20}, {'b' * 20}")
    digests = token_digests(server.work.serve.host)
    assert len(digests) == 2 and "aaaa" not in str(digests)

    def check(**headers):
        Server.check_sender(SimpleNamespace(digests=digests), SimpleNamespace(headers=headers))

    check(authorization=f"Bearer {'b' * 20}")
    check(authorization=f"bearer {'a' * 20}")
    wrong = ("", "Bearer", "Bearer c", f"Basic {'a' * 20}", f"Bearer {'a' * 19}", f"Bearer {digests[0]}")
    for headers in ({}, *({"authorization": value} for value in wrong)):
        with pytest.raises(Refused) as refused:
            check(**headers)
        assert refused.value.status == 401


def test_a_public_host_needs_tokens_and_a_used_port_is_reported(
    server, storage, monkeypatch, capsys, in_root
):
    monkeypatch.delenv(TOKENS, raising=False)
    open_to_all = r"serve.host: found 0\.0\.0\.0, which other machines can reach, but no tokens"
    with pytest.raises(InputError, match=open_to_all):
        token_digests("0.0.0.0")
    monkeypatch.setenv(TOKENS, "short")
    with pytest.raises(InputError, match="less than 16 characters"):
        token_digests("127.0.0.1")
    monkeypatch.delenv(TOKENS)
    port = server.url.rpartition(":")[2]
    given = [f"serve.port={port}", "serve.policies={toy: models:/toy-policy/1}", "serve.rewards={}"]
    assert main(["serve", "jobs/demo/serve.yaml", *given, f"run.storage_path={storage}"]) == 2
    assert f"serve.port: the server cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_an_adapter_that_cannot_share_a_batch_is_refused(tmp_path, capsys, in_root):
    shared = shared_base()
    shared.add("dora", lora={"r": 4, "target_modules": "all-linear", "use_dora": True})
    shared.save("dora", tmp_path)
    given = [f"serve.policies={{a: {tmp_path}}}", "serve.rewards={}", f"run.storage_path={tmp_path}"]
    assert main(["serve", "jobs/demo/serve.yaml", "serve.port=0", *given]) == 2
    message = "serve.policies.a: it is a DoRA adapter, which peft cannot batch with others"
    assert message in capsys.readouterr().err
