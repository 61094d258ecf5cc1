"""Writes the model card of an exported folder, and pushes the folder to the Hub or shows what a push would do.

    make export ARGS="reward=null trainer.hub_model_id=OWNER/NAME"                              sends nothing
    make export ARGS="reward=null trainer.hub_model_id=OWNER/NAME trainer.push_to_hub=true"     pushes

The token comes only from HF_TOKEN. A push is one commit: whoever loads the repository gets the old files or the new ones. It
replaces the files of an earlier export, which stay in the repository's history, and rejects a repository with other content.
After an interruption the same command continues: files that have arrived are not sent again.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from pipeline import registry
from pipeline.config import Job
from pipeline.data.counts import count, most_frequent
from pipeline.data.sets import NAME as DATA_SET
from pipeline.errors import Failure, InputError, in_brief
from pipeline.models import hub
from pipeline.references import Ref
from pipeline.registry import lineage
from pipeline.runtime.host import Host
from pipeline.system import deadline, storage
from pipeline.system.credentials import without_credentials

MADE_HERE = "rlhf-pipeline"  # the tag by which a push recognizes a repository of an earlier export
TOKENS = "https://huggingface.co/settings/tokens"
CARD_LINES = 24  # lines of the model card that a dry run shows
ASK = """\
messages = [{"role": "user", "content": "What is the capital of Peru?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
completion = model.generate(**inputs, do_sample=False, max_new_tokens=128)
print(tokenizer.decode(completion[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))"""
SCORE = """\
messages = [{"role": "user", "content": "What is the capital of Peru?"}, {"role": "assistant", "content": "Lima."}]
inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
print(model(**inputs).logits.item())"""
# How to use a folder, by kind: the class of transformers, and Python that asks the model.
USE = {"policy": ("AutoModelForCausalLM", ASK), "reward": ("AutoModelForSequenceClassification", SCORE)}
# How to load it: {(kind, merged): Python}.
LOAD = {
    ("policy", True): 'model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")',
    ("reward", True): """\
# It has one label: the score
model = AutoModelForSequenceClassification.from_pretrained(FOLDER, dtype="auto")""",
    ("policy", False): """\
base = AutoModelForCausalLM.from_pretrained(BASE, dtype="auto")
model = PeftModel.from_pretrained(base, FOLDER)""",
    ("reward", False): """\
base = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1, dtype="float32")  # bfloat16 rounds scores
base.config.pad_token_id = tokenizer.pad_token_id
model = PeftModel.from_pretrained(base, FOLDER)  # with the adapter comes its scalar head""",
}

# ---------------------------------------------------------------------------------------------------- the card


def card(host: Host, name: str, compared: dict[str, float] | None = None) -> str:
    """Returns the README.md for the input `name` (`policy` or `reward.0`) of an export job.

    Args:
        compared: differences of the merged model, loaded back, from the adapter, or None if the folder holds the adapter.
    """
    kind, base = name.removesuffix(".0"), host.work.base
    uri, reference = registry.tracking_uri(host.job), host.work.inputs[name]
    tags = registry.version(reference, uri)["tags"] if Ref.parse(reference).version else {}
    figures = {k: v for k, v in tags.items() if k.startswith("eval_")}
    repo, made_from = host.job.args.hub_model_id, list(ancestors(reference, uri))
    title = repo or reference.removeprefix("models:/")
    if compared is not None:
        what = f"merged into {base['name_or_path']} ({host.job.model.dtype}), loadable in plain transformers."
    else:
        what = (
            f"{'with a scalar head ' if kind == 'reward' else ''}on {base['name_or_path']}, loadable in plain peft. In a job of "
            f"this pipeline on the same base: `{kind}: {title}`."
        )
    if registry.parameters(reference, uri).get("model.load_in_4bit") == "True":
        what += " Its base was in 4 bits (nf4) in training."
    auto, ask = USE[kind]
    code = "\n".join(
        [
            *(["from peft import PeftModel"] if compared is None else []),
            f"from transformers import {auto}, AutoTokenizer\n\ntokenizer = AutoTokenizer.from_pretrained(FOLDER)",
            LOAD[kind, compared is not None],
            ask,
        ]
    ).replace("FOLDER", f'"{repo or "."}"')
    revision = f", revision `{base['revision']}`" if base["revision"] else ""
    lines = [
        f"# {title}",
        "",
        f"A {kind} model: a LoRA adapter {what}",
        "",
        "```python",
        code.replace("BASE", f'"{base["name_or_path"]}"'),
        "```",
        "",
        "## Lineage",
        "",
        f"base `{base['name_or_path']}`{revision}",
        f"(`{base['digest']}`)",
        "",
        *(line for one in made_from for line in _shown(one)),
        "",
        "## Evaluation, when it was registered",
        "",
        *([f"- {k}: {v}" for k, v in sorted(figures.items())] or ["none is recorded"]),
        "",
    ]
    if compared is not None:
        differences = ", ".join(f"{k.replace('_', ' ')} {v:.3g}" for k, v in compared.items())
        checked = "Loaded back with plain transformers and compared with the adapter on its base"
        lines += ["## Checked at export", "", f"{checked}: {differences}.", ""]
    lines += [
        "## License",
        "",
        f"These weights are a derivative of `{base['name_or_path']}`. Its license and use policy apply to them, and so may the "
        'licenses of the data above. (Models built on Llama carry Llama in their name and the notice "Built with Llama".)',
        "",
    ]
    return f"---\n{_metadata(host, kind, compared is not None, figures, made_from)}\n---\n" + "\n".join(lines)


def _metadata(
    host: Host, kind: str, merged: bool, figures: dict[str, str], made_from: "list[Ancestor]"
) -> str:
    """Returns the card's metadata as YAML: library, base, datasets, metrics, tags."""
    from huggingface_hub import EvalResult, ModelCardData

    base, uri = host.work.base["name_or_path"], registry.tracking_uri(host.job)
    title = host.job.args.hub_model_id or host.work.inputs["policy" if kind == "policy" else "reward.0"]
    on_hub = hub.is_reference(base) and not hub.local(base).is_dir()  # the hub rejects a folder as base
    task = "text-generation" if kind == "policy" else "text-classification"
    stages = [str(one.facts["stage"]) for one in made_from if "stage" in one.facts]
    parameters = [registry.parameters(one.reference, uri) for one in made_from]
    rows = [value for found in parameters for key, value in found.items() if key.startswith("data.train")]
    datasets = [found["repo"] for value in rows if (found := DATA_SET.fullmatch(value))]
    results = [
        EvalResult(
            task_type=task,
            dataset_type="held-out",
            dataset_name="held-out rows",
            metric_type=key.removeprefix("eval_"),
            metric_value=float(value),
        )
        for key, value in sorted(figures.items())
    ]
    tags = [
        MADE_HERE,
        "trl",
        "lora",
        *dict.fromkeys(stages),
        *["reward-model"] * (kind == "reward"),
        *["merged"] * merged,
    ]
    data = ModelCardData(
        library_name="transformers" if merged else "peft",
        pipeline_tag=task,
        base_model=base if on_hub else None,
        base_model_relation=("finetune" if merged else "adapter") if on_hub else None,
        datasets=list(dict.fromkeys(datasets)) or None,
        tags=tags,
        model_name=title if results else None,
        eval_results=results or None,
        **_license(base, host.job.model.revision),
    )
    return data.to_yaml()


def _license(base: str, revision: str | None) -> dict[str, Any]:
    """Returns the license of the base, as its card names it."""
    from huggingface_hub import ModelCard

    data: Any = {}
    try:
        path = hub.base_file(base, "README.md", revision)
        if path:
            data = ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True).data
    except (InputError, ValueError, OSError):  # the Hub is unreachable, or has no card
        pass
    if not data.get("license"):
        return {"license": "other", "license_name": "that-of-the-base-model"}
    keys = ("license", "license_name", "license_link")
    return {key: str(data.get(key)) for key in keys if data.get(key)}


