"""The command line: one verb for each stage.

    python -m pipeline VERB JOB.yaml [section.key=value ...]        installed, also: rlhf VERB ...
    python -m pipeline rlhf jobs/demo [section.key=value ...]

Exit status: 0 done, 1 the run failed (with its traceback), 2 the command, the job file or the data is wrong
(`error: ...`), 130 interrupted, 143 terminated. With RAY_ADDRESS=http://HEAD:8265 the stages run as jobs on that cluster
(pipeline/cloud/submit.py).
"""

import argparse
import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from pipeline.config.stages import STAGE
from pipeline.errors import Failure, InputError, causes
from pipeline.system import process, signals
from pipeline.system.credentials import without_credentials

# Verbs that are no stages.
COMMANDS = {
    "demo": "writes jobs/demo where it is typed, and runs its sft, rm, ppo and evaluate",
    "init": "writes jobs for a file of one's own rows",
    "chat": "talk with a policy in the terminal",
    "validate": "read the data of a job and report on it, without training",
    "plan": "memory, time and money that a job will need, from shapes alone",
    "doctor": "one rollout and one minibatch of a ppo job, examined from all sides",
    "sweep": "a job with several values of some keys, side by side on Ray Tune; the best one is registered",
    "iterate": "rounds of collect, training and evaluate on a policy's own completions: online DPO, rejection sampling",
    "rlhf": "sft, rm, ppo and evaluate of a folder of jobs, on one Ray",
    "report": "a page about a run, or several: curves, samples, lineage, data, job",
    "completion": "a script that lets bash or zsh complete verbs, job files and keys",
}
VERBS = {name: stage.summary for name, stage in STAGE.items()} | COMMANDS

# Verbs that take the job file of a stage with another name; None: of any stage.
JOBS_OF = {
    **dict.fromkeys(("sweep", "validate", "plan", "doctor")),
    "chat": "generate",
}

# Verbs that run on this machine, with models that a cluster may have trained.
HERE = ("chat", "export")

EXAMPLES = """\
examples:
  python -m pipeline rlhf jobs/demo
  python -m pipeline validate jobs/demo/sft.yaml data.train=my.jsonl
  python -m pipeline sft jobs/demo/sft.yaml trainer.learning_rate=1e-4 scaling.num_workers=2
  python -m pipeline chat jobs/demo/generate.yaml policy=models:/rlhf-sft@champion
  python -m pipeline sweep jobs/demo/rm.yaml trainer.learning_rate=1e-3,2e-3,4e-3 lora.r=8,16
  python -m pipeline ppo jobs/demo/ppo.yaml policy=models:/rlhf-sft/3 run.name=ppo-kl trainer.kl_coef=0.02

A value is YAML: data.train=[a.jsonl,b.jsonl], data.eval=null. Keys are the job file's; jobs/demo/*.yaml explains them.
The same run.name again continues that run; run.fresh=true starts it over.
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="rlhf" if Path(sys.argv[0]).name == "rlhf" else "python -m pipeline",
        description="RLHF on Ray: train, compare and register LoRA adapters. One job file is one run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, summary in VERBS.items():
        sub = verbs.add_parser(
            verb,
            help=summary,
            description=summary,
            epilog=EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if verb == "report":
            sub.add_argument(
                "job", nargs="?", metavar="RUN", help="a run's folder, its name under runs/, or its MLflow id"
            )
            sub.add_argument(
                "overrides", nargs="*", default=[], metavar="RUN", help="further runs, on the same page"
            )
            continue
        if verb == "completion":
            sub.set_defaults(job="", overrides=[])
            continue
        if verb == "init":
            sub.add_argument(
                "job", metavar="FILE", help="rows: a path, a glob, a folder, s3://, gs://, hf://"
            )
            sub.add_argument("overrides", nargs="?", default="own", metavar="PROFILE", help="default: own")
            continue
        if verb == "demo":
            sub.set_defaults(job="")
        elif verb == "rlhf":
            sub.add_argument(
                "job", metavar="FOLDER", help="a folder with sft.yaml, rm.yaml, ppo.yaml and evaluate.yaml"
            )
        else:
            sub.add_argument("job", metavar="JOB.yaml", help="a job file, for example jobs/demo/sft.yaml")
        sub.add_argument(
            "overrides",
            nargs="*",
            default=[],
            metavar="section.key=value",
            help="replaces that value of the job; of a sweep, key=a,b,c varies it",
        )
    return top


def dispatch(verb: str, path: str, overrides: list[str]) -> int:
    """Checks the job, then imports the stage and runs it, here or on a cluster; returns the exit status.

    The job is checked first, so that its mistakes are reported at once.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise InputError("the current folder was deleted; change into one that exists") from error
    if verb == "demo":
        from pipeline.commands import shipped

        verb, path = "rlhf", str(shipped.bring("demo"))
    if address := os.environ.get("RAY_ADDRESS"):
        from pipeline.cloud import address as addresses
        from pipeline.cloud import submit

        if verb in submit.VERBS and addresses.is_dashboard(address):
            return submit.submit_and_follow(verb, path, overrides)
        if verb in submit.VERBS:
            addresses.check(address)
    if verb == "rlhf":
        importlib.import_module("pipeline.commands.rlhf").run(path, overrides)
        return 0
    if verb == "iterate":
        importlib.import_module("pipeline.commands.iterate").run(path, overrides)
        return 0
    if verb == "sweep":
        importlib.import_module("pipeline.commands.sweep").run(path, overrides)
        return 0
    if verb == "completion":
        importlib.import_module("pipeline.commands.completion").run(list(VERBS), JOBS_OF)
        return 0
    if verb == "init":
        importlib.import_module("pipeline.commands.init").run(path, overrides)
        return 0
    if verb == "report":
        importlib.import_module("pipeline.commands.report").run([*filter(None, [path]), *overrides])
        return 0
    from pipeline.config import STAGES, load_job

    job = load_job(path, overrides, JOBS_OF.get(verb, verb))
    if address and verb in HERE and addresses.is_dashboard(address):
        submit.check_registry(verb, job)
    importlib.import_module(f"pipeline.{'stages' if verb in STAGES else 'commands'}.{verb}").run(job)
    return 0


