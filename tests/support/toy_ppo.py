"""Tiny random models, prompts and rewards for the tests of adapters and PPO."""

import json
import re
from dataclasses import replace

import torch
import transformers

from pipeline.models.adapters import SharedBase
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.episodes import Prompts
from pipeline.ppo.sampler import Roles, Sampler
from pipeline.ppo.trainer import PPOTrainer
from pipeline.scoring.rewards import FunctionReward, Samples, weighted_scores
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.rows import Row, Sampling

KINDS = ["llama", "gpt2", "qwen3", "mistral", "gemma", "gemma2"]  # architectures that `config` makes
MEASURED = re.compile("time/|memory/|per_second")  # metrics that differ between runs
VOCAB, EOS = 64, [2, 3]
SMALL = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2
)
LORA = dict(r=4, lora_alpha=8, target_modules="all-linear")


class Tokenizer:
    """The part of a tokenizer that the trainer needs. The text of a token is its id."""

    pad_token_id, eos_token_id, generation_eos, chat_template = 0, 2, EOS, None

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i in EOS))

    def get_added_vocab(self):
        return {}


def config(kind="llama", **changes):
    special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=128)
    one_key = dict(intermediate_size=48, num_key_value_heads=1, head_dim=8)
    two_keys = dict(intermediate_size=48, num_key_value_heads=2)
    name, shape = {
        "gpt2": ("GPT2Config", {}),
        "llama": ("LlamaConfig", two_keys),
        "qwen3": ("Qwen3Config", {**two_keys, "head_dim": 8}),
        "mistral": ("MistralConfig", {**two_keys, "sliding_window": 8}),
        "gemma": ("GemmaConfig", one_key),
        "gemma2": ("Gemma2Config", {**one_key, "sliding_window": 8, "final_logit_softcapping": 5.0}),
    }[kind]
    return getattr(transformers, name)(**{**SMALL, **shape, **special, **changes})


def base(kind="llama", seed=0, **changes):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config(kind, **changes)).eval()


def shared_base(kind="llama", critic=True, spread=0.0, seed=0, **changes):
    """Returns a tiny base model with the roles reference, policy, reward and critic.

    Args:
        critic: True adds a critic that is a copy of the reward, "head" adds a critic that is a head on the policy, and False adds
            neither reward nor critic.
        spread: standard deviation of random changes of policy and critic, which otherwise equal reference and reward.
    """
    shared = SharedBase(base(kind, seed, **changes))
    shared.add("reference", lora=LORA)
    shared.add("policy", copy_of="reference", trainable=True)
    if critic:
        shared.add("reward", lora={**LORA, "r": 3}, head=True)
        shared.heads["reward"].weight.data.normal_(std=33**-0.5)  # makes the new head nonzero, as if trained
        start = dict(head_on="policy") if critic == "head" else dict(copy_of="reward", head=True)
        shared.add("critic", **start, trainable=True)
    for role in ("policy", "critic") if spread else ():
        for parameter in shared.parameters_of(role) if role in shared.roles else ():
            parameter.data += spread * torch.randn_like(parameter)
    return shared


def values(shared, role, ids):
    """Returns the (B, T) outputs of the role's head for token ids (B, T) that are padded on the right."""
    return shared.head(role, shared.hidden(role, ids))


def prompts(count=32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(4, VOCAB, (3 + i % 5,), generator=generator).tolist() for i in range(count)]
    return [
        dict(input_ids=x, row=json.dumps(dict(prompt=f"question {i}", answer=i))) for i, x in enumerate(ids)
    ]


def low(completion_ids, **columns):
    """The reward of the toy runs. Returns the fraction of token ids below 20 for each completion."""
    return [sum(t < 20 for t in ids) / len(ids) for ids in completion_ids]


def noisy(completion_ids):
    """Returns `low` plus random numbers from torch's global generator, which a user's reward may also use."""
    return [score + 0.1 * torch.rand(1).item() for score in low(completion_ids)]


