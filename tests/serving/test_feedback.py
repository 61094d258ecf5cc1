"""Tests the feedback folder: rows, rejected feedback, size limit, damaged files, and that only one server uses the folder."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest
from running import ROOT
from toy_models import tokenizer

from pipeline.errors import InputError
from pipeline.serving import feedback
from pipeline.serving.feedback import FeedbackStore, feedback_encoders
from pipeline.serving.protocol import Refused

MESSAGES = [{"role": "user", "content": "What is the capital of Peru?"}]
ID = {"id": "chatcmpl-1"}


@pytest.fixture(autouse=True)
def no_wait_for_the_lock(monkeypatch):
    monkeypatch.setattr(feedback, "LOCK_S", 0.0)


@pytest.fixture
def stores(tmp_path):
    """Returns a function that makes feedback stores. Each new store takes over the folder from the previous store."""
    made = []

    def store(*answers, max_bytes=1 << 20):
        for earlier in made:
            earlier.close()
        made.append(FeedbackStore(str(tmp_path), max_bytes, feedback_encoders(tokenizer(), 2048, (), "text")))
        made[-1].remember(list(answers))
        return made[-1]

    yield store
    for one in made:
        one.close()


def answer(name="chatcmpl-1", texts=("Lima.", "Cuzco."), time=4e9, truncated=(), variables=None):
    facts = {"id": name, "time": time, "version": "models:/p/3", "model": "p", "seed": 7}
    facts |= {"choices": len(texts), "texts": list(texts), "truncated": list(truncated)}
    return facts | {"messages": MESSAGES, "chat_template_kwargs": variables}


def rows(folder, name):
    file = folder / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def refused(store, request, status, message=None):
    with pytest.raises(Refused, match=message) as error:
        store.add({**ID, **request})
    assert error.value.status == status


def test_each_kind_has_its_rows_with_the_version_that_answered(stores, tmp_path):
    variables = {"enable_thinking": False}
    store = stores(answer(), answer("chatcmpl-2", variables=variables))
    store.add({**ID, "label": True})
    store.add({**ID, "label": False, "choice": 1})
    store.add({"id": "chatcmpl-2", "label": True})
    store.add({**ID, "chosen": 0, "rejected": 1})
    assert store.add({**ID, "edit": "It is Lima."})["version"] == "models:/p/3"
    labels = rows(tmp_path, "labels")
    assert [row["completion"] for row in labels] == ["Lima.", "Cuzco.", "Lima."]
    assert [row["label"] for row in labels] == [True, False, True]
    assert [row.get("chat_template_kwargs") for row in labels] == [None, None, variables]
    [pair], [edit] = rows(tmp_path, "comparisons"), rows(tmp_path, "edits")
    assert (pair["chosen"], pair["rejected"]) == ("Lima.", "Cuzco.")
    assert (edit["completion"], edit["original"]) == ("It is Lima.", "Lima.")
    for row in (*labels, pair, edit):
        assert (row["prompt"], row["version"], row["seed"]) == (MESSAGES, "models:/p/3", 7)


def test_repeated_feedback_changes_nothing_and_different_feedback_is_refused_also_after_a_restart(
    stores, tmp_path
):
    store = stores(answer())
    for _ in range(2):
        for request in ({"label": True}, {"edit": "It is Lima."}, {"chosen": 1, "rejected": 0}):
            assert store.add({**ID, **request}) == store.add({**ID, **request})
        for request in ({"label": False}, {"edit": "No."}, {"chosen": 0, "rejected": 1}):
            refused(store, request, 409)
        store = stores()
    assert [len(rows(tmp_path, name)) for name in ("labels", "edits", "comparisons")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        ({"id": "chatcmpl-9", "label": True}, 404, "no answer with this id"),
        ({"label": True, "choice": 3}, 400, "choice: found 3, but the answer has 3 choices"),
        ({"chosen": 1, "rejected": 3}, 400, "rejected: found 3"),
        ({"id": "same", "chosen": 0, "rejected": 1}, 400, "chosen: no stage can train on this row"),
        ({"label": True}, 400, "label: no stage can train on this row: `completion` is"),
        ({"edit": " ", "choice": 1}, 400, "edit: no stage can train on this row: `completion` is"),
        ({"chosen": 1, "rejected": 2}, 400, r"chosen: no stage can train on this row: found \d+ tokens; expected at most 2048"),
    ],
)  # fmt: skip
def test_feedback_that_no_stage_can_use_is_refused_and_not_written(
    stores, tmp_path, request_, status, message
):
    store = stores(answer(texts=("", "Lima.", "word " * 2048)), answer("same", ("Lima.", "Lima.")))
    for _ in range(2):  # the second attempt must not find the rejected feedback as a duplicate
        refused(store, request_, status, message)
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_truncated_choice_is_never_preferred(stores):
    store = stores(answer(texts=("Lima is", "Cuzco."), truncated=[0]))
    for request in ({"label": True}, {"chosen": 0, "rejected": 1}):
        refused(store, request, 400, "choice 0 was truncated")
    for request in ({"label": False}, {"chosen": 1, "rejected": 0}, {"edit": "Lima."}):
        assert store.add({**ID, **request})


def test_an_incomplete_line_of_a_killed_writer_is_removed_and_reported(stores, tmp_path, capsys):
    store = stores(answer(), answer("chatcmpl-2"))
    store.add({**ID, "label": True})
    whole = (tmp_path / "labels.jsonl").read_bytes()
    (tmp_path / "labels.jsonl").write_bytes(whole + whole[: len(whole) // 2])
    store = stores()
    assert (tmp_path / "labels.jsonl").read_bytes() == whole
    message = f"{tmp_path}/labels.jsonl: removed an incomplete last line of {len(whole) // 2} bytes"
    assert capsys.readouterr().out.strip() == message
    store.add({"id": "chatcmpl-2", "label": False})
    assert [row["label"] for row in rows(tmp_path, "labels")] == [True, False]


def test_a_partly_written_line_is_removed(stores, tmp_path, monkeypatch):
    store, write = stores(answer()), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
        refused(store, {"label": True}, 507)
    assert (tmp_path / "labels.jsonl").read_bytes() == b""
    store.add({**ID, "label": True})
    assert len(rows(tmp_path, "labels")) == 1
    (tmp_path / "edits.jsonl").mkdir()  # the file cannot be created, as on a full disk
    refused(store, {"edit": "Lima."}, 507)


def test_the_folder_has_a_size_limit_and_old_conversations_are_deleted(stores, tmp_path):
    store = stores(max_bytes=1 << 16)
    for i in range(40):
        store.remember([answer(f"chatcmpl-{i}-{j}", ("x" * 200, "y"), time=4e9 + i) for j in range(64)])
    assert store.conversation_bytes <= 1 << 15
    refused(store, {"id": "chatcmpl-0-0", "label": True}, 404)
    written = 0
    with pytest.raises(Refused) as full:
        for j in range(64):
            store.remember([answer(f"new-{j}", ("z" * 2000,), time=5e9 + j)])
            store.add({"id": f"new-{j}", "label": True})
            written += 1
    assert full.value.status == 507 and written == len(rows(tmp_path, "labels")) > 5
    assert sum(file.stat().st_size for file in tmp_path.glob("*.jsonl")) <= 1 << 15


def test_a_conversation_is_deleted_after_thirty_days_but_not_if_the_clock_jumps(stores, monkeypatch):
    day, now = 24 * 3600, time.time()
    store = stores(answer("new", time=now - 29 * day), answer("old", time=now - 31 * day))
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + 40 * day)
        store.remember([answer("ahead", time=now + 40 * day)])
    assert store.add({"id": "new", "label": True})
    refused(store, {"id": "old", "label": True}, 404)


def test_no_other_user_can_read_the_folders_files(stores, tmp_path):
    """Uses a folder that all users may enter, and a database that an earlier version made readable for all users."""
    (tmp_path / "conversations.db").touch(0o644)
    store = stores(answer())
    store.add({**ID, "label": True})
    held = [file for file in tmp_path.iterdir() if file.stat().st_size]
    assert {"conversations.db-wal", "labels.jsonl"} <= {file.name for file in held}
    assert all(file.stat().st_mode & 0o077 == 0 for file in held), held


def test_only_one_process_at_a_time_uses_the_folder(tmp_path):
    writer = "import sys, time; from pipeline.serving.feedback import FeedbackStore; "
    writer += "store = FeedbackStore(sys.argv[1], 9, {}); print(1, flush=True); time.sleep(600)"
    given = [sys.executable, "-c", writer, str(tmp_path)]
    with subprocess.Popen(given, stdout=subprocess.PIPE, cwd=ROOT) as other:
        try:
            assert other.stdout.readline() == b"1\n"
            message = f"^serve.feedback_path: {tmp_path} cannot be used .*another server.* serve.feedback_path=FOLDER"
            with pytest.raises(InputError, match=message):
                FeedbackStore(str(tmp_path), 1 << 20, {})
        finally:
            other.kill()
    FeedbackStore(str(tmp_path), 1 << 20, {}).close()  # the killed process has released the lock


def test_a_restarted_recorder_waits_for_the_previous_one(tmp_path, stores, monkeypatch):
    threading.Timer(0.3, stores(answer()).close).start()
    monkeypatch.setattr(feedback, "LOCK_S", 60.0)
    FeedbackStore(str(tmp_path), 1 << 20, {}).close()


def test_an_unusable_folder_is_reported(tmp_path):
    (tmp_path / "conversations.db").write_bytes(b"no database" * 1000)
    (tmp_path / "file").touch()
    damaged = f"{tmp_path}/conversations.db: file is not a database; move conversations.db. elsewhere"
    no_folder = f"{tmp_path}/file cannot be used .*File exists.*; set another folder"
    for folder, message in ((tmp_path, damaged), (tmp_path / "file", no_folder)):
        with pytest.raises(InputError, match=message):
            FeedbackStore(str(folder), 1 << 20, {})
    (tmp_path / "conversations.db").unlink()
    # Succeeds, because the previous store released the folder.
    FeedbackStore(str(tmp_path), 1 << 20, {}).close()
