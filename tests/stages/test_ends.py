"""Tests the EOS metrics of sft, and that stages that sample warn if hardly any completion ends with EOS."""

import json

import pytest
import torch
import transformers
from peft import PeftModel
from running import ROOT, stage

from pipeline.models import base
from pipeline.models.tokenizer import eos_ids, load_tokenizer


def test_eos_accuracy_is_the_share_of_end_tokens_that_are_predicted(tmp_path, monkeypatch):
    """Compares the metric with a loop over the rows. The last batch is smaller than the other batches."""
    checked = []
    monkeypatch.setattr(base, "check_ends", lambda model, tokenizer, ends: checked.append(ends))
    lines = (ROOT / "jobs/demo/data/demonstrations_eval.jsonl").read_text().splitlines()[:21]
    rows = [json.loads(line)["messages"] for line in lines]
    for _, answer in rows[::3]:  # truncates answers, so that no model would predict EOS after them
        answer["content"] = answer["content"][:3]
    (tmp_path / "eval.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    settings = [
        "trainer.max_steps=1",
        "trainer.per_device_eval_batch_size=8",
        f"data.eval={tmp_path}/eval.jsonl",
    ]
    found = stage("sft", tmp_path, "ends", *settings)["metrics"]["initial_eos_accuracy"]

    tokenizer = load_tokenizer(str(ROOT / "jobs/demo/model"))
    model = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "jobs/demo/model", dtype=torch.float32)
    ends, hits = eos_ids(tokenizer), []
    for row in rows:
        ids = tokenizer.apply_chat_template(row, return_dict=True)["input_ids"]
        last = max(i for i, token in enumerate(ids) if token in ends)
        assert checked == [{ids[last]}]
        with torch.no_grad():
            hits.append(model(torch.tensor([ids])).logits[0, last - 1].argmax().item() == ids[last])
    assert found == pytest.approx(sum(hits) / len(hits)) and 0 < found < 1


def test_sft_shows_greedy_completions_of_the_base_and_of_its_adapter(tmp_path):
    """The shown completions equal those of transformers' `generate` with peft. A prompt that two rows share is shown once."""
    lines = (ROOT / "jobs/demo/data/demonstrations_eval.jsonl").read_text().splitlines()
    (tmp_path / "eval.jsonl").write_text("\n".join(lines[:2] * 2 + lines[2:12]))
    rows = [json.loads(line)["messages"] for line in lines]
    for _, answer in rows:
        answer["content"] = "Lisbon."
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    files = [f"data.{name}={tmp_path}/{name}.jsonl" for name in ("train", "eval")]
    settings = ["trainer.max_steps=8", "trainer.learning_rate=5e-3", "data.batch_size=16", *files]
    result = stage("sft", tmp_path, "shown", *settings)
    shown = result["samples"]
    prompts = [json.loads(line)["messages"][0]["content"] for line in lines[:8]]
    assert [sample["prompt"] for sample in shown] == prompts and len({*prompts}) == 8

    tokenizer = load_tokenizer(str(ROOT / "jobs/demo/model"))
    model = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "jobs/demo/model", dtype=torch.float32)
    for side in ("before", "after"):
        if side == "after":
            model = PeftModel.from_pretrained(model, result["adapter"])
        for prompt, sample in zip(prompts, shown, strict=True):
            asked = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")[
                "input_ids"
            ]
            written = model.generate(input_ids=ids, do_sample=False, max_new_tokens=128)[0, ids.shape[1] :]
            assert sample[side]["completion"] == tokenizer.decode(written, skip_special_tokens=True).strip()
    assert any(sample["before"] != sample["after"] for sample in shown)


@pytest.mark.parametrize(
    "verb", ["ppo", *(pytest.param(verb, marks=pytest.mark.slow) for verb in ("evaluate", "generate"))]
)
def test_a_policy_whose_completions_do_not_end_is_named(verb, tmp_path, capfd, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "first_token.py").write_text(
        "def f(completion_ids, seeds):\n    assert len({*seeds}) == len(seeds)\n    return [ids[0] % 7 for ids in completion_ids]"
    )
    prompts = (ROOT / "jobs/demo/data/prompts_eval.jsonl").read_text().splitlines()[:16]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    rows = f"data.train={tmp_path}/prompts.jsonl"
    sampled = ["trainer.response_length=1", "policy=base", "reward=python:first_token:f"]
    settings = {
        "ppo": [rows, "data.eval=null", "trainer.total_episodes=16", "trainer.batch_size=16", "trainer.eval_steps=0"],
        "evaluate": [f"data.eval={tmp_path}/prompts.jsonl", "data.pairs=null", "judge=null", "baseline=base"],
        "generate": [rows],
    }  # fmt: skip
    stage(verb, tmp_path, f"endless-{verb}", *sampled, *settings[verb])
    out = capfd.readouterr().out
    warning = "completions ended with EOS, the other ones were truncated at trainer.response_length"
    assert out.count(warning) == 1
    assert verb != "ppo" or "truncated 1" in out
