"""A profile for your own rows: finds out which stages can read which files, and writes the jobs that they allow.

    rlhf init my --name velo --model Qwen/Qwen2.5-0.5B-Instruct        or   python -m pipeline init ...

The jobs are those of the profile `own` (`--profile` names another) with other values: your files and their columns,
lengths that fit your rows, and names for the models that they train. Columns are guessed from names and values;
`validate` shows the rows as the model will see them. With --name of a profile that is there, only jobs that it lacks are written.
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
from pipeline.data.files import HELD_OUT, files_of, find, is_held_out
from pipeline.data.files import NAME as DATA_SET
from pipeline.data.reshape import Preprocess, listed
from pipeline.data.shapes import Kind, Record, kind_of
from pipeline.data.tasks import checked, held_out
from pipeline.data.values import RowError, some
from pipeline.errors import InputError, show
from pipeline.job import Data, Job, load_job
from pipeline.job.job import OF_ROWS
from pipeline.job.yaml_tree import Tree, override
from pipeline.models.base import context_length
from pipeline.models.template import text_as_chat
from pipeline.models.tokenizer import eos_ids, load_tokenizer
from pipeline.system.hub import base_config

# {kind of rows: a stage that reads them}. A file has the kind of the first stage that can read it.
READER = {"pairs": "rm", "labels": "kto", "demonstrations": "sft", "prompts": "ppo"}
# {stage: the kinds of rows that it can train on}. It gets the files of the first kind that any file has.
TAKES = {
    "sft": ("demonstrations", "labels", "pairs"),
    "rm": ("pairs",),
    "dpo": ("pairs",),
    "kto": ("labels", "pairs"),
    "ppo": ("prompts", "demonstrations", "pairs", "labels"),
}
# Other job -> the stage whose rows it reads.
ROWS_OF = {**dict.fromkeys(("evaluate", "collect", "generate", "serve"), "ppo"), "score": "rm"}
EVAL_PROMPTS = 200  # largest number of prompts in a file that init writes
# Examples with a transform or with thresholds -> columns that identify their rows.
EXAMPLES = {
    "rm/oasst": "message_tree_id prompt tree_state",
    "rm/oasst_flat": "message_tree_id parent_id role text",
    "rm/ultrafeedback_raw": "instruction completions models",
    "rm/nectar": "prompt answers num_responses",
    "rm/helpsteer": "prompt response helpfulness correctness",
    "kto/red_team": "transcript rating task_description",
    "sft/glaive": "system chat",
    "sft/xlam": "query answers tools",
    "sft/imdb": "review sentiment",
}


@dataclass(frozen=True)
class Source:
    """A file, or several with rows of one format."""

    path: str  # path as written in a job
    rows: list[dict[str, Any]]  # the first rows
    stages: dict[str, dict[str, Any]]  # stage -> the keys of `data` with which it reads these rows
    for_eval: bool

    @property
    def kind(self) -> str:
        """Returns what the rows are, a key of READER, or an empty text if no stage reads them."""
        return next((kind for kind, stage in READER.items() if stage in self.stages), "")


@dataclass(frozen=True)
class Request:
    """The options on the command line."""

    path: str
    name: str
    profile: str
    model: str | None
    reward: str | None  # reward of ppo
    own: dict[str, Any]  # keys of `data` that describe the rows
    kept: dict[str, str]  # jobs that are there already -> their text

    @property
    def folder(self) -> Path:
        return Path("jobs") / self.name

    def new(self, jobs: dict[str, str]) -> list[str]:
        return [job for job in jobs if job not in self.kept]


def run(path: str, options: list[str]) -> None:
    """Writes jobs/NAME for a file, a folder or a dataset, and prints what to run next.

    `options` may have name=NAME, model=MODEL, profile=PROFILE, reward=REWARD, and keys of the rows, such as data.columns.
    Raises InputError if no stage can read any file, if an option is wrong, or if there is no job to write.
    """
    request = requested(path, options)
    sources = [source_of(item, for_eval, request.own) for item, for_eval in parts(path)]
    jobs = possible(request, sources)
    shipped.bring(request.profile)
    if any("transform" in keys for source in sources for keys in source.stages.values()):
        shipped.bring("examples")
    request.folder.mkdir(parents=True, exist_ok=True)
    shipped.write_schema(request.folder.parent)
    jobs = with_lengths(request, sources, jobs)
    print_written(request, sources, jobs)
    add_prompts(request, sources, jobs)
    write(request, jobs)
    if "collect" in request.new(jobs) and "dpo" in jobs:
        write_rounds(request.folder, jobs)
    print_next(request.folder, jobs)


def requested(path: str, options: list[str]) -> Request:
    """Returns the parsed options. Raises InputError if one is wrong, or if the profile must not be written to."""
    tree = Tree("")
    of_rows = [option for option in options if "." in option.partition("=")[0]]
    for one in of_rows:
        override(tree, one)
    given = dict(option.partition("=")[::2] for option in options if option not in of_rows)
    typed = {
        f"{section}.{key}": value for section in tree.data for key, value in tree.section(section).items()
    }
    own = {key: typed.pop(f"data.{key}") for key in OF_ROWS if f"data.{key}" in typed}
    named, model, reward = (given.pop(key, None) for key in ("name", "model", "reward"))
    profiles = [name for name in shipped.profiles() if name != "demo"]
    if (profile := given.pop("profile", "own")) not in profiles:
        raise InputError(f"there is no profile {profile!r}; expected one of {', '.join(profiles)}")
    if given or typed:
        known = f"--name, --model, --profile, reward=REWARD, {', '.join(f'data.{key}' for key in OF_ROWS)}"
        found = f"unknown option {next(iter(given | typed))!r}; expected {known}"
        raise InputError(f"{found}; set other keys in the jobs that init writes")
    stage, checked = ("ppo", [f"reward={reward}"]) if reward else ("sft", [])
    load_job(
        shipped.JOBS / "own" / f"{stage}.yaml", [*of_rows, *checked], stage
    )  # raises InputError, as a run would
    folder = Path("jobs") / (name := named or name_of(path))
    if not re.fullmatch(r"[\w-]{1,64}", name):
        raise InputError(f"name: found {show(name)}, expected at most 64 letters, digits, `_` and `-`")
    if name in shipped.FOLDERS:
        raise InputError(f"the project comes with a profile {name}; choose another name: --name NAME")
    kept = {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.yaml"))}
    if folder.exists() and not (kept and named):
        raise InputError(f"{folder} exists; run with --name {name} to add to it, or with another name")
    if (Path(path) / "config.json").exists():
        raise InputError(f"{path} is the folder of a model; expected files of rows")
    return Request(path, name, profile, model, reward, own, kept)


def possible(request: Request, sources: list[Source]) -> dict[str, str]:
    """Returns the jobs that the rows allow, as `profile_of` does. Raises InputError if none of them is new, with the reason."""
    jobs, first, path = profile_of(request, sources), sources[0].rows[0], request.path
    read_with = [keys.get("columns") for source in sources for keys in source.stages.values()]
    if request.own.get("columns") not in (None, *read_with):
        found = f"no stage can read {path} with this mapping; its columns are {', '.join(some(first))}"
        raise InputError(found, key="data.columns")
    if not jobs:
        path, kind = sources[0].path, kind_of("sft")
        if preview.fits(first, kind) and isinstance(wrong := checked(first, kind), RowError):
            raise InputError(f"{path}: {wrong.field}: found {wrong.found}; expected {wrong.expected}")
        raise InputError(guess.misfit(sources[0].rows, "sft", path))
    if not request.new(jobs):
        folder = request.folder
        raise InputError(f"{folder} has every job that these rows allow; name the rows there: data.train")
    if request.reward and "ppo" not in request.new(jobs):
        raise InputError("these rows make no new ppo job, which alone takes it", key="reward")
    return jobs


def write(request: Request, jobs: dict[str, str]) -> None:
    for job in request.new(jobs):
        (request.folder / f"{job}.yaml").write_text(jobs[job], encoding="utf-8")


def with_lengths(request: Request, sources: list[Source], jobs: dict[str, str]) -> dict[str, str]:
    """Writes the jobs, and returns them with lengths for the rows, without stages that reject all of their rows."""
    write(request, jobs)
    pending = [stage for one in sources for stage in one.stages if one.stages[stage].get("label", 0) is None]
    while refused := set_lengths(request, jobs) - {*request.kept, *pending}:
        for source in sources:
            for stage in refused:
                source.stages.pop(stage, None)
        for job in request.new(jobs):
            (request.folder / f"{job}.yaml").unlink()
        jobs = profile_of(request, sources)
        if not request.new(jobs):
            if not request.kept:
                request.folder.rmdir()
            raise InputError(f"no stage can train on {request.path}; the warnings above say why")
        write(request, jobs)
    return jobs


def print_written(request: Request, sources: list[Source], jobs: dict[str, str]) -> None:
    """Prints the jobs that were written, and which stages read each file."""
    print(f"wrote {request.folder}: {', '.join(request.new(jobs))}")
    if request.kept:
        print(f"  kept as they are, without what is new: {', '.join(request.kept)}")
    for source in sources:
        readers = [stage for stage in TAKES if stage in jobs and source in chosen(sources, stage)]
        how = ", ".join(readers) or f"no stage; its columns are {', '.join(some(source.rows[0]))}"
        if columns := next((source.stages[stage].get("columns") for stage in readers), None):
            how += f"; columns {columns}"
        used = {
            *preview.known_fields(kind_of("ppo")),
            *itertools.chain(*map(listed, (columns or {}).values())),
        }
        others = [name for name in some(source.rows[0]) if name not in used]
        if source.kind == "prompts" and others:
            how += f"; only a Python reward reads {', '.join(others)}"
        print(f"  {source.path}: {source.kind or 'skipped'}, read by {how}")


def add_prompts(request: Request, sources: list[Source], jobs: dict[str, str]) -> None:
    """Writes files of prompts for the new jobs that read one, and sets them in `jobs`."""
    new, folder = request.new(jobs), request.folder
    if "generate" in new and not chosen(sources, "ppo"):  # conversations, which end with an answer
        learns = loaded(folder, next(stage for stage in ("sft", "dpo", "kto") if stage in jobs))
        asked = [{"prompt": record.prompt} for _, record in first_records(learns.stage, learns.data)]
        jobs["generate"] = with_prompts(jobs["generate"], "train", folder / "prompts.jsonl", asked)
    if "evaluate" in new and not any(source.for_eval for source in chosen(sources, "ppo")):
        set_prompts(folder, jobs)


def print_next(folder: Path, jobs: dict[str, str]) -> None:
    """Prints the keys that are still to be set, and the five commands to run next."""
    for job, text in jobs.items():
        for key in re.findall(r"^ *(\w+): null .*# set ", text, re.M):
            print(f"  set `{key}` in {folder}/{job}.yaml; a comment there explains its values")
    command = "rlhf {} {}" if Path(sys.argv[0]).name == "rlhf" else "python -m pipeline {} {}"
    if "MAKELEVEL" in os.environ:  # `make init`, whose user may have no environment activated
        command = "make {} JOB={}"
    ready = [job for job in jobs if job in TAKES and not re.search(r"^reward: null", jobs[job], re.M)]
    trained = [job for job in ready if job not in ("dpo", "kto") or "ppo" not in ready]
    after = [("evaluate", "evaluate"), ("chat", "generate"), ("serve", "serve"), ("export", "export")]
    commands = [("validate", job) for job in trained[:1]] + [(job, job) for job in trained]
    commands += [(subcommand, job) for subcommand, job in after if job in jobs]
    if commands:
        print("Run next:")
    for subcommand, job in commands[:5]:
        print(f"  {command.format(subcommand, folder / f'{job}.yaml')}")


# ---- files -------------------------------------------------------------------------------------------------------


def parts(path: str) -> Iterator[tuple[str, bool]]:
    """Yields the splits of a dataset or the files of a folder, and whether they are for evaluation.

    Files whose names differ only in numbers (`train-00000-of-00002.parquet`) become one glob.
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
    aside = dict[str, str]()
    files = [file.path for file in find(path, "data", aside)]
    shared = os.path.dirname(files[0])  # a number in its name is no shard number that other folders continue
    while shared and not all(file.startswith(f"{shared}/") for file in files):
        shared = os.path.dirname(shared)
    groups: dict[str, list[str]] = {}
    for file in files:
        groups.setdefault(shared + re.sub(r"\d+", "*", file.removeprefix(shared)), []).append(file)
    for pattern, group in groups.items():
        as_glob = len(group) > 1 and group == fnmatch.filter(files, pattern)
        for name in [pattern] if as_glob else group:
            yield name, is_held_out(os.path.relpath(name, path))
    for name, why in aside.items():
        print(f"  {name}: not read ({why})")


