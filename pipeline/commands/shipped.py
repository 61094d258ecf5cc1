"""Copies the project's job files to the current folder. pipeline/jobs links to jobs/ in a clone; a wheel contains a copy."""

import shutil
from pathlib import Path

import pipeline
from pipeline.errors import InputError

JOBS = Path(pipeline.__file__).parent / "jobs"  # has a folder for each profile: demo, own, llama3-8b, ...
# Folders under JOBS in a wheel. In a clone, JOBS also contains the user's profiles.
FOLDERS = "cloud demo examples llama3-70b llama3-70b-qlora llama3-8b llama3-8b-qlora own".split()


def shipped_profiles() -> list[str]:
    """Returns the names of the profiles, which are the folders with an evaluate.yaml."""
    return sorted(file.parent.name for file in JOBS.glob("*/evaluate.yaml"))


def copy_profile(profile: str) -> Path:
    """Copies a profile to jobs/<profile> in the current folder if that folder does not exist. Returns the folder."""
    target, source = Path("jobs") / profile, JOBS / profile
    if target.is_dir():
        return target
    try:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        write_schema(target.parent)
    except OSError as error:
        raise InputError(
            f"{target} cannot be written ({error.strerror or error}); change into a folder that you can write to"
        ) from error
    print(f"wrote {target}: job files to read and change", flush=True)
    return target


def write_schema(folder: Path) -> None:
    """Copies schema.json into `folder`, the parent of the job files' folder.

    The first line of each job file links to this copy.
    """
    if not (file := folder / "schema.json").exists():
        file.unlink(missing_ok=True)  # a copy of jobs/ has a link to a file of the clone
        shutil.copyfile(JOBS / "schema.json", file)
