"""Writes docs/configuration.md, docs/metrics.md and docs/cli.md from the schema, the table of metrics and the parser.

    .venv/bin/python docs/reference.py

tests/test_readme.py checks that the pages are up to date.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.__main__ import parser
from pipeline.commands import SUMMARIES
from pipeline.errors import show_value
from pipeline.job import schema
from pipeline.job.stages import INPUTS, STAGE_SPECS
from pipeline.metrics import TABLE

DOCS = Path(__file__).parent
TRL = [stage for stage, spec in STAGE_SPECS.items() if spec.trainer.startswith("trl.")]
LIBRARIES = {  # package of a configuration class -> its documentation
    "peft": "https://huggingface.co/docs/peft/package_reference/lora#peft.{name}",
    "ray": "https://docs.ray.io/en/latest/train/api/doc/ray.train.{name}.html",
    "transformers": "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.{name}",
    "trl": "https://huggingface.co/docs/trl/{page}#trl.{name}",
}
CONFIGURATION = """\
# Configuration: every key of a job file

Made by `docs/reference.py` from [schema.json](../pipeline/job/schema.json). `rlhf help KEY`
explains one key. With the first line of a job file, an editor completes and checks keys.

A job file sets its `stage`, and has the sections below. A job file may also have a
[`gate`](runs.md#which-version-gets-the-alias), and `extends`, one or more files with default keys.
On the command line, set a key with `section.key=value` or `--section.key value`. Values are YAML. A
key that is not listed is an error. The tables omit limits of 10,000 and more, and the default null.
The linked pages explain the keys of TRL, transformers and peft.
"""
METRICS = """\
# Metrics

Made by `docs/reference.py` from [metrics.py](../pipeline/metrics.py). [evaluate.md](evaluate.md)
and [rollouts.md](rollouts.md) explain many metrics. A
[`gate`](runs.md#which-version-gets-the-alias) may name any metric in `result.json`: all metrics on
this page except curves. Metrics of [eval rows](glossary.md) have the prefix `eval_`, and `initial_`
before training; with "no prefix", the name is as listed. Larger values are better with ↑, and
smaller values with ↓. "other" stands for other units. In a name, `*` stands for a reward, a judge,
a probe or a value of the rows. TRL may log additional metrics.
"""
PREFIX = {"curve": "curve", "result": "no prefix", "initial": "`initial_`", "eval": "`eval_`"}
CLI = """\
# Command line

Made by `docs/reference.py` from the parser. `rlhf` and `python -m pipeline` are the same command,
after `. .venv/bin/activate`. In a clone, `make SUBCOMMAND` runs `rlhf SUBCOMMAND` with a job of
`jobs/PROFILE`; `make help-all` lists all targets. All subcommands have the same [exit
statuses](runs.md#exit-statuses). A subcommand without arguments in the table takes `JOB.yaml` and
any number of `section.key=value`.
"""
MAKE = """\

## Variables of make

| variable | meaning, default |
|---|---|
| `PROFILE`, `JOB` | the folder `jobs/PROFILE` (`demo`), or a single job file |
| `ARGS` | keys of the job, or arguments of the command |
| `SWEEP` | for `sweep`: keys with lists of values |
| `DATA`, `NAME`, `MODEL` | for `init`: rows (`my`, a file, or `hf://datasets/NAME`), name of the new profile, base; `ARGS="--profile llama3-8b"` copies its jobs instead of `own` |
| `RUN` | for `report`: folders of runs |
| `NAME` | for `logs`, `stop`: a job on the cluster, by default the newest |
| `CLUSTER`, `PORT` | the cluster file (`cluster.yaml`); for `ui`: the port (5000) |
| `RAY_ADDRESS`, `FORWARD` | the [cluster](clusters.md), and variables to send there |
| `REGISTRY`, `VARIANT` | for `image`: a registry; `cuda` or `cpu` |
| `PYTHON`, `PIP_ARGS` | for `setup`: the Python of `.venv`, arguments of pip |

In `ARGS="..."`, put single quotes around keys with spaces, `<`, `>` or braces (`gate={}` needs
none). Without the quotes, the shell splits the keys, or writes a file named `=`:

```text
make rm ARGS="trainer.seed=2 'gate.eval_accuracy=>= 0.97'"
```

Some targets have no subcommand: `ui` opens MLflow, `notebook` runs the notebooks, and `up`,
`status`, `dashboard`, `jobs`, `logs`, `stop` and `down` manage a [cluster](clusters.md).
"""


def configuration() -> str:
    """Returns the page about keys of job files."""
    pages = [CONFIGURATION]
    for title, dotted, intro in (
        ("Top level", "pipeline.job.job.Job", "Models that a job starts from. Which stage takes which: `rlhf help policy`."),
        ("model", "pipeline.job.job.Model", "The frozen base model."),
        ("data", "pipeline.job.job.Data", "Rows: see [data.md](data.md)."),
        ("An entry of data.train, data.eval, data.pairs or data.benchmarks", "pipeline.job.job.Source", "A path, or a mapping, which may also have `columns`, `label`, `transform` and `group_by`:"),
        ("lora", schema.class_of("lora", ""), "What `r` and `lora_alpha` change: [glossary](glossary.md)."),
        ("scaling", schema.class_of("scaling", ""), "With `num_workers: 0`, the command itself trains ([runs.md](runs.md))."),
        ("run", "pipeline.job.job.Run", "Folder, resume, checkpoints: see [runs.md](runs.md)."),
        ("mlflow", "pipeline.job.job.MLflow", "Tracking and registration."),
        ("rollout", schema.class_of("rollout", "ppo"), "Which processes sample: see [rollouts.md](rollouts.md)."),
        ("serve", "pipeline.job.job.Serve", "The endpoint: see [serving.md](serving.md)."),
        ("A judge's file", "pipeline.job.judge.Definition", "The file of `{judge: FILE}`: see [judges.md](judges.md)."),
        ("sweep", "pipeline.sweep.space.SweepSettings", "For the subcommand `sweep`: see [training.md](training.md#sweeps)."),
    ):  # fmt: skip
        sections = {*INPUTS} if title == "Top level" else None
        known = {key: one for key, one in schema.keys(dotted).items() if sections is None or key in sections}
        if dotted.endswith("Source"):  # the intro names the keys that are the same as in `data`
            known = {
                key: one for key, one in known.items() if not one["description"].startswith("Replaces data.")
            }
        pages.append(table(f"## {title}", known, intro, dotted))
    ours = [stage for stage in STAGE_SPECS if stage not in TRL]
    for stages, known in shared_keys(ours).items():
        pages.append(table(f"## trainer of {', '.join(stages)}", known, "", STAGE_SPECS[stages[0]].trainer))
    for stages, known in shared_keys(TRL).items():
        classes = [STAGE_SPECS[one].trainer for one in stages]
        if stages == (*TRL,):
            classes = ["transformers.TrainingArguments"]
        names = [
            f"`{key}={show_value(one['default'])}`"
            for key, one in known.items()
            if one.get("default") is not None
        ]
        names += [f"`{key}`" for key, one in known.items() if one.get("default") is None]
        intro = f"Keys of {', '.join(map(link, classes))}, with their defaults:"
        pages += [f"## trainer of {', '.join(stages)}\n\n{intro}\n", filled(", ".join(names) + ".") + "\n"]
    return "\n".join(pages)


def shared_keys(stages: Iterable[str]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Groups the keys of `trainer` by the stages that have the key with the same schema. Returns {stages: {key: schema}}."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for stage in stages:
        for key, one in schema.keys(STAGE_SPECS[stage].trainer).items():
            group = tuple(name for name in stages if schema.keys(STAGE_SPECS[name].trainer).get(key) == one)
            if "not" not in one:
                groups.setdefault(group, {})[key] = one
    return groups


def link(dotted: str) -> str:
    """Returns a link to a library's documentation of its class `package.module.Class`."""
    library, _, name = dotted.partition(".")
    name = name.rpartition(".")[2]
    page = f"{name.removesuffix('Config').lower()}_trainer"
    return f"[`{name}` ({library})]({LIBRARIES[library].format(name=name, page=page)})"


def filled(text: str, indent: str = "") -> str:
    """Wraps a paragraph at 100 columns. `indent` goes before all lines except the first."""
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def table(title: str, keys: Mapping[str, Mapping[str, Any]], intro: str, dotted: str) -> str:
    """Returns a section with a row for each key that a job may set. Keys of libraries get no explanation."""
    columns = 3
    if dotted.partition(".")[0] in LIBRARIES:
        intro, columns = f"Keys of {link(dotted)}. {intro}".strip(), 2
    rows = [
        (f"`{key}`", value_of(one), meaning(one.get("description", "")))[:columns]
        for key, one in keys.items()
        if "not" not in one
    ]
    lines = [title, "", *([intro, ""] if intro else [])]
    lines += markdown(("key", "value and default", "meaning")[:columns], rows)
    return "\n".join([*lines, ""])


def value_of(one: Mapping[str, Any]) -> str:
    """Returns the type of a key, and its default unless that is null."""
    if one.get("needed"):
        return f"{type_of(one)}; required"
    default = one.get("default")
    return type_of(one) + ("" if default is None else f"; `{show_value(default)}`")


def type_of(one: Mapping[str, Any]) -> str:
    """Returns the type and range of a key, with JSON's names of types."""
    words = re.sub(r" between (\S+) and (\S+)", r", \1 to \2", schema.expected_in_words(one))
    words = re.sub(r" of at least (\S+)", r", \1 or more", words)
    names = {"a whole number": "integer", "true or false": "boolean", "a number": "number", "text": "string"}
    names |= {"a list": "list", "a mapping": "mapping"}
    for name, usual in names.items():
        words = re.sub(rf"(?<!one of )\b{name}\b", usual, words)  # leaves values such as `text` unchanged
    words = re.sub(
        r" and at most \d{5,}|(?<=\d) to \d{5,}", lambda found: " or more" * (" to" in found[0]), words
    )
    # If the default is null, the type need not name null.
    return re.sub(r" or null\b|\bnull or ", "", words) if one.get("default") is None else words


def meaning(text: str) -> str:
    """Returns the first sentences of a description, up to 110 characters, and the sentence about the default or null."""
    text = re.sub(r"\bNone\b", "null", " ".join(text.split()))
    text = re.sub(r" \[[a-zA-Z][^\]]*\]$", "", text)  # the symbol in a paper, which only `help` prints
    stops = re.finditer(r"(?<!e\.g)(?<!i\.e)(?<!Dr)[.](?= [A-Z`(])", text)
    ends = [*(stop.end() for stop in stops), len(text)]
    end = max([end for end in ends if end <= 110], default=ends[0])
    default = re.search(r" (By default,?|null:|-1:|0:) .*?\.(?= [A-Z`(\[]|$)", text[end:])
    return text[:end] + (default[0] if default else "")


def metrics() -> str:
    """Returns the page with all metrics."""
    groups: dict[str, dict[str, list[str]]] = {}
    for row in TABLE:
        prefix = ", ".join(PREFIX[at] for at in row.at.split())
        units = groups.setdefault(f"**{row.stages.replace(' ', ', ')}:** {prefix}", {})
        unit = (row.unit or "other") + {True: " ↑", False: " ↓", None: ""}[row.greater_is_better]
        units.setdefault(unit, []).extend(f"`{name}`" for name in row.name.split())
    lines = [METRICS]
    for title, units in groups.items():
        items = [filled(f"- {unit}: {', '.join(names)}", "  ") for unit, names in units.items()]
        lines += [title, "", *items, ""]
    return "\n".join(lines)


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    head = list(head)
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in (head, *cells)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def cli() -> str:
    """Returns the page about subcommands."""
    top = parser()
    (subparsers,) = [action for action in top._actions if action.dest == "verb"]
    rows = []
    for name, sub in subparsers.choices.items():  # type: ignore[union-attr, attr-defined]
        arguments = [str(action.metavar) for action in sub._actions if action.dest in ("job", "overrides")]
        if arguments == ["JOB.yaml", "section.key=value"]:  # the usual arguments, which the page names once
            arguments = []
        rows.append((" ".join(f"`{one}`" for one in (name, *arguments)), SUMMARIES[name]))
    return "\n".join([CLI, *markdown(("subcommand", "what it does"), rows), MAKE])


PAGES = {"configuration.md": configuration, "metrics.md": metrics, "cli.md": cli}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
        print(f"wrote docs/{name}")
