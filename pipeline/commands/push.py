"""An exported folder pushed to the Hugging Face hub, or what would be pushed.

    make export ARGS="reward=null trainer.hub_model_id=OWNER/NAME"                              sends nothing
    make export ARGS="reward=null trainer.hub_model_id=OWNER/NAME trainer.push_to_hub=true"     pushes

The token comes from HF_TOKEN alone. A push is one commit: whoever loads the repository sees the old files or the new ones. A
repository that an earlier export filled gets its files replaced (its history keeps them); one with other content is refused.
After an interruption the same command goes on: what has arrived is not sent again.
"""

import os
from typing import Any

from pipeline.commands.card import MADE_HERE, problem
from pipeline.config import Job
from pipeline.errors import Failure, InputError, in_brief
from pipeline.system import deadline, storage
from pipeline.system.credentials import without_credentials
from pipeline.system.progress import size

TOKENS = "https://huggingface.co/settings/tokens"
CARD_LINES = 24  # of the card that a dry run shows


def check(job: Job) -> None:
    """Before anything is merged: that the hub knows the token, and that the repository may be written to.

    A job that does not push asks the hub nothing.

    Raises:
        InputError: with what to type.
    """
    if not job.args.push_to_hub:
        return
    from huggingface_hub import constants

    if constants.is_offline_mode():
        raise InputError(
            "HF_HUB_OFFLINE is set, so nothing can be pushed; leave it out", "trainer.push_to_hub"
        )
    _answered(job, _may_write, job)


def push(job: Job, result: dict[str, Any]) -> dict[str, Any]:
    """Pushes what was exported, or says what would be pushed; the result, with where it went.

    Raises:
        Failure: when the hub refuses it, or stops answering.
    """
    kind = "policy" if job.policy else "reward"
    if kind not in result["exported"]:
        raise InputError(
            f"{result['name']!r} exported no {kind}; type run.fresh=true or another run.name", key="run.name"
        )
    folder = result["exported"][kind]["folder"]
    with open(os.path.join(folder, "README.md"), encoding="utf-8") as file:
        card = file.read()
    if wrong := problem(card):
        raise Failure(f"the model card of {folder} is not valid ({wrong}); nothing was sent")
    if not job.args.push_to_hub:
        _say(job, folder, card)
        return result
    print(f"pushing {folder} to {_address(job)}", flush=True)
    try:
        commit = _send(job, folder, result["name"])
    except Exception as error:  # the HTTP client, and the uploader beside it, have types of their own
        again = f"the same command with run.name={result['name']} goes on without merging again"
        raise Failure(f"{_refusal(job, error)}; {again}") from error
    print(f"   {_address(job)}  commit {commit[:12]}", flush=True)
    result = result | {
        "hub": {
            "repo_id": job.args.hub_model_id,
            "revision": job.args.hub_revision or "main",
            "commit": commit,
        }
    }
    storage.write_json(storage.join(result["folder"], "result.json"), result)
    return result


def _send(job: Job, folder: str, run: str) -> str:
    """Makes repository and branch if there are none, and puts the folder's files there; the commit."""
    api, repo, branch = _hub(), job.args.hub_model_id, job.args.hub_revision
    _may_write(job)  # again: merging takes a while, and somebody may have pushed meanwhile
    api.create_repo(repo, private=job.args.hub_private_repo, exist_ok=True)
    if branch:
        api.create_branch(repo, branch=branch, exist_ok=True)
    before = api.repo_info(repo, revision=branch)
    return str(
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=branch,
            parent_commit=before.sha,  # refused if somebody else has pushed meanwhile
            delete_patterns="*",  # what an earlier push left: an adapter beside merged weights would be loaded onto them
            commit_message=f"{'Merged model' if job.args.merge else 'Adapter'} from {run}",
        ).oid
    )


