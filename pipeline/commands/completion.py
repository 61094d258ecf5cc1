"""Prints a completion script for bash and zsh, which completes subcommands, job files, and the keys of a subcommand's job.

source <(rlhf completion)        in ~/.bashrc or ~/.zshrc
"""

from pipeline.commands import COMMANDS, SUMMARIES
from pipeline.job import TRAIN_STAGES
from pipeline.job.schema import keys_of
from pipeline.job.stages import STAGE_SPECS

SCRIPT = """\
# Made by `rlhf completion` for the installed versions. Run it again after an upgrade.
if [ -n "$ZSH_VERSION" ]; then autoload -U +X bashcompinit && bashcompinit; fi
_rlhf() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} keys=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{verbs}" -- "$word"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  COMPREPLY=($(compgen -W "$keys" -- "$word"))
  if [[ $word != *=* ]]; then COMPREPLY+=($(compgen -d -- "$word") $(compgen -f -X '!*.yaml' -- "$word")); fi
  if [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}}
complete -o filenames -F _rlhf rlhf
"""


def run(path: str, overrides: list[str]) -> None:
    print(completion_script(list(SUMMARIES)), end="")


def completion_script(verbs: list[str]) -> str:
    """Returns the completion script for some subcommands."""
    cases = []
    for verb in verbs:
        takes, stage = ("job", verb) if verb in STAGE_SPECS else COMMANDS[verb][1:]
        stages = [stage] if stage else TRAIN_STAGES if takes == "job" or verb == "sweep" else []
        specs = [(stage, spec) for stage, spec in STAGE_SPECS.items() if stage in stages]
        names = {key for stage, spec in specs for key in (*keys_of(stage), *spec.inputs)}
        keys = " ".join(f"{key}=" for key in sorted(names))
        cases.append(f'    {verb}) keys="{keys}" ;;')
    return SCRIPT.format(verbs=" ".join(verbs), cases="\n".join(cases))
