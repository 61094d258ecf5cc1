"""The model card of an exported folder: what it is, where it comes from, how to load it, under which licence.

Its head is what the hub reads: library, base, data sets, figures, tags. huggingface_hub writes it, and refuses what the hub
would refuse of its form.
"""

import re
from typing import Any

from pipeline import registry
from pipeline.data.counts import count, most_frequent
from pipeline.data.sets import NAME as DATA_SET
from pipeline.errors import InputError
from pipeline.models import hub
from pipeline.models.hub import base_file, local
from pipeline.registry import lineage
from pipeline.runtime.host import Host

MADE_HERE = "rlhf-pipeline"  # the tag by which a push knows a repository as one of ours
ASK = """\
messages = [{"role": "user", "content": "What is the capital of Peru?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
completion = model.generate(**inputs, do_sample=False, max_new_tokens=128)
print(tokenizer.decode(completion[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))"""
SCORE = """\
messages = [{"role": "user", "content": "What is the capital of Peru?"}, {"role": "assistant", "content": "Lima."}]
inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
print(model(**inputs).logits.item())"""
# How to load it: {(kind, merged): Python}.
USE = {
    ("policy", True): f"""\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained(FOLDER), AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")
{ASK}""",
    ("reward", True): f"""\
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForSequenceClassification.from_pretrained(FOLDER, dtype="auto")  # one label: the score
{SCORE}""",
    ("policy", False): f"""\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE, dtype="auto"), FOLDER)
{ASK}""",
    ("reward", False): f"""\
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
base = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1, dtype="float32")  # bfloat16 rounds scores
base.config.pad_token_id = tokenizer.pad_token_id
model = PeftModel.from_pretrained(base, FOLDER)  # with the adapter comes its scalar head
{SCORE}""",
}


def card(host: Host, name: str, compared: dict[str, float] | None = None) -> str:
    """The text of README.md for the input `name` (`policy` or `reward.0`) of an export job.

    Args:
        compared: how far the merged model, loaded back, was from the adapter; None: it is the adapter itself.
    """
    kind, base = name.removesuffix(".0"), host.work.base
    uri, reference = registry.tracking_uri(host.job), host.work.inputs[name]
    figures = {k: v for k, v in registry.tags(reference, uri).items() if k.startswith("eval_")}
    merged, title = compared is not None, host.job.args.hub_model_id or reference.removeprefix("models:/")
    what = (
        f"A {kind} model: a LoRA adapter merged into {base['name_or_path']} ({host.job.model.dtype}), loadable in plain "
        "transformers."
        if merged
        else f"A {kind} model: a LoRA adapter{' with a scalar head' * (kind == 'reward')} on {base['name_or_path']}, loadable in "
        f"plain peft. In a job of this pipeline on the same base: `{kind}: {title}`."
    )
    code = USE[kind, merged].replace("FOLDER", f'"{host.job.args.hub_model_id or "."}"')
    lines = [
        f"# {title}",
        "",
        what + (" Its base was in 4 bits (nf4) in training." if _in_4bit(reference, uri) else ""),
        "",
        "```python",
        code.replace("BASE", f'"{base["name_or_path"]}"'),
        "```",
        "",
        "## Lineage",
        "",
        f"base `{base['name_or_path']}`" + (f", revision `{base['revision']}`" if base["revision"] else ""),
        f"(`{base['digest']}`)",
        "",
        *_ancestors(reference, uri, ""),
        "",
        "## Evaluation, when it was registered",
        "",
        *([f"- {k}: {v}" for k, v in sorted(figures.items())] or ["none is recorded"]),
        "",
        *(_checked(compared) if compared is not None else []),
        "## Licence",
        "",
        f"These weights are a derivative of `{base['name_or_path']}`: its licence and use policy apply to them, and so may those "
        'of the data named above. (Models built on Llama carry Llama in their name and the notice "Built with Llama".)',
        "",
    ]
    return f"---\n{_head(host, kind, merged, figures)}\n---\n" + "\n".join(lines)


