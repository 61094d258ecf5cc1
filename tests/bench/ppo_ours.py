"""One measurement of our PPO: `python tests/bench/ppo_ours.py SIZE CASE`, started by `make bench`."""

import json
import sys

from sizes import (
    EOS,
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


def main(name: str, case: str) -> None:
    from transformers import AutoModelForCausalLM

    from pipeline.models.adapters import SharedBase
    from pipeline.ppo.config import PPOConfig
    from pipeline.ppo.rewards import AdapterReward
    from pipeline.ppo.trainer import PPOTrainer

    size, clock, tokens = SIZES[name], Clock(), tokenizer(name)
    base = AutoModelForCausalLM.from_pretrained(model_folder(name), dtype="float32")
    shared = SharedBase(with_ends(base, name, case))
    shared.add("policy", lora=LORA, trainable=True)  # the bare base is the reference, as in TRL's with LoRA
    shared.add("reward", lora=LORA, head=True)
    shared.add("critic", copy_of="reward", head=True, trainable=True)
    args = PPOConfig(
        total_episodes=size.prompts * size.updates,
        batch_size=size.prompts,
        num_ppo_epochs=2,
        num_mini_batches=2,
        per_device_train_batch_size=size.together,
        local_rollout_forward_batch_size=size.prompts,
        response_length=size.new_tokens,
        learning_rate=LEARNING_RATE,
        seed=SEED,
    )
    phases: list[dict[str, float]] = []

    def on_update(metrics: dict[str, float], update: int, total: int) -> None:
        clock.step(update)
        phases.append({k: v for k, v in metrics.items() if k.startswith(("time/", "memory/"))})
        clock.facts.setdefault("lengths", []).append(metrics["completions/mean_length"])

    rows = [{"input_ids": ids, "row": json.dumps({"prompt": ""})} for ids in prompts(name, tokens)]
    before = high_water()  # the trainer resets the system's own figure, and keeps the highest itself
    trainer = PPOTrainer(shared, tokens, args, rows, [AdapterReward(shared)], eos=[EOS], on_update=on_update)
    trainer.train()
    clock.facts["phases"] = phases[1:]
    clock.write(max(before, high_water(), int(phases[-1]["memory/peak"] * 2**30)))


if __name__ == "__main__":
    main(*sys.argv[1:])