def input_error(error: BaseException, kind: Any = InputError) -> Any:
    """The InputError (or another `kind`) that Ray wrapped between a worker and the driver; None if there is none."""
    for one in causes(error):
        # A RayTaskError may itself pass for an InputError, with a traceback as its text.
        if isinstance(one, kind) and not isinstance(getattr(one, "cause", None), kind):
            return one
    return None


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; the exit status."""
    options = parser().parse_args(arguments)
    try:
        return dispatch(options.verb, options.job, options.overrides)
    except KeyboardInterrupt as stop:
        return stopped("interrupted", options.verb, 130, stop)
    except SystemExit as error:
        if signal := signals.received or signals.of_ray():
            return stopped(f"terminated by {signal.name}", options.verb, 128 + signal, error)
        return failed(f"{caller(error)} called sys.exit({error.code!r}), which no run may do")
    except Exception as error:
        if wrong := input_error(error):
            print(f"error: {without_credentials(str(wrong))}", file=sys.stderr)
            return 2
        if failure := input_error(error, Failure):
            return failed(str(failure))
        print(without_credentials(traceback.format_exc()), end="", file=sys.stderr)
        return 1


def stopped(how: str, verb: str, status: int, stop: BaseException) -> int:
    """Prints how a signal ended the run, and how to continue it; returns `status`."""
    several = verb in ("rlhf", "demo")
    resumable = (
        several
        or verb in ("sweep", "iterate")
        or (verb in STAGE and STAGE[verb].runs_in in ("train", "data"))
    )
    name = "the same run.name"
    # STAGE.run.name=NAME, of the run that was open (runtime/run.py); sweeps and iterations have names of their own
    for note in getattr(stop, "__notes__", []) if verb not in ("sweep", "iterate") else []:
        name = note if several else note.partition(".")[2]
    further = f"; the same command with {name} continues from the last checkpoint, if there is one"
    with signals.ignored():
        print(f"\n{how}{further if resumable else ''}", file=sys.stderr)
    return status


def failed(why: str) -> int:
    print(f"failed: {without_credentials(why)}", file=sys.stderr)
    return 1


def caller(error: SystemExit) -> str:
    """The line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def command() -> None:
    """The console command `rlhf`."""
    sys.exit(process.run(main))


if __name__ == "__main__":
    command()
