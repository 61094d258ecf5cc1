"""One measurement of a plain loop: `python tests/bench/serve_plain.py SIZE SECONDS`, started by `make bench`.

Two merged models in memory, as without a shared base, and transformers' `generate` for one request after the other, without HTTP.
A step is a token; the peak is the private memory of the process.
"""

import json
import os
import sys
import time
from pathlib import Path

from sizes import LORA, ROOT, WORK, model_folder, tokenizer

TOKENS = {"toy": 6, "demo": 40, "large": 64}  # of each completion, on both sides


def adapters(name: str) -> list[str]:
    """Folders of two adapters of random numbers, made once."""
    import torch
    from transformers import AutoModelForCausalLM

    from pipeline.models.adapters import SharedBase

    folders = [WORK / name / f"adapter-{i}" for i in range(2)]
    if not all((folder / "adapter_model.safetensors").exists() for folder in folders):
        shared = SharedBase(AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=torch.float32))
        for i, folder in enumerate(folders):
            torch.manual_seed(i)
            shared.add(f"role_{i}", lora=LORA)
            for parameter in shared.parameters_of(f"role_{i}"):
                parameter.data += 0.02 * torch.randn_like(parameter)
            shared.save(f"role_{i}", folder)
    return [str(folder) for folder in folders]


def questions(name: str) -> list[str]:
    rows = (ROOT / "jobs/demo/data/prompts_eval.jsonl").read_text().splitlines()
    return [json.loads(row)["prompt"] for row in rows]


def main(name: str, seconds: float) -> None:
    import psutil
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokens, limit, texts = tokenizer(name), TOKENS[name], questions(name)
    models = []
    for folder in adapters(name):
        base = AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=torch.float32)
        models.append(PeftModel.from_pretrained(base, folder).merge_and_unload().eval())
    asked, first, began = 0, 0.0, time.monotonic()
    settings = {"do_sample": True, "top_k": 0, "pad_token_id": tokens.pad_token_id}
    while time.monotonic() < began + seconds:
        messages = [{"role": "user", "content": texts[asked % len(texts)]}]
        ids = tokens.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            models[asked % 2].generate(**ids, max_new_tokens=limit, min_new_tokens=limit, **settings)
        first, asked = first or time.time(), asked + 1
    found = {
        "step": (time.monotonic() - began) / (asked * limit),
        "first_step": first - float(os.environ["BENCH_BEGIN"]),
        "peak": psutil.Process().memory_full_info().uss,
        "answers": asked,
    }
    Path(os.environ["BENCH_OUT"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
