"""Which curves a report shows: small panels in groups, each with a title in words and a sentence on how to read it.

A panel appears where at least one of its metrics was logged, so one list serves every stage.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

Points = list[tuple[int, float]]  # (step, value), ascending
History = dict[str, Points]  # metric -> its points


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str  # of the vertical axis
    lines: dict[str, str]  # metric, or a pattern of metrics -> what the line is called
    note: str  # how to read it
    kind: str = "lines"  # or `stack`: parts of a whole; `band`: lowest, mean, highest
    level: float | None = None  # a horizontal line that means something
    zero: bool = False  # the axis begins at 0: for counts, shares, sizes
    when: Callable[[Points], bool] = bool  # is a curve worth showing?

    def select(self, history: History) -> History:
        """{name of the line: its points} of what this panel shows of a run; empty where there is nothing."""
        found = {}
        for pattern, label in self.lines.items():
            for metric in sorted(history) if "*" in pattern else [pattern]:
                if fnmatchcase(metric, pattern) and self.when(points := history.get(metric, [])):
                    found[label or _middle(metric)] = points
        return found


def _middle(metric: str) -> str:
    """`rewards/reward/mean` -> `reward`, `time/rollout` -> `rollout`."""
    return metric.split("/")[min(1, metric.count("/"))].replace("_", " ")


def varies(points: Points) -> bool:
    return len({value for _, value in points}) > 1


GROUPS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "learning": (
        "Is it learning?",
        (
            Panel(
                "Loss",
                "loss",
                {"loss": "training", "eval_loss": "held-out"},
                "Held-out should fall with training. When it turns up, the rest of the run memorises.",
            ),
            Panel(
                "Next token predicted",
                "share of tokens",
                {"mean_token_accuracy": "training", "eval_mean_token_accuracy": "held-out"},
                "Share of the completion's tokens to which the model gives the highest probability.",
            ),
            Panel(
                "Pairs ranked right",
                "share of pairs",
                {"accuracy": "training", "eval_accuracy": "held-out"},
                "The chosen completion scores above the rejected one. A coin gets one half.",
                level=0.5,
            ),
            Panel(
                "Margin",
                "score",
                {"margin": "training", "eval_margin": "held-out"},
                "Mean of chosen minus rejected. Growing without more accuracy is growing confidence.",
            ),
            Panel(
                "Scores",
                "score",
                {"min_reward": "lowest", "mean_reward": "mean", "max_reward": "highest"},
                "Lowest, mean and highest score of a batch. A mean that drifts is an offset PPO would have to undo.",
                kind="band",
            ),
            Panel(
                "Pairs ranked right",
                "share of pairs",
                {"rewards/accuracies": "training", "eval_rewards/accuracies": "held-out"},
                "The chosen completion gained more probability over the reference than the rejected one.",
                level=0.5,
            ),
            Panel(
                "Implicit rewards",
                "β × log-ratio",
                {"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
                "They should part. When both fall, the policy moves away from all that it was shown.",
            ),
            Panel(
                "Margin",
                "β × log-ratio",
                {"rewards/margins": "training", "eval_rewards/margins": "held-out"},
                "Implicit reward of chosen minus rejected.",
            ),
            Panel(
                "Reward of the completions",
                "score",
                {"rewards/*/mean": ""},
                "Mean score of the completions of an update, as each reward gives it.",
            ),
            Panel(
                "What PPO maximises",
                "normalised score",
                {"objective/scores": "score", "objective/rlhf_reward": "less the price of KL"},
                "Score in standard deviations of the reward model, and what is left after KL is paid for.",
            ),
            Panel(
                "Better than before, on held-out prompts",
                "share of prompts",
                {"eval_win_rate": "by the reward", "eval_judge_win_rate": "by the judge"},
                "Share of completions that score higher than the policy's first ones. If only the reward agrees, it is outwitted.",
                level=0.5,
                when=varies,
            ),
        ),
    ),
    "policy": (
        "How did its behaviour change?",
        (
            Panel(
                "KL from the reference",
                "nats a completion",
                {"objective/kl": ""},
                "How far the policy has moved. It starts at 0; reward that needs more and more KL is suspect.",
                level=0.0,
            ),
            Panel(
                "Entropy of a completion",
                "nats",
                {"objective/entropy": ""},
                "Mean -log p of a completion. Near 0 the policy always says the same, and has stopped exploring.",
            ),
            Panel(
                "Entropy",
                "nats a token",
                {"entropy": "training", "eval_entropy": "held-out"},
                "How undecided the model is about the next token.",
            ),
            Panel(
                "Length of the completions",
                "tokens",
                {"completions/mean_length": ""},
                "Length that climbs with reward is the most common way to please a reward model.",
                zero=True,
            ),
            Panel(
                "Completions cut off",
                "share of completions",
                {"completions/clipped_ratio": ""},
                "Completions that reached the longest length allowed without an end of their own.",
                zero=True,
            ),
            Panel(
                "Log-probability",
                "nats a completion",
                {"logps/chosen": "chosen", "logps/rejected": "rejected"},
                "What the policy gives the completions of the pairs.",
            ),
            Panel(
                "Price of KL",
                "reward a nat",
                {"objective/kl_coef": ""},
                "What the adaptive controller asks for a nat of KL.",
                when=varies,
            ),
        ),
    ),
    "health": (
        "Is the optimisation sound?",
        (
            Panel(
                "Explained variance of the values",
                "share",
                {"val/explained_variance": ""},
                "1: the critic foresees the return of every token. 0: no better than their mean.",
                level=0.0,
            ),
            Panel(
                "Value loss",
                "loss",
                {"loss/value_avg": ""},
                "Squared error of the critic, halved and clipped.",
                zero=True,
            ),
            Panel(
                "Policy loss",
                "loss",
                {"loss/policy_avg": ""},
                "Around 0 by construction: advantages are whitened.",
            ),
            Panel(
                "Clipped",
                "share of tokens",
                {"policy/clipfrac_avg": "policy", "val/clipfrac_avg": "value"},
                "Tokens whose ratio left the clip range. Above 0.2 or so, the steps are too long.",
                zero=True,
            ),
            Panel(
                "KL of one update",
                "nats a token",
                {"policy/approxkl_avg": ""},
                "From the policy that wrote the completions to the one that learned from them.",
                zero=True,
            ),
            Panel(
                "Ratio new to old",
                "ratio",
                {"val/ratio": ""},
                "Mean ratio of probabilities. It belongs near 1.",
                level=1.0,
            ),
            Panel(
                "Sampler against trainer",
                "nats a token",
                {"val/sampler_drift": ""},
                "Log-probs while sampling against those of the training graph: rounding, if all is well.",
                zero=True,
            ),
            Panel(
                "Gradient norm",
                "norm",
                {"grad_norm": "gradient", "grad_norm/policy": "policy", "grad_norm/critic": "critic"},
                "Before clipping. Spikes are rare batches; a steady climb is trouble.",
            ),
            Panel(
                "Updates skipped",
                "count",
                {"skipped_steps": ""},
                "Steps left out because a gradient was not finite.",
                when=lambda points: any(value for _, value in points),
            ),
            Panel(
                "Learning rate",
                "rate",
                {"learning_rate": "", "lr": ""},
                "As the schedule set it.",
                when=varies,
            ),
        ),
    ),
    "cost": (
        "What did it cost?",
        (
            Panel(
                "Seconds an update",
                "seconds",
                {"time/*": ""},
                "Where the time of an update goes.",
                kind="stack",
            ),
            Panel(
                "Speed",
                "tokens a second",
                {"train_tokens_per_second": ""},
                "Sampled, scored and learned from, over all workers.",
                zero=True,
            ),
            Panel(
                "Memory",
                "GiB",
                {"memory/rollout": "rollout", "memory/update": "update", "memory/peak": "highest so far"},
                "Highest use in a phase: GPU memory where there is one, else resident.",
                zero=True,
            ),
        ),
    ),
}
