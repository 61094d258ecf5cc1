"""TRL 1.12's PPO on the same reward: `python tests/bench/score_trl.py SIZE SEED`, started by `make bench`."""

import sys
from typing import Any

from ppo_trl import trainer_of  # also puts TRL 1.12 before the installed TRL
from score import GOALS, SETTINGS, courtesy, write
from sizes import SIZES, model_folder, tokenizer, with_ends


def main(name: str, seed: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback
    from trl.experimental.ppo import ppo_trainer

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

    trainer = trainer_of(
        name,
        tokens,
        policy,
        reward,
        critic,
        Watch(),
        total_episodes=size.prompts * GOALS[name].updates,
        bf16=False,
        logging_steps=1,
        seed=int(seed),
        **SETTINGS,
    )
    trainer.train()
    write(curve)


if __name__ == "__main__":
    main(*sys.argv[1:])
