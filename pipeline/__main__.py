"""Command-line interface: a subcommand for each stage and for each file in pipeline/commands.

    python -m pipeline VERB JOB.yaml [section.key=value ...]        installed, also: rlhf VERB ...
    python -m pipeline run jobs/demo [section.key=value ...]

The exit status is 0 on success, 1 if the run failed, 2 if the command, the job file or the data is wrong, 130 after Ctrl-C, and
143 after SIGTERM. If RAY_ADDRESS is http://HEAD:8265, the stages run as jobs on that cluster (pipeline/cloud/submit.py).
"""

import argparse
import errno
import importlib
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from pipeline.commands import COMMANDS, SUMMARIES
from pipeline.errors import Failure, InputError, causes_of, in_brief
from pipeline.job import RESUMABLE, TRAIN_STAGES, command_line
from pipeline.job.schema import suggest_known_key
from pipeline.system import process, terminal
from pipeline.system.credentials import take_forwarded, without_secrets

VALUE = "replaces a key's value, also written --section.key value; a sweep runs all values of key=a,b,c"
KEY_VALUE = ("section.key=value", VALUE)
# {Command.takes: (name and description of the first argument, name and description of the others)}
WORDS = {
    "job": ("JOB.yaml", "a job file, for example jobs/demo/sft.yaml", *KEY_VALUE),
    "file": ("JOB.yaml", "a job file, for example jobs/demo/rm.yaml", *KEY_VALUE),
    "folder": ("FOLDER", "a folder with sft.yaml, rm.yaml, ppo.yaml and evaluate.yaml", *KEY_VALUE),
    "nothing": ("", "", *KEY_VALUE),
    "rows": (
        "FILE",
        "rows: a path, a glob, a folder, s3://, gs://, hf://",
        "--name NAME --model MODEL --profile PROFILE data.columns=COLUMNS reward=REWARD",
        "name and base of the jobs; the profile whose jobs are copied (default: own); the columns of your rows; the reward of ppo",
    ),
    "key": ("KEY", "section.key, or a section", "KEY", "more keys or sections"),
    "runs": ("RUN", "a run's folder, or its name under runs/", "RUN", "more runs"),
}

# Subcommands that run on this machine even if RAY_ADDRESS is set. These subcommands use models that the cluster has trained.
HERE = ("chat", "export")

EXAMPLES = """\
examples:
  python -m pipeline run jobs/demo
  python -m pipeline validate jobs/demo/sft.yaml data.train=my.jsonl
  python -m pipeline sft jobs/demo/sft.yaml trainer.learning_rate=1e-4 scaling.num_workers=2
  python -m pipeline chat jobs/demo/generate.yaml policy=models:/rlhf-sft@champion
  python -m pipeline sweep jobs/demo/rm.yaml trainer.learning_rate=1e-3,2e-3,4e-3 lora.r=8,16
  python -m pipeline ppo jobs/demo/ppo.yaml policy=models:/rlhf-sft/3 run.name=ppo-kl trainer.kl_coef=0.02

A value is YAML: data.train=[a.jsonl,b.jsonl], data.eval=null. Keys are the job file's; jobs/demo/*.yaml explains them.
The same run.name again continues that run; run.overwrite=true starts it over.
"""


def parser() -> argparse.ArgumentParser:
    settings: dict[str, Any] = {"epilog": EXAMPLES, "formatter_class": argparse.RawDescriptionHelpFormatter}
    root = argparse.ArgumentParser(
        prog="rlhf" if Path(sys.argv[0]).name == "rlhf" else "python -m pipeline",
        description="RLHF on Ray: train, compare and register LoRA adapters. One job file is one run.",
        **settings,
    )
    verbs = root.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, summary in SUMMARIES.items():
        subparser = verbs.add_parser(verb, help=summary, description=summary, **settings)
        verbose_help = "also print the lines of runs/NAME/log.txt"
        subparser.add_argument("-v", "--verbose", action="store_true", help=verbose_help)
        subparser.add_argument("-q", "--quiet", action="store_true", help="only show errors and the result")
        takes = COMMANDS[verb].takes if verb in COMMANDS else "job"
        name, meaning, others, others_meaning = WORDS[takes]
        subparser.set_defaults(job="", overrides=[])
        if name:
            subparser.add_argument("job", metavar=name, help=meaning, nargs="?" if takes == "runs" else None)
        if verb != "completion":
            subparser.add_argument("overrides", nargs="*", default=[], metavar=others, help=others_meaning)
    return root


def normalize_arguments(arguments: list[str]) -> list[str]:
    """Returns the arguments with `--section.key value` rewritten to `section.key=value`. Applies -v and -q.

    Raises InputError if the subcommand is unknown, or if a value is missing.
    """
    if arguments and not arguments[0].startswith("-") and arguments[0] not in SUMMARIES:
        raise InputError(f"unknown subcommand {arguments[0]!r}; {suggest_known_key(arguments[0], SUMMARIES)}")
    words, options, rest = [], [], iter(arguments)
    for word in rest:
        if word in terminal.FLAGS:
            terminal.screen.level = terminal.FLAGS[word]
            continue
        option = re.fullmatch(r"--(\w[\w.-]*)(?:=(.*))?", word, re.DOTALL)
        if option is None or option[1] == "help":
            words.append(word)
            continue
        value = next(rest, None) if option[2] is None else option[2]
        if value is None:
            raise InputError(f"a value is missing; for example {option[1]}=VALUE", key=option[1])
        options.append(f"{option[1]}={value}")
    return words + options