def _head(host: Host, kind: str, merged: bool, figures: dict[str, str]) -> str:
    """The card's metadata as YAML."""
    from huggingface_hub import EvalResult, ModelCardData

    base, uri = host.work.base["name_or_path"], registry.tracking_uri(host.job)
    reference = host.work.inputs["policy" if kind == "policy" else "reward.0"]
    task = "text-generation" if kind == "policy" else "text-classification"
    stages, sets = _training(reference, uri)
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
    data = ModelCardData(
        library_name="transformers" if merged else "peft",
        pipeline_tag=task,
        base_model=base if _is_hub_id(base) else None,  # the hub refuses a folder
        base_model_relation=("finetune" if merged else "adapter") if _is_hub_id(base) else None,
        datasets=sets or None,
        tags=[MADE_HERE, "trl", "lora", *stages, *(["reward-model"] if kind == "reward" else []), *["merged"] * merged],
        model_name=host.job.args.hub_model_id or reference if results else None,
        eval_results=results or None,
        **_licence(base, host.job.model.revision),
    )  # fmt: skip
    return data.to_yaml()


def _is_hub_id(base: str) -> bool:
    return hub.is_reference(base) and not local(base).is_dir()


def _licence(base: str, revision: str | None) -> dict[str, Any]:
    """That of the base, as its own card names it."""
    from huggingface_hub import ModelCard

    unknown = {"license": "other", "license_name": "that-of-the-base-model"}
    try:
        path = base_file(base, "README.md", revision)
        said = ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True).data if path else None
    except (
        InputError,
        ValueError,
        OSError,
    ):  # out of reach, or not a card: then nothing is known of its licence
        return unknown
    if said is None or not said.get("license"):
        return unknown
    keys = ("license", "license_name", "license_link")
    return {key: str(said.get(key)) for key in keys if said.get(key)}


def _training(reference: str, uri: str) -> tuple[list[str], list[str]]:
    """Stages and data sets on the hub that a version and its ancestors were trained with."""
    stages, sets, waiting = [], [], [reference]
    while waiting:
        one = waiting.pop(0)
        folder = one if one.startswith("python:") else registry.fetch(one, uri)
        if not lineage.is_adapter(folder):
            continue
        facts = lineage.read(folder, one)
        waiting += facts.get("parents", {}).values()
        stages += [str(facts["stage"])] if "stage" in facts else []
        named = [
            value for key, value in registry.parameters(one, uri).items() if key.startswith("data.train")
        ]
        sets += [found["repo"] for value in named if (found := DATA_SET.fullmatch(value))]
    return list(dict.fromkeys(stages)), list(dict.fromkeys(sets))


def _in_4bit(reference: str, uri: str) -> bool:
    return registry.parameters(reference, uri).get("model.load_in_4bit") == "True"


def _checked(compared: dict[str, float]) -> list[str]:
    return [
        "## Checked at export",
        "",
        "Loaded back with plain transformers and compared with the adapter on its base: "
        + ", ".join(f"{k.replace('_', ' ')} {v:.3g}" for k, v in compared.items())
        + ".",
        "",
    ]


def problem(text: str) -> str | None:
    """What is wrong with the form of a card, found without the hub; None: nothing."""
    from huggingface_hub import ModelCard

    try:
        data = ModelCard(text).data
    except Exception as error:  # of YAML, or of one of its fields
        return re.sub(r"\s+", " ", str(error))
    lacking = [key for key in ("library_name", "license", "tags") if not data.get(key)]
    return f"it has no {', '.join(lacking)}" if lacking else None


def _ancestors(reference: str, uri: str, indent: str) -> list[str]:
    """A version with its data digests and library versions, and below it, indented, those that it was made from."""
    if reference.startswith("python:"):
        return [f"{indent}- `{reference}`"]
    folder = registry.fetch(reference, uri)
    facts: dict[str, Any] = lineage.read(folder, reference) if lineage.is_adapter(folder) else {}
    data = ", ".join(f"{name} `sha256:{digest[:16]}`" for name, digest in facts.get("data", {}).items())
    lines = [f"{indent}- `{reference}` ({facts.get('stage', 'unknown stage')}): data {data or 'unknown'}"]
    rows_from = most_frequent(facts.get("rows_from", {}), 8)
    lines += [f"{indent}  - {count(rows)} from `{version}`" for version, rows in rows_from.items()]
    if not indent and "versions" in facts:
        lines.append("  made with " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items()))
    for name, parent in facts.get("parents", {}).items():
        lines.append(f"{indent}  - as its {name.removesuffix('.0')}:")
        lines += _ancestors(parent, uri, indent + "    ")
    return lines
