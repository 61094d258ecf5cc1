"""Tests the loop from labels to a better policy: serve, collect labels, train on them, pass the gate, serve again."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from running import ROOT, client, stage
from served import ask, chat, served

from pipeline.demo import gold
from tools.chaos.runs import until

pytestmark = [pytest.mark.usefixtures("embedded_ray"), pytest.mark.slow]


def conversations(server, rows, seed):
    """Returns (answer, its score) for each prompt, with eight users at a time."""

    def one(i):
        status, answer = chat(server.url, rows[i]["prompt"], "assistant", seed=seed + i)
        assert status == 200, answer
        text = answer["choices"][0]["message"]["content"]
        return answer, gold([rows[i]["prompt"]], [text], [rows[i]["answer"]])[0]

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, range(len(rows))))


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def mean(answers):
    return sum(score for _, score in answers) / len(answers)


def test_labels_make_a_better_policy_that_is_served_without_a_restart(tmp_path, in_root):
    storage = tmp_path / "runs"
    stage("sft", storage, "sft")
    prompts, held_out = (
        rows_of(ROOT / f"jobs/demo/data/{name}.jsonl") for name in ("prompts", "prompts_eval")
    )
    settings = (
        "serve.log_prompts=true",
        "serve.alias_poll_interval_s=0.5",
        f"serve.feedback_path={tmp_path}/feedback",
    )
    policies = "serve.policies={assistant: models:/rlhf-sft@champion}"
    with served(storage, *settings, policies=policies, rewards="serve.rewards={}") as server:
        before = mean(conversations(server, held_out, seed=10_000))
        for answer, score in conversations(server, (prompts * 2)[:300], seed=0):
            ended = answer["choices"][0]["finish_reason"] == "stop"
            said = {"id": answer["id"], "label": ended and score >= 0.5}
            assert ask(server.url, "/v1/feedback", said)[0] == 200
        thumbs = rows_of(tmp_path / "feedback/labels.jsonl")
        liked = sum(row["label"] for row in thumbs)
        assert len(thumbs) == 300 and 10 < liked < 290
        given = [
            f"data.train={tmp_path}/feedback/labels.jsonl",
            "data.eval=jobs/demo/data/thumbs_eval.jsonl",
            f"trainer.desirable_weight={1.2 * (300 - liked) / liked}",
            "trainer.num_train_epochs=10",
            "mlflow.registered_model=rlhf-sft",
            "gate.eval_rewards/margins=>= 0.2",
        ]
        result = stage("kto", storage, "kto", *given)
        assert result["data"]["report"]["splits"]["train"]["versions"] == {"models:/rlhf-sft/1": 300}
        assert client(storage).get_model_version_by_alias("rlhf-sft", "champion").version == 2
        asked = {"model": "assistant", "max_tokens": 1}
        until(lambda: chat(server.url, **asked)[1]["system_fingerprint"] == "models:/rlhf-sft/2", "version 2")
        after = conversations(server, held_out, seed=10_000)
        assert {answer["system_fingerprint"] for answer, _ in after} == {"models:/rlhf-sft/2"}
        print(f"judge: {before:.3f} before, {mean(after):.3f} after, {liked} of 300 thumbs up")
        assert mean(after) > before + 0.02
