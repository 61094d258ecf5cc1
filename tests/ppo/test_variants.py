"""Tests that every estimator and option of PPO learns on the demo: the judge's score, which nothing trains on, rises.

Each case is a short run of jobs/demo/ppo.yaml with one change. `make test-all` prints the table of gains.
"""

import json

import pytest
import torch
import toy_ppo
from running import ROOT, stage

from pipeline.demo import gold
from pipeline.job import load_job
from pipeline.models.adapters import SharedBase
from pipeline.models.base import load_base
from pipeline.models.tokenizer import load_tokenizer
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.trainer import PPOTrainer
from pipeline.registry import lineage
from pipeline.scoring.rewards import AdapterReward, FunctionReward

pytestmark = [pytest.mark.usefixtures("embedded_ray"), pytest.mark.slow]
EPISODES = 1280  # half as many as the demo
GROUPS = {"num_generations": 4}
LOSS_KL = {"kl_in": "loss", "kl_estimator": "k3"}

VARIANTS = {
    "gae (the demo)": {},
    "rloo": {"advantage_estimator": "rloo", **GROUPS},
    "grpo": {"advantage_estimator": "grpo", **GROUPS},
    "grpo, not scaled (Dr. GRPO)": {"advantage_estimator": "grpo", "scale_rewards": False, **GROUPS},
    "remax": {"advantage_estimator": "remax"},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus"},
    "kl k2": {"kl_estimator": "k2"},
    "kl k3": {"kl_estimator": "k3"},
    "kl abs": {"kl_estimator": "abs"},
    "kl in the loss": LOSS_KL,
    "kl adaptive": {"kl_controller": "adaptive", "kl_target": 3.0, "kl_horizon": 1000},
    "reference follows (EMA)": {
        "sync_ref_model": True, "ref_model_mixup_alpha": 0.1, "ref_model_sync_steps": 1, "check_reference": True,
    },
    "rewards as they are": {"normalize_rewards": False, "reward_clip": None},
    "rewards whitened": {"whiten_rewards": True},
    "bootstrap of cut-off completions": {"missing_eos_penalty": None, "bootstrap_truncated": True},
    "overlong filter": {"missing_eos_penalty": None, "mask_truncated_completions": True},
    "at least 4 new tokens": {"min_new_tokens": 4},
    "critic warm-up": {"critic_warmup_steps": 3},
    "values normalised": {"normalize_values": True},
    "values unclipped": {"cliprange_value": None},
    "dual clip": {"dual_clip": 3.0},
    "entropy bonus": {"entropy_coef": 0.005},
    "early stop on KL": {"target_kl": 0.02, "num_ppo_epochs": 4},
    "gamma 0.99, lambda 1": {"gamma": 0.99, "lam": 1.0},
    "bf16": {"bf16": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "token budget": {"max_tokens_per_micro_batch": 512},
}  # fmt: skip


def manners(completions, answer, **_):
    """Returns 1 for right answers of more than one word. This Python reward needs a column of the data."""
    return [float(a in c) * min(len(c.split()), 6) / 6 for c, a in zip(completions, answer, strict=True)]


@pytest.fixture(scope="module")
def trained(embedded_ray, tmp_path_factory, request):
    """Returns the folders of the demo's sft and reward adapters and the table of gains, which it prints at the end."""
    storage = tmp_path_factory.mktemp("variants")
    adapters = {name: stage(name, storage, name)["adapter"] for name in ("sft", "rm")}
    gains = []
    yield adapters, gains
    terminal = request.config.pluginmanager.getplugin("terminalreporter")  # pytest would capture print()
    head = [
        "",
        "| variant | gold reward before | after | KL, nats a completion |",
        "| --- | --- | --- | --- |",
    ]
    terminal.write_line("\n".join([*head, *gains]))


def rows(name, tokenizer):
    lines = (ROOT / f"jobs/demo/data/{name}.jsonl").read_text().splitlines()
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    ids = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    return [{"input_ids": i, "row": line} for i, line in zip(ids, lines, strict=True)]


def learn(trained, name, changes, reward=None, least=0.1):
    """Trains for EPISODES. Compares the judge's score of greedy completions before and after, and the KL."""
    folders, gains = trained
    job = load_job(ROOT / "jobs/demo/ppo.yaml", [f"model.name_or_path={ROOT}/jobs/demo/model"], "ppo")
    args = PPOConfig(**{**job.trainer, "total_episodes": EPISODES, **changes})
    tokenizer = load_tokenizer(job.model.name_or_path)
    torch.manual_seed(args.seed)
    shared = SharedBase(load_base(job.model), autocast=torch.bfloat16 if args.bf16 else None)
    shared.add("policy", folder=folders["sft"], trainable=True)
    if args.sync_ref_model:
        shared.add("reference", copy_of="policy")
    else:
        shared.add("reference", folder=folders["sft"])
    shared.add("reward", folder=folders["rm"], head=True)
    if args.has_critic_adapter:
        shared.add("critic", copy_of="reward", head=True, trainable=True)
    elif args.uses_critic:
        shared.add("critic", head_on="policy", trainable=True)
    constants = lineage.read(folders["rm"], "rm")["reward"]
    rewards = reward(shared, constants) if reward else [AdapterReward(shared, **constants)]
    trainer = PPOTrainer(shared, tokenizer, args, rows("prompts", tokenizer), rewards)

    def gold_score():
        return toy_ppo.greedy_score(trainer, rows("prompts_eval", tokenizer), [FunctionReward(gold)])

    start = gold_score()
    history = trainer.train()
    end, kl = gold_score(), history[-1]["objective/kl"]
    gains.append(f"| {name} | {start:.2f} | {end:.2f} | {kl:.1f} |")
    print(gains[-1], flush=True)
    assert end - start > least
    return history


@pytest.mark.parametrize("name", VARIANTS)
def test_it_learns(name, trained):
    learn(trained, name, VARIANTS[name])


def test_two_rewards_one_of_them_a_python_function(trained):
    learn(
        trained,
        "two rewards, weighted",
        {},
        lambda shared, constants: [AdapterReward(shared, **constants), FunctionReward(manners, weight=0.5)],
    )
