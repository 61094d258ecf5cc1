"""Tests feedback: complete lines, written once, for the given answer; and what is stored if prompts are not logged."""

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
from pipeline.serving.feedback import FeedbackStore, encoders
from pipeline.serving.protocol import Refused

MESSAGES = [{"role": "user", "content": "What is the capital of Peru?"}]
ID = {"id": "chatcmpl-1"}


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(feedback, "LOCK_S", 0.0)


@pytest.fixture
def stores(tmp_path):
    """Makes stores for one test. Each store takes over the folder from the previous one."""
    made = []

    def store(*answers, log_prompts=True, most=1 << 20):
        for earlier in made:
            earlier.close()
        reading = encoders(tokenizer(), 2048, (), "text")
        made.append(FeedbackStore(str(tmp_path), log_prompts, most, reading))
        made[-1].remember(list(answers))
        return made[-1]

    yield store
    for one in made:
        one.close()


def answer(name="chatcmpl-1", texts=("Lima.", "Cuzco."), time=4e9, truncated=()):
    facts = {
        "id": name,
        "time": time,
        "version": "models:/p/3",
        "model": "p",
        "seed": 7,
        "choices": len(texts),
    }
    return facts | {"messages": MESSAGES, "texts": list(texts), "truncated": list(truncated)}


def rows(folder, name):
    file = folder / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def refused(kept, said, status, says=None):
    with pytest.raises(Refused, match=says) as error:
        kept.give({**ID, **said})
    assert error.value.status == status


def test_each_kind_has_its_rows_with_the_version_that_answered(stores, tmp_path):
    kept = stores(answer())
    kept.give({**ID, "label": True})
    kept.give({**ID, "label": False, "choice": 1})
    kept.give({**ID, "chosen": 0, "rejected": 1})
    assert kept.give({**ID, "edit": "It is Lima."})["version"] == "models:/p/3"
    thumbs = [(row["prompt"], row["completion"], row["label"]) for row in rows(tmp_path, "labels")]
    assert thumbs == [(MESSAGES, "Lima.", True), (MESSAGES, "Cuzco.", False)]
    [pair], [edit] = rows(tmp_path, "comparisons"), rows(tmp_path, "edits")
    assert (pair["chosen"], pair["rejected"]) == ("Lima.", "Cuzco.")
    assert (edit["completion"], edit["original"]) == ("It is Lima.", "Lima.")
    assert all((row["version"], row["seed"]) == ("models:/p/3", 7) for row in (pair, edit))


def test_the_row_has_the_variables_of_the_template(stores, tmp_path):
    given = {"chat_template_kwargs": {"enable_thinking": False}}
    kept = stores({**answer("chatcmpl-1"), **given}, {**answer("chatcmpl-2"), "chat_template_kwargs": None})
    for name in ("chatcmpl-1", "chatcmpl-2"):
        kept.give({"id": name, "label": True})
    first, second = rows(tmp_path, "labels")
    assert (
        first["chat_template_kwargs"] == {"enable_thinking": False} and "chat_template_kwargs" not in second
    )


def test_repeated_feedback_changes_nothing_and_different_feedback_is_refused_also_after_a_restart(
    stores, tmp_path
):
    kept = stores(answer())
    for _ in range(2):
        for said in ({"label": True}, {"edit": "It is Lima."}, {"chosen": 0, "rejected": 1}):
            assert kept.give({**ID, **said}) == kept.give({**ID, **said})
        for said in ({"label": False}, {"edit": "No."}, {"chosen": 1, "rejected": 0}):
            refused(kept, said, 409)
        kept = stores()
    assert [len(rows(tmp_path, name)) for name in ("labels", "edits", "comparisons")] == [1, 1, 1]


LONG = r"no row to learn from: found \d+ tokens; expected at most 2048"


