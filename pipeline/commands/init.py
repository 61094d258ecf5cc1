"""Writes jobs for your own rows: finds the stages that can read each file, and adapts a profile's jobs to these files.

    rlhf init my --name velo --model Qwen/Qwen2.5-0.5B-Instruct        or   python -m pipeline init ...

The jobs are copies of the profile `own`, or of the profile that --profile names. `init` sets your files and their columns,
lengths that fit your rows, and names for the trained models. It guesses columns from their names and values. `validate` shows the
rows as the model will see them. If the profile of --name exists, `init` writes only the jobs that the profile lacks.
"""

import contextlib
import fnmatch
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from pipeline.commands import shipped
from pipeline.data import chunks, guess, preview
from pipeline.data.encode import Encoder, Example
from pipeline.data.files import HELD_OUT, files_of, find_files, is_held_out
from pipeline.data.files import NAME as DATA_SET
from pipeline.data.formats import Kind, Record, kind_of
from pipeline.data.labels import as_list
from pipeline.data.reshape import Preprocess
from pipeline.data.tasks import held_out, parse_or_error
from pipeline.data.values import RowError, some_keys
from pipeline.errors import InputError, show_value
from pipeline.job import Data, Job, load_job
from pipeline.job.job import OF_ROWS
from pipeline.models.base import context_length
from pipeline.models.template import text_as_chat
from pipeline.models.tokenizer import eos_ids, load_tokenizer
from pipeline.system.hub import base_config

# {kind of rows: a stage that reads such rows}. The first stage in this table that can read a file decides the file's kind.
READER = {"pairs": "rm", "labels": "kto", "demonstrations": "sft", "prompts": "ppo"}
# {stage: kinds of rows that the stage can train on}. A stage trains on all files of the first kind for which there are files.
TAKES = {
    "sft": ("demonstrations", "labels", "pairs"),
    "rm": ("pairs",),
    "dpo": ("pairs",),
    "kto": ("labels", "pairs"),
    "ppo": ("prompts", "demonstrations", "pairs", "labels"),
}
# {job: stage}, for jobs that train nothing. Each job in this table reads the same rows as its stage.
ROWS_OF = {**dict.fromkeys(("evaluate", "collect", "generate", "serve"), "ppo"), "score": "rm"}
EVAL_PROMPTS = 200  # largest number of prompts in a file that init writes


@dataclass(frozen=True)
class RowSource:
    """A file, or several files with rows of one format."""

    path: str  # path as written in a job
    rows: list[dict[str, Any]]  # the first rows
    stages: dict[str, dict[str, Any]]  # {stage: the keys of `data` with which the stage reads these rows}
    for_eval: bool

    @property
    def kind(self) -> str:
        """Returns the kind of these rows (a key of READER), or "" if no stage can read the rows."""
        return next((kind for kind, stage in READER.items() if stage in self.stages), "")


@dataclass(frozen=True)
class Request:
    """The options on the command line."""

    path: str
    name: str
    profile: str
    model: str | None
    reward: str | None  # reward of ppo
    row_keys: dict[str, Any]  # keys of `data` that describe the rows
    existing: dict[str, str]  # {job that exists already: its text}

    @property
    def folder(self) -> Path:
        return Path("jobs") / self.name


def run(path: str, options: list[str]) -> None:
    """Writes jobs/NAME for a file, a folder or a dataset, and prints what to run next.

    `options` may have name=NAME, model=MODEL, profile=PROFILE, reward=REWARD, and keys of the rows, such as data.columns.
    Raises InputError if no stage can read any file, if an option is wrong, or if there is no job to write.
    """
    request = parse_options(path, options)
    sources = [source_of(item, for_eval, request.row_keys) for item, for_eval in splits_of(path)]
    check_readable(request, sources)
    shipped.copy_profile(request.profile)
    request.folder.mkdir(parents=True, exist_ok=True)
    shipped.write_schema(request.folder.parent)
    jobs = jobs_for(request, sources)
    write_jobs(request, jobs)  # set_lengths and add_prompts load these jobs
    set_lengths(request.folder, jobs)
    print_written(request, sources, jobs)
    add_prompts(request, sources, jobs)
    write_jobs(request, jobs)
    print_next(request.folder, jobs)


