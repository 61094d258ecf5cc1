"""The museum of bugs: every bug of exhibits.py is planted in turn; do the self-checks name it?

    make museum
    make museum ARGS="--scene dpo --say"

Prints a table, and writes it with what was said into runs/museum. Exit status 1 if fewer than 95 % are named, or if a
check fails where nothing is planted.
"""

import argparse
import re
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import torch  # noqa: E402
from exhibits import EXHIBITS  # noqa: E402
from scenes import adapters, of_pair, of_ppo, of_stage, visit  # noqa: E402

GOAL = 0.95
SCENES = ("ppo", "pair", "sft", "rm", "dpo", "kto")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make museum", description=__doc__.splitlines()[0])
    parser.add_argument("--scene", choices=SCENES, help="one kind of run only")
    parser.add_argument("--only", help="exhibits whose name contains this")
    parser.add_argument("--say", action="store_true", help="print what was said")
    parser.add_argument("--out", type=Path, default=Path("runs/museum"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [
        (number, exhibit)
        for number, exhibit in enumerate(EXHIBITS)
        if options.scene in (None, exhibit.scene) and (options.only or "") in exhibit.name
    ]
    started, lines, named, alarms = time.monotonic(), [], 0, 0
    for scene in SCENES:
        if options.scene in (None, scene):
            said = unharmed(scene)
            alarms += bool(said)
            print(f"{scene:<5} {'FALSE ALARM' if said else 'quiet':<12} nothing planted", *said, flush=True)
    for number, exhibit in chosen:
        said = visit(exhibit, number)
        holds = bool(exhibit.cause) and any(re.search(exhibit.cause, line, re.DOTALL) for line in said)
        named += holds
        word = "named" if holds else "seen" if said else "not seen"
        lines.append(
            f"| {exhibit.name} | {exhibit.scene} | {word} | {(said or [exhibit.unnamed])[0][:160]} |"
        )
        print(f"{exhibit.scene:<5} {word:<12} {exhibit.name}", flush=True)
        if options.say or not holds:
            print(*(f"        {line[:600]}" for line in said or [exhibit.unnamed]), sep="\n", flush=True)
    share = named / max(len(chosen), 1)
    summary = f"{named} of {len(chosen)} named ({share:.0%}), {alarms} false alarms; {time.monotonic() - started:.0f} s"
    print(summary)
    options.out.mkdir(parents=True, exist_ok=True)
    head = "| fault | run | | what is said first |\n|---|---|---|---|\n"
    (options.out / "museum.md").write_text(head + "\n".join(lines).replace("\n  ", " ") + f"\n\n{summary}\n")
    return int(share < GOAL or alarms > 0)


def unharmed(scene: str) -> list[str]:
    """What is said about a sound run."""
    inputs = adapters()
    if scene == "pair":
        return of_pair(-1, inputs=inputs)
    return of_ppo(inputs=inputs) if scene == "ppo" else of_stage(scene, inputs=inputs)


if __name__ == "__main__":
    sys.exit(main())
