"""Measures `serve`. `make bench` runs `python tools/bench/serve.py ours|plain SIZE serve [section.key=value ...]`.

One step generates one token for one client.
"""

import json
import sys
import threading
import time
import urllib.request

from sizes import DATA, ROOT, SIZES, WORK, since_start, write

CLIENTS = 64


def questions() -> list[str]:
    return [json.loads(row)["prompt"] for row in (DATA / "prompts_eval.jsonl").read_text().splitlines()]


def ours(name: str, _: str, *overrides: str) -> None:
    """Serves two policies on one base over HTTP. Each client waits for an answer before its next request.

    The peak is the private memory of the replica and of vLLM's processes before the first request. The replica uses one thread.
    """
    import psutil

    from pipeline.commands.serve import serve_models
    from pipeline.job import load_job
    from pipeline.run.model_host import load_model_host
    from pipeline.settle.identity import with_run_name

    size = SIZES[name]
    limit = size.serve_tokens
    given = [
        f"model.name_or_path={size.model}",
        f"serve.policies={{one: {size.adapter(0)}, two: {size.adapter(1)}}}",
        "serve.rewards={}",
        "serve.port=0",
        f"trainer.response_length={limit}",
        f"trainer.min_new_tokens={limit - 1}",
        f"run.storage_path={WORK}/serve",
        *overrides,
    ]
    job = load_job(ROOT / "jobs/demo/serve.yaml", given, "serve")
    with serve_models(load_model_host(with_run_name(job)).work) as work:
        url = f"http://127.0.0.1:{work.serve.port}/v1/chat/completions"
        texts, tokens, ends, errors = questions(), [0] * CLIENTS, [], []

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
                except OSError as error:
                    errors.append(error)

        processes = psutil.Process().children(recursive=True)
        [replica] = [p for p in processes if "ServeReplica:serve:server" in " ".join(p.cmdline())]

        def private() -> int:
            return sum(one.memory_full_info().uss for one in (replica, *replica.children(recursive=True)))

        models = private()
        threads = [threading.Thread(target=client, args=(i,)) for i in range(CLIENTS)]
        began = time.monotonic()
        end = began + size.serve_seconds
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        if errors:
            sys.exit(f"{len(errors)} requests failed: {errors[0]}")
        found = {"step": seconds / sum(tokens), "first_step": since_start(min(ends)), "peak": models}
        write(found | {"under_load": private(), "answers": len(ends)})


def plain(name: str, _: str) -> None:
    """Keeps two merged models in memory, and calls transformers' `generate` for one request after another, without HTTP.

    The peak is the private memory of the process.
    """
    import psutil
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    size, texts, models = SIZES[name], questions(), []
    tokens, limit = size.tokenizer(), size.serve_tokens
    for folder in (size.adapter(0), size.adapter(1)):
        base = AutoModelForCausalLM.from_pretrained(size.model, dtype=torch.float32)
        models.append(PeftModel.from_pretrained(base, folder).merge_and_unload().eval())
    asked, first, began = 0, 0.0, time.monotonic()
    settings = {"do_sample": True, "top_k": 0, "pad_token_id": tokens.pad_token_id}
    while time.monotonic() < began + size.serve_seconds:
        messages = [{"role": "user", "content": texts[asked % len(texts)]}]
        ids = tokens.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        with torch.no_grad():
            models[asked % 2].generate(**ids, max_new_tokens=limit, min_new_tokens=limit, **settings)
        first, asked = first or time.time(), asked + 1
    seconds, peak = time.monotonic() - began, psutil.Process().memory_full_info().uss
    found = {"step": seconds / (asked * limit), "first_step": since_start(first), "peak": peak}
    write(found | {"answers": asked})


if __name__ == "__main__":
    {"ours": ours, "plain": plain}[sys.argv[1]](*sys.argv[2:])
