"""Tests all shipped job files: they load, the commands in their headers work, and the jobs of a profile are compatible."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from running import ROOT

from pipeline.job import TRAIN_STAGES, load_job

PROFILES = ("demo", "own", "llama3-8b", "llama3-8b-qlora", "llama3-70b-qlora")
SHARDED = "llama3-70b"  # the only profile with FSDP, because its unsharded base fits on no GPU
FILES = [path.relative_to(ROOT) for path in sorted(ROOT.glob("jobs/*/*.yaml"))]
JOBS = [str(path) for path in FILES if path.parent.name in (*PROFILES, SHARDED)]
pytestmark = pytest.mark.usefixtures("in_root")


@pytest.mark.parametrize("path", JOBS)
def test_a_job_loads_and_its_header_works(path):
    stage, profile = Path(path).stem, Path(path).parent.name
    job = load_job(path, [], stage)
    assert json.loads(json.dumps(job.to_dict())) == job.to_dict()
    assert job.data.train or stage in ("evaluate", "export", "serve")
    header = "\n".join(line for line in Path(path).read_text().splitlines() if line.startswith("#"))
    assert f"python -m pipeline {stage} {path}" in header
    make = f"make {stage}" + ("" if profile == "demo" else f" PROFILE={profile}")
    assert make in header
    shown = re.findall(rf'{re.escape(make)} ARGS="([^"]*)"', header)
    assert shown, "a header shows at least one override"
    for arguments in shown:
        load_job(path, shlex.split(arguments), stage)


@pytest.mark.parametrize("profile", [*PROFILES, SHARDED])
def test_the_stages_of_a_profile_fit_together(profile):
    jobs = {stage: load_job(f"jobs/{profile}/{stage}.yaml") for stage in TRAIN_STAGES}
    assert len({repr((j.model, j.run.storage_path, j.mlflow.experiment)) for j in jobs.values()}) == 1
    made = {stage: f"models:/{j.mlflow.registered_model}@{j.mlflow.alias}" for stage, j in jobs.items()}
    started = {jobs[stage].policy for stage in ("dpo", "kto", "ppo")} | {jobs["evaluate"].baseline}
    assert started == {made["sft"]}
    assert jobs["ppo"].reward == jobs["evaluate"].reward == made["rm"]
    assert jobs["evaluate"].policy == made["ppo"]
    ppo, evaluate = jobs["ppo"], jobs["evaluate"]
    assert evaluate.data.eval == (ppo.data.eval or "my/prompts_eval.jsonl")
    # the evaluation uses the same sampling settings as the training
    alike = evaluate.trainer.keys() - {"local_rollout_forward_batch_size"}
    assert all(ppo.trainer[key] == evaluate.trainer[key] for key in alike)
    if profile == SHARDED:
        assert all(j.model.fsdp for j in jobs.values())
        return
    kinds = ("generate", "collect", "score", "export")
    uses = {kind: load_job(f"jobs/{profile}/{kind}.yaml") for kind in kinds}
    assert (uses["collect"].policy, uses["collect"].data.train) == (made["sft"], ppo.data.train)
    assert uses["generate"].policy == uses["export"].policy == made["ppo"]
    assert {use.reward for use in uses.values()} == {made["rm"]}
    for kind, use in uses.items():  # `export` merges the adapter into the base in its stored dtype
        four_bit = ppo.model.load_in_4bit and kind != "export"
        assert use.model == replace(ppo.model, load_in_4bit=four_bit)
        assert use.run.storage_path == ppo.run.storage_path
    for kind in ("generate", "collect"):
        assert uses[kind].trainer["response_length"] == ppo.trainer["response_length"]


def test_the_llama3_template():
    from pipeline.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer("jobs/demo/model", chat_template="jobs/llama3-8b/llama3.jinja")
    said = [("system", "Be brief. "), ("user", "Hello"), ("assistant", " Hi! "), ("user", "Bye")]
    turns = [{"role": role, "content": text} for role, text in said]
    start = "<|start_header_id|>{}<|end_header_id|>\n\n".format
    expected = [f"{start(role)}{text.strip()}<|eot_id|>" for role, text in said]
    prompted = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompted == tokenizer.bos_token + "".join(expected) + start("assistant")
    made = tokenizer.apply_chat_template(
        turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    trained = [token for token, mask in zip(made["input_ids"], made["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(trained) == "Hi!<|eot_id|>"
    with pytest.raises(Exception, match="not 'critic'"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "x"}], tokenize=False)
