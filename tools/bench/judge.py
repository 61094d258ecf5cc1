"""Measures questions to an LLM judge. `make bench` runs `python tools/bench/judge.py ours|plain SIZE judge`.

One step is one question. The server is a separate process, and answers each question after DELAY_S.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time

import aiohttp
from aiohttp import web
from sizes import high_water, since_start, write

QUESTIONS, CONCURRENCY, DELAY_S, MODEL = 2000, 32, 0.1, "wise"


def serve() -> None:
    async def answer(request):
        await request.read()
        await asyncio.sleep(DELAY_S)
        choice = {"index": 0, "message": {"role": "assistant", "content": "Score: 7"}}
        return web.json_response(
            {"model": MODEL, "choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}
        )

    async def main():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(site._server.sockets[0].getsockname()[1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())


@contextlib.contextmanager
def server():
    with subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.kill()


def measured(ask) -> None:
    begin = time.time()
    ask()
    end = time.time()
    write({"step": (end - begin) / QUESTIONS, "first_step": since_start(begin), "peak": high_water()})


def ours(endpoint: str) -> None:
    """Uses the pipeline's client, which writes each answer to disk before the answer is used."""
    from pipeline.job.judge import Definition
    from pipeline.scoring.judges import forms
    from pipeline.scoring.judges.client import JudgeClient
    from pipeline.scoring.judges.store import Store

    definition = Definition(MODEL, "score", endpoint, concurrency=CONCURRENCY)
    texts = [f"question {i}" for i in range(QUESTIONS)]
    questions = forms.make_questions(definition, texts, texts, [{}] * QUESTIONS, range(QUESTIONS))
    requests = [(question, 0) for question in questions]
    with tempfile.TemporaryDirectory() as folder:
        client = JudgeClient(definition, Store(folder, "bench"), "judge")
        measured(lambda: asyncio.run(client.answers(requests)))


def plain(endpoint: str) -> None:
    """Sends as many concurrent requests as `ours`, and only reads the answers."""

    async def ask() -> None:
        left = iter(range(QUESTIONS))

        async def work(session) -> None:
            for i in left:
                messages = [{"role": "user", "content": f"question {i} question {i}"}]
                body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 512}
                async with session.post(f"{endpoint}/chat/completions", json=body) as response:
                    json.loads(await response.read())["choices"][0]["message"]["content"]

        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(work(session) for _ in range(CONCURRENCY)))

    measured(lambda: asyncio.run(ask()))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        with server() as endpoint:
            {"ours": ours, "plain": plain}[sys.argv[1]](endpoint)