def source_of(path: str, for_eval: bool, own: dict[str, Any]) -> Source:
    """Finds the stages that can read the first rows of a path, with the keys of `data` that were typed, or guessed ones."""
    heads, made = [], Preprocess(transform=own.get("transform"), group_by=own.get("group_by"))
    for file in find(path, "data.train")[: preview.FILES]:
        head, errors = preview.first_rows(file, kind_of("sft", made))
        heads.append(head)
        if not head:
            raise InputError(str(errors[0]) if errors else f"{file.path}: it has no rows")
        if errors:
            total = len(errors) + len(head)
            print(f"warning: {len(errors):,} of the first {total:,} rows cannot be read; {errors[0]}")
    rows = heads[0]
    stages: dict[str, dict[str, Any]] = {}
    for example, columns in EXAMPLES.items():
        if {*columns.split()} <= rows[0].keys():
            stage, _, name = example.partition("/")
            job = yaml.safe_load((shipped.JOBS / f"examples/{name}.yaml").read_text(encoding="utf-8"))
            keys = {key: value for key, value in job["data"].items() if key != "train"}
            stages |= dict.fromkeys(["rm", "dpo"] if stage == "rm" else [stage], keys)
    named_prompts = {"prompt", "prompts"} & {*re.split(r"[^a-z]+", os.path.basename(path).lower())}
    if not stages and not own.get("columns") and (problem := guess.doubt(rows)):
        print(f"warning: {path}: not for sft and kto: {problem}")
    for stage in () if stages else ("ppo",) if named_prompts else TAKES:
        asked = [keys["columns"] for keys in stages.values() if "prompt" in keys.get("columns", ())]
        prompts = [{"prompt": columns["prompt"]} for columns in asked]
        guesses = (columns_for(stage, own.get("columns")), guess.guessed(rows, stage), *prompts)
        fit = (
            one for one in guesses if one is not None and all(guess.reads(head, one, stage) for head in heads)
        )
        if (found := next((one for one in fit if not contradicts(one, own.get("columns"))), None)) is None:
            continue
        labeled = stage != "ppo" and ("label" in found or "label" in rows[0])
        typed = {key: own[key] for key in own if key != "columns" and (key != "label" or labeled)}
        stages[stage] = ({"columns": found} if found else {}) | typed
        if "label" not in own and not guess.is_clear(found, rows):
            stages[stage]["label"] = None
    return Source(path, rows, stages, for_eval)