class Ancestor(NamedTuple):
    """A model or function in the lineage of another."""

    reference: str
    facts: dict[str, Any]  # its lineage.json
    depth: int = 0
    role: str = ""  # in its child: policy, reward, ...


def ancestors(reference: str, uri: str, depth: int = 0, role: str = "") -> Iterator[Ancestor]:
    """Yields a version and its ancestors, each before its parents."""
    facts: dict[str, Any] = {}
    if not Ref.parse(reference).is_function:
        folder = registry.fetch(reference, uri)
        facts = lineage.read(folder, reference) if lineage.is_adapter(folder) else {}
    yield Ancestor(reference, facts, depth, role)
    for name, parent in facts.get("parents", {}).items():
        yield from ancestors(parent, uri, depth + 1, name.removesuffix(".0"))


def _shown(one: Ancestor) -> list[str]:
    """Returns a card's lines about an ancestor: data digests, sources of rows, libraries."""
    indent = "    " * one.depth
    lines = [f"{indent[2:]}- as its {one.role}:"] if one.depth else []
    if Ref.parse(one.reference).is_function:
        return [*lines, f"{indent}- `{one.reference}`"]
    data = ", ".join(f"{name} `sha256:{digest[:16]}`" for name, digest in one.facts.get("data", {}).items())
    stage = one.facts.get("stage", "unknown stage")
    lines.append(f"{indent}- `{one.reference}` ({stage}): data {data or 'unknown'}")
    rows_from = most_frequent(one.facts.get("rows_from", {}), 8)
    lines += [f"{indent}  - {count(rows)} from `{version}`" for version, rows in rows_from.items()]
    if not one.depth and "versions" in one.facts:
        lines.append("  made with " + ", ".join(f"{k} {v}" for k, v in one.facts["versions"].items()))
    return lines


