"""One measurement of `serve`: `python tests/bench/serve.py ours|plain SIZE [section.key=value ...]`, by `make bench`.

A step is a token, over all clients.
"""

import json
import sys
import threading
import time
import urllib.request

from sizes import DATA, LORA, ROOT, SIZES, WORK, model_folder, since_start, tokenizer, write

CLIENTS = 64


def adapters(name: str) -> list[str]:
    """Returns the folders of two adapters of random numbers, made once."""
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


def questions() -> list[str]:
    return [json.loads(row)["prompt"] for row in (DATA / "prompts_eval.jsonl").read_text().splitlines()]


def ours(name: str, *overrides: str) -> None:
    """Two policies on one base, asked over HTTP by clients that each wait for an answer before they ask again.

    The peak is the private memory of the replica, and of vLLM's processes, before the first request: the models. The
    replica of an embedded Ray has one thread, as a worker on one CPU has.
    """
    import psutil

    from pipeline.commands.serve import serving
    from pipeline.config import load_job

    one, two = adapters(name)
    limit = SIZES[name].serve_tokens
    given = [
        f"model.name_or_path={model_folder(name)}",
        f"serve.policies={{one: {one}, two: {two}}}",
        "serve.rewards={}",
        "serve.port=0",
        f"trainer.response_length={limit}",
        f"trainer.min_new_tokens={limit - 1}",
        f"run.storage_path={WORK}/serve",
        *overrides,
    ]
    with serving(load_job(ROOT / "jobs/demo/serve.yaml", given, "serve")) as work:
        url = f"http://127.0.0.1:{work.job.serve.port}/v1/chat/completions"
        texts, tokens, ends, errors = questions(), [0] * CLIENTS, [], [0] * CLIENTS

        def client(i: int) -> None:
            asked = i
            while time.monotonic() < end:
                messages = [{"role": "user", "content": texts[asked % len(texts)]}]
                body = json.dumps({"model": ("one", "two")[i % 2], "messages": messages}).encode()
                asked += CLIENTS
                try:
                    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=300) as answer:
                        tokens[i] += json.load(answer)["usage"]["completion_tokens"]
                        ends.append(time.time())
                except OSError:
                    errors[i] += 1

        processes = psutil.Process().children(recursive=True)
        [replica] = [p for p in processes if "ServeReplica:serve:server" in " ".join(p.cmdline())]

        def private() -> int:
            return sum(one.memory_full_info().uss for one in (replica, *replica.children(recursive=True)))

        models = private()
        threads = [threading.Thread(target=client, args=(i,)) for i in range(CLIENTS)]
        began = time.monotonic()
        end = began + SIZES[name].serve_seconds
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = {
            "step": (time.monotonic() - began) / sum(tokens),
            "first_step": since_start(min(ends)),
            "peak": models,
            "under_load": private(),
            "errors": sum(errors),
            "answers": len(ends),
        }
    write(found)


def plain(name: str) -> None:
    """Two merged models in memory, and transformers' `generate` for one request after the other, without HTTP.

    The peak is the private memory of the process.
    """
    import psutil
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokens, limit, texts = tokenizer(name), SIZES[name].serve_tokens, questions()
    models = []
    for folder in adapters(name):
        base = AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=torch.float32)
        models.append(PeftModel.from_pretrained(base, folder).merge_and_unload().eval())
    asked, first, began = 0, 0.0, time.monotonic()
    settings = {"do_sample": True, "top_k": 0, "pad_token_id": tokens.pad_token_id}
    while time.monotonic() < began + SIZES[name].serve_seconds:
        messages = [{"role": "user", "content": texts[asked % len(texts)]}]
        ids = tokens.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            models[asked % 2].generate(**ids, max_new_tokens=limit, min_new_tokens=limit, **settings)
        first, asked = first or time.time(), asked + 1
    write(
        {
            "step": (time.monotonic() - began) / (asked * limit),
            "first_step": since_start(first),
            "peak": psutil.Process().memory_full_info().uss,
            "answers": asked,
        }
    )


if __name__ == "__main__":
    {"ours": ours, "plain": plain}[sys.argv[1]](*sys.argv[2:])
