"""Defines the panels of a report, in groups. Each panel has a title and a note that explains how to read it.

All stages share these panels. A panel is drawn only if the run has logged at least one of its metrics.
"""

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.metrics import METRICS

Points = list[tuple[int, float]]  # (step, value), ascending
History = dict[str, Points]  # metric -> its points


HELD_OUT = "held-out"


@dataclass(frozen=True)
class Panel:
    title: str
    lines: dict[str, str]  # {metric or pattern of metrics: label of the line}
    note: str  # text that explains how to read the panel
    kind: str = "lines"  # lines, stack (parts of a sum), or band (lowest, mean and highest value)
    also: str = ""  # an eval metric that is drawn as an additional line
    level: float | None = None  # value of a horizontal reference line
    zero: bool = False  # whether the axis begins at 0
    when: Callable[[Points], bool] = bool  # returns True if a curve should be drawn

    @property
    def unit(self) -> str:
        """Returns the unit of the vertical axis."""
        return next(one.unit for one in METRICS if fnmatch.fnmatch(one.name, next(iter(self.lines))))

    @property
    def held_out(self) -> set[str]:
        """Returns the labels of the lines that show eval metrics."""
        return {label for metric, label in self.lines.items() if metric.startswith("eval_")}

    def select(self, history: History) -> History:
        """Returns {label of a line: points} for the lines of this panel whose metrics a run has logged."""
        selected = {}
        for pattern, label in self.lines.items():
            for metric in sorted(fnmatch.filter(history, pattern)):
                if self.when(history[metric]):
                    # For example, the label of `rewards/reward/mean` is `reward`, and of `time/rollout` it is `rollout`.
                    name = metric.split("/")[min(1, metric.count("/"))].replace("_", " ")
                    selected[label or name] = history[metric]
        if selected and self.also in history:
            selected[HELD_OUT] = history[self.also]
        return selected


def varies(points: Points) -> bool:
    return len({value for _, value in points}) > 1


