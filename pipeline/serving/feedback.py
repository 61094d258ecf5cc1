"""Stores users' feedback on answers as training rows for `kto`, `rm`, `dpo` and `sft`.

    labels.jsonl         {prompt, completion, label}     kto
    comparisons.jsonl    {prompt, chosen, rejected}      rm, dpo
    edits.jsonl          {prompt, completion}            sft

Each row also has the version that answered, the seed and the time. The client gets a response after the row is on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
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

# {file: (a stage that trains on the file, the key of feedback requests that add a row to the file)}
FILES = {"labels": ("kto", "label"), "comparisons": ("rm", "chosen"), "edits": ("sft", "edit")}
KEY = "serve.feedback_path"
BYTES = "LENGTH(CAST(answer AS BLOB))"
LOCK_S = (
    10.0  # maximum time to wait until an earlier process, such as a replaced recorder, releases the folder
)
KEPT_S = 30 * 24 * 3600  # conversations that are older than this are deleted
TABLES = """
    PRAGMA journal_mode=WAL;
    PRAGMA foreign_keys=ON;
    CREATE TABLE IF NOT EXISTS answers (id TEXT PRIMARY KEY, time REAL, answer TEXT);
    CREATE INDEX IF NOT EXISTS by_time ON answers (time);
    CREATE TABLE IF NOT EXISTS feedback (
        answer TEXT REFERENCES answers ON DELETE CASCADE, name TEXT, kind TEXT, content TEXT,
        UNIQUE (answer, name, kind)
    );
