"""Users' feedback on answers, as rows that `kto`, `rm`, `dpo` and `sft` read.

    labels.jsonl         {prompt, completion, label}     kto
    comparisons.jsonl    {prompt, chosen, rejected}      rm, dpo
    edits.jsonl          {prompt, completion}            sft

Each row names the version that answered, the seed and the time. Without serve.log_prompts, no text is kept, and `votes.jsonl`
has only the labels. One process at a time uses the folder. A line is on disk before its sender gets an answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.data.encode import Encoder
from pipeline.data.formats import kind_of, parse_row
from pipeline.data.values import RowError
from pipeline.errors import InputError
from pipeline.job import Serve
from pipeline.serving.protocol import Feedback, Refused
from pipeline.system import storage

# {file: (a stage that reads it, the key of the request that makes its rows)}
READ_BY = {"labels": ("kto", "label"), "comparisons": ("rm", "chosen"), "edits": ("sft", "edit")}
KEY = "serve.feedback_path"
BYTES = "LENGTH(CAST(answer AS BLOB))"
LOCK_S = 10.0  # maximum wait for an earlier process to release the folder, such as a replaced recorder
KEPT_S = 30 * 24 * 3600  # age in seconds at which a conversation is deleted
TABLES = """
    PRAGMA journal_mode=WAL;
    PRAGMA foreign_keys=ON;
    CREATE TABLE IF NOT EXISTS answers (id TEXT PRIMARY KEY, time REAL, answer TEXT);
    CREATE INDEX IF NOT EXISTS by_time ON answers (time);
    CREATE TABLE IF NOT EXISTS said (
        answer TEXT REFERENCES answers ON DELETE CASCADE, name TEXT, kind TEXT, what TEXT, UNIQUE (answer, name, kind)
    );