GROUPS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "learning": ("Is it learning?", (
        Panel("Loss", {"loss": "training", "eval_loss": HELD_OUT},
              "The held-out loss should fall with the training loss. If it rises again, the rest of the run memorizes."),
        Panel("Token accuracy", {"mean_token_accuracy": "training", "eval_mean_token_accuracy": HELD_OUT},
              "Share of the completion's tokens that the model ranks first."),
        Panel("Accuracy on pairs", {"accuracy": "training", "eval_accuracy": HELD_OUT},
              "Share of pairs whose chosen completion scores higher. Chance is 0.5.", level=0.5),
        Panel("Margin", {"margin": "training", "eval_margin": HELD_OUT},
              "Mean of chosen minus rejected. If it grows without the accuracy, only confidence grows."),
        Panel("Scores", {"min_reward": "lowest", "mean_reward": "mean", "max_reward": "highest"},
              "Lowest, mean and highest score of a batch. A drifting mean is an offset in PPO's reward.", kind="band"),
        Panel("Accuracy on pairs", {"rewards/accuracies": "training", "eval_rewards/accuracies": HELD_OUT},
              "Share of pairs whose chosen completion gained more probability over the reference.", level=0.5),
        Panel("Implicit rewards", {"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
              "Both rewards should diverge. If both fall, the policy moves away from both completions."),
        Panel("Margin", {"rewards/margins": "training", "eval_rewards/margins": HELD_OUT},
              "Implicit reward of chosen minus rejected."),
        Panel("Score of the completions", {"rewards/*/mean": ""},
              "Mean score, by reward, of an update's completions, and of the completions to held-out prompts.", also="eval_reward"),
        Panel("What PPO maximizes", {"objective/scores": "normalized", "objective/rlhf_reward": "less the KL penalty"},
              "Score as PPO uses it (normalized and clipped if the job sets so), and that score less the KL penalty."),
        Panel("Win rate on held-out prompts", {"eval_win_rate": "by the reward", "eval_judge_win_rate": "by the judge"},
              "Share of completions that score higher than the completions before training. If only the reward's share rises, "
              "the reward is being exploited.", level=0.5, when=varies),
    )),
    "policy": ("How did its behavior change?", (
        Panel("KL from the reference", {"objective/kl": "training"},
              "How far the policy has moved; 0 at the start. A score that costs more and more KL is suspect.", level=0.0, also="eval_kl"),
        Panel("KL to the teacher", {"objective/teacher_kl": ""},
              "KL on the policy's completions, token by token. It should fall towards 0.", level=0.0),
        Panel("KL estimate", {"kl": "training"},
              "KTO's reference point: mean log-ratio of completions after prompts of other rows, at least 0. A completion counts as "
              "likelier if its log-ratio exceeds this point.", level=0.0, also="eval_kl"),
        Panel("Entropy of a completion", {"objective/entropy": ""},
              "Mean -log p of a completion. Near 0 the policy has collapsed to one completion and no longer explores."),
        Panel("Entropy", {"entropy": "training", "eval_entropy": HELD_OUT},
              "Entropy of the distribution of the next token."),
        Panel("Length of the completions", {"completions/mean_length": "training"},
              "Length that climbs with the score is the most common form of reward hacking.", zero=True, also="eval_length"),
        Panel("Truncated completions", {"completions/clipped_ratio": ""},
              "Share of completions that reached the maximum length without an end-of-sequence token.", zero=True),
        Panel("Log-probability", {"logps/chosen": "chosen", "logps/rejected": "rejected"},
              "Log-probability of chosen (desirable) and rejected completions under the policy."),
        Panel("KL coefficient", {"objective/kl_coef": ""},
              "KL coefficient, as the adaptive controller sets it.", when=varies),
    )),
    "health": ("Is the optimization sound?", (
        Panel("Explained variance of the values", {"val/explained_variance": ""},
              "At 1, the critic predicts the return of every token; at 0, it is no better than the mean return.", level=0.0),
        Panel("Value loss", {"loss/value_avg": ""},
              "Clipped squared error of the critic, halved.", zero=True),
        Panel("Clipped", {"policy/clipfrac_avg": "policy", "val/clipfrac_avg": "value"},
              "Tokens whose ratio left the clip range. Above about 0.2 the steps are too large.", zero=True),
        Panel("KL of one update", {"policy/approxkl_avg": ""},
              "KL between the policies before and after the update.", zero=True),
        Panel("Ratio new to old", {"val/ratio": ""},
              "Mean probability ratio of new to old policy. It should stay near 1.", level=1.0),
        Panel("Sampler against trainer", {"val/sampler_drift": "sampler", "policy/first_ratio_error": "first ratio"},
              "Difference between the log-probs of trainer and sampler, and between new and old ones at the first step of an update: "
              "only rounding errors.", zero=True),
        Panel("Off-policy weights", {"rollout/ess": "effective samples", "rollout/is_clipped_fraction": "ratios cut"},
              "Shares of the actions: effective sample size under the weights, and actions whose ratio trainer / sampler was cut. "
              "Staler completions leave fewer.", zero=True),
        Panel("Gradient norm", {"grad_norm": "gradient", "grad_norm/policy": "policy", "grad_norm/critic": "critic"},
              "Norm before clipping. Spikes are unusual batches; a steady climb is a problem."),
        Panel("Skipped steps", {"skipped_steps": ""},
              "Optimizer steps skipped because a gradient was not finite.", when=lambda points: any(value for _, value in points)),
        Panel("Learning rate", {"learning_rate": "", "lr": ""},
              "Learning rate, as the schedule set it.", when=varies),
    )),
    "cost": ("What did it cost?", (
        Panel("Seconds per update", {"time/*": ""},
              "Where an update spends its time.", kind="stack"),
        Panel("Who waits", {"rollout/wait_fraction": "trainer", "rollout/idle": "rollout workers"},
              "Time in which the trainer waited for completions, and rollout workers were idle.", zero=True),
        Panel("Speed", {"train_tokens_per_second": ""},
              "Completion tokens sampled, scored and trained on, over all workers.", zero=True),
        Panel("Memory", {"memory/rollout": "rollout", "memory/update": "update", "memory/peak": "highest so far"},
              "Peak of each phase: GPU memory if there is a GPU, else resident memory.", zero=True),
    )),
}  # fmt: skip
