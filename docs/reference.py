"""Writes docs/configuration.md, docs/metrics.md and docs/cli.md from schema, table and parser.

    .venv/bin/python docs/reference.py

tests/test_readme.py checks that the pages are up to date.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.__main__ import EXAMPLES, parser
from pipeline.commands import SUMMARIES
from pipeline.config import schema
from pipeline.config.stages import INPUTS, STAGE
from pipeline.errors import show
from pipeline.metrics import TABLE

DOCS = Path(__file__).parent
TRL = [stage for stage, facts in STAGE.items() if facts.trainer.startswith("trl.")]
LIBRARIES = {  # package of a configuration class -> its documentation
    "peft": "https://huggingface.co/docs/peft/package_reference/lora#peft.{name}",
    "ray": "https://docs.ray.io/en/latest/train/api/doc/ray.train.{name}.html",
    "transformers": "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.{name}",
    "trl": "https://huggingface.co/docs/trl/{page}#trl.{name}",
}
CONFIGURATION = """\
# Configuration: every key of a job file

Made by `docs/reference.py` from [schema.json](../pipeline/config/schema.json). `rlhf help KEY`
explains one key, also with the text of its library. The first line of a job file lets an editor
complete and check keys.

A job file names its `stage` and has the sections below. It may have a
[`gate`](runs.md#which-version-gets-the-alias), and `extends`, the files that it is merged over. On
the command line, set a key with `section.key=value` or `--section.key value`. Values are YAML. A
key that is not listed is an error, and the message names the nearest one, if one is near.
"""
METRICS = """\
# Metrics

Made by `docs/reference.py` from [metrics.py](../pipeline/metrics.py). [evaluate.md](evaluate.md) and
[rollouts.md](rollouts.md) explain many of them. A [`gate`](runs.md#which-version-gets-the-alias)
may name all but those that are only curves. In a name, `*` stands for a reward, a judge, a probe or
a value of the rows. TRL may log more.
"""
PREFIX = {"curve": "none (curve)", "result": "none", "initial": "`initial_`", "eval": "`eval_`"}
CLI = """\
# Command line

Made by `docs/reference.py` from the parser and the Makefile. `rlhf` and `python -m pipeline` are
the same command. In a clone, `make SUBCOMMAND` calls it with a job of `jobs/PROFILE`. All
subcommands have the same [exit statuses](runs.md#exit-statuses).
"""


def configuration() -> str:
    """Returns the page about the keys of job files."""
    pages = [CONFIGURATION]
    for title, dotted, intro in (
        ("Top level", "pipeline.config.job.Job", "Models that a job starts from. Which stage takes which: `rlhf help policy`."),
        ("model", "pipeline.config.job.Model", "The frozen base model."),
        ("data", "pipeline.config.job.Data", "Rows: see [data.md](data.md)."),
        ("An entry of data.train, data.eval, data.pairs or data.benchmarks", "pipeline.config.job.Source", "A path, or a mapping:"),
        ("lora", schema.class_of("lora", ""), ""),
        ("scaling", schema.class_of("scaling", ""), "With `num_workers: 0`, the command itself trains ([runs.md](runs.md))."),
        ("run", "pipeline.config.job.Run", "Folder, resume, checkpoints: see [runs.md](runs.md)."),
        ("mlflow", "pipeline.config.job.MLflow", "Tracking and registration."),
        ("rollout", schema.class_of("rollout", "ppo"), "Which processes sample: see [rollouts.md](rollouts.md)."),
        ("serve", "pipeline.config.job.Serve", "The endpoint: see [serving.md](serving.md)."),
        ("A judge's file", "pipeline.config.judge.Definition", "The file of `{judge: FILE}`: see [judges.md](judges.md)."),
        ("sweep", "pipeline.sweep.space.SweepSettings", "For the subcommand `sweep`: see [training.md](training.md#sweeps)."),
    ):  # fmt: skip
        sections = {*INPUTS} if title == "Top level" else None
        known = {key: one for key, one in schema.keys(dotted).items() if sections is None or key in sections}
        pages.append(table(f"## {title}", known, intro, dotted))
    trainers = {STAGE[stage].trainer: stage for stage in STAGE if stage not in TRL}
    for dotted in trainers:
        stages = [stage for stage in STAGE if STAGE[stage].trainer == dotted]
        pages.append(table(f"## trainer of {', '.join(stages)}", schema.keys(dotted), "", dotted))
    keys = [schema.keys(STAGE[stage].trainer) for stage in TRL]
    shared = {key: one for key, one in keys[0].items() if all(other.get(key) == one for other in keys[1:])}
    intro = "A few of these keys are TRL's own. All are the same in these stages."
    pages.append(table(f"## trainer of {', '.join(TRL)}", shared, intro, "transformers.TrainingArguments"))
    for stage, own in zip(TRL, keys, strict=True):
        rest = {key: one for key, one in own.items() if key not in shared}
        intro = "These keys, or their defaults, differ from those above."
        pages.append(table(f"## trainer of {stage} alone", rest, intro, STAGE[stage].trainer))
    return "\n".join(pages)


def table(title: str, keys: Mapping[str, Mapping[str, Any]], intro: str, dotted: str) -> str:
    """Returns a section with a row for each key that a job may have. A library explains its own keys."""
    library, _, name = dotted.partition(".")
    if address := LIBRARIES.get(library):
        name = name.rpartition(".")[2]
        page = f"{name.removesuffix('Config').lower()}_trainer"
        intro = f"Keys of [`{name}` ({library})]({address.format(name=name, page=page)}). {intro}".strip()
    columns = 3 if address else 4
    rows = [
        (
            f"`{key}`",
            type_of(one),
            "required" if one.get("needed") else f"`{show(one.get('default'))}`",
            meaning(one.get("description", "")),
        )[:columns]
        for key, one in keys.items()
        if "not" not in one
    ]
    return "\n".join(
        [
            title,
            "",
            *([intro, ""] if intro else []),
            *markdown(("key", "type", "default", "meaning")[:columns], rows),
            "",
        ]
    )


def type_of(one: Mapping[str, Any]) -> str:
    """Returns type and range of a key, with the usual names of types."""
    allowed = schema.outside(float("nan"), one["range"]) if "range" in one else None
    words = re.sub(
        r"between (\S+) and (\S+)", r"\1 to \2", schema.expected(one) + (f", {allowed}" if allowed else "")
    )
    names = {"a whole number": "integer", "true or false": "boolean", "a number": "number", "text": "string"}
    names |= {"a list": "list", "a mapping": "mapping"}
    for name, usual in names.items():
        words = re.sub(rf"(?<!one of )\b{name}\b", usual, words)  # not values such as `text`
    # The default says null, too.
    return re.sub(r" or null\b|\bnull or ", "", words) if one.get("default") is None else words


def meaning(text: str) -> str:
    """Returns the first sentence of a description, or several short ones, and the sentence about the default or null."""
    text = re.sub(r"\bNone\b", "null", " ".join(text.split()))
    ends = [match.end() for match in re.finditer(r"(?<!e\.g)(?<!i\.e)[.](?= [A-Z`(])", text)] + [len(text)]
    end = max([end for end in ends if end <= 160], default=ends[0])
    default = re.search(r" (By default,?|null:) .*?\.(?= [A-Z`(\[]|$)", text[end:])
    return text[:end] + (default[0] if default else "")


def metrics() -> str:
    """Returns the page about metrics."""
    rows = [
        (
            ", ".join(f"`{name}`" for name in row.name.split()),
            row.stages.replace(" ", ", "),
            ", ".join(PREFIX[at] for at in row.at.split()),
            row.unit,
            {True: "yes", False: "no", None: ""}[row.greater_is_better],
        )
        for row in TABLE
    ]
    return "\n".join(
        [METRICS, *markdown(("metric", "stages", "prefix", "unit", "larger is better"), rows), ""]
    )


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Returns the lines of a table."""
    head = list(head)
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]


def cli() -> str:
    """Returns the page about subcommands and make targets."""
    top = parser()
    (subparsers,) = [action for action in top._actions if action.dest == "verb"]
    rows = []
    for name, sub in subparsers.choices.items():  # type: ignore[union-attr, attr-defined]
        arguments = [str(action.metavar) for action in sub._actions if action.dest in ("job", "overrides")]
        rows.append((f"`{name}`", " ".join(f"`{one}`" for one in arguments), SUMMARIES[name]))
    targets: list[str] = []
    for line in (DOCS.parent / "Makefile").read_text().splitlines():
        if title := re.match(r"##@ (.*)", line):
            targets += ["", f"### {title[1]}", "", *markdown(("target", "what it does"), [])]
        elif targets and (target := re.match(r"([a-z-]+):.*## (.*)", line)):
            targets += markdown((f"`make {target[1]}`", target[2]), [])[:1]
    lines = [CLI, "## Subcommands", "", *markdown(("subcommand", "arguments", "what it does"), rows), ""]
    lines += ["## Examples", "", "```text", *EXAMPLES.splitlines()[1:], "```", ""]
    lines += ["## Targets of make", "", "`make help-all` prints the same.", *targets, ""]
    return "\n".join(lines)


PAGES = {"configuration.md": configuration, "metrics.md": metrics, "cli.md": cli}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(f"wrote docs/{name}")