def columns_for(stage: str, columns: dict[str, str] | None) -> dict[str, str] | None:
    """Returns the columns that the user gave, without fields that only other stages read."""
    fields = {one: preview.known_fields(kind_of(one)) for one in TAKES}
    others = {*itertools.chain(*fields.values())} - {*fields[stage]}
    return columns and {field: column for field, column in columns.items() if field not in others}


def contradicts(guessed: dict[str, Any], typed: dict[str, Any] | None) -> bool:
    """Returns True if a column is guessed to be another field than the one that was typed for it."""
    fields = {one: field for field, column in (typed or {}).items() for one in listed(column)}
    return any(fields.get(one, field) != field for field, column in guessed.items() for one in listed(column))


def name_of(path: str) -> str:
    """Derives the profile's name from a path or URI; no shipped profile has this name."""
    on_hub = DATA_SET.fullmatch(path)
    last = (on_hub["repo"] if on_hub else path.rstrip("/")).rpartition("/")[2]
    name = re.sub(r"[^\w-]+", "_", last.partition(".")[0]).strip("_") or "data"
    return f"{name}_rows" if name in shipped.FOLDERS else name


# ---- jobs --------------------------------------------------------------------------------------------------------


def profile_of(request: Request, sources: list[Source]) -> dict[str, str]:
    """Returns the text of each job that the rows allow, with the lengths of the profile; of the jobs that are kept, that text."""
    name, profile, model, kept = request.name, request.profile, request.model, request.kept
    rows = {stage: chosen(sources, stage) for stage in TAKES}
    there = {stage for stage in TAKES if rows[stage] or stage in kept}
    reward = f"models:/{name}-rm@champion" if "rm" in there else None
    policies = [
        stage
        for stage in ("ppo", "dpo", "kto", "sft")
        if stage in there and (reward or request.reward or stage != "ppo")
    ]
    served = {f"{name}-{stage}": f"models:/{name}-{stage}@champion" for stage in policies}
    start = served.get(f"{name}-sft", "base")
    newest = [*served.values()]  # the job uses the first that exists, because a gate may fail
    best = {"policy": newest if len(newest) > 1 else start, "reward": reward}
    models = (yaml.safe_load(text).get("model") for text in kept.values())
    base: dict[str, Any] = next(filter(None, models), {}) | ({"name_or_path": model} if model else {})
    values: dict[str, dict[str, Any]] = {
        **{job: {"policy": start} for job in ("dpo", "kto", "collect")},
        "ppo": {"policy": start, "reward": request.reward or reward},
        "evaluate": {**best, "baseline": start},
        **dict.fromkeys(("generate", "export"), best),
        "serve": {
            "serve.policies": served,
            "serve.rewards": {f"{name}-rm": reward} if reward else {},
            "data.max_length": None,  # the context length minus the completion length
        },
    }
    made = [stage for stage in TAKES if rows[stage]]
    if reward:
        made += ["score"]
        if rows["ppo"]:
            made += ["evaluate", "collect"]
    if policies:
        made += ["generate", "serve", "export"]
    jobs = dict(kept)
    for job in made:
        if job in kept or not (file := shipped.JOBS / profile / f"{job}.yaml").exists():
            continue
        text = file.read_text(encoding="utf-8")
        for pattern in ("rlhf-{}", "PROFILE={}", "jobs/{}/"):
            text = text.replace(pattern.format(profile), pattern.removeprefix("rlhf-").format(name))
        own_base = {f"model.{key}": value for key, value in base.items()}
        for key, value in {**own_base, **values.get(job, {})}.items():
            text = with_key(text, key, value)
        used = dict.fromkeys(re.findall(rf"models:/{name}-(\w+)@champion", str(values.get(job))))
        needs = filter(None, (" or ".join(one for one in used if one != "rm"), "rm" if "rm" in used else ""))
        text = re.sub(r"\(needs [^)]*first\)", f"(needs {', and '.join(needs)} first)" if used else "", text)
        if job == "ppo" and not (reward or request.reward):
            text = with_key(text, "reward", None, "set python:MODULE:FUNCTION, or a reward model")
        stage = ROWS_OF.get(job, job)
        if job != "serve" and rows.get(stage):
            text = with_rows(text, job, rows[stage], stage)
        jobs[job] = with_device(text) if profile == "own" else text
    return jobs if made else {}


