"""Tests PPO with a teacher: the gradient, the teacher's prompts, and a student that approaches its teacher."""

import json
from dataclasses import replace

import alone
import pytest
import torch
import toy_ppo as toy
from running import ROOT

from pipeline.errors import InputError, SelfCheckFailed
from pipeline.job import load_job
from pipeline.models.template import DATE
from pipeline.models.tokenizer import load_tokenizer
from pipeline.ppo import losses, teacher
from pipeline.ppo.episodes import Totals
from pipeline.ppo.teacher import Teacher

ALONE = dict(advantage_estimator="none", teacher_coef=1.0, kl_coef=0.0, num_ppo_epochs=1, num_mini_batches=1)


def student(shared, role="reference", rewards=(), **changes):
    """Returns a trainer without rewards, whose teacher is a role of `shared`."""
    return toy.trainer(shared, reward=list(rewards), teacher=Teacher(role), **{**ALONE, **changes})


def test_the_gradient_is_that_of_the_reverse_kl():
    """Compares with the gradient of mean(log p_policy * c) over tokens, with the constant c = log p_policy - log p_teacher."""
    shared, temperature = toy.shared_base(critic=False, spread=0.1), 0.7
    trainer = student(shared, temperature=temperature, check_reference=False)
    episodes = trainer.make_experience().episodes
    parameters = shared.parameters_of("policy")
    trainer.accumulate(episodes, list(range(len(episodes))), Totals.of(episodes.learn))
    found = torch.cat([p.grad.flatten() for p in parameters])
    shared.zero_grad()

    given = (episodes.input_ids, episodes.starts, episodes.mask, temperature)
    ours, theirs = (shared.logprobs(role, *given)[0] for role in ("policy", "reference"))
    apart = (ours - theirs).detach()
    assert apart[episodes.mask].abs().max() > 0.1
    (apart * ours).where(episodes.mask, 0.0).sum().div(episodes.mask.sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in parameters])
    assert expected.norm() > 1e-3 and (found - expected).abs().max() < 1e-6


def test_the_first_update_is_checked_with_the_teachers_definition(monkeypatch):
    shared = toy.shared_base(critic=False, spread=0.1)
    fill = losses.fill_advantages

    def wrong_sign(args, config, episodes, kl_coef):
        fill(replace(args, teacher_coef=-args.teacher_coef), config, episodes, kl_coef)

    student(shared, check_reference=False).train()
    monkeypatch.setattr(losses, "fill_advantages", wrong_sign)
    with pytest.raises(SelfCheckFailed, match="rewards and advantages are as defined"):
        student(toy.shared_base(critic=False, spread=0.1), check_reference=False).train()


# ------------------------------------------------------------------------------------------- a system message


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(ROOT / "jobs/demo/model"))


def rendered(tokenizer, *turns):
    roles = [{"role": role, "content": text} for role, text in turns]
    text = tokenizer.apply_chat_template(roles, tokenize=False, add_generation_prompt=True, date_string=DATE)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_teacher_reads_its_system_message_in_front_of_each_prompt(tokenizer):
    told = "Answer politely."
    prompts = [
        rendered(tokenizer, ("user", text)) for text in ("Who is there?", "What is the capital of Peru?")
    ]
    one = teacher.make_teacher(None, told, tokenizer, prompts)
    trainer = toy.trainer()
    episodes = trainer.make_experience().episodes.take([0, 1])
    width = max(map(len, prompts))
    episodes.input_ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in prompts])
    episodes.starts = torch.tensor([len(ids) for ids in prompts])
    seen = one.as_seen(episodes)
    for row, text in enumerate(("Who is there?", "What is the capital of Peru?")):
        expected = rendered(tokenizer, ("system", told), ("user", text))
        assert seen.input_ids[row, : int(seen.starts[row])].tolist() == expected


def test_a_prompt_with_its_own_system_message_is_refused(tokenizer):
    own = rendered(tokenizer, ("system", "Be short."), ("user", "Who is there?"))
    plain = rendered(tokenizer, ("user", "Who is there?"))
    with pytest.raises(
        InputError, match=r"prompt 2 of data.train is no chat, or already has a system message"
    ):
        teacher.make_teacher(None, "Be kind.", tokenizer, [plain, own])


# ---------------------------------------------------------------------------------------------------- the job


NONE = ["reward=null", "trainer.advantage_estimator=none"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["reward=null"], r"reward: missing; `ppo` needs it.*trainer.advantage_estimator=none"),
        (["trainer.advantage_estimator=none"], r"advantage_estimator: found none.*set reward=null"),
        (NONE, r"teacher: missing; the job learns from a teacher"),
        (["trainer.teacher_coef=1"], r"teacher: missing"),
        (["teacher=base"], r"trainer.teacher_coef: found 0.0, with which the teacher has no effect"),
        (["trainer.teacher_system=Be kind."], r"trainer.teacher_system: needs teacher"),
        (
            ["teacher=python:a:b", "trainer.teacher_coef=1"],
            r"teacher: found 'python:a:b', expected an adapter",
        ),
    ],
)
def test_an_invalid_teacher_section_is_refused(settings, message, in_root):
    with pytest.raises(InputError, match=message):
        load_job("jobs/demo/ppo.yaml", ["trainer.critic=adapter", *settings], "ppo")


def test_a_stage_learns_from_a_teacher_without_a_reward(tmp_path):
    """The student is the sft adapter. The teacher is the base with a system message, which changes the base's completions."""
    sft = alone.train("sft", tmp_path, "trainer.learning_rate=3e-3", "trainer.warmup_steps=0")["adapter"]
    settings = [*NONE, "judge=null", "teacher=base", "trainer.teacher_coef=1", "trainer.kl_coef=0", "gate={}"]
    settings += [
        "trainer.teacher_system=Answer politely.",
        "trainer.critic=adapter",
        "trainer.critic_warmup_steps=0",
    ]
    settings += ["trainer.normalize_values=false", "trainer.total_episodes=128"]
    worker = alone.worker("ppo", tmp_path, *settings, inputs={"policy": sft})
    from pipeline.stages import ppo

    result = ppo.train(worker)
    facts = json.loads((tmp_path / result["adapter"] / "lineage.json").read_text())
    assert facts["stage"] == "ppo" and result["metrics"]["objective/teacher_kl"] > 0
    lines = [metrics for _, metrics in worker.lines]
    assert lines[-1]["objective/teacher_kl"] < lines[0]["objective/teacher_kl"]
