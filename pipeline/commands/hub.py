"""Writes the model card of an exported folder, and pushes the folder to the Hub.

    make export ARGS="reward=null trainer.hub_model_id=OWNER/NAME"                              sends nothing
    make export ARGS="reward=null trainer.hub_model_id=OWNER/NAME trainer.push_to_hub=true"     pushes

The token comes only from HF_TOKEN. A push is one commit, so a download never mixes old and new files. A push replaces the files
of an earlier export, which stay in the repository's history. A push fails if the repository has files that no export wrote. After
an interruption, the same command continues without merging again.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import registry
from pipeline.data.counts import most_frequent, with_unit
from pipeline.data.files import NAME as DATA_SET
from pipeline.errors import Failure, InputError, in_brief
from pipeline.input_uri import InputURI
from pipeline.job.job import Export
from pipeline.models import transformers4
from pipeline.models.tokenizer import eos_ids
from pipeline.registry import lineage
from pipeline.run.model_host import ModelHost
from pipeline.run_folder import RESULT, Result
from pipeline.system import deadline, hub, storage
from pipeline.system.credentials import without_credentials

CARD = Path(__file__).with_name("card.jinja")
TAG = "rlhf-pipeline"  # tag in the model card of each export; a push recognizes an earlier export's repository by this tag
# Names of the files that an export writes in addition to the model card. A push deletes only files with these names.
WRITTEN = re.compile(r"[^/]+\.(safetensors|json|jinja)|tokenizer\.model|merges\.txt|vocab\.txt")
ADVICE = "make a token with write access at https://huggingface.co/settings/tokens; export HF_TOKEN=..."

# ---------------------------------------------------------------------------------------------------- the card


class AncestorOfExport(NamedTuple):
    """A model or a reward function that was used to train an exported model."""

    reference: str
    lineage: dict[str, Any]  # the adapter's lineage.json
    depth: int = 0
    role: str = ""  # what the descendant used this ancestor for: policy, reward, ...


def model_card(host: ModelHost, name: str, differences: dict[str, float] | None = None) -> str:
    """Returns the README.md for the input `name` (`policy` or `reward.0`) of an export job.

    Args:
        differences: differences between the outputs of merged model and adapter, or None if the folder has the adapter.
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    kind, base, model = name.removesuffix(".0"), host.work.base, host.work.model
    uri, reference = host.work.uri, host.work.versions[name]
    tags = registry.read_version(reference, uri)["tags"] if InputURI.parse(reference).version else {}
    metrics = {key: value for key, value in sorted(tags.items()) if key.startswith("eval_")}
    repo, ancestors = host.args.hub_model_id, list(ancestors_of_version(reference, uri))
    parameters = [registry.read_parameters(a.reference, uri) for a in ancestors]
    paths = [value for params in parameters for key, value in params.items() if key.startswith("data.train")]
    datasets = dict.fromkeys(match["repo"] for value in paths if (match := DATA_SET.fullmatch(value)))
    stages = dict.fromkeys(str(a.lineage["stage"]) for a in ancestors if "stage" in a.lineage)
    task, merged = "text-generation" if kind == "policy" else "text-classification", differences is not None
    kinds = ["reward-model"] * (kind == "reward") + ["merged"] * merged
    path = base["name_or_path"]
    # The Hub does not accept a local folder as the base model.
    on_hub = hub.is_reference(path) and not hub.local(path).is_dir()
    data = ModelCardData(
        library_name="transformers" if merged else "peft",
        pipeline_tag=task,
        base_model=path if on_hub else None,
        base_model_relation=("finetune" if merged else "adapter") if on_hub else None,
        datasets=list(datasets) or None,
        tags=[TAG, "trl", "lora", *stages, *kinds],
        model_name=(repo or reference) if metrics else None,
        eval_results=[
            EvalResult(task, "held-out", "held-out rows", key.removeprefix("eval_"), float(value))
            for key, value in metrics.items()
        ]
        or None,
        **_license(path, model.revision),
    )
    card = ModelCard.from_template(
        data,
        str(CARD),
        title=repo or reference.removeprefix("models:/"),
        kind=kind,
        base=base,
        dtype=model.dtype,
        folder=repo or ".",
        in_4_bits=parameters[0].get("model.load_in_4bit") == "True",
        ancestors=ancestors,
        metrics=metrics,
        differences=differences,
        with_unit=with_unit,
        most_frequent=most_frequent,
        oldest=transformers4.oldest_version(hub.base_config(path, model.revision)),
        ends=eos_ids(host.tokenizer),
    )
    return f"{card}\n"


