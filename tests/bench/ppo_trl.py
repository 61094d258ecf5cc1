"""One measurement of TRL 1.12's PPO: `python tests/bench/ppo_trl.py ppo SIZE CASE THEIRS` or `score SIZE`, by `make bench`.

THEIRS: the fields of `variants.Theirs` as JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from sizes import EOS, LEARNING_RATE, LORA, SIZES, TRL_PPO, Clock, Size, high_water, write
from variants import GOALS, PHASES, SETTINGS, Theirs, courtesy

sys.path.insert(0, str(TRL_PPO))  # before the installed TRL


def ppo(name: str, case: str, fields: str) -> None:
    """Updates with a reward model, timed by phase."""
    clock, size, theirs = Clock(), SIZES[name], Theirs(**json.loads(fields))
    if theirs.bf16:
        # As `accelerate launch --mixed_precision bf16` does: its trainer does not hand args.bf16 on.
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    dtype = "bfloat16" if theirs.bf16 else "float32"
    import torch
    from transformers import TrainerCallback

    if theirs.matmul:
        torch.set_float32_matmul_precision(os.environ["BENCH_MATMUL"])
    policy = policy_of(size, case, dtype)
    torch.manual_seed(0)
    reward, critic = scalar_model(size, dtype), scalar_model(size, dtype)
    watch = Stopwatch(reward)

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
            clock.step(state.global_step)
            watch.next_update()

    settings = {"num_ppo_epochs": 2, "num_mini_batches": 2, "temperature": 1.0}
    settings |= {"learning_rate": LEARNING_RATE, "bf16": theirs.bf16}
    trainer = trainer_of(size, size.updates, policy, reward, critic, Watch(), **settings)
    watch.next_update()
    trainer.train()
    dtypes = [str(policy.dtype), trainer.accelerator.mixed_precision]
    clock.facts = {"phases": watch.phases[2:], "lengths": watch.lengths, "dtypes": dtypes}
    clock.write(high_water())


def score(name: str) -> None:
    """The curve of score and KL on the Python reward."""
    import torch
    from transformers import TrainerCallback
    from trl.experimental.ppo import ppo_trainer

    seed, size = int(os.environ["BENCH_SEED"]), SIZES[name]
    tokens = size.tokenizer()
    torch.manual_seed(seed)
    policy, critic = policy_of(size, "own"), scalar_model(size)
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

    settings = {"bf16": False, "logging_steps": 1, "seed": seed, **SETTINGS}
    trainer_of(size, GOALS[name].updates, policy, reward, critic, Watch(), **settings).train()
    write(GOALS[name].read(curve))


def policy_of(size: Size, case: str, dtype: str = "float32") -> Any:
    from transformers import AutoModelForCausalLM

    return size.with_ends(AutoModelForCausalLM.from_pretrained(size.model, dtype=dtype), case)


def scalar_model(size: Size, dtype: str = "float32") -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(size.model, num_labels=1, dtype=dtype)


def trainer_of(
    size: Size, updates: int, policy: Any, reward: Any, critic: Any, watch: Any, **more: Any
) -> Any:
    """Returns TRL's trainer of a size, which tells `watch` about its updates."""
    import datasets
    from peft import LoraConfig
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokens = size.tokenizer()
    tokens.padding_side = "left"
    args = PPOConfig(
        output_dir=str(size.folder / "trl"),
        total_episodes=size.prompts * updates,
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
        **more,
    )
    return PPOTrainer(
        args=args,
        processing_class=tokens,
        model=policy,
        ref_model=None,  # the policy without its adapter
        reward_model=reward,
        value_model=critic,
        train_dataset=datasets.Dataset.from_list([{"input_ids": ids} for ids in size.token_ids(tokens)]),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA),
        callbacks=[watch],
    )


class Stopwatch:
    """Seconds of each phase of TRL's updates, and the mean lengths of its completions, read off the functions it calls."""

    def __init__(self, reward: Any) -> None:
        import torch
        from trl.experimental.ppo import ppo_trainer

        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.phases: list[dict[str, float]] = []  # of each update; the first is the time before them
        self.lengths: list[float] = []
        self.begin = time.perf_counter()

        def role(model: Any, *_: Any) -> str:
            return "score" if model is reward else "values"

        def no_grad(*_: Any) -> str | None:
            return None if torch.is_grad_enabled() else "values"  # else a part of the update

        ppo_trainer.batch_generation = self.timed(ppo_trainer.batch_generation, lambda *_: "rollout")
        ppo_trainer.get_reward = self.timed(ppo_trainer.get_reward, role)
        ppo_trainer.forward = self.timed(ppo_trainer.forward, no_grad)
        truncate = ppo_trainer.truncate_response

        def truncated(stop: int, pad: int, responses: Any) -> Any:
            completions = truncate(stop, pad, responses)
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
        """Ends an update; what no function of theirs took counts as its phase `update`."""
        end = time.perf_counter()
        self.phases.append(self.seconds | {"update": end - self.begin - sum(self.seconds.values())})
        self.seconds, self.begin = dict.fromkeys(PHASES, 0.0), end


if __name__ == "__main__":
    {"ppo": ppo, "score": score}[sys.argv[1]](*sys.argv[2:])
