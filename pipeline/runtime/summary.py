"""The end of a run, on the terminal."""

from typing import Any

from pipeline import registry
from pipeline.config import OPERATORS, make, parse_gate
from pipeline.config.stages import STAGE
from pipeline.errors import visible
from pipeline.references import Ref
from pipeline.report.headline import how_it_ended
from pipeline.system import prices

SHOWN_SAMPLES = 4


def print_summary(result: dict[str, Any], drawn: str | None) -> None:
    """Prints the end of a run: samples, headline metrics before and after, the gate, the version, and the folder.

    result.json and the report have all samples and metrics.

    Args:
        drawn: the path of its report, or None.
    """
    if result["samples"]:
        print("\n" + sample_table(result["samples"][:SHOWN_SAMPLES]) + "\n")
    metrics = result["metrics"]
    for figure in STAGE[result["stage"]].headline:
        if figure.after in metrics:
            before = metrics.get(figure.before)
            was = f"{before:>10.4g} -> " if before is not None else " " * 14
            print(f"   {figure.label:<28}{was}{metrics[figure.after]:.4g}")
    for metric, condition in (result["job"].get("gate") or {}).items():
        symbol, threshold = parse_gate(condition)
        holds = metric in metrics and OPERATORS[symbol](metrics[metric], threshold)
        found = f"{metrics[metric]:.4g}" if metric in metrics else "missing"
        print(f"   {f'gate: {metric} {condition}':<42}{found}  {'passed' if holds else 'failed'}")
    if ended := how_it_ended(result):
        print(f"   {ended}")
    if poor := not_better(result):
        print(f"   {poor}")
    if result["version"]:
        version = registry.Version(*(result[k] for k in ("registered_model", "version", "alias", "gate")))
        gate = f"gate {version.gate}" if result["job"]["gate"] else "no gate set"
        print(f"   {'registered ' if result['adapter'] else ''}{version}  ({gate})")
        if result["adapter"] and not version.alias:
            print(f"   {without_alias(result, version)}")
    where = result["folder"]
    cost = prices.in_words(result["cost"])
    print(
        f"   {result['seconds']:.0f} s, {cost}  {where}/{'report.html' if drawn else 'result.json'}",
        flush=True,
    )


def not_better(result: dict[str, Any]) -> str | None:
    """Returns what the held-out win rate does not show, or None if the policy is better or was not compared."""
    rate, low, high = (result["metrics"].get(f"eval_win_rate{end}") for end in ("", "_low", "_high"))
    if rate is None or low > 0.5:
        return None
    before = "before" if STAGE[result["stage"]].learns else "the baseline"
    return f"{'worse' if high < 0.5 else 'not better'} than {before}: win rate {rate:.2f} ({low:.2f} to {high:.2f})"


def without_alias(result: dict[str, Any], version: registry.Version) -> str:
    """Returns how to continue with a version whose gate failed."""
    job, facts = result["job"], STAGE[result["stage"]]
    following = "evaluate" if facts.keeps_reference else "ppo"
    reference = Ref(version.name, version=version.version)
    return (
        f"@{job['mlflow']['alias']} has not moved; to go on with this version:  "
        f'{make(following, job["source"])} ARGS="{facts.learns}={reference}"'
    )


def sample_table(samples: list[dict[str, Any]], width: int = 44) -> str:
    """Returns prompts with the completions before and after, and their scores, as aligned text."""
    lines = []
    for sample in samples:
        lines.append(f"   {_cut(sample['prompt'], 2 * width)}")
        for key in ("before", "after"):
            side = sample[key]
            scores = "  ".join(f"{name} {side[name]:.2f}" for name in ("reward", "judge") if name in side)
            lines.append(f"     {key:<6}  {_cut(side['completion'], width):<{width}}  {scores}")
    return "\n".join(lines)


def subsets_table(
    subsets: dict[str, dict[str, float]], title: str = "subset", of: str = "pairs", value: str = "accuracy"
) -> str:
    """Returns the accuracy on each subset of the pairs, or a benchmark's score on each of its subsets, as aligned text."""
    width = max(len(title), *map(len, subsets))
    lines = [f"   {title:<{width}}  {of:>5}  {value} (95 %)"]
    for name, one in subsets.items():
        interval = f"  ({one['low']:.3f} to {one['high']:.3f})" if "low" in one else ""
        lines.append(f"   {name:<{width}}{one[of]:>7}  {one[value]:.3f}{interval}")
    return "\n".join(lines)


def probes_table(probes: dict[str, Any]) -> str:
    """Returns the effect of each probe of a reward, in standard deviations of its score, as aligned text."""
    lines = [f"   {'probe':<16}{'effect (95 %)':<26}accuracy  verdict"]
    for name, one in probes.items():
        effect = f"{one['effect']:+.2f} ({one['low']:+.2f} to {one['high']:+.2f})"
        lines.append(f"   {name:<16}{effect:<26}{one['accuracy']:>8.3f}  {one['verdict']}")
    return "\n".join(lines)


def _cut(text: str, width: int) -> str:
    text = visible(" ".join(text.split()))
    return text if len(text) <= width else text[: width - 1] + "…"