def trainer(
    shared=None, reward=low, rows=None, draws=None, decoder=None, rollout=None, workers=None, critic_reward=None,
    teacher=None, **changes,
):  # fmt: skip
    """Returns a PPO trainer. `changes` overrides keys of the trainer's PPOConfig."""
    settings = dict(
        total_episodes=64, batch_size=16, response_length=8, learning_rate=1e-2, kl_coef=0.02, num_ppo_epochs=2, seed=3,
        num_mini_batches=2, per_device_train_batch_size=8, lr_scheduler_type="constant",
    )  # fmt: skip
    args = PPOConfig(**{**settings, **changes})
    shared = shared or shared_base(critic=args.uses_critic and args.critic)
    rewards = [reward] if not callable(reward) and not isinstance(reward, list) else reward
    rewards = [FunctionReward(reward)] if callable(reward) else rewards
    sampler = Sampler(Roles(shared, rewards, critic_reward, teacher), Tokenizer(), args, decoder)
    return PPOTrainer(sampler, Prompts(rows or prompts(), draws), rollout, workers)


def unmeasured(history):
    """Returns the metrics of each update, except those that differ between runs."""
    return [{k: v for k, v in metrics.items() if not MEASURED.search(k)} for metrics in history]


def weights(trainer_or_shared, roles=("policy", "critic")):
    """Returns all parameters of the roles as one vector."""
    shared = getattr(trainer_or_shared, "shared", trainer_or_shared)
    return torch.cat([p.data.flatten() for r in roles if r in shared.roles for p in shared.parameters_of(r)])


def greedy_score(trainer, prompts, rewards=None):
    """Returns the mean score of greedy completions. By default, uses the trainer's own rewards."""
    ids = [[int(i) for i in row["input_ids"]] for row in prompts]
    trainer.sampler.decoder.changed("policy")
    greedy = replace(trainer.sampler.sampling, temperature=0.0)
    completions = trainer.sampler.decoder.generate("policy", ids, range(len(ids)), greedy)
    samples = Samples.of(
        ids, completions, [json.loads(row["row"]) for row in prompts], trainer.sampler.tokenizer
    )
    total = weighted_scores(rewards or trainer.sampler.rewards, samples, trainer.args.normalize_rewards)
    return sum(total) / len(total)


def cache_bytes(shared, rows, tokens):
    """Returns the bytes of a decoder's cache for `rows` rows of `tokens` tokens."""
    decoder = SlotDecoder(shared)
    decoder.join([Row([1] * (tokens - 2), i, Sampling(2, ())) for i in range(rows)])
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in decoder.cache.layers)


def recorded(trainer):
    """Makes a trainer record its rollouts. Returns a list that receives the samples of each rollout."""
    recorded_samples, rollout = [], trainer.rollout

    def record():
        result = rollout()
        recorded_samples.append(samples_of(trainer, result))
        return result

    trainer.rollout = record
    return recorded_samples


def first_episodes(trainer, spread=0.0):
    """Returns the episodes of the first update. `spread` is the size of random changes of the policy before this update."""
    for parameter in trainer.shared.parameters_of("policy"):
        parameter.data += spread * torch.randn_like(parameter)
    return trainer.make_experience().episodes


def samples_of(trainer, rollout):
    """Returns the samples of a rollout that has one chunk."""
    [(chunk, sampled)] = rollout.parts
    return trainer.sampler.samples(chunk, sampled.completions)


def in_some_rows(condition):
    """Returns `condition`.

    Asserts that the condition holds in some rows but not in all, because otherwise a test would prove nothing.
    """
    assert condition.any() and not condition.all()
    return condition


def batch(seed=5):
    """Returns token ids, positions of first actions, numbers of actions, and a mask, for three rows padded on the right."""
    torch.manual_seed(seed)
    ids = torch.randint(4, VOCAB, (3, 12))
    starts, counts = torch.tensor([3, 5, 2]), torch.tensor([6, 7, 1])
    mask = torch.arange(7) < counts.unsqueeze(-1)
    return ids, starts, counts, mask


def plain_logprobs(model, ids, starts, counts, temperature=1.0):
    """Returns log-probs, computed row by row with the model's own forward pass, without padding."""
    rows = []
    for row, start, count in zip(ids, starts.tolist(), counts.tolist(), strict=True):
        logits = model(input_ids=row[None, : start + count]).logits[0].float() / temperature
        logprobs = logits.log_softmax(-1)
        rows.append([logprobs[start + t - 1, row[start + t]].item() for t in range(count)])
    return rows
