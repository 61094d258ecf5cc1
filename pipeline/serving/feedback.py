"""What users thought of the answers, as rows that `kto`, `rm`, `dpo` and `sft` read as they are.

    thumbs.jsonl         {prompt, completion, label}     kto
    comparisons.jsonl    {prompt, chosen, rejected}      rm, dpo
    edits.jsonl          {prompt, completion}            sft

Each row names the version that spoke, the seed and the time. Without serve.log_prompts no text is kept: `votes.jsonl` then
has the figures alone. One process at a time has the folder: a line is whole and on the disk before its sender is answered.
Other files in the folder are left as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.data.kinds import kind_of
from pipeline.data.parse import parse
from pipeline.data.values import RowError
from pipeline.errors import InputError
from pipeline.serving.protocol import Feedback, Refused
from pipeline.system import storage

if TYPE_CHECKING:
    from pipeline.config import Job

# {file: (a stage that reads it, the key of the request that asks for its rows)}
READ_BY = {"thumbs": ("kto", "label"), "comparisons": ("rm", "chosen"), "edits": ("sft", "edit")}
OWN = (*READ_BY, "votes")
KEY = "serve.feedback_path"
UNFINISHED = (json.JSONDecodeError, UnicodeDecodeError)
LOCK = ".lock"
LOCK_S = 10.0  # for a process that ends to let go of the folder: a recorder that Ray Serve replaces, a server that was killed
KEPT_S = 30 * 24 * 3600  # a conversation that nobody has said anything about is forgotten


def folder_of(job: Job) -> str:
    return job.serve.feedback_path or f"{job.run.storage_path}/feedback"


def check_folder(folder: str) -> None:
    """Raises InputError where no recorder could use it; mends what a process that was killed left."""
    FeedbackStore(folder, log_prompts=False, most_bytes=0).close()


class FeedbackStore:
    """The folder: rows, and the conversations that feedback may still be about (conversations.db).

    Args:
        most_bytes: half of it for the rows, of which those that would exceed it are refused, half for the conversations, of
            which the oldest make room for new ones.

    Raises:
        InputError: where another process has the folder, or it cannot be used.
    """

    def __init__(self, folder: str, log_prompts: bool, most_bytes: int) -> None:
        self.folder, self.log_prompts, self.most_bytes = Path(folder), log_prompts, most_bytes
        self.given: dict[tuple[str, str], Any] = {}  # (answer and choice, kind): what was said
        try:
            with contextlib.ExitStack() as opened:
                self._lock(opened)
                for file in self._files():
                    self._read(file)
                self.bytes = sum(file.stat().st_size for file in self._files())
                self._open_conversations(opened)
                self.opened = opened.pop_all()
        except sqlite3.Error as error:
            raise InputError(
                f"{self.folder}/conversations.db: {error}; move conversations.db* elsewhere, and feedback on earlier answers gets 404",
                key=KEY,
            ) from error
        except OSError as error:
            raise InputError(
                f"{error.filename or self.folder} cannot be used ({error.strerror}); name another folder: {KEY}=FOLDER",
                key=KEY,
            ) from error

    def close(self) -> None:
        """Lets go of the folder, as the end of the process does."""
        self.opened.close()

    def _files(self) -> list[Path]:
        return [file for name in OWN if (file := self.folder / f"{name}.jsonl").exists()]

    def _lock(self, opened: contextlib.ExitStack) -> None:
        """Keeps the folder to this process: each checks what was said in its own memory, and mends at its start.

        The file system lets go of the lock when the process dies.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        what = f"another server to let go of {self.folder}"
        try:
            opened.enter_context(storage.locked(str(self.folder / LOCK), what, LOCK_S))
        except TimeoutError as error:
            raise InputError(
                f"another server writes into {self.folder}; end it, or name another folder: {KEY}=FOLDER",
                key=KEY,
            ) from error

    def _open_conversations(self, opened: contextlib.ExitStack) -> None:
        self.known = sqlite3.connect(self.folder / "conversations.db", check_same_thread=False)
        opened.callback(self.known.close)
        self.known.execute("PRAGMA journal_mode=WAL")
        self.known.execute("CREATE TABLE IF NOT EXISTS answers (id TEXT PRIMARY KEY, time REAL, answer TEXT)")
        self.known.execute("CREATE INDEX IF NOT EXISTS by_time ON answers (time)")
        self.known.commit()
        [self.conversation_bytes] = self.known.execute(
            "SELECT COALESCE(SUM(LENGTH(CAST(answer AS BLOB))), 0) FROM answers"
        ).fetchone()

    def _read(self, file: Path) -> None:
        """Remembers what was said already; the last line gets its end, or goes where a killed process left a part of it."""
        size = 0
        with file.open("rb") as rows:
            for number, line in enumerate(rows, 1):
                whole = line.endswith(b"\n")
                try:
                    self._said_before(file.stem, line)
                except (ValueError, RecursionError) as error:
                    # What is written begins so, and its sender was never told that it was.
                    if whole or not line.startswith(b"{") or not isinstance(error, UNFINISHED):
                        raise InputError(
                            f"{file}:{number}: {error}; mend the line, or move the file elsewhere", key=KEY
                        ) from error
                    os.truncate(file, size)
                    print(f"{file}:{number}: took out an unfinished line of {len(line)} bytes", flush=True)
                    return
                size += len(line)
        if size and not whole:  # edited by hand
            with file.open("ab") as rows:
                rows.write(b"\n")

    def _said_before(self, stem: str, line: bytes) -> None:
        """Raises ValueError where the line is no row of ours."""
        if not line.strip():
            return
        row = json.loads(line.decode("utf-8-sig"))  # an editor may have put a mark at the beginning
        said = row.get("said", {"kind": stem}) if isinstance(row, dict) else None
        if not isinstance(said, dict) or not isinstance(row.get("id"), str) or "kind" not in said:
            raise ValueError("found no row that serve wrote: it has no `id`, or a damaged `said`")
        self.given[row["id"], str(said["kind"])] = row.get("said")

    # -------------------------------------------------------------------------------------------- answers

    def remember(self, answers: list[dict[str, Any]]) -> None:
        """Answers that feedback may come on: id, version, seed, time, choices; with log_prompts also messages and texts."""
        if not answers:
            return
        rows = [(answer["id"], answer["time"], json.dumps(answer, ensure_ascii=False)) for answer in answers]
        held = self.conversation_bytes
        with self.known:  # a transaction
            for row in rows:  # a replica that was not told of the first time sends them again
                if self.known.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", row).rowcount:
                    held += len(row[2].encode())
            held -= self._forget("time < ?", time.time() - KEPT_S)
            while held > self.most_bytes // 2:
                held -= self._forget("id = (SELECT id FROM answers ORDER BY time LIMIT ?)", 1)
        self.conversation_bytes = held  # once it is on the disk

    def _forget(self, which: str, value: float) -> int:
        """How much it was."""
        gone = self.known.execute(
            f"DELETE FROM answers WHERE {which} RETURNING LENGTH(CAST(answer AS BLOB))", (value,)
        )
        return sum(length for (length,) in gone)

    # ------------------------------------------------------------------------------------------- feedback

    def give(self, feedback: dict[str, Any]) -> dict[str, Any]:
        """Write one thumb, comparison or edit. The same again changes nothing.

        Raises:
            Refused: 404 for an answer that is not known, 400 for a choice that it does not have and for what would be no row to
                learn from (an empty completion), 409 where something else, or the opposite, was said of it, 507 where the folder
                is full.
        """
        said = Feedback.model_validate(feedback)
        found = self.known.execute("SELECT answer FROM answers WHERE id = ?", (said.id,)).fetchone()
        if found is None:
            raise Refused(404, "no answer with this id is known here", "id", "not_found")
        answer = json.loads(found[0])
        for key, choice in (("choice", said.choice), ("chosen", said.chosen), ("rejected", said.rejected)):
            if choice is not None and choice >= answer["choices"]:
                raise Refused(
                    400,
                    f"{key}: found {choice}, and the answer has {answer['choices']} choices",
                    key,
                    "invalid_value",
                )
        what = {"kind": said.kind, **said.model_dump(exclude_none=True, exclude={"id"})}
        if said.edit is not None:
            what["edit"] = hashlib.sha256(said.edit.encode()).hexdigest()[:16]  # the row has its text
        name = f"{said.id}/{said.choice}" if said.kind != "comparisons" else said.id
        earlier = self.given.get((name, said.kind))
        if earlier is not None and earlier != what:
            raise Refused(
                409, "something else was said of it before, and the first counts", "id", "already_given"
            )
        if earlier is None:
            self._check_agreement(said, what)
            file, row = self._row(answer, said, name, what)
            _check(file, row)
            self._append(file, row)
            self.given[name, said.kind] = what
        return {"id": said.id, "object": "feedback", "kind": said.kind, "version": answer["version"]}

    def _check_agreement(self, said: Feedback, what: dict[str, Any]) -> None:
        """Raises Refused, 409, where a choice with a thumb down would be preferred to one with a thumb up."""
        compared = what if said.kind == "comparisons" else self.given.get((said.id, "comparisons"))
        if said.kind == "edits" or compared is None:
            return

        def thumb(choice: Any) -> bool | None:
            given = what if said.kind == "thumbs" and said.choice == choice else None
            return (given or self.given.get((f"{said.id}/{choice}", "thumbs")) or {}).get("label")

        chosen, rejected = compared.get("chosen"), compared.get("rejected")
        if thumb(chosen) is False and thumb(rejected) is True:
            raise Refused(
                409,
                f"choice {chosen} has a thumb down and choice {rejected} a thumb up, and {chosen} would be preferred to {rejected}",
                "id",
                "contradiction",
            )

    def _row(
        self, answer: dict[str, Any], said: Feedback, name: str, what: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        facts = {
            "version": answer["version"],
            "seed": answer["seed"],
            "time": time.time(),
            "id": name,
            "said": what,
        }
        if not self.log_prompts or "messages" not in answer:
            if said.kind == "edits":
                raise Refused(
                    400, "edit: texts are not kept here (serve.log_prompts is false)", "edit", "no_texts"
                )
            return "votes", facts
        texts, row = answer["texts"], {"prompt": answer["messages"]}
        if said.kind == "thumbs":
            return "thumbs", {**row, "completion": texts[said.choice], "label": said.label, **facts}
        if said.kind == "edits":
            return "edits", {**row, "completion": said.edit, "original": texts[said.choice], **facts}
        assert said.chosen is not None and said.rejected is not None
        if texts[said.chosen] == texts[said.rejected]:
            raise Refused(400, "chosen: both choices have the same text", "chosen", "invalid_value")
        return "comparisons", {**row, "chosen": texts[said.chosen], "rejected": texts[said.rejected], **facts}

    def _append(self, name: str, row: dict[str, Any]) -> None:
        """One line, whole and on the disk when this returns. Raises Refused where the folder is full."""
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        if self.bytes + len(line) > self.most_bytes // 2:
            raise Refused(507, "the feedback folder is full (serve.feedback_bytes)", code="full")
        file = os.open(self.folder / f"{name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        before = os.fstat(file).st_size
        try:
            if os.write(file, line) < len(line):
                raise OSError("written in part")
            os.fsync(file)
        except OSError as error:
            os.ftruncate(file, before)
            raise Refused(
                507, f"feedback cannot be written ({error.strerror or error})", code="not_written"
            ) from error
        finally:
            os.close(file)
        self.bytes += len(line)


def _check(file: str, row: dict[str, Any]) -> None:
    """Raises Refused, 400, where the stage that reads this file would stop at the row."""
    if file == "votes":
        return
    try:
        parse(row, kind_of(READ_BY[file][0]))
    except RowError as error:
        _, key = READ_BY[file]
        raise Refused(
            400, f"{key}: no row to learn from: `{error.field}` is {error.found}", key, "invalid_value"
        ) from error