@pytest.mark.parametrize(
    ("said", "status", "says"),
    [
        ({"id": "chatcmpl-9", "label": True}, 404, "no answer with this id"),
        ({"label": True, "choice": 3}, 400, "choice: found 3, and the answer has 3 choices"),
        ({"chosen": 1, "rejected": 3}, 400, "rejected: found 3"),
        ({"id": "same", "chosen": 0, "rejected": 1}, 400, "chosen: no row to learn from"),
        # The stage would stop at such rows.
        ({"label": True}, 400, "label: no row to learn from: `completion` is"),
        ({"chosen": 1, "rejected": 0}, 400, "chosen: no row to learn from: `rejected` is"),
        ({"edit": " ", "choice": 1}, 400, "edit: no row to learn from: `completion` is"),
        ({"edit": "word " * 2048, "choice": 1}, 400, f"edit: {LONG}"),
        ({"label": False, "choice": 2}, 400, f"label: {LONG}"),
        ({"chosen": 1, "rejected": 2}, 400, f"chosen: {LONG}"),
    ],
)
def test_feedback_that_no_stage_can_use_is_refused_and_not_written(stores, tmp_path, said, status, says):
    kept = stores(answer(texts=("", "Lima.", "word " * 2048)), answer("same", ("Lima.", "Lima.")))
    for _ in range(2):  # refused feedback does not count as given
        refused(kept, said, status, says)
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_truncated_choice_is_never_the_good_one(stores):
    kept = stores(answer(texts=("Lima is", "Cuzco."), truncated=[0]))
    for said in ({"label": True}, {"chosen": 0, "rejected": 1}):
        refused(kept, said, 400, "choice 0 was truncated")
    for said in (
        {"label": False},
        {"label": True, "choice": 1},
        {"chosen": 1, "rejected": 0},
        {"edit": "Lima."},
    ):
        assert kept.give({**ID, **said})


def test_an_incomplete_line_of_a_killed_writer_is_removed_and_reported(stores, tmp_path, capsys):
    kept = stores(answer(), answer("chatcmpl-2"))
    kept.give({**ID, "label": True})
    whole = (tmp_path / "labels.jsonl").read_bytes()
    (tmp_path / "labels.jsonl").write_bytes(whole + whole[: len(whole) // 2])
    kept = stores()
    assert (tmp_path / "labels.jsonl").read_bytes() == whole
    said = f"{tmp_path}/labels.jsonl: removed an unfinished last line of {len(whole) // 2} bytes"
    assert capsys.readouterr().out.strip() == said
    kept.give({"id": "chatcmpl-2", "label": False})
    assert [row["label"] for row in rows(tmp_path, "labels")] == [True, False]


def test_a_partly_written_line_is_removed(stores, tmp_path, monkeypatch):
    kept, write = stores(answer()), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
        refused(kept, {"label": True}, 507)
    assert (tmp_path / "labels.jsonl").read_bytes() == b""
    kept.give({**ID, "label": True})
    assert len(rows(tmp_path, "labels")) == 1
    (tmp_path / "edits.jsonl").mkdir()  # the file cannot be created, as on a full disk
    refused(kept, {"edit": "Lima."}, 507)


def test_the_folder_has_a_size_limit_and_old_conversations_are_deleted(stores, tmp_path):
    kept = stores(most=1 << 16)
    for i in range(40):
        kept.remember([answer(f"chatcmpl-{i}-{j}", ("x" * 200, "y"), time=4e9 + i) for j in range(64)])
    assert kept.conversation_bytes <= 1 << 15
    refused(kept, {"id": "chatcmpl-0-0", "label": True}, 404)
    written = 0
    with pytest.raises(Refused) as full:
        for j in range(64):
            kept.remember([answer(f"new-{j}", ("z" * 2000,), time=5e9 + j)])
            kept.give({"id": f"new-{j}", "label": True})
            written += 1
    assert full.value.status == 507 and written == len(rows(tmp_path, "labels")) > 5
    assert sum(file.stat().st_size for file in tmp_path.glob("*.jsonl")) <= 1 << 15


def test_repeated_answers_and_answers_that_cannot_be_written_take_no_space(stores):
    kept = stores(most=4000)
    for _ in range(2):
        kept.remember([answer("chatcmpl-1"), answer("chatcmpl-2")])
    [held] = kept.known.execute("SELECT SUM(LENGTH(answer)) FROM answers").fetchone()
    assert kept.conversation_bytes == held
    [pages] = kept.known.execute("PRAGMA page_count").fetchone()
    kept.known.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(Refused, match="disk is full") as full:
        kept.remember([answer("chatcmpl-3", ("x" * 99_999,))])
    assert full.value.status == 507 and kept.conversation_bytes == held


def test_a_conversation_is_forgotten_after_thirty_days_and_not_if_the_clock_jumps(stores, monkeypatch):
    day, now = 24 * 3600, time.time()
    kept = stores(answer("today", time=now), answer("old", time=now - 29 * day))
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + 40 * day)
        kept.remember([answer("ahead", time=now + 40 * day)])
    kept.remember([answer("new", time=now)])
    for name in ("today", "old", "new"):
        assert kept.give({"id": name, "label": True})
    kept.epoch += 2 * day  # as if two days had passed
    kept.remember([answer("later", time=now)])
    refused(kept, {"id": "old", "label": True}, 404)
    assert kept.give({"id": "today", "label": True})


def test_no_other_user_can_read_the_folders_files(stores, tmp_path):
    """Uses a folder that all users may enter, and a database that an earlier version made readable for all."""
    (tmp_path / "conversations.db").touch(0o644)
    kept = stores(answer())
    kept.give({**ID, "label": True})
    held = [file for file in tmp_path.iterdir() if file.stat().st_size]
    assert {"conversations.db-wal", "labels.jsonl"} <= {file.name for file in held}
    assert all(file.stat().st_mode & 0o077 == 0 for file in held), held


def test_feedback_of_different_kinds_may_contradict(stores):
    """docs/serving.md says so."""
    kept = stores(answer())
    kept.give({**ID, "label": True})
    assert kept.give({**ID, "chosen": 1, "rejected": 0})["kind"] == "comparisons"


def test_without_log_prompts_no_text_is_on_disk(stores, tmp_path):
    """The replica sends no prompts."""
    facts = {key: value for key, value in answer().items() if key not in ("messages", "texts", "truncated")}
    kept = stores(facts, log_prompts=False)
    kept.give({**ID, "label": True})
    kept.give({**ID, "chosen": 1, "rejected": 0})
    refused(kept, {"edit": "It is Lima."}, 400, "texts are not kept")
    assert [row["said"]["kind"] for row in rows(tmp_path, "votes")] == ["labels", "comparisons"]
    content = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"Lima" not in content and b"capital" not in content
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.glob("*.jsonl"))