def with_device(text: str) -> str:
    """Returns the text of a job for the GPU of this machine. Without a GPU, ppo gets half of the completions."""
    gpu = {"model.dtype": "bfloat16", "trainer.bf16": True, "scaling.use_gpu": True}
    values, comment = gpu, "`init` found a GPU"
    if not shutil.which("nvidia-smi"):
        values = {"trainer.total_episodes": 1280}
        comment = "20 updates: `init` found no GPU; with one, 2560 or more"
    for key, value in values.items():
        if f"\n  {key.partition('.')[2]}:" in text:
            text = with_key(text, key, value, comment)
    return text


def chosen(sources: list[Source], stage: str) -> list[Source]:
    """Returns the sources that a stage takes, by TAKES."""
    for kind in TAKES[stage]:
        found = [source for source in sources if source.kind == kind and stage in source.stages]
        if any(not source.for_eval for source in found):
            return found
    return []


def with_rows(text: str, job: str, sources: list[Source], stage: str) -> str:
    """Returns the text of a job that reads these sources as `stage` does."""
    keys = [source.stages[stage] for source in sources]
    same = keys[0] if all(one == keys[0] for one in keys) else None

    def paths(for_eval: bool) -> Any:
        mine = [source for source in sources if source.for_eval == for_eval]
        if same is None:
            return [{"path": one.path, **one.stages[stage]} for one in mine] or None
        return [one.path for one in mine] if len(mine) > 1 else next((one.path for one in mine), None)

    held_out = paths(True)
    if job != "evaluate":
        text = with_key(text, "data.train", paths(False))
    if job in TAKES or job == "evaluate":
        text = with_key(text, "data.eval", held_out)
    if job in TAKES:
        text = with_key(text, "data.eval_fraction", 0 if held_out else 0.1, "of the training rows, by prompt")
    for key, value in (same or {}).items():
        meaning = f"set what its values mean: {guess.meaning(keys[0]['columns'])}" if value is None else ""
        text = with_key(text, f"data.{key}", value, meaning)
    return text