# ---------------------------------------------------------------------------------------------------- the push


def check(job: Job) -> str | None:
    """Checks the token and the repository before anything is merged. Contacts the Hub only if the job pushes.

    Returns:
        the commit that a push will replace, or None if repository or branch have to be made.

    Raises:
        InputError: if the push cannot work.
    """
    if not job.args.push_to_hub:
        return None
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token:
        raise InputError(
            f"HF_TOKEN is not set; make a token with write access at {TOKENS}, then `export HF_TOKEN=...`",
            "trainer.push_to_hub",
        )
    try:
        return deadline.answer(_replaced, job, token)  # type: ignore[no-any-return]
    except InputError:
        raise
    except Exception as error:  # the HTTP client raises its own types
        raise InputError(_explained(job, error), "trainer.push_to_hub") from error


def _replaced(job: Job, token: str) -> str | None:
    from huggingface_hub import HfApi, ModelCard
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    api: Any = HfApi(token=token)
    repo = job.args.hub_model_id
    api.whoami()
    try:
        if job.args.hub_private_repo and not api.repo_info(repo).private:
            raise InputError(
                f"{repo} exists and is public; set trainer.hub_private_repo=false, or use another name",
                "trainer.hub_model_id",
            )
        found = api.repo_info(repo, revision=job.args.hub_revision)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return None
    files = {file.rfilename for file in found.siblings or []} - {".gitattributes"}
    tags: list[str] = []
    if "README.md" in files:
        card = Path(api.hf_hub_download(repo, "README.md", revision=found.sha))
        text = card.read_text(encoding="utf-8", errors="replace")
        try:
            tags = ModelCard(text, ignore_metadata_errors=True).data.get("tags") or []
        except Exception:  # damaged YAML: no export wrote this card
            tags = []
    if files and MADE_HERE not in tags:
        raise InputError(
            f"{repo} holds files that do not come from an export ({', '.join(sorted(files)[:3])}); use another name, or "
            "trainer.hub_revision=BRANCH for a branch of it",
            "trainer.hub_model_id",
        )
    return str(found.sha)