def test_only_one_process_at_a_time_uses_the_folder(tmp_path):
    writer = "import sys, time; from pipeline.serving import feedback; "
    writer += "kept = feedback.FeedbackStore(sys.argv[1], True, 9); print(1, flush=True); time.sleep(600)"
    given = [sys.executable, "-c", writer, str(tmp_path)]
    with subprocess.Popen(given, stdout=subprocess.PIPE, cwd=ROOT) as other:
        try:
            assert other.stdout.readline() == b"1\n"
            says = f"^serve.feedback_path: {tmp_path} cannot be used .*another server.* serve.feedback_path=FOLDER"
            with pytest.raises(InputError, match=says):
                FeedbackStore(str(tmp_path), True, 1 << 20)
        finally:
            other.kill()
    FeedbackStore(str(tmp_path), True, 1 << 20).close()  # a killed process no longer holds the lock


def test_a_restarted_recorder_waits_for_the_previous_one(tmp_path, stores, monkeypatch):
    threading.Timer(0.3, stores(answer()).close).start()
    monkeypatch.setattr(feedback, "LOCK_S", 60.0)
    after = FeedbackStore(str(tmp_path), True, 1 << 20)
    assert after.give({**ID, "label": True})["kind"] == "labels"
    after.close()


def test_an_unusable_folder_is_reported(tmp_path):
    (tmp_path / "conversations.db").write_bytes(b"no database" * 1000)
    (tmp_path / "file").touch()
    damaged = f"{tmp_path}/conversations.db: file is not a database; move conversations.db. elsewhere"
    no_folder = f"{tmp_path}/file cannot be used .*File exists.*; set another folder"
    for folder, says in ((tmp_path, damaged), (tmp_path / "file", no_folder)):
        with pytest.raises(InputError, match=says):
            FeedbackStore(str(folder), True, 1 << 20)
    (tmp_path / "conversations.db").unlink()
    FeedbackStore(str(tmp_path), True, 1 << 20).close()  # the previous store released the folder
