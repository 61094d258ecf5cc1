"""One measurement of our PPO: `python tests/bench/ppo_ours.py SIZE CASE OURS`, started by `make bench`.

OURS: the fields of `variants.Ours` as JSON.
"""

import json
import sys
from typing import Any

from sizes import (
    LEARNING_RATE,
    LORA,
    SEED,
    SIZES,
    Clock,
    high_water,
    model_folder,
    prompts,
    tokenizer,
    with_ends,
)
from variants import OPTIMIZER_OF_TRL, PHASES, Ours


def main(name: str, case: str, fields: str) -> None:
    from transformers import AutoModelForCausalLM

    from pipeline.models import matmul
    from pipeline.models.adapters import SharedBase
    from pipeline.ppo.config import PPOConfig
    from pipeline.ppo.rewards import AdapterReward
    from pipeline.ppo.trainer import PPOTrainer

    size, ours, clock, tokens = SIZES[name], Ours(**json.loads(fields)), Clock(), tokenizer(name)
    base = AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=ours.dtype)
    matmul.configure(base.config.hidden_size, "cpu")
    shared = SharedBase(with_ends(base, name, case))
    shared.add("policy", lora=LORA, trainable=True)  # the bare base is the reference, as in TRL's with LoRA
    shared.add("reward", lora=LORA, head=True)
    add_critic(shared, ours.critic)
    # Few rows save memory; completions to one prompt have to be in one micro-batch to share it.
    few_rows = ours.prompts == "different" and not ours.like_trl
    settings: dict[str, Any] = {
        "total_episodes": size.prompts * size.updates,
        "batch_size": size.prompts,
        "critic": ours.critic,
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
        "num_generations": size.generations if ours.prompts == "shared" else 1,
        "per_device_train_batch_size": size.together if few_rows else size.prompts // 2,  # the minibatch
        "response_length": size.new_tokens,
        "learning_rate": LEARNING_RATE,
        "bf16": ours.dtype == "bfloat16",
        "seed": SEED,
    }
    if ours.like_trl:
        settings |= OPTIMIZER_OF_TRL
    args = PPOConfig(**settings)
    phases: list[dict[str, float]] = []
    peaks: list[float] = []

    def on_update(metrics: dict[str, float], update: int, total: int) -> None:
        clock.step(update)
        phases.append({phase: metrics[f"time/{phase}"] for phase in PHASES})
        peaks.append(metrics["memory/peak"])
        clock.facts.setdefault("lengths", []).append(metrics["completions/mean_length"])

    token_ids = prompts(name, tokens, ours.long_prompts)
    if ours.prompts != "different":
        token_ids = token_ids[: size.prompts * size.updates // size.generations]
    if ours.prompts == "repeated":
        token_ids = repeated(token_ids, size.generations)
    rows = [{"input_ids": ids, "row": json.dumps({"prompt": ""})} for ids in token_ids]
    before = high_water()  # the trainer resets the system's own figure, and keeps the highest itself
    trainer = PPOTrainer(shared, tokens, args, rows, [AdapterReward(shared)], on_update=on_update)
    if ours.prompts == "repeated":
        shared.can_pack = trainer.sampler.decoder.share = False
    trainer.train()
    clock.facts |= {"phases": phases[1:], "dtypes": [str(base.dtype), str(shared.autocast)]}
    clock.write(max(before, high_water(), int(peaks[-1] * 2**30)))


def add_critic(shared: Any, critic: str) -> None:
    """The role `critic`: a copy of the reward, or a head on the policy's hidden states."""
    if critic == "head":
        shared.add("critic", head_on="policy", trainable=True)
    else:
        shared.add("critic", copy_of="reward", head=True, trainable=True)


def repeated(distinct: list[list[int]], times: int) -> list[list[int]]:
    """Rows that give, one completion each, the same episodes as `times` completions to each of the distinct prompts."""
    from pipeline.ppo.episodes import prompt_order

    count = len(distinct) * times
    rows: list[list[int]] = [[]] * count
    order = prompt_order(0, len(distinct), len(distinct), SEED)
    for episode, row in enumerate(prompt_order(0, count, count, SEED)):
        rows[row] = distinct[order[episode // times]]
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:])
