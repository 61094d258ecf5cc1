"""Our PPO on a Python reward: `python tests/bench/score_ours.py SIZE OURS SEED`, started by `make bench`.

OURS: the fields of `variants.Ours` as JSON; all but `critic` and `like_trl` are as they are by default.
"""

import json
import sys

from score import GOALS, SETTINGS, courtesy, write
from sizes import LORA, SIZES, model_folder, prompts, tokenizer, with_ends
from variants import OPTIMIZER_OF_TRL, Ours


def main(name: str, fields: str, seed: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from pipeline.models.adapters import SharedBase
    from pipeline.ppo.config import PPOConfig
    from pipeline.ppo.rewards import FunctionReward
    from pipeline.ppo.trainer import PPOTrainer

    size, ours, tokens = SIZES[name], Ours(**json.loads(fields)), tokenizer(name)
    torch.manual_seed(int(seed))
    base = AutoModelForCausalLM.from_pretrained(model_folder(name), dtype="float32")
    shared = SharedBase(with_ends(base, name, "own"))
    shared.add("policy", lora=LORA, trainable=True)
    if ours.critic == "head":
        shared.add("critic", head_on="policy", trainable=True)
    else:
        shared.add("critic", lora=LORA, head=True, trainable=True)
    args = PPOConfig(
        total_episodes=size.prompts * GOALS[name].updates,
        batch_size=size.prompts,
        critic=ours.critic,
        per_device_train_batch_size=size.prompts,
        response_length=size.new_tokens,
        seed=int(seed),
        **SETTINGS,
        **(OPTIMIZER_OF_TRL if ours.like_trl else {}),
    )
    rows = [{"input_ids": ids, "row": json.dumps({"prompt": ""})} for ids in prompts(name, tokens)]
    reward = FunctionReward(lambda completions: [courtesy(text) for text in completions])
    history = PPOTrainer(shared, tokens, args, rows, [reward]).train()
    write([(metrics["objective/scores"], metrics["objective/kl"]) for metrics in history])


if __name__ == "__main__":
    main(*sys.argv[1:])
