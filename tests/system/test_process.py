"""Tests how the command line behaves as a process: output streams, signals and exit status."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from running import NO_EVAL, ROOT, client

from pipeline.__main__ import main
from pipeline.system import console

SMALL = [
    "gate={}", "run.report=false", "trainer.logging_steps=1", "trainer.save_strategy=steps", "trainer.save_steps=2",
    "data.batch_size=8", "trainer.per_device_train_batch_size=8", *NO_EVAL,
]  # fmt: skip


def program(text, status=0, **how):
    """Runs a program with `process.run_main` in a new process. Returns (stdout, stderr)."""
    body = textwrap.indent(textwrap.dedent(text), "    ")
    source = f"import sys\nfrom pipeline.system import process\ndef main():\n{body}\n"
    # if the tests run under nohup, child processes ignore this signal
    how.setdefault("preexec_fn", lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    done = subprocess.run(
        [sys.executable, "-c", source + "sys.exit(process.run_main(main))"],
        cwd=ROOT, capture_output=not how.keys() & {"stdout", "stderr"}, timeout=60, **how,
    )  # fmt: skip
    assert done.returncode == status, done
    return done.stdout, done.stderr


# ---------------------------------------------------------------------------------------------------- the terminal


def test_any_terminal_shows_any_text_and_no_escapes():
    text = r"""
    print('⟦Ünï 😀\ud800⟧')
    print('\x1b[31mred\x07\x9b', file=sys.stderr)
    return 0
    """
    out, err = program(text, env=os.environ | {"PYTHONIOENCODING": "latin-1"})
    assert r"\ud800" in out.decode("latin-1") and err == b"\\x1b[31mred\\x07\\x9b\n"


def test_a_run_continues_if_its_output_cannot_be_written(tmp_path):
    text = f"""
    for line in range(300):
        print("line", line, flush=True)
    open({str(tmp_path / "end")!r}, "w").close()
    return 0
    """
    read, write = os.pipe()
    os.close(read)
    _, err = program(text, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert err == b"" and (tmp_path / "end").exists()
    _, err = program(text, preexec_fn=lambda: os.close(1))  # stdout is closed, as by `>&-`
    assert err == b""
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            _, err = program(text, stdout=full, stderr=subprocess.PIPE)
        assert err == b"warning: cannot write to stdout any more: No space left on device\n"


def test_a_full_disk_is_named_without_a_traceback(tmp_path, monkeypatch, capsys):
    def full(*_):
        with open("/dev/full", "w") as disk:
            disk.write("a checkpoint")

    monkeypatch.setattr("pipeline.commands.report.run", full)
    assert main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "failed: OSError: [Errno 28] No space left on device; free disk space, then run the same command again"
    ]


# ----------------------------------------------------------------------------------------------------- exit status


def test_a_sys_exit_inside_a_run_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr("pipeline.__main__.run_subcommand", lambda *_: sys.exit(0))
    assert main(["sft", "job.yaml"]) == 1
    assert re.match(r"failed: .*test_process\.py:\d+ called sys\.exit\(0\)", capsys.readouterr().err)


def test_a_signal_after_the_last_line_does_not_change_the_status():
    """The signal arrives while Python exits."""
    text = """
    import os, signal, time
    class Late:
        def __del__(self, kill=os.kill, pid=os.getpid(), sleep=time.sleep):
            kill(pid, signal.SIGTERM)
            sleep(0.5)
    sys.late = Late()
    return 0
    """
    program(text)


def test_the_message_about_a_signal_has_the_common_name_of_the_runs(monkeypatch, capsys):
    """After the message of the interrupted stage, `run` adds a message with the common name of all stages."""

    def interrupted(*_):
        stop = KeyboardInterrupt()
        stop.add_note("run.name=sft-1")
        stop.add_note("run.name=1")
        raise stop

    monkeypatch.setattr("pipeline.__main__.run_subcommand", interrupted)
    assert main(["run", "jobs/demo"]) == 130
    assert "the same command with run.name=1 continues" in capsys.readouterr().err


def test_only_the_first_signal_counts_until_its_cleanup_takes_too_long():
    """One of the signals arrives in a weakref callback, where Python ignores exceptions."""
    text = """
    import os, signal, time, weakref
    def arrive(*numbers):
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.05)
    class Thing: pass
    thing = Thing()
    reference = weakref.ref(thing, lambda _: arrive(signal.SIGINT))
    with process.signals_ignored():
        arrive(signal.SIGINT)
    for turn in range(3):
        try:
            if turn < 2:
                arrive(signal.SIGINT)
            del thing
            time.sleep(20)
            return 1
        except KeyboardInterrupt:
            process.resume()
    try:
        arrive(signal.SIGTERM)
        return 2
    except SystemExit:
        arrive(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        print("handled", flush=True)
    process.PATIENCE_S = 0.1
    arrive(signal.SIGHUP)
    time.sleep(20)
    """
    assert program(text, status=128 + signal.SIGHUP) == (b"handled\n", b"")


class Run:
    """Runs `sft` as a process, and reads its output line by line."""

    def __init__(self, folder, *overrides, name="one"):
        given = [f"run.storage_path={folder}", f"run.name={name}", *SMALL, *overrides]
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipeline", "sft", "jobs/demo/sft.yaml", "-v", *given],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.lines = []

    def until(self, pattern):
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError(f"no {pattern} in {self.lines[-30:]}")

    def ends(self):
        """Returns (exit status, remaining lines)."""
        since = len(self.lines)
        self.lines += self.process.stdout
        return self.process.wait(60), self.lines[since:]


@pytest.mark.parametrize(
    ("number", "status", "word", "workers"),
    [
        (signal.SIGINT, 130, "interrupted", 0),
        pytest.param(signal.SIGTERM, 143, "terminated by SIGTERM", 1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_a_run_starts(number, status, word, workers, tmp_path):
    """If the run has a worker, Ray's own signal handler is installed when the signal arrives."""
    run = Run(tmp_path, f"scaling.num_workers={workers}")
    run.until("starting Ray|tokeni[sz]ing|data for")
    os.killpg(run.process.pid, number)
    found, lines = run.ends()
    assert found == status and [line for line in lines if line.strip()][-1].startswith(word), lines
    assert "Traceback" not in "".join(lines) and not (tmp_path / "one/failed.json").exists()
    store = client(tmp_path)
    assert not store.get_experiment_by_name("rlhf") or store.search_runs(["1"]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "group", "status", "word"),
    [
        (signal.SIGINT, True, 130, "interrupted"),
        (signal.SIGTERM, False, 143, "terminated by SIGTERM"),
    ],
)
def test_a_signal_while_workers_train(number, group, status, word, tmp_path):
    """The run ends with one line and is KILLED in MLflow, no process is left, and the same command resumes the run."""
    run = Run(tmp_path, "trainer.max_steps=400")
    run.until(r"step +[1-9]\d+/400")
    descendants = psutil.Process(run.process.pid).children(recursive=True)
    (os.killpg if group else os.kill)(run.process.pid, number)
    found, lines = run.ends()
    assert found == status, lines
    [message] = [line for line in lines if line.strip() and not line.startswith("step ")]
    assert message.startswith(word) and "the same command with run.name=one continues" in message, lines
    assert not (tmp_path / "one/failed.json").exists() and not (tmp_path / "one/result.json").exists()
    _, left = psutil.wait_procs(descendants, timeout=5)
    assert not left
    experiment = client(tmp_path).get_experiment_by_name("rlhf").experiment_id
    (before,) = client(tmp_path).search_runs([experiment])
    assert before.info.status == "KILLED"

    again = Run(tmp_path, "trainer.max_steps=400", "trainer.logging_steps=100")
    found, lines = again.ends()
    assert found == 0, lines[-20:]
    assert "step 1/" not in "".join(lines)
    result = json.loads((tmp_path / "one/result.json").read_text())
    assert result["mlflow_run_id"] == before.info.run_id
    assert client(tmp_path).get_run(before.info.run_id).info.status == "FINISHED"


@pytest.mark.slow
def test_runs_that_start_together_share_a_storage_path(tmp_path):
    """The runs create the folder, the MLflow store, the row cache and the registered model at the same time."""
    runs = [Run(tmp_path / "new", "trainer.max_steps=4", "run.report=true", name=name) for name in "abc"]
    ended = [run.ends() for run in runs]
    assert [status for status, _ in ended] == [0, 0, 0], ended
    results = [json.loads((tmp_path / "new" / name / "result.json").read_text()) for name in "abc"]
    assert sorted(result["version"] for result in results) == ["1", "2", "3"]
    assert len({json.dumps(result["metrics"]["train_loss"]) for result in results}) == 1


def test_warnings_of_user_code_are_shown_and_warnings_of_libraries_are_not():
    code = """
    from pipeline.system import console
    console.silence_libraries()
    for module in ("my_rewards", "transformers.trainer", "torch", "pipeline.ppo.trainer", "raymond"):
        exec("import warnings; warnings.warn('of ' + __name__)", {"__name__": module})
    """
    _, err = program(code + "return 0", env=os.environ | console.QUIET)
    assert re.findall(rb"UserWarning: of (\S+)", err) == [b"my_rewards", b"raymond"]
