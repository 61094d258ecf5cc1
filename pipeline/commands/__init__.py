"""The subcommands that are not stages: a file each, and a row in this table."""

from typing import Literal, NamedTuple

from pipeline.config.stages import STAGE


class Command(NamedTuple):
    """A subcommand. Its file has `run(job)`, or `run(path, overrides)` if it reads the job files itself."""

    summary: str  # one line for --help
    # The arguments: a stage's job file, a file that the subcommand reads itself, or other words (__main__.parser).
    takes: Literal["job", "file", "folder", "rows", "runs", "key", "nothing"] = "file"
    stage: str | None = None  # the only stage whose jobs it takes, or None for any stage


COMMANDS = {
    "demo": Command(
        "writes jobs/demo to the current folder, and runs its sft, rm, ppo and evaluate", "nothing"
    ),
    "init": Command("writes a profile of jobs for your rows", "rows"),
    "chat": Command("talk with a policy in the terminal", "job", "generate"),
    "validate": Command("read the data of a job and report on it, without training", "job"),
    "plan": Command("memory, time and money that a job will need, from shapes alone", "job"),
    "sweep": Command(
        "a job with several values of some keys, side by side on Ray Tune; the best one is registered"
    ),
    "rlhf": Command("sft, rm, ppo and evaluate of a folder of jobs, in one Ray session", "folder"),
    "report": Command("a page about a run, or several: curves, samples, lineage, data, job", "runs"),
    "help": Command("type, default, range and meaning of keys of a job", "key"),
    "completion": Command(
        "a script that lets bash or zsh complete subcommands, job files and keys", "nothing"
    ),
}
SUMMARIES = {name: stage.summary for name, stage in STAGE.items()} | {
    name: command.summary for name, command in COMMANDS.items()
}


def stages_of(verb: str) -> list[str]:
    """Returns the stages whose jobs a subcommand takes."""
    if verb in STAGE:
        return [verb]
    command = COMMANDS[verb]
    if verb != "sweep" and command.takes != "job":
        return []
    return [command.stage] if command.stage else [name for name in STAGE if STAGE[name].runs_in == "train"]
