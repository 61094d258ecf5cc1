"""Reads and tokenizes the rows of a run, and checks that the job's settings and inputs fit the rows."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pipeline.errors import InputError
from pipeline.job.job import Data, transforms_of
from pipeline.job.judge import at_version
from pipeline.settle.inputs import GIVEN, digests_of_functions, missing_parameter
from pipeline.settle.work import Input, Work
from pipeline.system import functions, storage


def tokenize_rows(work: Work, start_ray: Callable[[], Any] | None = None) -> tuple[Work, dict[str, Any], Any]:
    """Reads, tokenizes and checks the rows. Returns the Work object with their digests, {name: tokenized rows}, and a report.

    Args:
        start_ray: a function that starts Ray if there are many rows, or None if Ray is already running.
    """
    from pipeline.data import read

    print("reading and tokenizing the rows", flush=True)
    data, context = work.data, work.base["context_length"]
    sets: dict[str, tuple[Any, str]] = {}  # {name: (tokenized rows, their split)}
    report: Any = None
    mixture: Any = None
    cache = data.cache_dir or storage.join(work.identity.storage_path, "data")
    prepare = partial(read.prepare_rows, tokenizer=work.tokenizer, cache_root=cache, ray_for_rows=start_ray)
    if data.train or data.eval:
        packing = bool(work.trainer.get("packing"))
        prepared = prepare(work.identity.stage, data, context_length=work.room, packing=packing)
        report, mixture = prepared.report, prepared.mixture
        sets = {name: (prepared, name) for name in ("train", "eval") if getattr(prepared, name) is not None}
    for name in ("pairs", "benchmarks"):  # `evaluate` only scores these rows
        if not (scored_rows := getattr(data, name)):
            continue
        section = replace(data, train=None, eval=scored_rows, max_length=None)
        if name == "benchmarks":  # a benchmark's format sets its columns
            section = replace(section, columns=None, label=None, transform=None, group_by=None)
        try:
            scored = prepare(name, section, context_length=context)
        except InputError as error:
            key = f"data.{name}" if error.key == "data.eval" else error.key
            raise InputError(error.message, key) from error
        report, new_report = report or scored.report, scored.report
        for target, source in ((report.splits, new_report.splits), (report.sources, new_report.sources)):
            if "eval" in source:
                target[name] = source.pop("eval")
        sets[name] = (scored, "eval")
    rows = {name: getattr(tokenized, split) for name, (tokenized, split) in sets.items()}
    # Checks that need the rows
    if work.spec.scores:
        check_needed_columns(work, rows)
    check_row_format(data, work.inputs, work.keys, report.row_format())
    if data.train and work.identity.stage == "kto":
        check_labels(work.trainer, *report.labels())
    if data.train and work.spec.online:
        check_updates(work.args, len(mixture) if mixture else report.splits["train"].kept)
    # Facts about the rows that workers and the registry need
    digests = {name: tokenized.digests[split] for name, (tokenized, split) in sets.items()}
    if transforms := transforms_of(data):
        digests["transform"] = functions.digest_functions(transforms.values())
    train = report.splits.get("train")
    work = replace(
        work,
        digests=digests | digests_of_functions(work),
        fingerprints={name: tokenized.fingerprints[split] for name, (tokenized, split) in sets.items()},
        mixture=mixture,
        row_format=report.row_format(),
        rows_from=train.versions if train else {},
        judged_by=train.judges if train else {},
    )
    return work, rows, report


def check_row_format(
    data: Data, inputs: Mapping[str, Input], keys: Mapping[str, str], rows: str | None
) -> None:
    """Raises InputError if an adapter was trained on plain text and the rows are chat messages, or the other way around.

    Args:
        keys: {name of an input: its key in the job}.
        rows: the form in which the models read the rows (chat, text or both), or None if the job has no rows.
    """
    forms = {
        "text": "plain text",
        "chat": "messages in the chat template",
        "both": "messages in the chat template",
    }
    for name, model in inputs.items():
        trained = str(model.lineage.get("rows"))
        differs = (trained, rows) in (("text", "chat"), ("text", "both"), ("chat", "text"))
        if differs and data.apply_chat_template is None:
            stage, apply = model.lineage["stage"], str(trained == "text").lower()
            raise InputError(
                f"{model.version} was trained by {stage} on {forms[trained]}, and the models of this run read {forms[str(rows)]}; train "
                f"{stage} with data.apply_chat_template={apply}, or set this key here to use the model in another format",
                key=keys[name],
            )


def check_labels(trainer: dict[str, Any], desirable: int, undesirable: int) -> None:
    """Prints how many KTO rows are desirable and undesirable. Warns if their weighted ratio is outside the KTO paper's range."""
    print(f"labels: {desirable:,} desirable, {undesirable:,} undesirable rows", flush=True)
    good = trainer.get("desirable_weight", 1.0) * desirable
    bad = trainer.get("undesirable_weight", 1.0) * undesirable
    if not (good and bad):
        print(
            "warning: only one of the labels has rows and a weight: the policy moves towards, or away from, all completions",
            flush=True,
        )
    elif not 1 <= good / bad <= 4 / 3:
        weight = bad / desirable
        print(
            f"warning: desirable_weight * desirable rows is {good / bad:.2f} of undesirable_weight * undesirable rows; expected 1 to "
            f"4/3 (eq. 8 of https://arxiv.org/abs/2402.01306), as with trainer.desirable_weight={weight:.3g} to {weight * 4 / 3:.3g}",
            flush=True,
        )


