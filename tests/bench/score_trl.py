"""TRL 1.12's PPO on the same reward: `python tests/bench/score_trl.py SIZE SEED`, started by `make bench`."""

import sys
from typing import Any

from score import GOALS, SETTINGS, courtesy, write
from sizes import EOS, LORA, SIZES, TRL_PPO, WORK, model_folder, prompts, tokenizer, with_ends

sys.path.insert(0, str(TRL_PPO))  # before the installed TRL


def main(name: str, seed: str) -> None:
    import datasets
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    size, tokens, folder = SIZES[name], tokenizer(name), model_folder(name)
    tokens.padding_side = "left"
    torch.manual_seed(int(seed))
    policy = with_ends(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), name, "own")
    critic = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype="float32")
    reward, get_reward = torch.nn.Identity(), ppo_trainer.get_reward

    def scored(model: Any, ids: Any, pad: int, start: int) -> Any:
        """TRL takes a reward model only; its other caller, for the values, goes on as it was."""
        if model is not reward:
            return get_reward(model, ids, pad, start)
        texts = tokens.batch_decode(ids[:, start:], skip_special_tokens=True)
        return None, torch.tensor([courtesy(text) for text in texts]), None

    ppo_trainer.get_reward = scored
    curve: list[tuple[float, float]] = []

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: object) -> None:
            if "objective/scores" in logs:
                curve.append((logs["objective/scores"], logs["objective/kl"]))

    args = PPOConfig(
        output_dir=str(WORK / name / "trl"),
        total_episodes=size.prompts * GOALS[name].updates,
        per_device_train_batch_size=size.prompts,
        gradient_accumulation_steps=1,
        local_rollout_forward_batch_size=size.prompts,
        response_length=size.new_tokens,
        stop_token_id=EOS,
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=int(seed),
        **SETTINGS,
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
    write(curve)


if __name__ == "__main__":
    main(*sys.argv[1:])
