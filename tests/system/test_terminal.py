"""Tests what a command shows and logs at each log level, with and without a terminal."""

import io
import sys

import pytest
from ray._private import worker
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

from pipeline.system import console, terminal


class Stream(io.StringIO):
    def __init__(self, tty):
        super().__init__()
        self.isatty = lambda: tty
        self.reconfigure = lambda **_: None


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Simulates a command whose stdout is a stream. Returns a function that prints lines and returns (stream text, log text)."""

    def run(lines, tty=False, level=terminal.NORMAL):
        out = Stream(tty)
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", Stream(tty))
        monkeypatch.setattr(terminal, "screen", terminal.Screen(out))
        terminal.wrap_streams()
        terminal.screen.level = level
        with terminal.output_logged() as log_into:
            print("before the folder")
            log_into(str(tmp_path))
            lines()
        return out.getvalue(), (tmp_path / "log.txt").read_text()

    return run


def lines():
    print("a detail")
    print("warning: two files:\n  a\n  b\nanother detail")
    terminal.show_progress("train 1/2", 5.0, "loss 3")
    terminal.show_progress("train 2/2", 0.0, "loss 2")
    print("registering")
    terminal.say("gate passed", result=True)


WARNING = "warning: two files:\n  a\n  b\n"
DETAILS = f"before the folder\na detail\n{WARNING}another detail\n"


@pytest.mark.parametrize(
    ("level", "interval", "expected"),
    [
        (terminal.NORMAL, 30.0, f"{WARNING}train 2/2  loss 2\ngate passed\n"),
        (terminal.NORMAL, 0.0, f"{WARNING}train 1/2  5 s left  loss 3\ntrain 2/2  loss 2\ngate passed\n"),
        (terminal.QUIET, 30.0, "gate passed\n"),
        (terminal.VERBOSE, 30.0, f"{DETAILS}registering\ngate passed\n"),
    ],
)
def test_what_is_shown_without_a_terminal_and_logged(level, interval, expected, command, monkeypatch):
    monkeypatch.setattr(terminal, "INTERVAL_S", interval)
    shown, log = command(lines, level=level)
    assert shown == expected and log == f"{DETAILS}registering\ngate passed\n"


def test_on_a_terminal_one_line_is_rewritten(command):
    shown, _ = command(lines, tty=True)
    rows = [line.split(terminal.WIPE)[-1] for line in shown.split("\n")]
    assert rows == [*WARNING.splitlines(), "train 2/2  loss 2", "gate passed", ""]
    assert f"{terminal.WIPE}train 1/2  5 s left  loss 3{terminal.WIPE}" in shown


def test_a_live_line_does_not_wrap_even_after_a_c_that_the_terminal_echoes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert terminal.fit_line("train 9/9  loss 0.4  accuracy 0.9") == "train 9/9  loss 0.4"
    assert terminal.fit_line("x" * 40) == "x" * 27


def test_the_log_has_errors_and_no_secret(command, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")

    def fails():
        print("token hf_abcdefgh http://me:password@host/x?token=abc \x1b[2J")
        print("shown on stderr hf_abcdefgh", file=sys.stderr)
        raise ValueError(f"hf_abcdefgh is wrong, and the user's own key sk-{'a1' * 12}")

    with pytest.raises(ValueError):
        command(fails)
    log = (tmp_path / "log.txt").read_text()
    assert r"token *** http://host/x?token=*** \x1b[2J" in log and "shown on stderr ***" in log
    assert "ValueError: *** is wrong, and the user's own key ***\n" in log and "hf_abcdefgh" not in log
    assert sys.stderr.getvalue() == "shown on stderr ***\n"


def test_half_a_surrogate_is_shown_and_logged(command):
    """A completion may contain half of a surrogate pair, and a reward function may print completions."""
    out, log = command(lambda: print("warning: \ud83d is no emoji"))
    assert out == "warning: \\ud83d is no emoji\n" and log.endswith(out)


def test_errors_that_ray_reports_to_the_driver_are_shown_but_for_noise(monkeypatch, capsys):
    for place, name in ((worker, "print_to_stdstream"), (dispatcher, "handlers")):
        # monkeypatch restores the attribute after the test
        monkeypatch.setattr(place, name, getattr(place, name))
    console.attach_ray_printer()
    for line in ("A node has died", f"{console.NOISE[-1]}. There are infinite retries remaining"):
        worker.print_to_stdstream({"lines": [line], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert capsys.readouterr().out == "A node has died\n"
