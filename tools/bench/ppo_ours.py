"""Measures our PPO. `make bench` runs `python tools/bench/ppo_ours.py SIZE CASE SETTING`.

SETTING has the fields of `sizes.Setting` as JSON.
"""

import json
import sys
from typing import Any

from sizes import LEARNING_RATE, LORA, PHASES, SEED, SIZES, Clock, Setting, high_water


def ppo(name: str, case: str, fields: str) -> None:
    """Runs updates with a reward adapter, and measures the time of each phase."""
    from pipeline.ppo.config import PPOConfig
    from pipeline.ppo.episodes import Prompts
    from pipeline.ppo.sampler import Roles, Sampler
    from pipeline.ppo.trainer import PPOTrainer
    from pipeline.scoring.rewards import AdapterReward

    clock, size, ours = Clock(), SIZES[name], Setting(**json.loads(fields))
    shared, tokens = shared_base(size.base(case, ours.dtype), ours), size.tokenizer()
    args = PPOConfig(
        total_episodes=size.prompts * size.updates,
        batch_size=size.prompts,
        critic=ours.critic,
        response_length=size.new_tokens,
        num_ppo_epochs=2,
        num_mini_batches=2,
        num_generations=size.generations if ours.prompts == "shared" else 1,
        # Small micro-batches save memory. To share prompts among all completions, the micro-batch must be the full minibatch.
        per_device_train_batch_size=size.together if ours.prompts == "different" else size.prompts // 2,
        learning_rate=LEARNING_RATE,
        bf16=ours.bf16,
        seed=SEED,
    )
    history: list[dict[str, float]] = []

    def on_update(metrics: dict[str, float], update: int, total: int) -> None:
        clock.step(update)
        history.append(metrics)

    token_ids = size.token_ids(tokens, long=ours.prompts != "different")
    if ours.prompts != "different":
        token_ids = token_ids[: size.prompts * size.updates // size.generations]
    if ours.prompts == "repeated":
        token_ids = repeated(token_ids, size.generations)
    rows = [{"input_ids": ids, "row": json.dumps({"prompt": ""})} for ids in token_ids]
    # Reads the peak before the trainer exists, because the trainer resets the system's record of peak memory.
    before = high_water()
    trainer = PPOTrainer(Sampler(Roles(shared, [AdapterReward(shared)]), tokens, args), Prompts(rows))
    if ours.prompts == "repeated":
        shared.can_pack = trainer.sampler.decoder.share = False
    trainer.train(on_update)
    clock.facts = {
        "phases": [{phase: metrics[f"time/{phase}"] for phase in PHASES} for metrics in history[1:]],
        "lengths": [metrics["completions/mean_length"] for metrics in history],
        "dtypes": [str(shared.base.dtype), str(shared.autocast)],
    }
    clock.write(max(before, high_water(), int(history[-1]["memory/peak"] * 2**30)))


def shared_base(base: Any, ours: Setting) -> Any:
    """Returns the base with the roles policy, reward and critic. The bare base is the reference, as in TRL with LoRA."""
    from pipeline.models.adapters import SharedBase

    shared = SharedBase(base)
    shared.add("policy", lora=LORA, trainable=True)
    shared.add("reward", lora=LORA, head=True)
    critic = {"head_on": "policy"} if ours.critic == "head" else {"head": True, "copy_of": "reward"}
    shared.add("critic", trainable=True, **critic)
    return shared


def repeated(distinct: list[list[int]], times: int) -> list[list[int]]:
    """Repeats prompts, so that one completion per prompt gives the same episodes as `times` completions per distinct prompt."""
    from pipeline.ppo.episodes import prompt_order

    count = len(distinct) * times
    found: list[list[int]] = [[]] * count
    order = prompt_order(0, len(distinct), len(distinct), SEED)
    for episode, row in enumerate(prompt_order(0, count, count, SEED)):
        found[row] = distinct[order[episode // times]]
    return found


if __name__ == "__main__":
    ppo(*sys.argv[1:])
