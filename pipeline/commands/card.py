"""The model card of an exported folder: what it is, where it comes from, how to load it, under which licence."""

from typing import Any

from pipeline import registry
from pipeline.registry import lineage
from pipeline.runtime.host import Host

USE = {
    "policy": """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained(FOLDER), AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")
messages = [{"role": "user", "content": "What is the capital of Peru?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
completion = model.generate(**inputs, do_sample=False, max_new_tokens=128)
print(tokenizer.decode(completion[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))""",
    "reward": """\
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForSequenceClassification.from_pretrained(FOLDER, dtype="auto")  # one label: the score
messages = [{"role": "user", "content": "What is the capital of Peru?"}, {"role": "assistant", "content": "Lima."}]
inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
print(model(**inputs).logits.item())""",
}


def card(host: Host, name: str, compared: dict[str, float]) -> str:
    """The text of README.md for the input `name` (`policy` or `reward.0`) of an export job."""
    kind, base = name.removesuffix(".0"), host.work.base
    uri, reference = registry.tracking_uri(host.job), host.work.inputs[name]
    figures = {k: v for k, v in registry.tags(reference, uri).items() if k.startswith("eval_")}
    task = "text-generation" if kind == "policy" else "text-classification"
    lines = [
        "---",
        "library_name: transformers",
        f"pipeline_tag: {task}",
        f"base_model: {base['name_or_path']}",
        "license: other",
        "license_name: that-of-the-base-model",
        "tags: [rlhf, lora, merged]",
        "---",
        f"# {reference.removeprefix('models:/')}",
        "",
        f"A {kind} model: a LoRA adapter merged into {base['name_or_path']} ({host.job.model.dtype}), loadable in plain "
        "transformers.",
        "",
        "```python",
        USE[kind].replace("FOLDER", '"."'),
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
        "## Checked at export",
        "",
        "Loaded back with plain transformers and compared with the adapter on its base: "
        + ", ".join(f"{k.replace('_', ' ')} {v:.3g}" for k, v in compared.items())
        + ".",
        "",
        "## Licence",
        "",
        f"These weights are a derivative of `{base['name_or_path']}`: its licence and use policy apply to them, and so may those "
        'of the data named above. (Models built on Llama carry Llama in their name and the notice "Built with Llama".)',
        "",
    ]
    return "\n".join(lines)


def _ancestors(reference: str, uri: str, indent: str) -> list[str]:
    """A version with its data digests and library versions, and below it, indented, those that it was made from."""
    if reference.startswith("python:"):
        return [f"{indent}- `{reference}`"]
    folder = registry.fetch(reference, uri)
    facts: dict[str, Any] = lineage.read(folder, reference) if lineage.is_adapter(folder) else {}
    data = ", ".join(f"{name} `sha256:{digest[:16]}`" for name, digest in facts.get("data", {}).items())
    lines = [f"{indent}- `{reference}` ({facts.get('stage', 'unknown stage')}): data {data or 'unknown'}"]
    if not indent and "versions" in facts:
        lines.append("  made with " + ", ".join(f"{k} {v}" for k, v in facts["versions"].items()))
    for name, parent in facts.get("parents", {}).items():
        lines.append(f"{indent}  - as its {name.removesuffix('.0')}:")
        lines += _ancestors(parent, uri, indent + "    ")
    return lines
