"""Defines the panels of a report, in groups. Each panel has a title, and a note that explains how to read the panel. All stages
share these panels. A panel is drawn only if the run has logged at least one of its metrics.
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
    extra: str = ""  # an eval metric that is drawn as an additional line
    level: float | None = None  # value of a horizontal reference line
    zero: bool = False  # whether the axis begins at 0
    when: Callable[[Points], bool] = bool  # returns True if a curve should be drawn

    @property
    def unit(self) -> str:
        """Returns the unit of the vertical axis."""
        return next(metric.unit for metric in METRICS if fnmatch.fnmatch(metric.name, next(iter(self.lines))))

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
                    # For example, the label of `rewards/reward/mean` is `reward`, and the label of `time/rollout` is `rollout`.
                    name = metric.split("/")[min(1, metric.count("/"))].replace("_", " ")
                    selected[label or name] = history[metric]
        if selected and self.extra in history:
            selected[HELD_OUT] = history[self.extra]
        return selected


def has_variation(points: Points) -> bool:
    return len({value for _, value in points}) > 1


GROUPS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "learning": ("Is it learning?", (
        Panel("Loss", {"loss": "training", "eval_loss": HELD_OUT},
              "The held-out loss should fall with the training loss. If the held-out loss rises again, the model overfits."),
        Panel("Token accuracy", {"mean_token_accuracy": "training", "eval_mean_token_accuracy": HELD_OUT},
              "Share of the completion's tokens that the model ranks first."),
        Panel("Accuracy on pairs", {"accuracy": "training", "eval_accuracy": HELD_OUT},
              "Share of pairs whose chosen completion scores higher. Chance is 0.5.", level=0.5),
        Panel("Margin", {"margin": "training", "eval_margin": HELD_OUT},
              "Mean score of chosen minus rejected. If the margin grows but the accuracy does not, only confidence grows."),
        Panel("Scores", {"min_reward": "lowest", "mean_reward": "mean", "max_reward": "highest"},
              "Lowest, mean and highest score of a batch. A drifting mean adds an offset to PPO's reward.", kind="band"),
        Panel("Accuracy on pairs", {"rewards/accuracies": "training", "eval_rewards/accuracies": HELD_OUT},
              "Share of pairs whose chosen completion gained more probability over the reference.", level=0.5),
        Panel("Implicit rewards", {"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
              "The two rewards should diverge. If both rewards fall, the policy moves away from both completions."),
        Panel("Margin", {"rewards/margins": "training", "eval_rewards/margins": HELD_OUT},
              "Difference between the implicit rewards of the chosen and the rejected completion."),
        Panel("Score of the completions", {"rewards/*/mean": ""},
              "Mean score of an update's completions, for each reward, and of completions on held-out prompts.", extra="eval_reward"),
        Panel("What PPO maximizes", {"objective/scores": "normalized", "objective/rlhf_reward": "less the KL penalty"},
              "Score that PPO uses (normalized and clipped if the job says so), and the same score minus the KL penalty."),
        Panel("Win rate on held-out prompts", {"eval_win_rate": "by the reward", "eval_judge_win_rate": "by the judge"},
              "Share of completions that score higher than the completions before training. If only the win rate by the reward "
              "rises, the reward is being exploited.", level=0.5, when=has_variation),
    )),
    "policy": ("How did its behavior change?", (
        Panel("KL from the reference", {"objective/kl": "training"},
              "Distance from the reference; 0 at the start. A score that needs more and more KL is suspect.", level=0.0, extra="eval_kl"),
        Panel("KL to the teacher", {"objective/teacher_kl": ""},
              "Mean KL per token on the policy's completions. This KL should fall towards 0.", level=0.0),
        Panel("KL estimate", {"kl": "training"},
              "KTO's reference point: mean log-ratio of completions paired with prompts of different rows, clipped at 0. A "
              "completion counts as more likely if its log-ratio exceeds this point.", level=0.0, extra="eval_kl"),
        Panel("Entropy of a completion", {"objective/entropy": ""},
              "Mean -log p of a completion. Near 0, the policy has collapsed to one completion and no longer explores."),
        Panel("Entropy", {"entropy": "training", "eval_entropy": HELD_OUT},
              "Entropy of the distribution of the next token."),
        Panel("Length of the completions", {"completions/mean_length": "training"},
              "Length that grows with the score is the most common form of reward hacking.", zero=True, extra="eval_length"),
        Panel("Truncated completions", {"completions/clipped_ratio": ""},
              "Share of completions that reached the maximum length without an end-of-sequence token.", zero=True),
        Panel("Log-probability", {"logps/chosen": "chosen", "logps/rejected": "rejected"},
              "Log-probability of chosen (desirable) and rejected completions under the policy."),
        Panel("KL coefficient", {"objective/kl_coef": ""},
              "KL coefficient that the adaptive controller sets.", when=has_variation),
    )),
    "health": ("Is the optimization sound?", (
        Panel("Explained variance of the values", {"val/explained_variance": ""},
              "At 1, the critic predicts the return of every token; at 0, it is no better than the mean return.", level=0.0),
        Panel("Value loss", {"loss/value_avg": ""},
              "Clipped squared error of the critic, halved.", zero=True),
        Panel("Clipped", {"policy/clipfrac_avg": "policy", "val/clipfrac_avg": "value"},
              "Share of tokens whose ratio left the clip range. Above about 0.2, the steps are too large.", zero=True),
        Panel("KL of one update", {"policy/approxkl_avg": ""},
              "KL between the policies before and after the update.", zero=True),
        Panel("Ratio new to old", {"val/ratio": ""},
              "Mean probability ratio of the new to the old policy. The ratio should stay near 1.", level=1.0),
        Panel("Sampler against trainer", {"val/sampler_drift": "sampler", "policy/first_ratio_error": "first ratio"},
              "Difference between the log-probs of trainer and sampler, and between new and old log-probs at the first step of an "
              "update. Both should be rounding errors.", zero=True),
        Panel("Off-policy weights", {"rollout/ess": "effective samples", "rollout/is_clipped_fraction": "ratios cut"},
              "Shares of the actions: effective sample size under the weights, and actions whose ratio trainer / sampler was "
              "clipped. Staler completions lower the effective sample size.", zero=True),
        Panel("Gradient norm", {"grad_norm": "gradient", "grad_norm/policy": "policy", "grad_norm/critic": "critic"},
              "Gradient norm before clipping. Spikes come from unusual batches; a steady increase is a problem."),
        Panel("Skipped steps", {"skipped_steps": ""},
              "Optimizer steps skipped because a gradient was not finite.", when=lambda points: any(value for _, value in points)),
        Panel("Learning rate", {"learning_rate": "", "lr": ""},
              "Learning rate that the schedule set.", when=has_variation),
    )),
    "cost": ("What did it cost?", (
        Panel("Seconds per update", {"time/*": ""},
              "Time of each phase of an update.", kind="stack"),
        Panel("Who waits", {"rollout/wait_fraction": "trainer", "rollout/idle": "rollout workers"},
              "Share of time in which the trainer waited for completions, or rollout workers were idle.", zero=True),
        Panel("Speed", {"train_tokens_per_second": ""},
              "Completion tokens sampled, scored and trained on, over all workers.", zero=True),
        Panel("Memory", {"memory/rollout": "rollout", "memory/update": "update", "memory/peak": "highest so far"},
              "Peak memory of each phase: GPU memory if there is a GPU, or else resident memory.", zero=True),
    )),
}  # fmt: skip