def run_subcommand(verb: str, path: str, overrides: list[str]) -> int:
    """Checks the job, then runs it here or on a cluster. Returns the exit status.

    Checks the job first, because importing libraries and starting Ray takes seconds.
    """
    if verb == "demo":
        from pipeline.commands import shipped

        verb, path = "run", str(shipped.copy_profile("demo"))
    if address := os.environ.get("RAY_ADDRESS"):
        from pipeline.cloud import submit

        if verb in submit.VERBS and submit.is_dashboard(address):
            return submit.submit_and_follow(verb, path, overrides)
        if verb in submit.VERBS:
            submit.check_address(address)
    command = COMMANDS.get(verb)
    trains = verb in TRAIN_STAGES
    module = f"pipeline.{'stages' if trains else 'commands'}.{verb}"
    if command and command.takes != "job":
        importlib.import_module(module).run(path, overrides)
        return 0
    from pipeline.job import load_job, make_target

    job = load_job(path, overrides, command.stage if command else verb)
    if address and verb in HERE and submit.is_dashboard(address):
        references = [job.model.name_or_path, *job.inputs.values()]
        submit.check_registry(make_target(verb, job.source), references, job.mlflow.tracking_uri)
    code = importlib.import_module(module)
    if trains:
        from pipeline import report
        from pipeline.run.launch import launch

        result = launch(job, code.RECIPE)
        if job.run.report:
            report.of_run(result)
    else:
        code.run(job)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand. Returns the exit status."""
    take_forwarded()
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        parser().print_help(sys.stderr)
        return 2
    try:
        options = parser().parse_args(normalize_arguments(arguments))
    except InputError as error:
        return print_end("error", str(error), 2)
    try:
        return run_subcommand(options.verb, options.job, options.overrides)
    except KeyboardInterrupt as stop:
        return print_stop("interrupted", options.verb, 130, stop)
    except SystemExit as error:
        # Until Ray has started, Ray's own SIGTERM handler calls sys.exit(15).
        if number := process.received or (signal.SIGTERM if error.code == signal.SIGTERM else None):
            return print_stop(f"terminated by {number.name}", options.verb, 128 + number, error)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{frame.filename}:{frame.lineno} called sys.exit({error.code!r}), which no run may do"
        return print_end("failed", reason, 1)
    except Exception as error:
        if problem := input_error(error):
            print_end("error", str(problem), 2)
            if problem.change:
                retry = command_line(options.verb, options.job, [*options.overrides, problem.change])
                print(f"run: {without_secrets(retry)}", file=sys.stderr)
            return 2
        if failure := input_error(error, Failure):
            return print_end("failed", str(failure), 1)
        codes = (errno.ENOSPC, errno.EDQUOT)
        if disk_full := [cause for cause in causes_of(error) if getattr(cause, "errno", None) in codes]:
            reason = f"{in_brief(disk_full[0])}; free disk space, then run the same command again"
            return print_end("failed", reason, 1)
        print(without_secrets(traceback.format_exc()), end="", file=sys.stderr)
        return 1


def input_error(error: BaseException, kind: Any = InputError) -> Any:
    """Returns the first error of class `kind` among an error and its causes, or None.

    Ray wraps a worker's error in a RayTaskError, which may be an instance of InputError with a traceback as its text.
    """
    for cause in causes_of(error):
        if isinstance(cause, kind) and not isinstance(getattr(cause, "cause", None), kind):
            return cause
    return None


def print_end(outcome: str, reason: str, status: int) -> int:
    """Prints why a command ended. Returns `status`."""
    print(f"{outcome}: {without_secrets(reason)}", file=sys.stderr)
    return status


def print_stop(outcome: str, verb: str, status: int, stop: BaseException) -> int:
    """Prints which signal ended the run, and how to continue the run. Returns `status`."""
    own_names = verb == "sweep"
    resumable = verb in ("run", "demo", "sweep", *RESUMABLE)
    # The error's last note is `run.name=NAME`. The open run adds this note, or `run` adds one for all stages.
    name = ["the same run.name", *getattr(stop, "__notes__", [])][0 if own_names else -1]
    advice = f"; the same command with {name} continues from the last checkpoint, if there is one"
    with process.signals_ignored():
        print(f"\n{outcome}{advice if resumable else ''}", file=sys.stderr)
    return status


def command() -> None:
    """Runs the console command `rlhf`. Like `python -m pipeline`, `rlhf` imports Python functions from the current folder."""
    sys.path.append("")
    sys.exit(process.run_main(main))


if __name__ == "__main__":
    command()