def parse_options(path: str, options: list[str]) -> Request:
    """Parses the command line. Raises InputError if an option is wrong, or if the profile exists and --name is not set."""
    row_options = [o for o in options if o.partition("=")[0] in {f"data.{key}" for key in OF_ROWS}]
    settings = dict(option.partition("=")[::2] for option in options if option not in row_options)
    typed_name, model, reward = (settings.pop(key, None) for key in ("name", "model", "reward"))
    profiles = [name for name in shipped.shipped_profiles() if name != "demo"]
    if (profile := settings.pop("profile", "own")) not in profiles:
        raise InputError(f"there is no profile {profile!r}; expected one of {', '.join(profiles)}")
    if settings:
        allowed = f"--name, --model, --profile, reward=REWARD, {', '.join(f'data.{key}' for key in OF_ROWS)}"
        problem = f"unknown option {next(iter(settings))!r}; expected {allowed}"
        raise InputError(f"{problem}; set other keys in the jobs that init writes")
    # Loads a job with the user's options, because this raises the same errors as a run with these options.
    data = load_job(shipped.JOBS / "own/sft.yaml", row_options, "sft").data
    if reward:
        load_job(shipped.JOBS / "own/ppo.yaml", [f"reward={reward}"], "ppo")
    row_keys = {key: value for key in OF_ROWS if (value := getattr(data, key)) is not None}
    name = typed_name or profile_name(path)
    if not re.fullmatch(r"[\w-]{1,64}", name):
        raise InputError(f"name: found {show_value(name)}, expected at most 64 letters, digits, `_` and `-`")
    if name in shipped.FOLDERS:
        raise InputError(f"the project comes with a profile {name}; choose another name: --name NAME")
    folder = Path("jobs") / name
    existing = {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.yaml"))}
    if folder.exists() and not (existing and typed_name):
        raise InputError(f"{folder} exists; add jobs to it with --name {name}, or choose another name")
    if (Path(path) / "config.json").exists():
        raise InputError(f"{path} is the folder of a model; expected data files")
    return Request(path, name, profile, model, reward, row_keys, existing)


def profile_name(path: str) -> str:
    """Derives a name for the profile from a path or URI."""
    match = DATA_SET.fullmatch(path)
    basename = (match["repo"] if match else path.rstrip("/")).rpartition("/")[2]
    return re.sub(r"[^\w-]+", "_", basename.partition(".")[0]).strip("_") or "data"


def check_readable(request: Request, sources: list[RowSource]) -> None:
    """Raises InputError if no new job can use the rows, or if no stage can read the columns that the user set."""
    path, rows = sources[0].path, sources[0].rows
    columns = [keys.get("columns") for source in sources for keys in source.stages.values()]
    if request.row_keys.get("columns") not in (None, *columns):
        problem = f"no stage can read {request.path} with these columns; the first file has the columns {', '.join(some_keys(rows[0]))}"
        raise InputError(problem, key="data.columns")
    if not any(sources_for(sources, stage) for stage in TAKES):
        kind = kind_of("sft")
        if preview.fits_kind(rows[0], kind) and isinstance(error := parse_or_error(rows[0], kind), RowError):
            raise InputError(f"{path}: {error.field}: found {error.found}; expected {error.expected}")
        raise InputError(guess.explain_misfit(rows, kind, path))
    new_jobs = jobs_for(request, sources).keys() - request.existing.keys()
    if not new_jobs:
        raise InputError(
            f"{request.folder} already has a job for each stage that can train on these rows; set data.train in these jobs"
        )
    if request.reward and "ppo" not in new_jobs:
        raise InputError("only ppo uses a reward, and there is no new ppo job for these rows", key="reward")


def write_jobs(request: Request, jobs: dict[str, str]) -> None:
    """Writes the job files that do not exist yet."""
    for job, text in jobs.items():
        if job not in request.existing:
            (request.folder / f"{job}.yaml").write_text(text, encoding="utf-8")


def print_written(request: Request, sources: list[RowSource], jobs: dict[str, str]) -> None:
    """Prints the jobs that were written, and which stages read each file."""
    new_jobs = [job for job in jobs if job not in request.existing]
    print(f"wrote {request.folder}: {', '.join(new_jobs)}")
    if request.existing:
        print(f"  not changed: {', '.join(request.existing)}")
    for source in sources:
        readers = [stage for stage in TAKES if stage in new_jobs and source in sources_for(sources, stage)]
        use = ", ".join(readers) or f"no stage; the file's columns are {', '.join(some_keys(source.rows[0]))}"
        if columns := next((source.stages[stage].get("columns") for stage in readers), None):
            use += f"; columns {columns}"
        print(f"  {source.path}: {source.kind or 'skipped'}, read by {use}")


def print_next(folder: Path, jobs: dict[str, str]) -> None:
    """Prints the keys that the user must set, and the five commands to run next."""
    for job, text in jobs.items():
        for key in re.findall(r"^ *(\w+): null .*# set ", text, re.M):
            print(f"  set `{key}` in {folder}/{job}.yaml; a comment there explains its values")
    command = "rlhf {} {}" if Path(sys.argv[0]).name == "rlhf" else "python -m pipeline {} {}"
    if "MAKELEVEL" in os.environ:  # `make init` works without an activated virtual environment
        command = "make {} JOB={}"
    ready = [job for job in jobs if job in TAKES and not re.search(r"^reward: null", jobs[job], re.M)]
    trained = [job for job in ready if job not in ("dpo", "kto") or "ppo" not in ready]
    follow_ups = [("evaluate", "evaluate"), ("chat", "generate"), ("serve", "serve"), ("export", "export")]
    commands = [("validate", job) for job in trained[:1]] + [(job, job) for job in trained]
    commands += [(subcommand, job) for subcommand, job in follow_ups if job in jobs]
    if commands:
        print("Run next:")
    for subcommand, job in commands[:5]:
        print(f"  {command.format(subcommand, folder / f'{job}.yaml')}")


# ---- files -------------------------------------------------------------------------------------------------------


def splits_of(path: str) -> Iterator[tuple[str, bool]]:
    """Yields (path, whether it is for evaluation) for each split of a dataset or file of a folder.

    Files whose names differ only in numbers (`train-00000-of-00002.parquet`) become one glob. The only file or glob of a folder
    is for training, whatever its name.
    """
    if files_of(path, "data.train"):
        yield path, False
        for name in HELD_OUT:
            split = f"{path.rstrip('/').removesuffix('/train')}/{name}"
            with contextlib.suppress(InputError):
                if files_of(split, "data.eval"):
                    yield split, True
                    return
        return
    skipped = dict[str, str]()
    files = [file.path for file in find_files(path, "data", skipped)]
    # In the part of the path that all files share, numbers are not shard numbers.
    root = os.path.dirname(files[0])
    while root and not all(file.startswith(f"{root}/") for file in files):
        root = os.path.dirname(root)
    groups: dict[str, list[str]] = {}
    for file in files:
        groups.setdefault(root + re.sub(r"\d+", "*", file.removeprefix(root)), []).append(file)
    names = list[str]()
    for pattern, group in groups.items():
        as_glob = len(group) > 1 and group == fnmatch.filter(files, pattern)
        names += [pattern] if as_glob else group
    for name in names:
        yield name, len(names) > 1 and is_held_out(os.path.relpath(name, path))
    for name, reason in skipped.items():
        print(f"  {name}: not read ({reason})")


def source_of(path: str, for_eval: bool, args: dict[str, Any]) -> RowSource:
    """Finds the stages that can read the first rows of a path. Guesses the columns if the user did not set them."""
    heads, preprocess = [], Preprocess(transform=args.get("transform"), group_by=args.get("group_by"))
    typed_kind, kinds = kind_of("sft").with_preprocess(preprocess), {stage: kind_of(stage) for stage in TAKES}
    for file in find_files(path, "data.train")[: preview.FILES]:
        head, errors = preview.first_rows(file, typed_kind)
        heads.append(head)
        if not head:
            raise InputError(str(errors[0]) if errors else f"{file.path}: the file has no rows")
        if errors:
            total = len(errors) + len(head)
            print(f"warning: {len(errors):,} of the first {total:,} rows cannot be read; {errors[0]}")
    rows = heads[0]
    stages: dict[str, dict[str, Any]] = {}
    named_prompts = {"prompt", "prompts"} & {*re.split(r"[^a-z]+", os.path.basename(path).lower())}
    if not args.get("columns") and (problem := guess.unclear_label_note(rows)):
        print(f"warning: {path}: sft and kto will not use this file: {problem}")
    for stage in ("ppo",) if named_prompts else TAKES:
        column_maps = [keys["columns"] for keys in stages.values() if "prompt" in keys.get("columns", ())]
        prompts = [{"prompt": columns["prompt"]} for columns in column_maps]
        guesses = (columns_for(stage, args.get("columns")), guess.guess_columns(rows, kinds[stage]), *prompts)
        fitting = (
            cols
            for cols in guesses
            if cols is not None and all(guess.reads_most_rows(head, cols, kinds[stage]) for head in heads)
        )
        if (
            columns := next((c for c in fitting if not contradicts_user(c, args.get("columns"))), None)
        ) is None:
            continue
        labeled = stage != "ppo" and ("label" in columns or "label" in rows[0])
        extras = {key: args[key] for key in args if key != "columns" and (key != "label" or labeled)}
        stages[stage] = ({"columns": columns} if columns else {}) | extras
        if "label" not in args and not guess.is_clear(columns, rows):
            stages[stage]["label"] = None
    return RowSource(path, rows, stages, for_eval)


def columns_for(stage: str, columns: dict[str, str] | None) -> dict[str, str] | None:
    """Returns the columns that the user set, except for fields that this stage does not read."""
    fields = {name: preview.known_fields(kind_of(name)) for name in TAKES}
    others = {*itertools.chain(*fields.values())} - {*fields[stage]}
    return columns and {field: column for field, column in columns.items() if field not in others}


def contradicts_user(guessed: dict[str, Any], typed: dict[str, Any] | None) -> bool:
    """Returns True if the guess and the user assign a column to different fields."""
    fields = {column: field for field, value in (typed or {}).items() for column in as_list(value)}
    return any(
        fields.get(column, field) != field for field, value in guessed.items() for column in as_list(value)
    )


# ---- jobs --------------------------------------------------------------------------------------------------------


def jobs_for(request: Request, sources: list[RowSource]) -> dict[str, str]:
    """Returns {job: text} for existing jobs and for new jobs that can use the rows. New jobs have the profile's lengths."""
    name, existing = request.name, request.existing
    rows = {stage: sources_for(sources, stage) for stage in TAKES}
    stages = {stage for stage in TAKES if rows[stage] or stage in existing}
    reward = f"models:/{name}-rm@champion" if "rm" in stages else None
    ppo_reward = request.reward or reward
    policies = [
        stage for stage in ("ppo", "dpo", "kto", "sft") if stage in stages and (ppo_reward or stage != "ppo")
    ]
    served = {f"{name}-{stage}": f"models:/{name}-{stage}@champion" for stage in policies}
    start = served.get(f"{name}-sft", "base")
    newest = [*served.values()]  # a job uses the first model in this list that exists
    inputs = {"policy": newest if len(newest) > 1 else (newest or ["base"])[0], "reward": reward}
    values: dict[str, dict[str, Any]] = {
        **{job: {"policy": start} for job in ("dpo", "kto", "collect")},
        "ppo": {"policy": start, "reward": ppo_reward},
        "evaluate": {**inputs, "baseline": start},
        **dict.fromkeys(("generate", "export"), inputs),
        "serve": {
            "serve.policies": served,
            "serve.rewards": {f"{name}-rm": reward} if reward else {},
            "data.max_length": None,  # by default the context length minus the completion length
        },
    }
    new_jobs = [stage for stage in TAKES if rows[stage]]
    new_jobs += ["score"] if reward else []
    new_jobs += ["evaluate", "collect"] if reward and rows["ppo"] else []
    new_jobs += ["generate", "serve", "export"] if policies else []
    models = (yaml.safe_load(text).get("model") for text in existing.values())
    # A new job uses the same base as the existing jobs.
    model: dict[str, Any] = next(filter(None, models), {})
    model |= {"name_or_path": request.model} if request.model else {}
    jobs = dict(existing)
    for job in new_jobs:
        if job in existing or not (file := shipped.JOBS / request.profile / f"{job}.yaml").exists():
            continue
        text = file.read_text(encoding="utf-8")
        for pattern in ("rlhf-{}", "PROFILE={}", "jobs/{}/"):
            text = text.replace(pattern.format(request.profile), pattern.removeprefix("rlhf-").format(name))
        text = re.sub(r" *\(needs [^)]*first\)", "", text)  # the new profile may lack the required stage
        base = {f"model.{key}": value for key, value in model.items()}
        for key, value in {**base, **values.get(job, {})}.items():
            text = with_key(text, key, value)
        if job == "ppo" and not ppo_reward:
            text = with_key(text, "reward", None, "set python:MODULE:FUNCTION, or a reward model")
        stage = ROWS_OF.get(job, job)
        if job != "serve" and rows.get(stage):
            text = with_rows(text, job, rows[stage], stage)
        jobs[job] = with_device(text) if request.profile == "own" else text
    return jobs


def with_device(text: str) -> str:
    """Sets a job's keys for this machine's GPU, and returns the text. Without a GPU, halves the number of completions in ppo."""
    gpu = {"model.dtype": "bfloat16", "trainer.bf16": True, "scaling.use_gpu": True}
    values, comment = gpu, "`init` found a GPU"
    if not shutil.which("nvidia-smi"):
        values = {"trainer.total_episodes": 1280}
        comment = "20 updates: `init` found no GPU; with one, 2560 or more"
    for key, value in values.items():
        if f"\n  {key.partition('.')[2]}:" in text:
            text = with_key(text, key, value, comment)
    return text


def sources_for(sources: list[RowSource], stage: str) -> list[RowSource]:
    """Returns the sources of the first kind in TAKES that a stage can train on."""
    for kind in TAKES[stage]:
        readable = [source for source in sources if source.kind == kind and stage in source.stages]
        if any(not source.for_eval for source in readable):
            return readable
    return []


def with_rows(text: str, job: str, sources: list[RowSource], stage: str) -> str:
    """Sets the paths of `sources` in a job, with the keys of `data` that `stage` needs. Returns the job's text."""
    keys = [source.stages[stage] for source in sources]
    shared = keys[0] if all(k == keys[0] for k in keys) else None

    def paths(for_eval: bool) -> Any:
        split = [source for source in sources if source.for_eval == for_eval]
        if shared is None:
            return [{"path": s.path, **s.stages[stage]} for s in split] or None
        return [s.path for s in split] if len(split) > 1 else next((s.path for s in split), None)

    eval_paths = paths(True)
    if job != "evaluate":
        text = with_key(text, "data.train", paths(False))
    if job in TAKES or job == "evaluate":
        text = with_key(text, "data.eval", eval_paths)
    if job in TAKES:
        text = with_key(
            text, "data.eval_fraction", 0 if eval_paths else 0.1, "of the training rows, by prompt"
        )
    for key, value in (shared or {}).items():
        meaning = (
            f"set the label's meaning: {guess.label_template(keys[0]['columns'])}" if value is None else ""
        )
        text = with_key(text, f"data.{key}", value, meaning)
    return text


def with_key(text: str, key: str, value: Any, comment: str = "") -> str:
    """Sets `key` or `section.key` in the text of a job, and returns the text. Does not change other lines."""
    section, _, name = key.rpartition(".")
    indent = "  " if section else ""
    style: dict[str, Any] = {"default_flow_style": True, "width": 10_000, "sort_keys": False}
    value_text = yaml.safe_dump(value, allow_unicode=True, **style).removesuffix("...\n").strip()
    line = f"{indent}{name}: {value_text}"
    line = f"{line:<35} # {comment}\n" if comment else f"{line}\n"
    start, end = 0, len(text)
    if section:
        if not (block := re.search(rf"^{section}:.*\n((?: .*|)\n)*", text, re.M)):
            return f"{text}\n{section}:\n{line}"
        start, end = text.index("\n", block.start()) + 1, block.end()
    pattern = re.compile(rf"^{indent}{name}:.*\n(?:{indent} +.*\n)*", re.M)
    if match := pattern.search(text, start, end):
        return text[: match.start()] + line + text[match.end() :]
    end = len(text[:end].rstrip("\n")) + 1
    return text[:end] + line + text[end:]


# ---- chat template, lengths and eval prompts ---------------------------------------------------------------------


def set_lengths(folder: Path, jobs: dict[str, str]) -> None:
    """Sets lengths in `jobs`, rounded up to multiples of 64 tokens, so that 99 % of the first rows fit.

    If rows have messages and the base has no chat template, all jobs get the built-in chat template. The template is then also
    applied to plain text, so that policy and reward model see the same format. If the tokenizer or a stage's rows cannot be read,
    keeps the profile's lengths. No length exceeds the model's context.
    """
    stage_jobs = {stage: load_profile_job(folder, stage) for stage in TAKES if stage in jobs}
    first_job = next(iter(stage_jobs.values()))
    base, source = first_job.model, (first_job.model.name_or_path, first_job.model.revision)
    try:
        tokenizer = load_tokenizer(*source, base.chat_template, base.trust_remote_code)
        context = context_length(base_config(*source)) or 1 << 20
    except InputError as error:
        print(f"warning: the jobs keep the lengths of the profile: {error}")
        return
    records: dict[str, list[tuple[Kind, Record]]] = {}
    for stage, job in stage_jobs.items():
        try:
            records[stage] = [*first_records(stage, job.data)]
        except InputError as error:
            print(f"warning: {stage}: {error}")
    is_chat = any(not isinstance(record.prompt, str) for group in records.values() for _, record in group)
    if is_chat and not text_as_chat(tokenizer, first_job.data.apply_chat_template):
        tokenizer = load_tokenizer(*source, "plain", base.trust_remote_code)
        for name in jobs:
            jobs[name] = with_key(jobs[name], "model.chat_template", "plain")
    sizes: dict[str, tuple[int, int]] = {}  # {stage: tokens of prompts and of completions}
    for stage, group in records.items():
        try:
            sizes[stage] = typical_lengths(stage, stage_jobs[stage].data, tokenizer, group, context)
        except InputError as error:
            print(f"warning: {stage}: {error}")
    for name, text in jobs.items():
        jobs[name] = with_lengths(name, text, sizes, context)


def with_lengths(name: str, text: str, sizes: dict[str, tuple[int, int]], context: int) -> str:
    """Sets lengths that fit a job's rows, and returns the job's text. If the rows were not measured, keeps the profile's lengths.

    Args:
        sizes: {stage: tokens of prompts and of completions}.
        context: context length of the base.
    """
    job, stage = yaml.safe_load(text), ROWS_OF.get(name, name)
    learner = next((s for s in ("sft", "dpo", "kto") if s in sizes), None)
    if learner and stage == "ppo" and stage not in sizes:  # `generate` reads the conversations' prompts
        sizes = {**sizes, "ppo": (sizes[learner][0], 0)}
    if stage == "ppo":  # completions are not part of data.max_length
        completions = max((sizes[s][1] for s in ("sft", "rm", "kto") if s in sizes), default=0)
        response = -(-completions // 16) * 16 or job["trainer"]["response_length"]
        response = min(response, context // 2)
        text = with_key(text, "trainer.response_length", response, "tokens of a completion")
        context -= response
    if name in ("serve", "export"):
        return text
    max_length, comment = job["data"].get("max_length") or context, "as in the profile"
    if stage in sizes:
        prompt, completion = sizes[stage]
        if name in ("generate", "evaluate"):  # generate and evaluate may read sft's prompts
            prompt = max(prompt, sizes.get("sft", (0,))[0])
        max_length, comment = -(-(prompt + completion) // 64) * 64, "99 % of the first rows fit"
    if max_length > context:
        max_length, comment = context, "the model's context length; some rows are longer"
    return with_key(text, "data.max_length", max_length, f"tokens; {comment}")


def load_profile_job(folder: Path, stage: str) -> Job:
    """Loads the job of a stage. Accepts a ppo job whose reward is not set yet."""
    return load_job(folder / f"{stage}.yaml", ["reward=models:/any/1"] if stage == "ppo" else [], stage)


def typical_lengths(
    stage: str, data: Data, tokenizer: Any, records: list[tuple[Kind, Record]], context: int
) -> tuple[int, int]:
    """Returns the number of tokens that 99 % of the prompts fit into, and the number that 99 % of the completions fit into."""
    ends, special = eos_ids(tokenizer), data.parse_special_tokens
    as_chat = text_as_chat(tokenizer, data.apply_chat_template)
    examples, errors = list[Any](), list[RowError]()
    for kind, group in itertools.groupby(records, key=itemgetter(0)):
        encoder = Encoder(tokenizer, kind, context, "truncate", as_chat, ends, special)
        for outcome in itertools.chain.from_iterable(encoder.encode([record for _, record in group])):
            examples += [outcome] * isinstance(outcome, Example)
            errors += [outcome] if isinstance(outcome, RowError) else []
    if not examples:
        reason = f": {errors[0].expected}" if errors else ""
        raise InputError(f"none of the first rows of {show_value(data.train)} can be read{reason}")
    if (total := len(examples) + len(errors)) < 20 * len(errors):
        print(f"warning: {stage} skips {len(errors)} of the first {total} rows: {errors[0].expected}")
    index = int(0.99 * (len(examples) - 1))
    return (
        sorted(example.prompt_tokens for example in examples)[index],
        sorted(example.completion_tokens for example in examples)[index],
    )


def first_records(stage: str, data: Data) -> Iterator[tuple[Kind, Record]]:
    """Yields the first readable rows of each file of data.train."""
    files = find_files(data.train, "data.train")
    source_kinds = {"train": [*map(without_label, preview.source_kinds(stage, data)["train"])]}
    kinds = preview.resolve_labels(source_kinds, {"train": files})["train"]
    for file in files:
        kind = kinds[file.source]
        chunk = chunks.plan_chunks(file, "train", kind)[0]
        for _, row, _ in itertools.islice(chunks.chunk_rows(chunk), preview.ROWS):
            for reshaped in kind.rows(row):
                record = parse_or_error(reshaped, kind) if isinstance(reshaped, dict) else None
                if isinstance(record, Record):
                    yield kind, record


def without_label(kind: Kind) -> Kind:
    """Reads `first` as `chosen` if the meaning of data.label is unknown, which does not affect prompts and lengths."""
    preprocess, columns = kind.preprocess, dict(kind.preprocess.columns)
    if preprocess.rule is not None or not {"first", "second", "label"} <= columns.keys():
        return kind
    del columns["label"]
    columns |= {"chosen": columns.pop("first"), "rejected": columns.pop("second")}
    return kind_of(kind.stage).with_preprocess(replace(preprocess, columns=columns))


def add_prompts(request: Request, sources: list[RowSource], jobs: dict[str, str]) -> None:
    """Writes files of prompts for generate and evaluate if the user has no such files. Sets the new files in `jobs`."""
    new_jobs, folder = jobs.keys() - request.existing.keys(), request.folder
    if "generate" in new_jobs and not sources_for(sources, "ppo"):  # all conversations end with an answer
        learner = load_profile_job(folder, next(stage for stage in ("sft", "dpo", "kto") if stage in jobs))
        prompts = [{"prompt": record.prompt} for _, record in first_records(learner.stage, learner.data)]
        jobs["generate"] = with_prompts(jobs["generate"], "train", folder / "prompts.jsonl", prompts)
    if "evaluate" in new_jobs and not any(source.for_eval for source in sources_for(sources, "ppo")):
        ppo, path = load_profile_job(folder, "ppo"), folder / "eval_prompts.jsonl"
        by_content = {record.prompt_content(): record for _, record in first_records("ppo", ppo.data)}
        records = [record for record in by_content.values() if held_out(record.split_key(), ppo.data)]
        rows = [json.loads(record.row) for record in records]
        for row in rows:
            row.pop("system", None)  # the prompt already contains the system prompt
        jobs["evaluate"] = with_prompts(jobs["evaluate"], "eval", path, rows)
        print(f"  {path}: {len(rows)} prompt{'s' * (len(rows) != 1)} from ppo's eval split, for evaluate")


def with_prompts(text: str, key: str, path: Path, rows: list[dict[str, Any]]) -> str:
    """Writes a file of prompts. Returns the text of a job that reads this file and does not set data.columns."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows[:EVAL_PROMPTS]]
    path.write_text("".join(lines), encoding="utf-8")
    text = with_key(text, f"data.{key}", str(path))
    return with_key(text, "data.columns", None) if "columns" in yaml.safe_load(text)["data"] else text
