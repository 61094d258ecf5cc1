"""Lists the subcommands that are not stages. Each has a row in this table and a file in this folder."""

from typing import Literal, NamedTuple

from pipeline.job.stages import STAGE_SPECS


class Command(NamedTuple):
    """A subcommand. Its file defines `run(job)`, or `run(path, overrides)` if the subcommand reads the job files itself."""

    summary: str  # one line for --help
    # Arguments after the subcommand: `job` is a job file that is checked first, `file` is a file that the subcommand itself reads
    takes: Literal["job", "file", "folder", "rows", "runs", "key", "nothing"] = "file"
    stage: str | None = None  # the only stage whose jobs the subcommand takes, or None for any stage


COMMANDS = {
    "demo": Command("write jobs/demo to this folder, and run it", "nothing"),
    "init": Command("write a profile of jobs for your rows", "rows"),
    "chat": Command("talk with a policy in the terminal", "job", "generate"),
    "validate": Command("read the rows of a job and report on them, without training", "job"),
    "plan": Command("estimate the memory, time and money that a job needs", "job"),
    "sweep": Command("train with several values of some keys, and register the best"),
    "run": Command("run sft, rm, ppo and evaluate of a folder of jobs", "folder"),
    "report": Command("write a page about one run or several", "runs"),
    "help": Command("explain keys of a job: type, default, range and meaning", "key"),
    "completion": Command("print a script for completion in bash or zsh", "nothing"),
}
SUMMARIES = {name: spec.summary for name, spec in STAGE_SPECS.items()} | {
    name: command.summary for name, command in COMMANDS.items()
}