def with_key(text: str, key: str, value: Any, comment: str = "") -> str:
    """Returns the text of a job with another value of `key` or `section.key`. All other lines stay."""
    section, _, name = key.rpartition(".")
    indent = "  " if section else ""
    flow: dict[str, Any] = {"default_flow_style": True, "width": 10_000, "sort_keys": False}
    written = yaml.safe_dump(value, allow_unicode=True, **flow).removesuffix("...\n").strip()
    line = f"{indent}{name}: {written}"
    line = f"{line:<35} # {comment}\n" if comment else f"{line}\n"
    start, end = 0, len(text)
    if section:
        if not (found := re.search(rf"^{section}:.*\n((?: .*|)\n)*", text, re.M)):
            return f"{text}\n{section}:\n{line}"
        start, end = text.index("\n", found.start()) + 1, found.end()
    nested = re.compile(rf"^{indent}{name}:.*\n(?:{indent} +.*\n)*", re.M)
    if old := nested.search(text, start, end):
        return text[: old.start()] + line + text[old.end() :]
    end = len(text[:end].rstrip("\n")) + 1
    return text[:end] + line + text[end:]


# ---- chat template, lengths and held-out prompts -----------------------------------------------------------------


def set_lengths(request: Request, jobs: dict[str, str]) -> set[str]:
    """Sets the smallest lengths, in steps of 64 tokens, that 99 % of the first rows fit into.

    If a stage reads messages and the base has no chat template, all jobs get the built-in one: plain text then becomes messages
    too, so that policy and reward model see one format. If the tokenizer or rows cannot be read, prints why and keeps the
    lengths of the profile, as far as the model's context allows. Returns the stages that can read none of their rows.
    """
    sizes, measured, refused, warnings = dict[str, tuple[int, int, int]](), set[str](), set[str](), []
    for stage in (stage for stage in TAKES if stage in jobs):
        try:
            job = loaded(request.folder, stage)
            base = job.model
            context = context_length(base_config(base.name_or_path, base.revision)) or 1 << 20
            sizes[stage] = (job.data.max_length or context, 0, context)  # if no row can be read
            tokenizer = load_tokenizer(
                base.name_or_path, base.revision, base.chat_template, base.trust_remote_code
            )
            as_chat = text_as_chat(tokenizer, job.data.apply_chat_template)
        except InputError as error:
            warnings.append(f"warning: {stage} keeps the lengths of the profile: {error}\n")
            continue
        try:
            records = [*first_records(stage, job.data)]
            if not as_chat and any(not isinstance(record.prompt, str) for _, record in records):
                for name in jobs:
                    jobs[name] = with_key(jobs[name], "model.chat_template", "plain")
                write(request, jobs)
                return set_lengths(request, jobs)
            sizes[stage] = (*longest(stage, job.data, tokenizer, as_chat, records, context), context)
            measured.add(stage)
        except InputError as error:
            warnings.append(f"warning: {stage}: {error}\n")
            refused.add(stage)
    print(*warnings, sep="", end="")
    learner = next((stage for stage in ("sft", "dpo", "kto") if stage in sizes), None)
    if learner and "ppo" not in jobs:  # generate completes the prompts of these rows
        sizes["ppo"] = (sizes[learner][0], 0, sizes[learner][2])
        measured |= {"ppo"} if learner in measured else set()
    completions = max((sizes[stage][1] for stage in ("sft", "rm", "kto") if stage in sizes), default=0)
    for job_name, text in jobs.items():
        if (stage := ROWS_OF.get(job_name, job_name)) not in sizes:
            continue
        prompt, completion, room = sizes[stage]
        if job_name in ("generate", "evaluate"):  # also for the chats that sft learns from
            prompt = max(prompt, sizes.get("sft", (0,))[0])
        if stage == "ppo":  # completions are not part of data.max_length
            answer = -(-completions // 16) * 16 or yaml.safe_load(text)["trainer"]["response_length"]
            answer = min(answer, room // 2)
            text = with_key(text, "trainer.response_length", answer, "tokens of a completion")
            room -= answer
        if job_name == "serve":
            jobs[job_name] = text
            continue
        wanted = -(-(prompt + completion) // 64) * 64
        known = "99 % of the first rows fit" if stage in measured else "as in the profile"
        fits = known if wanted <= room else "the model's context; longer rows exist"
        jobs[job_name] = with_key(text, "data.max_length", min(wanted, room), f"tokens; {fits}")
    return refused


def loaded(folder: Path, stage: str) -> Job:
    """Returns the job of a stage; a ppo job may still lack its reward."""
    return load_job(folder / f"{stage}.yaml", ["reward=models:/any/1"] if stage == "ppo" else [], stage)


def longest(
    stage: str, data: Data, tokenizer: Any, as_chat: bool, records: list[tuple[Kind, Record]], context: int
) -> tuple[int, int]:
    """Returns how many tokens cover 99 % of the prompts, and how many cover 99 % of the completions."""
    ends, special = eos_ids(tokenizer), data.parse_special_tokens
    examples, refused = list[Any](), list[RowError]()
    for kind, found in itertools.groupby(records, key=itemgetter(0)):
        encoder = Encoder(tokenizer, kind, context, "truncate", as_chat, ends, special)
        outcomes = itertools.chain.from_iterable(encoder.encode([record for _, record in found]))
        for outcome in outcomes:
            examples += [outcome] * isinstance(outcome, Example)
            refused += [outcome] if isinstance(outcome, RowError) else []
    if not examples:
        why = f": {refused[0].expected}" if refused else ""
        raise InputError(f"none of the first rows of {show(data.train)} can be read{why}")
    if (total := len(examples) + len(refused)) < 20 * len(refused):
        print(f"warning: {stage} leaves out {len(refused)} of the first {total} rows: {refused[0].expected}")
    prompts = sorted(example.prompt_tokens for example in examples)
    completions = sorted(example.completion_tokens for example in examples)
    at = int(0.99 * (len(examples) - 1))
    return prompts[at], completions[at]


def first_records(stage: str, data: Data) -> Iterator[tuple[Kind, Record]]:
    """Yields the first readable rows of each file of data.train."""
    files = find(data.train, "data.train")
    asked = {"train": [*map(unlabeled, preview.preprocessing(stage, data)["train"])]}
    preprocess = preview.resolve_labels(asked, {"train": files}, stage)["train"]
    for file in files:
        kind = kind_of(stage, preprocess[file.source])
        chunk = chunks.plan(file, "train", kind)[0]
        for _, row, _ in itertools.islice(chunks.rows(chunk), preview.ROWS):
            for made in kind.rows(row):
                record = checked(made, kind) if isinstance(made, dict) else None
                if isinstance(record, Record):
                    yield kind, record


def unlabeled(one: Preprocess) -> Preprocess:
    """Returns the preprocessing with `first` as `chosen`: prompts and lengths of a pair do not depend on its label."""
    columns = dict(one.columns)
    if one.rule is None and {"first", "second", "label"} <= columns.keys():
        del columns["label"]
        columns |= {"chosen": columns.pop("first"), "rejected": columns.pop("second")}
    return replace(one, columns=columns)


def set_prompts(folder: Path, jobs: dict[str, str]) -> None:
    """Makes evaluate read ppo's held-out prompts."""
    data: Any = loaded(folder, "ppo").data
    prompts = {record.prompt_content(): record.row for _, record in first_records("ppo", data)}
    away = [json.loads(row) for content, row in prompts.items() if held_out(content, data)]
    for row in away:
        row.pop("system", None)  # it is in the prompt
    path = folder / "eval_prompts.jsonl"
    jobs["evaluate"] = with_prompts(jobs["evaluate"], "eval", path, away)
    print(f"  {path}: {len(away)} prompt{'s' * (len(away) != 1)} that ppo holds out, for evaluate")


def write_rounds(folder: Path, jobs: dict[str, str]) -> None:
    """Writes the script that repeats collect, dpo and evaluate, for the rows that dpo reads."""
    text = (shipped.JOBS / "demo/iterate.sh").read_text(encoding="utf-8")
    text = text.replace("jobs/demo/", f"{folder}/").replace("`make sft rm`", "the runs that collect needs")
    if {*OF_ROWS} & {*yaml.safe_load(jobs["dpo"])["data"]}:  # collected rows have the columns that dpo reads
        nothing = " ".join(f"data.{key}=null" for key in (*OF_ROWS, "eval"))
        text = text.replace("data.train=", f"{nothing} data.eval_fraction=0.1 \\\n    data.train=")
    (folder / "iterate.sh").write_text(text, encoding="utf-8")
    print(f"  {folder}/iterate.sh: rounds of collect, dpo and evaluate")


def with_prompts(text: str, key: str, path: Path, rows: list[dict[str, Any]]) -> str:
    """Writes a file of prompts. Returns the text of a job that reads it: the columns of the source are not the file's."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows[:EVAL_PROMPTS]]
    path.write_text("".join(lines), encoding="utf-8")
    text = with_key(text, f"data.{key}", str(path))
    return with_key(text, "data.columns", None) if "columns" in yaml.safe_load(text)["data"] else text