"""


def folder_of(serve: Serve, storage_path: str) -> str:
    return serve.feedback_path or f"{storage_path}/feedback"


def encoders(
    tokenizer: Any, max_length: int, ends: Sequence[int], parse_special_tokens: bool
) -> dict[str, Encoder]:
    """Returns for each file the encoder of the stage that will learn from its rows.

    Args:
        max_length: tokens of the longest conversation that the server can produce.
    """
    settings = (max_length, "error", True, ends, parse_special_tokens)
    return {file: Encoder(tokenizer, kind_of(stage), *settings) for file, (stage, _) in READ_BY.items()}


class FeedbackStore:
    """The feedback folder: rows, and in conversations.db the answers that may get feedback, with their feedback.

    Args:
        max_bytes: half is for rows, half for conversations. A row that exceeds its half is refused. If conversations
            exceed theirs, the oldest are deleted.
        encoders: None accepts every row.

    Raises:
        InputError: if another process uses the folder, or it is unusable.
    """

    def __init__(
        self, folder: str, log_prompts: bool, max_bytes: int, encoders: dict[str, Encoder] | None = None
    ) -> None:
        self.folder, self.log_prompts, self.max_bytes = Path(folder), log_prompts, max_bytes
        self.encoders = encoders
        self.epoch = time.time() - time.monotonic()  # a system clock that is ahead for a while ages nothing
        try:
            with contextlib.ExitStack() as opened:
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                what = f"another server to release {folder}"
                opened.enter_context(storage.locked(f"{folder}/.lock", what, LOCK_S))
                self.bytes = sum(cut_to_lines(self.folder / f"{name}.jsonl") for name in (*READ_BY, "votes"))
                database = self.folder / "conversations.db"
                database.touch()
                database.chmod(0o600)  # it contains prompts and completions, like the rows
                self.known = sqlite3.connect(database, check_same_thread=False)
                opened.callback(self.known.close)
                self.known.executescript(TABLES)
                held = self.known.execute(f"SELECT TOTAL({BYTES}) FROM answers")
                [self.conversation_bytes] = held.fetchone()
                self.opened = opened.pop_all()
        except sqlite3.Error as error:
            why = f"{folder}/conversations.db: {error}; move conversations.db* elsewhere (feedback on earlier answers then gets 404)"
            raise InputError(why, key=KEY) from error
        except OSError as error:  # TimeoutError means that another server uses the folder
            why = f"{folder} cannot be used ({error}); set another folder: {KEY}=FOLDER"
            raise InputError(why, key=KEY) from error

    def close(self) -> None:
        """Releases the folder, like the end of the process."""
        self.opened.close()

    def remember(self, answers: list[dict[str, Any]]) -> None:
        """Stores answers that may get feedback, with messages and texts if prompts are logged."""
        if not answers:
            return
        held = self.conversation_bytes
        with self._transaction():
            for answer in answers:  # a replica that missed the reply sends them again
                row = (answer["id"], answer["time"], json.dumps(answer, ensure_ascii=False))
                if self.known.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", row).rowcount:
                    held += len(row[2].encode())
            held -= self._forget("time < ?", self.epoch + time.monotonic() - KEPT_S)
            while held > self.max_bytes // 2:
                held -= self._forget("id = (SELECT id FROM answers ORDER BY time LIMIT ?)", 1)
        self.conversation_bytes = held  # only after the rows are on disk

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commits the block's changes of conversations, or raises Refused if the disk is full."""
        try:
            with self.known:
                yield
        except (sqlite3.Error, OSError) as error:
            raise Refused(507, f"feedback cannot be written ({error})", code="not_written") from error

    def _forget(self, which: str, value: float) -> int:
        """Deletes answers with their feedback. Returns their bytes."""
        gone = self.known.execute(f"DELETE FROM answers WHERE {which} RETURNING {BYTES}", (value,))
        return sum(length for (length,) in gone)

    def give(self, feedback: dict[str, Any]) -> dict[str, Any]:
        """Writes one label, comparison or edit. The same feedback again changes nothing.

        Raises:
            Refused: 404 for an unknown answer, 400 for an unknown choice and for a row that no stage can learn from, 409 if
                other feedback of this kind was given before, 507 if the folder is full.
        """
        said = Feedback.model_validate(feedback)
        found = self.known.execute("SELECT answer FROM answers WHERE id = ?", (said.id,)).fetchone()
        if found is None:
            raise Refused(404, "no answer with this id is known here", "id")
        answer = json.loads(found[0])
        for key, choice in (("choice", said.choice), ("chosen", said.chosen), ("rejected", said.rejected)):
            if choice is not None and choice >= answer["choices"]:
                why = f"{key}: found {choice}, and the answer has {answer['choices']} choices"
                raise Refused(400, why, key)
        what = {"kind": said.kind, **said.model_dump(exclude_none=True, exclude={"id"})}
        if said.edit is not None:
            what["edit"] = hashlib.sha256(said.edit.encode()).hexdigest()[:16]  # the row has the text
        name = said.id if said.kind == "comparisons" else f"{said.id}/{said.choice}"
        earlier = self.known.execute(
            "SELECT what FROM said WHERE answer = ? AND name = ? AND kind = ?", (said.id, name, said.kind)
        ).fetchone()
        if earlier is not None and json.loads(earlier[0]) != what:
            raise Refused(409, "different feedback was given before; the first one counts", "id")
        if earlier is None:
            row = self._row(answer, said)
            if row and self.encoders is not None:
                self._check(said.kind, row)
            facts = {"version": answer["version"], "seed": answer["seed"], "time": time.time()}
            row |= facts | {"id": name, "said": what}
            with self._transaction():  # undone if the row cannot be written
                given = (said.id, name, said.kind, json.dumps(what))
                self.known.execute("INSERT INTO said VALUES (?, ?, ?, ?)", given)
                self._append(said.kind if "prompt" in row else "votes", row)
        return {"id": said.id, "object": "feedback", "kind": said.kind, "version": answer["version"]}

    def _row(self, answer: dict[str, Any], said: Feedback) -> dict[str, Any]:
        """Returns the row for a stage, or {} if texts are not logged. Raises Refused."""
        if not self.log_prompts or "messages" not in answer:
            if said.kind == "edits":
                why = "edit: texts are not kept here (serve.log_prompts is false)"
                raise Refused(400, why, "edit", "no_texts")
            return {}
        preferred = said.chosen if said.kind == "comparisons" else said.choice if said.label else None
        if preferred in answer["truncated"]:
            key = READ_BY[said.kind][1]
            why = f"{key}: choice {preferred} was truncated and would teach the policy to stop there"
            raise Refused(400, f"{why}; send an edit with its end", key, "truncated")
        texts, prompt = answer["texts"], {"prompt": answer["messages"]}
        prompt |= {key: answer[key] for key in ("chat_template_kwargs",) if answer.get(key)}
        if said.kind == "labels":
            return prompt | {"completion": texts[said.choice], "label": said.label}
        if said.kind == "edits":
            return prompt | {"completion": said.edit, "original": texts[said.choice]}
        assert said.chosen is not None and said.rejected is not None
        return prompt | {"chosen": texts[said.chosen], "rejected": texts[said.rejected]}

    def _check(self, kind: str, row: dict[str, Any]) -> None:
        """Raises Refused, 400, if the stage would stop at the row or drop it."""
        assert self.encoders is not None
        encoder, key = self.encoders[kind], READ_BY[kind][1]
        outcome: Any
        try:
            [outcome] = encoder.encode([parse_row(row, encoder.kind)])[0]
        except RowError as error:
            outcome = error
        if isinstance(outcome, RowError):
            field = f"`{outcome.field}` is " if outcome.field else "found "
            why = f"{key}: no row to learn from: {field}{outcome.found}; expected {outcome.expected}"
            raise Refused(400, why, key)

    def _append(self, name: str, row: dict[str, Any]) -> None:
        """Appends one line and flushes it to disk before returning. Raises Refused if the folder is full."""
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        if self.bytes + len(line) > self.max_bytes // 2:
            raise Refused(507, "the feedback folder is full (serve.max_feedback_bytes)")
        file = os.open(self.folder / f"{name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        before = os.fstat(file).st_size
        try:
            if os.write(file, line) < len(line):
                raise OSError("only a part was written")
            os.fsync(file)
        except OSError as error:
            os.ftruncate(file, before)
            why = f"feedback cannot be written ({error.strerror or error})"
            raise Refused(507, why, code="not_written") from error
        finally:
            os.close(file)
        self.bytes += len(line)


def cut_to_lines(file: Path) -> int:
    """Removes a killed process's incomplete last line, whose sender got no answer. Returns the remaining bytes."""
    size = file.stat().st_size if file.exists() else 0
    if size == 0:
        return 0
    with file.open("r+b") as rows:
        with mmap.mmap(rows.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        if end < size:
            rows.truncate(end)
            print(f"{file}: removed an unfinished last line of {size - end} bytes", flush=True)
    return end