def push(job: Job, result: dict[str, Any], before: str | None) -> dict[str, Any]:
    """Pushes what was exported, or prints what a push would do. Returns the result, with where it went.

    Args:
        before: what `check` returned.

    Raises:
        Failure: if the hub rejects it, or stops answering.
    """
    kind = "policy" if job.policy else "reward"
    if kind not in result["exported"]:
        raise InputError(
            f"{result['name']!r} exported no {kind}; set run.fresh=true or another run.name", key="run.name"
        )
    folder = result["exported"][kind]["folder"]
    if not job.args.push_to_hub:
        _print_dry_run(job, folder)
        return result
    print(f"pushing {folder} to {_address(job)}", flush=True)
    try:
        commit = _send(job, folder, result["name"], before)
    except Exception as error:  # the HTTP client and the uploader raise their own types
        again = f"the same command with run.name={result['name']} continues without merging again"
        raise Failure(f"{_explained(job, error)}; {again}") from error
    print(f"   {_address(job)}  commit {commit[:12]}", flush=True)
    where = {"repo_id": job.args.hub_model_id, "revision": job.args.hub_revision or "main", "commit": commit}
    result = result | {"hub": where}
    storage.write_json(storage.join(result["folder"], "result.json"), result)
    return result


def _send(job: Job, folder: str, run: str, before: str | None) -> str:
    """Creates repository and branch if necessary, and replaces their files with the folder's. Returns the commit."""
    from huggingface_hub import HfApi

    api = HfApi(token=os.environ["HF_TOKEN"].strip())
    repo, branch = job.args.hub_model_id, job.args.hub_revision
    if before is None:
        api.create_repo(repo, private=job.args.hub_private_repo, exist_ok=True)
        if branch:
            api.create_branch(repo, branch=branch, exist_ok=True)
        before = api.repo_info(repo, revision=branch).sha
    return str(
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=branch,
            parent_commit=before,  # the Hub rejects the push if another one came in between
            delete_patterns="*",  # an adapter of an earlier push would be loaded onto merged weights
            commit_message=f"{'Merged model' if job.args.merge else 'Adapter'} from {run}",
        ).oid
    )


def _explained(job: Job, error: Exception) -> str:
    """Returns why the hub rejected a request, and what to do."""
    from huggingface_hub.errors import HTTPError

    repo, found = job.args.hub_model_id, without_credentials(in_brief(error))
    changed = f"{repo} was changed by another push, and nothing was replaced"
    known = {
        401: f"the hub does not know this HF_TOKEN; make one with write access at {TOKENS}, then `export HF_TOKEN=...`",
        403: f"the account of this HF_TOKEN may not write to {repo}: use a token with write access to "
        f"{repo.partition('/')[0]!r} ({TOKENS}), or another owner in trainer.hub_model_id",
        409: changed,
        412: changed,
    }
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"HTTP {status}: {known.get(status, f'the hub rejected it ({found})')}"
    unreachable = isinstance(error, (HTTPError, OSError))
    return f"the hub cannot be reached ({found})" if unreachable else f"the upload failed ({found})"


def _print_dry_run(job: Job, folder: str) -> None:
    """Prints what a push would do, without contacting the hub."""
    text = Path(folder, "README.md").read_text(encoding="utf-8")
    sizes = {one.name: one.stat().st_size for one in sorted(os.scandir(folder), key=lambda one: one.name)}
    width = max(map(len, sizes))
    visibility = "private" if job.args.hub_private_repo else "public"
    owner, token = job.args.hub_model_id.partition("/")[0], "set" if os.environ.get("HF_TOKEN") else "not set"
    lines = [
        "",
        "dry run: nothing was sent. With trainer.push_to_hub=true this goes",
        f"   to     {_address(job)}, {visibility} if it has to be made",
        f"   as     a user who may write to {owner!r}: HF_TOKEN, which is {token}",
        f"   in     {len(sizes)} files, {tqdm.format_sizeof(sum(sizes.values()), 'B')}",
        *(f"          {name:{width}}  {tqdm.format_sizeof(count, 'B'):>8}" for name, count in sizes.items()),
        "   under  the card",
        *(f"          {line}" for line in text.splitlines()[:CARD_LINES]),
    ]
    if "base_model:" not in text and not job.args.merge:
        base = job.model.name_or_path
        lines.append(f"warning: the base is a folder, {base}: others cannot load an adapter on it")
    print("\n".join(lines), flush=True)


def _address(job: Job) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{job.args.hub_model_id}, branch {job.args.hub_revision or 'main'}"
