"""Measures TRL 1.12's PPO. `make bench` runs `python tools/bench/ppo_trl.py SIZE CASE SETTING`.

SETTING has the fields of `sizes.Setting` as JSON.
"""

import json
import os
import sys
from typing import Any

from sizes import EOS, LEARNING_RATE, LORA, SIZES, TRL_PPO, Clock, Setting, Size, high_water

sys.path.insert(0, str(TRL_PPO))  # so that TRL 1.12 is imported instead of the installed TRL


def ppo(name: str, case: str, fields: str) -> None:
    """Runs updates with a reward model."""
    clock, size, theirs = Clock(), SIZES[name], Setting(**json.loads(fields))
    if theirs.bf16:
        # like `accelerate launch --mixed_precision bf16`, because TRL's trainer does not pass args.bf16 to accelerate
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    import torch
    from transformers import AutoModelForSequenceClassification, TrainerCallback

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
            clock.step(len(clock.ends) + 1)

    policy = size.base(case, theirs.dtype)
    torch.manual_seed(0)
    reward, critic = (
        AutoModelForSequenceClassification.from_pretrained(size.model, num_labels=1, dtype=theirs.dtype)
        for _ in range(2)
    )
    lengths = lengths_of_completions()
    trainer = trainer_of(size, policy, reward, critic, Watch(), theirs.bf16)
    trainer.train()
    clock.facts = {"lengths": lengths, "dtypes": [str(policy.dtype), trainer.accelerator.mixed_precision]}
    clock.write(high_water())


def trainer_of(size: Size, policy: Any, reward: Any, critic: Any, watch: Any, bf16: bool) -> Any:
    """Returns TRL's trainer for a size. The trainer reports its updates to `watch`."""
    import datasets
    from peft import LoraConfig
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokens = size.tokenizer()
    tokens.padding_side = "left"
    args = PPOConfig(
        output_dir=str(size.folder / "trl"),
        total_episodes=size.prompts * size.updates,
        num_ppo_epochs=2,
        num_mini_batches=2,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        bf16=bf16,
        # TRL itself splits the rows of an update into minibatches. If gradient accumulation split the rows, accelerate would
        # skip every other optimizer step.
        per_device_train_batch_size=size.prompts,
        gradient_accumulation_steps=1,
        local_rollout_forward_batch_size=size.prompts,
        response_length=size.new_tokens,
        stop_token_id=EOS,
        num_sample_generations=0,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    return PPOTrainer(
        args=args,
        processing_class=tokens,
        model=policy,
        ref_model=None,  # TRL uses the policy without its adapter as the reference
        reward_model=reward,
        value_model=critic,
        train_dataset=datasets.Dataset.from_list([{"input_ids": ids} for ids in size.token_ids(tokens)]),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA),
        callbacks=[watch],
    )


def lengths_of_completions() -> list[float]:
    """Returns a list that receives the mean length of each update's completions."""
    from trl.experimental.ppo import ppo_trainer

    lengths, truncate = [], ppo_trainer.truncate_response

    def truncated(stop: int, pad: int, responses: Any) -> Any:
        completions = truncate(stop, pad, responses)
        lengths.append((completions != pad).sum(-1).float().mean().item())
        return completions

    ppo_trainer.truncate_response = truncated
    return lengths


if __name__ == "__main__":
    ppo(*sys.argv[1:])