def _license(base: str, revision: str | None) -> dict[str, Any]:
    """Returns the license fields of the base's model card, or `other` if there is no card."""
    from huggingface_hub import ModelCard

    data: Any = {}
    try:
        if path := hub.base_file(base, "README.md", revision):
            data = ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True).data
    except (InputError, ValueError, OSError):  # the Hub is unreachable, or the base has no card
        pass
    if not data.get("license"):
        return {"license": "other", "license_name": "that-of-the-base-model"}
    keys = ("license", "license_name", "license_link")
    return {key: str(data.get(key)) for key in keys if data.get(key)}


def ancestors_of_version(
    reference: str, uri: str, depth: int = 0, role: str = ""
) -> Iterator[AncestorOfExport]:
    """Yields a model version and all its ancestors, depth first."""
    record: dict[str, Any] = {}
    if InputURI.parse(reference).is_model:
        folder = registry.fetch(reference, uri)
        record = lineage.read(folder, reference) if lineage.is_adapter(folder) else {}
    yield AncestorOfExport(reference, record, depth, role)
    for name, parent in record.get("parents", {}).items():
        yield from ancestors_of_version(parent, uri, depth + 1, name.removesuffix(".0"))


# ---------------------------------------------------------------------------------------------------- the push


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(token=os.environ["HF_TOKEN"].strip())


def check_push(args: Export) -> None:
    """Checks the Hub token and the repository if the job sets push_to_hub. Changes nothing on the Hub.

    Raises InputError if the token is missing or wrong, if the Hub does not answer, if the repository has files that no export
    wrote, or if the repository is public but hub_private_repo is true.
    """
    if not args.push_to_hub:
        return
    if not os.environ.get("HF_TOKEN", "").strip():
        raise InputError(f"HF_TOKEN is not set; {ADVICE}", "trainer.push_to_hub")
    try:
        deadline.call_with_deadline(_check_repository, args)
    except InputError:
        raise
    except Exception as error:  # the HTTP client raises its own exception types
        raise InputError(_explained(args, error), "trainer.push_to_hub") from error


def _check_repository(args: Export) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    api, repo = _api(), args.hub_model_id
    api.whoami()
    try:
        info = api.repo_info(repo)
    except RepositoryNotFoundError:
        return
    if args.hub_private_repo and not info.private:
        raise InputError(
            f"{repo} exists and is public; set trainer.hub_private_repo=false, or use another name",
            "trainer.hub_model_id",
        )
    files = {file.rfilename for file in info.siblings or []} - {".gitattributes"}
    was_exported = False
    if "README.md" in files:
        card = Path(api.hf_hub_download(repo, "README.md", revision=info.sha))
        metadata, _, _ = card.read_text(encoding="utf-8", errors="replace").partition("\n---")
        was_exported = f"- {TAG}" in metadata.splitlines()
    if files and not was_exported:
        raise InputError(
            f"{repo} has files that no export wrote ({', '.join(sorted(files)[:3])}); use another name",
            "trainer.hub_model_id",
        )


def push_to_hub(args: Export, kind: str, base: str, result: Result) -> Result:
    """Pushes the exported folder if trainer.push_to_hub is true. Returns the result of the export, with the commit id.

    Args:
        kind: policy or reward.
        base: the name of the base.

    Raises Failure if the Hub rejects the push, or stops answering.
    """
    repo = args.hub_model_id
    if kind not in result["exported"]:
        raise InputError(
            f"{result['name']!r} did not export the {kind}; set run.overwrite=true or another run.name",
            key="run.name",
        )
    folder = result["exported"][kind]["folder"]
    if "base_model:" not in Path(folder, "README.md").read_text(encoding="utf-8") and not args.merge:
        print(f"warning: the base is a local folder, {base}; other users cannot load the adapter", flush=True)
    if not args.push_to_hub:
        print(f"nothing was uploaded; set trainer.push_to_hub=true to push {folder} to {repo}", flush=True)
        return result
    print(f"pushing {folder} to {repo}", flush=True)
    api = _api()
    try:
        api.create_repo(repo, private=args.hub_private_repo, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            # If an earlier push's adapter stayed next to merged weights, transformers would load both.
            delete_patterns=[*filter(WRITTEN.fullmatch, api.list_repo_files(repo))],
            commit_message=f"{'Merged model' if args.merge else 'Adapter'} from {result['name']}",
        )
    except Exception as error:  # the HTTP client and the uploader raise their own exception types
        advice = f"the same command with run.name={result['name']} continues without merging again"
        raise Failure(f"{_explained(args, error)}; {advice}") from error
    print(f"   {commit}", flush=True)
    result |= {"hub": {"repo_id": repo, "commit": str(commit.oid)}}
    storage.write_json(storage.join(result["folder"], RESULT), result)
    return result


def _explained(args: Export, error: Exception) -> str:
    """Returns why the Hub rejected a push, and what to do."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    advice = f"; {ADVICE}, or set another owner" if status in (401, 403) else ""
    return f"the push to {args.hub_model_id} failed ({without_credentials(in_brief(error))}){advice}"
