"""Prints the summary at the end of a run."""

from typing import Any

from pipeline import registry, text
from pipeline.errors import escape_controls
from pipeline.input_uri import InputURI
from pipeline.job.stages import TRAINED, headline_metrics
from pipeline.metrics import Metric
from pipeline.run.prepare import ALONE, heading
from pipeline.run_folder import RESULT, Result
from pipeline.system import prices, storage, terminal

SHOWN_SAMPLES = 4


def print_summary(result: Result) -> None:
    """Prints samples, headline metrics before and after, the gate, the version, and the folder of a run.

    In `run`, a stage prints only its first metric and the metrics of its gate, because `run` prints samples at the end. The log
    has the other headline metrics. result.json and the report have all samples and metrics.
    """
    one_of_several = heading.get() != ALONE
    detail = print if one_of_several else terminal.say
    if result["samples"]:
        detail("\n" + sample_table(result["samples"][:SHOWN_SAMPLES]) + "\n")
    metrics = result["metrics"]
    champion = registry.Champion(**(result.get("champion") or {}))
    conditions = registry.check_conditions(result["job"].get("gate") or {}, metrics, champion.metrics)
    gate = {
        name: f"{f'gate {condition} ':<14}{'passed' if is_met else 'FAILED'}"
        for name, condition, _, is_met in conditions
    }
    for index, metric in enumerate(headline_metrics(result["stage"], metrics)):
        line = text.row(metric.label, f"{metric_change(metrics, metric):<21} {gate.get(metric.name, '')}")
        is_shown = index == 0 or metric.name in gate
        terminal.say(line.rstrip(), result=True) if is_shown else detail(line.rstrip())
        gate.pop(metric.name, None)
    lines = []
    for name, condition in gate.items():
        value = f"{metrics[name]:.4g}" if name in metrics else "missing"
        lines.append(text.row(name, f"{value:<22}{condition}"))
    lines += [f"  {warning}" for warning in (how_it_ended(result), not_better(result)) if warning]
    if result["version"]:
        version = registry.Version(*(result[k] for k in ("registered_model", "version", "alias", "gate")))
        verdict = f"gate {version.gate}" if result["job"]["gate"] else "no gate set"
        lines.append(text.row("registered" if result["adapter"] else "version", f"{version}  ({verdict})"))
        if result["adapter"] and not version.alias:
            reference = InputURI(version.name, version=version.version)
            lines.append(
                f"  @{result['job']['mlflow']['alias']} has not moved; name {reference} to use this version"
            )
        if champion.note not in version.gate:
            lines.append(f"  {champion.note}")
    for line in lines:
        terminal.say(line, result=True)
    location = text.row("result", storage.relative(f"{result['folder']}/{RESULT}"))
    print(location) if one_of_several else terminal.say(location, result=True)
    words = filter(None, (terminal.duration(result["seconds"]), prices.cost_in_words(result["cost"])))
    terminal.say(text.row("time", ", ".join(words)), result=True)


def how_it_ended(result: Result) -> str | None:
    """Returns a text about the best step and the reason for an early stop, or None if the run has neither.

    Args:
        result: the content of result.json.
    """
    kept, ended = result.get("kept", {}), result.get("ended", {})
    parts = []
    if kept.get("by"):
        value = text.number(kept.get("value"))
        parts.append(f"kept step {kept.get('step')} of {ended.get('step')}: the best {kept['by']}, {value}")
    if ended.get("early"):
        parts.append(f"stopped at step {ended.get('step')} of {ended.get('of')}: {ended['early']}")
    return "; ".join(parts) or None


def metric_change(metrics: dict[str, float], metric: Metric) -> str:
    """Returns a metric before and after training, for example 0.5465 -> 0.5104."""
    before = metrics.get(metric.before)
    return (f"{before:.4g} -> " if before is not None else "") + f"{metrics[metric.name]:.4g}"


def not_better(result: Result) -> str | None:
    """Returns a warning if there is an eval win rate that is not clearly above 0.5, or else None."""
    metrics = result["metrics"]
    if "eval_win_rate" not in metrics or metrics["eval_win_rate_low"] > 0.5:
        return None
    rate, low, high = (metrics[f"eval_win_rate{end}"] for end in ("", "_low", "_high"))
    learns = result["stage"] in TRAINED
    verdict = f"{'worse' if high < 0.5 else 'not better'} than {'before' if learns else 'the baseline'}"
    advice = "; try a higher trainer.learning_rate, or train longer" if learns and high >= 0.5 else ""
    return f"{verdict}: win rate {rate:.2f} ({low:.2f} to {high:.2f}){advice}"


def sample_table(samples: list[dict[str, Any]], width: int = 40) -> str:
    """Returns a table of prompts with the completions before and after training, and their scores."""
    lines = []
    for sample in samples:
        lines.append(f"   {_cut(sample['prompt'], 2 * width)}")
        for key in ("before", "after"):
            side = sample[key]
            scores = "  ".join(f"{name} {side[name]:.2f}" for name in ("reward", "judge") if name in side)
            lines.append(f"     {key:<6}  {_cut(side['completion'], width):<{width}}  {scores}".rstrip())
    return "\n".join(lines)


def subsets_table(
    subsets: dict[str, dict[str, float]], title: str = "subset", unit: str = "pairs", value: str = "accuracy"
) -> str:
    """Returns a table of the accuracy on each subset of the pairs, or of a benchmark's score on each of its subsets."""
    rows = []
    for name, subset in subsets.items():
        interval = f"  ({subset['low']:.3f} to {subset['high']:.3f})" if "low" in subset else ""
        rows.append((name, str(subset[unit]), f"{subset[value]:.3f}{interval}"))
    return text.table((title, unit, f"{value} (95 %)"), rows, "<><")


def best_of_n_table(curve: list[dict[str, float]]) -> str:
    """Returns a table of the best-of-n curve, with a warning if a larger n lowers the judge's score."""
    rows = [(str(p["n"]), f"{p['proxy']:.3f}", f"{p['gold']:.3f}", f"{p['kl_bound']:.2f}") for p in curve]
    table = text.table(("best of n", "reward", "judge", "KL at most"), rows, ">>>>")
    falls = curve[-1]["gold"] < max(point["gold"] for point in curve)
    return (
        table
        + "\n   the judge's score falls at large n: choosing completions by this reward exploits the reward"
        * falls
    )


def probes_table(probes: dict[str, Any]) -> str:
    """Returns a table with the effect of each probe of a reward, in standard deviations of the reward's scores."""
    rows = []
    for name, probe in probes.items():
        effect = f"{probe['effect']:+.2f} ({probe['low']:+.2f} to {probe['high']:+.2f})"
        rows.append((name, effect, f"{probe['accuracy']:.3f}", probe["verdict"]))
    return text.table(("probe", "effect (95 %)", "accuracy", "verdict"), rows, "<<><")


def _cut(words: str, width: int) -> str:
    words = escape_controls(" ".join(words.split()))
    return words if len(words) <= width else words[: width - 1] + "…"
