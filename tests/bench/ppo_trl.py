"""One measurement of TRL 1.12's PPOTrainer: `python tests/bench/ppo_trl.py SIZE CASE`, started by `make bench`."""

import sys
from typing import Any

from sizes import (
    EOS,
    LEARNING_RATE,
    LORA,
    SIZES,
    TRL_PPO,
    WORK,
    Clock,
    high_water,
    model_folder,
    prompts,
    tokenizer,
    with_ends,
)

sys.path.insert(0, str(TRL_PPO))  # before the installed TRL


def main(name: str, case: str) -> None:
    import datasets
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    size, clock, tokens = SIZES[name], Clock(), tokenizer(name)
    tokens.padding_side = "left"
    folder = model_folder(name)
    policy = with_ends(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), name, case)
    torch.manual_seed(0)
    reward, critic = (
        AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype="float32")
        for _ in range(2)
    )

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
            clock.step(state.global_step)

    args = PPOConfig(
        output_dir=str(WORK / name / "trl"),
        total_episodes=size.prompts * size.updates,
        # The rows of an update; it cuts them into the minibatches by itself. With gradient accumulation instead,
        # accelerate would leave out every other optimizer step.
        per_device_train_batch_size=size.prompts,
        gradient_accumulation_steps=1,
        num_ppo_epochs=2,
        num_mini_batches=2,
        local_rollout_forward_batch_size=size.prompts,
        response_length=size.new_tokens,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        stop_token_id=EOS,
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = PPOTrainer(
        args=args,
        processing_class=tokens,
        model=policy,
        ref_model=None,  # the policy without its adapter
        reward_model=reward,
        value_model=critic,
        train_dataset=datasets.Dataset.from_list([{"input_ids": ids} for ids in prompts(name, tokens)]),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA),
        callbacks=[Watch()],
    )
    trainer.train()
    clock.write(high_water())


if __name__ == "__main__":
    main(*sys.argv[1:])
