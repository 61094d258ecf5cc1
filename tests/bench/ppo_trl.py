"""One measurement of TRL 1.12's PPOTrainer: `python tests/bench/ppo_trl.py SIZE CASE THEIRS`, started by `make bench`.

THEIRS: the fields of `variants.Theirs` as JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable
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
from variants import PHASES, Theirs

sys.path.insert(0, str(TRL_PPO))  # before the installed TRL


def main(name: str, case: str, fields: str) -> None:
    theirs = Theirs(**json.loads(fields))
    if theirs.bf16:
        # As `accelerate launch --mixed_precision bf16` does: its trainer does not hand args.bf16 on.
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    dtype = "bfloat16" if theirs.bf16 else "float32"
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

    if theirs.matmul:
        torch.set_float32_matmul_precision(os.environ["BENCH_MATMUL"])
    size, clock, tokens = SIZES[name], Clock(), tokenizer(name)
    tokens.padding_side = "left"
    folder = model_folder(name)
    policy = with_ends(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), name, case)
    torch.manual_seed(0)
    reward, critic = (
        AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=dtype)
        for _ in range(2)
    )
    watch = Stopwatch(reward, tokens.pad_token_id)

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
            clock.step(state.global_step)
            watch.next_update()

    trainer = trainer_of(
        name,
        tokens,
        policy,
        reward,
        critic,
        Watch(),
        total_episodes=size.prompts * size.updates,
        num_ppo_epochs=2,
        num_mini_batches=2,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        bf16=theirs.bf16,
    )
    watch.next_update()
    trainer.train()
    dtypes = [str(policy.dtype), trainer.accelerator.mixed_precision]
    clock.facts |= {"phases": watch.phases[2:], "lengths": watch.lengths, "dtypes": dtypes}
    clock.write(high_water())


def trainer_of(
    name: str, tokens: Any, policy: Any, reward: Any, critic: Any, watch: Any, **settings: Any
) -> Any:
    """Returns TRL's trainer of a size, which tells `watch` about its updates."""
    import datasets
    from peft import LoraConfig
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    size = SIZES[name]
    args = PPOConfig(
        output_dir=str(WORK / name / "trl"),
        # The rows of an update; it cuts them into the minibatches by itself. With gradient accumulation instead,
        # accelerate would leave out every other optimizer step.
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
        **settings,
    )
    return PPOTrainer(
        args=args,
        processing_class=tokens,
        model=policy,
        ref_model=None,  # the policy without its adapter
        reward_model=reward,
        value_model=critic,
        train_dataset=datasets.Dataset.from_list([{"input_ids": ids} for ids in prompts(name, tokens)]),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA),
        callbacks=[watch],
    )


class Stopwatch:
    """Seconds of each phase of TRL's updates, and the mean lengths of its completions, read off the functions it calls."""

    def __init__(self, reward: Any, pad: int) -> None:
        import torch
        from trl.experimental.ppo import ppo_trainer

        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.phases: list[dict[str, float]] = []  # of each update; the first is the time before them
        self.lengths: list[float] = []
        self.begin = time.perf_counter()

        def role(model: Any, *_: Any) -> str | None:
            return "score" if model is reward else "values"

        def no_grad(*_: Any) -> str | None:
            return None if torch.is_grad_enabled() else "values"  # else a part of the update

        ppo_trainer.batch_generation = self.timed(ppo_trainer.batch_generation, lambda *_: "rollout")
        ppo_trainer.get_reward = self.timed(ppo_trainer.get_reward, role)
        ppo_trainer.forward = self.timed(ppo_trainer.forward, no_grad)
        truncate = ppo_trainer.truncate_response

        def truncated(*args: Any) -> Any:
            completions = truncate(*args)
            self.lengths.append((completions != pad).sum(-1).float().mean().item())
            return completions

        ppo_trainer.truncate_response = truncated

    def timed(self, function: Callable[..., Any], phase_of: Callable[..., str | None]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            found = function(*args, **kwargs)
            if phase := phase_of(*args):
                self.seconds[phase] += time.perf_counter() - begin
            return found

        return call

    def next_update(self) -> None:
        """What no function of theirs took counts as the update."""
        end = time.perf_counter()
        self.phases.append(self.seconds | {"update": end - self.begin - sum(self.seconds.values())})
        self.seconds, self.begin = dict.fromkeys(PHASES, 0.0), end


if __name__ == "__main__":
    main(*sys.argv[1:])
