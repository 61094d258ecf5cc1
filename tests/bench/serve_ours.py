"""One measurement of `serve`: `python tests/bench/serve_ours.py SIZE SECONDS CLIENTS [section.key=value ...]`, by `make bench`.

Two policies on one base, asked by OpenAI's protocol over HTTP by clients that each wait for an answer before they ask again. A
step is a token, over all clients; the peak is the private memory of the replica, and of vLLM's processes, before the first
request: the models.
"""

import json
import os
import sys
import threading
import time
import urllib.request
from pathlib import Path

from serve_plain import TOKENS, adapters, questions
from sizes import ROOT, WORK, model_folder


def main(name: str, seconds: float, clients: int, overrides: list[str]) -> None:
    import psutil

    from pipeline.commands.serve import serving
    from pipeline.config import load_job

    one, two = adapters(name)
    limit = TOKENS[name]
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
        tokens, errors, first, texts = [0] * clients, [0] * clients, [], questions(name)

        def client(i: int) -> None:
            asked = i
            while time.monotonic() < end:
                messages = [{"role": "user", "content": texts[asked % len(texts)]}]
                body = json.dumps({"model": ("one", "two")[i % 2], "messages": messages}).encode()
                asked += clients
                try:
                    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=300) as answer:
                        tokens[i] += json.load(answer)["usage"]["completion_tokens"]
                        first.append(time.time())
                except OSError:
                    errors[i] += 1

        processes = psutil.Process().children(recursive=True)
        [replica] = [p for p in processes if "ServeReplica:serve:server" in " ".join(p.cmdline())]

        def private() -> int:
            return sum(one.memory_full_info().uss for one in (replica, *replica.children(recursive=True)))

        models = private()
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        spent = time.monotonic() - began
        found = {
            "step": spent / sum(tokens),
            "first_step": min(first) - float(os.environ["BENCH_BEGIN"]),
            "peak": models,
            "under_load": private(),
            "errors": sum(errors),
            "answers": len(first),
        }
    Path(os.environ["BENCH_OUT"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
