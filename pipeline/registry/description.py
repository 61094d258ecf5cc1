"""The description of a registered version, in Markdown: what MLflow's page shows of it first."""

from typing import Any

from pipeline.config.stages import STAGE
from pipeline.data.versions import counted, most_frequent

DIGEST = 19  # characters that are shown of `sha256:...` or `commit:...`, and that tell digests apart


def describe(
    stage: str, metrics: dict[str, float], lineage: dict[str, Any], gate: str, run: tuple[str, str, str]
) -> str:
    """Headline figures before and after, the gate, parents and run as links, data and library versions.

    Args:
        gate: whether it passed, in words.
        run: (experiment id, id, name) of the MLflow run.
    """
    experiment, run_id, name = run
    base, rows_from = lineage.get("base", {}), most_frequent(lineage.get("rows_from", {}), 8)
    figures = [figure for figure in STAGE[stage].headline if figure.after in metrics]
    lines = [
        f"- {one.label}: {_shown(metrics.get(one.before), one.unit, ' → ')}**{_shown(metrics[one.after], one.unit)}**"
        for one in figures
    ]
    lines += [
        f"- gate: {gate}",
        "",
        f"Trained by [{name}](#/experiments/{experiment}/runs/{run_id}) ({stage}) "
        f"on `{base.get('name_or_path', '?')}` ({base.get('digest', '?')[:DIGEST]})"
        + (", from" if lineage.get("parents") else "."),
        *(f"- {role}: {_link(source)}" for role, source in lineage.get("parents", {}).items()),
        *(["", "Learned from the conversations of"] if rows_from else []),
        *(f"- {_link(version)}: {counted(rows)}" for version, rows in rows_from.items()),
        "",
        *(
            f"{title}: {', '.join(f'{key} {value[:12]}' for key, value in lineage[entry].items())}  "
            for title, entry in (("Data", "data"), ("Libraries", "versions"))
            if lineage.get(entry)
        ),
    ]
    return "\n".join(lines).strip()


def _shown(value: float | None, unit: str, behind: str = "") -> str:
    if value is None:
        return ""
    return (f"{100 * value:.1f} %" if unit == "%" else f"{value:.4g} {unit}".strip()) + behind


def _link(source: str) -> str:
    """A registered parent as a link to its page; a folder, a hub id or a function as code."""
    name, _, version = source.removeprefix("models:/").partition("/")
    if not source.startswith("models:/"):
        return f"`{source}`"
    return f"[{name} v{version}](#/models/{name}/versions/{version})"