"""


def feedback_folder(serve: Serve, storage_path: str) -> str:
    """Returns the absolute path of the feedback folder, because a replica may run in another directory."""
    return storage.absolute(serve.feedback_path or f"{storage_path}/feedback")


def feedback_encoders(
    tokenizer: Any, max_length: int, ends: Sequence[int], parse_special_tokens: bool
) -> dict[str, Encoder]:
    """Returns {file: encoder of the stage that trains on the file}, to check new rows.

    Args:
        max_length: maximum number of tokens of a conversation with the server.
    """
    settings = (max_length, "error", True, ends, parse_special_tokens)
    return {file: Encoder(tokenizer, kind_of(stage), *settings) for file, (stage, _) in FILES.items()}


class FeedbackStore:
    """Manages the feedback folder, which has files of training rows, and conversations.db with the answers that can get feedback.

    Args:
        max_bytes: maximum size of the folder. If the rows fill half of it, new rows are rejected. If the conversations fill half
        of it, the oldest conversations are deleted.

    Raises:
        InputError: if another process uses the folder, or if the folder cannot be used.
    """

    def __init__(self, folder: str, max_bytes: int, encoders: dict[str, Encoder]) -> None:
        self.folder, self.max_bytes, self.encoders = Path(folder), max_bytes, encoders
        # Ages are computed from this start time, so that no conversation is deleted if the system clock jumps.
        self.epoch = time.time() - time.monotonic()
        try:
            with contextlib.ExitStack() as stack:
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                event = f"another server to release {folder}"
                stack.enter_context(storage.locked(f"{folder}/.lock", event, LOCK_S))
                self.bytes = sum(remove_incomplete_line(self.folder / f"{name}.jsonl") for name in FILES)
                path = self.folder / "conversations.db"
                path.touch()
                path.chmod(0o600)  # private, because the database contains prompts and completions
                self.database = sqlite3.connect(path, check_same_thread=False)
                stack.callback(self.database.close)
                self.database.executescript(TABLES)
                total = self.database.execute(f"SELECT TOTAL({BYTES}) FROM answers")
                [self.conversation_bytes] = total.fetchone()
                self.stack = stack.pop_all()
        except sqlite3.Error as error:
            problem = f"{folder}/conversations.db: {error}; move conversations.db* elsewhere (feedback on earlier answers then gets 404)"
            raise InputError(problem, key=KEY) from error
        except OSError as error:  # TimeoutError means that another server uses the folder
            problem = f"{folder} cannot be used ({error}); set another folder: {KEY}=FOLDER"
            raise InputError(problem, key=KEY) from error

    def close(self) -> None:
        """Closes the database, and unlocks the folder."""
        self.stack.close()

    def remember(self, answers: list[dict[str, Any]]) -> None:
        """Stores answers, so that they can get feedback. Deletes answers that are too old or exceed half of max_bytes."""
        size = self.conversation_bytes
        with self._transaction():
            for answer in answers:  # a replica that got no reply sends the same answers again
                row = (answer["id"], answer["time"], json.dumps(answer, ensure_ascii=False))
                if self.database.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", row).rowcount:
                    size += len(row[2].encode())
            size -= self._delete("time < ?", self.epoch + time.monotonic() - KEPT_S)
            while size > self.max_bytes // 2:
                size -= self._delete("id = (SELECT id FROM answers ORDER BY time LIMIT ?)", 1)
        self.conversation_bytes = size  # a failed transaction does not change this attribute

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commits changes to the database at the end of the `with` block. Raises Refused (507) if writing fails."""
        try:
            with self.database:
                yield
        except (sqlite3.Error, OSError) as error:
            raise Refused(507, f"feedback cannot be written ({error})") from error

    def _delete(self, condition: str, value: float) -> int:
        """Deletes answers, and their rows in the table `feedback`. Returns the number of deleted bytes."""
        rows = self.database.execute(f"DELETE FROM answers WHERE {condition} RETURNING {BYTES}", (value,))
        return sum(length for (length,) in rows)

    def add(self, request: dict[str, Any]) -> dict[str, Any]:
        """Writes one label, comparison or edit as a row. Sending the same feedback again changes nothing.

        Raises:
            Refused: 404 for an unknown answer; 400 for an unknown choice or an unusable row; 409 if the answer
                already has different feedback of this kind; 507 if the folder is full.
        """
        feedback = Feedback.model_validate(request)
        record = self.database.execute("SELECT answer FROM answers WHERE id = ?", (feedback.id,)).fetchone()
        if record is None:
            raise Refused(404, "this server has no answer with this id", "id")
        answer = json.loads(record[0])
        for key in ("choice", "chosen", "rejected"):
            choice = getattr(feedback, key)
            if choice is not None and choice >= answer["choices"]:
                problem = f"{key}: found {choice}, but the answer has {answer['choices']} choices"
                raise Refused(400, problem, key)
        content = {"kind": feedback.kind, **feedback.model_dump(exclude_none=True, exclude={"id"})}
        if feedback.edit is not None:
            # only a digest, because the row contains the full text
            content["edit"] = hashlib.sha256(feedback.edit.encode()).hexdigest()[:16]
        name = feedback.id if feedback.kind == "comparisons" else f"{feedback.id}/{feedback.choice}"
        previous = self.database.execute(
            "SELECT content FROM feedback WHERE answer = ? AND name = ? AND kind = ?",
            (feedback.id, name, feedback.kind),
        ).fetchone()
        if previous is not None and json.loads(previous[0]) != content:
            raise Refused(409, "the answer already has different feedback, which was not changed", "id")
        if previous is None:
            row = self._row(answer, feedback)
            self._check_row(feedback.kind, row)
            details = {"version": answer["version"], "seed": answer["seed"], "time": time.time()}
            row |= details | {"id": name}
            with self._transaction():  # rolled back if the row cannot be written
                values = (feedback.id, name, feedback.kind, json.dumps(content))
                self.database.execute("INSERT INTO feedback VALUES (?, ?, ?, ?)", values)
                self._append(feedback.kind, row)
        return {"id": feedback.id, "object": "feedback", "kind": feedback.kind, "version": answer["version"]}

    def _row(self, answer: dict[str, Any], feedback: Feedback) -> dict[str, Any]:
        """Returns the training row. Raises Refused if the feedback prefers a truncated choice."""
        kind, choice, texts = feedback.kind, feedback.choice, answer["texts"]
        preferred = feedback.chosen if kind == "comparisons" else choice if feedback.label else None
        if preferred in answer["truncated"]:
            key = FILES[kind][1]
            problem = f"{key}: choice {preferred} was truncated and would teach the policy to stop too early"
            raise Refused(400, f"{problem}; send an edit with the complete text", key)
        prompt = {"prompt": answer["messages"]}
        if variables := answer["chat_template_kwargs"]:
            prompt["chat_template_kwargs"] = variables
        if kind == "labels":
            return prompt | {"completion": texts[choice], "label": feedback.label}
        if kind == "edits":
            return prompt | {"completion": feedback.edit, "original": texts[choice]}
        assert feedback.chosen is not None and feedback.rejected is not None
        return prompt | {"chosen": texts[feedback.chosen], "rejected": texts[feedback.rejected]}

    def _check_row(self, kind: str, row: dict[str, Any]) -> None:
        """Raises Refused (400) if the stage that trains on this kind of row would reject or skip the row."""
        encoder, key = self.encoders[kind], FILES[kind][1]
        try:
            [[outcome]] = encoder.encode([parse_row(row, encoder.kind)])
            if isinstance(outcome, RowError):
                raise outcome
        except RowError as error:
            field = f"`{error.field}` is " if error.field else "found "
            problem = (
                f"{key}: no stage can train on this row: {field}{error.found}; expected {error.expected}"
            )
            raise Refused(400, problem, key) from error

    def _append(self, name: str, row: dict[str, Any]) -> None:
        """Appends one line and flushes it to disk before returning. Raises Refused if the folder is full."""
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        if self.bytes + len(line) > self.max_bytes // 2:
            raise Refused(507, "the feedback folder is full (serve.max_feedback_bytes)")
        file = os.open(self.folder / f"{name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        size = os.fstat(file).st_size
        try:
            if os.write(file, line) < len(line):
                raise OSError("only a part of the row was written")
            os.fsync(file)
        except OSError:
            os.ftruncate(file, size)
            raise
        finally:
            os.close(file)
        self.bytes += len(line)


def remove_incomplete_line(file: Path) -> int:
    """Removes the last line of a file if a killed process left it incomplete. Returns the size of the file."""
    content = file.read_bytes() if file.exists() else b""
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(file, end)
        print(f"{file}: removed an incomplete last line of {len(content) - end} bytes", flush=True)
    return end