def _may_write(job: Job) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    api, repo, branch = _hub(), job.args.hub_model_id, job.args.hub_revision
    api.whoami()
    try:
        public = not api.repo_info(repo).private
    except RepositoryNotFoundError:
        return  # it is made
    if job.args.hub_private_repo and public:
        raise InputError(
            f"{repo} is there already, and is public; type trainer.hub_private_repo=false, or another name",
            "trainer.hub_model_id",
        )
    try:
        found = api.repo_info(repo, revision=branch)
    except RevisionNotFoundError:
        return  # the branch is made
    files = {file.rfilename for file in found.siblings or []} - {".gitattributes"}
    if files and not _made_here(api, repo, found.sha, files):
        raise InputError(
            f"{repo} holds files that no export made ({', '.join(sorted(files)[:4])}); type another trainer.hub_model_id, or "
            "trainer.hub_revision=BRANCH for a branch of its own",
            "trainer.hub_model_id",
        )


def _made_here(api: Any, repo: str, commit: str, files: set[str]) -> bool:
    """Whether the repository's card says that an export wrote it."""
    from huggingface_hub import ModelCard

    if "README.md" not in files:
        return False
    path = api.hf_hub_download(repo, "README.md", revision=commit)
    with open(path, encoding="utf-8", errors="replace") as file:
        try:
            said = ModelCard(file.read(), ignore_metadata_errors=True).data
        except Exception:  # of YAML
            return False
    return MADE_HERE in (said.get("tags") or [])


def _hub() -> Any:
    from huggingface_hub import HfApi

    token = os.environ.get("HF_TOKEN", "").strip()
    if not token:
        raise InputError(
            f"HF_TOKEN is not set; make a token that may write at {TOKENS}, then `export HF_TOKEN=...`",
            "trainer.push_to_hub",
        )
    return HfApi(token=token)


def _answered(job: Job, call: Any, *arguments: Any) -> Any:
    try:
        return deadline.answer(call, *arguments)
    except InputError:
        raise
    except Exception as error:  # the HTTP client has types of its own
        raise InputError(_refusal(job, error), "trainer.push_to_hub") from error


def _refusal(job: Job, error: Exception) -> str:
    """Why the hub took nothing, in words, and what to do."""
    from huggingface_hub.errors import HTTPError

    repo = job.args.hub_model_id
    owner = repo.partition("/")[0]
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = without_credentials(in_brief(error))
    if status == 401:
        return f"the hub does not know this HF_TOKEN (HTTP 401); make one that may write at {TOKENS}, then `export HF_TOKEN=...`"
    if status == 403:
        return (
            f"the account of this HF_TOKEN may not write to {repo} (HTTP 403): take a token with write access to {owner!r} "
            f"({TOKENS}), or another owner in trainer.hub_model_id"
        )
    if status in (409, 412):
        return f"{repo} was changed by another push meanwhile (HTTP {status}), and nothing was replaced"
    if status is not None:
        return f"the hub refused it (HTTP {status}: {said})"
    if isinstance(error, (HTTPError, OSError)):
        return f"the hub cannot be reached ({said})"
    return f"the upload failed ({said})"


def _say(job: Job, folder: str, card: str) -> None:
    """What a push would do; asks nobody."""
    owner = job.args.hub_model_id.partition("/")[0]
    files = sorted(name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name)))
    sizes = [os.path.getsize(os.path.join(folder, name)) for name in files]
    visibility = "private" if job.args.hub_private_repo else "public"
    width = max(map(len, files))
    head = card.splitlines()[:CARD_LINES]
    print(
        "\n".join(
            [
                "",
                "dry run: nothing was sent. With trainer.push_to_hub=true this goes",
                f"   to     {_address(job)}, {visibility} if it has to be made",
                f"   as     a user who may write to {owner!r}: HF_TOKEN, which is {'set' if os.environ.get('HF_TOKEN') else 'not set'}",
                f"   in     {len(files)} files, {size(sum(sizes))}",
                *(
                    f"          {name:{width}}  {size(count):>8}"
                    for name, count in zip(files, sizes, strict=True)
                ),
                "   under  the card",
                *(f"          {line}" for line in head),
            ]
        ),
        flush=True,
    )
    if "base_model:" not in card and not job.args.merge:
        print(
            f"warning: the base is a folder, {job.model.name_or_path}: nobody else can load an adapter on it",
            flush=True,
        )


def _address(job: Job) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{job.args.hub_model_id}, branch {job.args.hub_revision or 'main'}"
