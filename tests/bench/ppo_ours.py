"""One measurement of our PPO: `python tests/bench/ppo_ours.py ppo SIZE CASE OURS` or `score SIZE OURS`, by `make bench`.

OURS: the fields of `variants.Ours` as JSON.
"""

import json
import os
import sys
from typing import Any

from sizes import LEARNING_RATE, LORA, SEED, SIZES, Clock, Size, high_water, write
from variants import GOALS, OPTIMIZER_OF_TRL, PHASES, SETTINGS, Ours, courtesy


def ppo(name: str, case: str, fields: str) -> None:
    """Updates with a reward adapter, timed by phase."""
    from pipeline.models import matmul
    from pipeline.ppo.rewards import AdapterReward
    from pipeline.ppo.trainer import PPOTrainer

    clock, size, ours = Clock(), SIZES[name], Ours(**json.loads(fields))
    shared, tokens = shared_base(size, case, ours.dtype), size.tokenizer()
    matmul.configure(shared.hidden_size, "cpu")
    shared.add("reward", lora=LORA, head=True)
    add_critic(shared, ours, copy_of="reward")
    # Few rows save memory; completions to one prompt have to be in one micro-batch to share it.
    few_rows = ours.prompts == "different" and not ours.like_trl
    args = config(
        size,
        ours,
        size.updates,
        num_ppo_epochs=2,
        num_mini_batches=2,
        num_generations=size.generations if ours.prompts == "shared" else 1,
        per_device_train_batch_size=size.together if few_rows else size.prompts // 2,  # the minibatch
        learning_rate=LEARNING_RATE,
        bf16=ours.dtype == "bfloat16",
        seed=SEED,
    )
    history: list[dict[str, float]] = []

    def on_update(metrics: dict[str, float], update: int, total: int) -> None:
        clock.step(update)
        history.append(metrics)

    token_ids = size.token_ids(tokens, ours.long_prompts)
    if ours.prompts != "different":
        token_ids = token_ids[: size.prompts * size.updates // size.generations]
    if ours.prompts == "repeated":
        token_ids = repeated(token_ids, size.generations)
    before = high_water()  # the trainer resets the system's own figure, and keeps the highest itself
    trainer = PPOTrainer(shared, tokens, args, rows(token_ids), [AdapterReward(shared)], on_update=on_update)
    if ours.prompts == "repeated":
        shared.can_pack = trainer.sampler.decoder.share = False
    trainer.train()
    clock.facts = {
        "phases": [{phase: metrics[f"time/{phase}"] for phase in PHASES} for metrics in history[1:]],
        "lengths": [metrics["completions/mean_length"] for metrics in history],
        "dtypes": [str(shared.base.dtype), str(shared.autocast)],
    }
    clock.write(max(before, high_water(), int(history[-1]["memory/peak"] * 2**30)))


def score(name: str, fields: str) -> None:
    """The curve of score and KL on a Python reward; of OURS, `critic` and `like_trl` count."""
    import torch

    from pipeline.ppo.rewards import FunctionReward
    from pipeline.ppo.trainer import PPOTrainer

    seed, size, ours = int(os.environ["BENCH_SEED"]), SIZES[name], Ours(**json.loads(fields))
    torch.manual_seed(seed)
    shared, tokens = shared_base(size, "own"), size.tokenizer()
    add_critic(shared, ours, lora=LORA)
    per_device = {"per_device_train_batch_size": size.prompts}
    args = config(size, ours, GOALS[name].updates, seed=seed, **per_device, **SETTINGS)
    reward = FunctionReward(lambda completions: [courtesy(text) for text in completions])
    history = PPOTrainer(shared, tokens, args, rows(size.token_ids(tokens)), [reward]).train()
    curve = [(metrics["objective/scores"], metrics["objective/kl"]) for metrics in history]
    write(GOALS[name].read(curve))


def shared_base(size: Size, case: str, dtype: str = "float32") -> Any:
    """Returns the base with its policy; the bare base is the reference, as in TRL's with LoRA."""
    from transformers import AutoModelForCausalLM

    from pipeline.models.adapters import SharedBase

    base = AutoModelForCausalLM.from_pretrained(size.model, dtype=dtype)
    shared = SharedBase(size.with_ends(base, case))
    shared.add("policy", lora=LORA, trainable=True)
    return shared


def add_critic(shared: Any, ours: Ours, **adapter: Any) -> None:
    """Adds the role `critic`: an adapter with a head, or a head on the policy's hidden states."""
    kind = {"head_on": "policy"} if ours.critic == "head" else {"head": True, **adapter}
    shared.add("critic", trainable=True, **kind)


def config(size: Size, ours: Ours, updates: int, **settings: Any) -> Any:
    from pipeline.ppo.config import PPOConfig

    return PPOConfig(
        total_episodes=size.prompts * updates,
        batch_size=size.prompts,
        critic=ours.critic,
        response_length=size.new_tokens,
        **(OPTIMIZER_OF_TRL if ours.like_trl else {}),
        **settings,
    )


def rows(token_ids: list[list[int]]) -> list[dict[str, Any]]:
    return [{"input_ids": ids, "row": json.dumps({"prompt": ""})} for ids in token_ids]


def repeated(distinct: list[list[int]], times: int) -> list[list[int]]:
    """Returns rows that give, one completion each, the episodes of `times` completions to each of the distinct prompts."""
    from pipeline.ppo.episodes import prompt_order

    count = len(distinct) * times
    found: list[list[int]] = [[]] * count
    order = prompt_order(0, len(distinct), len(distinct), SEED)
    for episode, row in enumerate(prompt_order(0, count, count, SEED)):
        found[row] = distinct[order[episode // times]]
    return found


if __name__ == "__main__":
    {"ppo": ppo, "score": score}[sys.argv[1]](*sys.argv[2:])
