"""Stores answers of a judge on disk. Each process writes one file, and reads the files of all processes and earlier runs.

A line is JSON: an answer with its `key` and `tokens`, the `tokens` of an unusable answer, or the other `counts` of a call. Files
in a bucket cannot grow, so each group of answers in a bucket is a new file.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from pipeline.job.judge import Definition
from pipeline.system import storage

POLL_S = 0.02  # time between two attempts to lock a question
COUNTS = ("judged", "from_store", "failed", "waited")  # names of the counts of a client's calls


def answers_folder(storage_path: str, definition: Definition) -> str:
    """Returns the folder with a judge's answers, which all runs of a storage path share."""
    return storage.join(storage_path, "judges", definition.digest[:16])


class Store:
    """Contains the answers for one definition of a judge, and counts the costs of each run.

    Args:
        folder: a folder or a bucket's path.
        run: the run whose budget pays for the answers to this process.
    """

    def __init__(self, folder: str, run: str) -> None:
        self.folder, self.run = folder, run
        self.answers: dict[str, dict[str, Any]] = {}
        # for each run: tokens sent to and answered by the judge, calls, and COUNTS
        self.totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.read: dict[str, int] = {}  # file -> number of bytes read
        self.name, self.parts = uuid.uuid4().hex, 0
        self.waiting: list[tuple[dict[str, Any], asyncio.Future[None]]] = []
        self.writing: asyncio.Task[None] | None = None
        self.remote, self.seen = storage.is_remote(folder), -1
        if not self.remote:
            os.makedirs(folder, exist_ok=True)
            # Each byte of this file is the lock of a question. The file grows with each write, so that other processes see
            # new answers. The file is never closed, because closing would release all locks of this process.
            self.lock = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def refresh(self) -> None:
        """Reads the answers that other processes have written since the last call."""
        if not self.remote:
            size = os.fstat(self.lock).st_size
            if size == self.seen:
                return
            self.seen = size
        for name, info in storage.names(self.folder).items():
            if name.endswith(".jsonl") and info.size > self.read.get(name, 0):
                self._read(name)

    def _read(self, name: str) -> None:
        content = storage.read_bytes(storage.join(self.folder, name), self.read.get(name, 0))
        # The last line may be incomplete, because a process is still writing it or was killed.
        complete = content[: content.rfind(b"\n") + 1]
        self.read[name] = self.read.get(name, 0) + len(complete)
        for line in complete.splitlines():
            try:
                self._add(json.loads(line))
            except ValueError:  # a full disk left an incomplete line
                path = storage.join(self.folder, name)
                print(f"warning: {path}: skipped a line that is no JSON", flush=True)

    def _add(self, record: dict[str, Any]) -> None:
        totals = self.totals[record["run"]]
        for name, value in record.get("counts", {}).items():
            totals[name] += value
        if "tokens" in record:
            totals["calls"] += 1
            for name, value in zip(("sent", "answered"), record["tokens"], strict=True):
                totals[name] += value
        if "key" in record:
            totals["judged"] += 1
            self.answers.setdefault(record["key"], record["answer"])

    def costs(self, definition: Definition) -> dict[str, float]:
        """Returns COUNTS and dollars of this run so far, over all its processes."""
        self.refresh()
        totals = self.totals[self.run]
        dollars = definition.dollars(totals["sent"], totals["answered"])
        return {key: round(totals[key], 2) for key in COUNTS} | {"dollars": round(dollars, 6)}

    @contextlib.asynccontextmanager
    async def asking(self, key: str) -> AsyncIterator[bool]:
        """Allows only one process of a machine at a time to send a question. Yields True if the question still has no answer."""
        if self.remote:
            yield key not in self.answers
            return
        offset = int(key[:15], 16)
        while True:
            try:
                fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
                break
            except OSError:
                await asyncio.sleep(POLL_S)
        try:
            self.refresh()
            yield key not in self.answers
        finally:
            fcntl.lockf(self.lock, fcntl.LOCK_UN, 1, offset)

    async def write(self, **record: Any) -> None:
        """Writes a record, together with other waiting records. Returns when the record is on disk or in the bucket."""
        done = asyncio.get_running_loop().create_future()
        self.waiting.append(({"run": self.run, **record}, done))
        if self.writing is None:
            self.writing = asyncio.create_task(self._write_all())
        await done

    async def _write_all(self) -> None:
        try:
            while self.waiting:
                group, self.waiting = self.waiting, []
                lines = [json.dumps(record) for record, _ in group]
                try:
                    await asyncio.to_thread(self._append, lines)
                except Exception as error:  # a full disk, or a bucket that does not answer
                    # starts a new file, because the last line of the old file may be incomplete
                    self.name = uuid.uuid4().hex
                    for _, done in group:
                        if not done.done():
                            done.set_exception(error)
                    continue
                for record, done in group:
                    self._add(record)
                    if not done.done():
                        done.set_result(None)
        finally:
            self.writing = None

    def _append(self, lines: list[str]) -> None:
        self.parts += 1
        if self.remote:
            name = f"{self.name}-{self.parts:06d}.jsonl"
            storage.write_lines(storage.join(self.folder, name), lines)
            self.read[name] = 1 << 62
            return
        content = "".join(f"{line}\n" for line in lines).encode()
        with open(f"{self.folder}/{self.name}.jsonl", "ab") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self.read[f"{self.name}.jsonl"] = 1 << 62  # a process need not read its own file
        os.write(self.lock, b".")
        if os.fstat(self.lock).st_size == self.seen + 1:  # no other process has written between the two reads
            self.seen += 1