def check_updates(args: Any, prompts: int) -> None:
    """Raises InputError if critic_warmup_steps covers all PPO updates. Warns if the run ends before the LR warmup."""
    updates = args.total_updates(prompts)
    run_length = f"the run has {updates} update{'s' * (updates > 1)}"
    if args.critic_warmup_steps >= updates:
        raise InputError(
            f"found {args.critic_warmup_steps}, but {run_length} ({prompts} prompts): the policy would "
            f"never learn; expected less than {updates}, or more trainer.total_episodes",
            key="trainer.critic_warmup_steps",
        )
    if args.warmup_steps >= updates:
        print(
            f"warning: trainer.warmup_steps={args.warmup_steps}, but {run_length}: the learning rate never reaches "
            f"trainer.learning_rate={args.learning_rate:g}",
            flush=True,
        )


def check_needed_columns(work: Work, rows: dict[str, Any]) -> None:
    """Raises InputError if the first rows lack the column that data.subset names, or a column that a reward or judge needs."""
    scorers = {name: scorer for name, scorer in work.inputs.items() if scorer.kind in ("function", "judge")}
    for name, dataset in rows.items():
        sample = dataset.slice(0, 100).to_pylist() if hasattr(dataset, "slice") else dataset.take(100)
        examples = [json.loads(row["row"]) for row in sample]
        keys = {key for row in examples for key in row}
        if name == "pairs" and work.data.subset and work.data.subset not in keys:
            raise InputError(
                f"found {work.data.subset!r}, which the rows of data.pairs do not have; expected one of "
                f"{', '.join(sorted(keys))}",
                key="data.subset",
            )
        columns = keys - {"prompt", "completion"}
        if any(isinstance(row.get("prompt"), list) for row in examples):
            columns.add("messages")
        for role, scorer in scorers.items():
            if role == "judge" and name != "eval":
                continue  # a judge skips pairs and benchmark rows that lack columns
            if scorer.definition:
                source, missing = at_version(scorer.version)[0], scorer.definition.columns - columns
                column = min(missing, default=None)
            else:
                source, column = scorer.version, missing_parameter(scorer.version, columns)
            if column:
                raise InputError(
                    f"{source} asks for `{column}`, which the rows of data.{name} do not have; "
                    f"expected one of {', '.join((*GIVEN, *sorted(columns)))}. Add the column to the rows, or give the "
                    "parameter a default",
                    key=work.keys[role],
                )
