"""The words of a command line, before any job is read."""

import pytest

from pipeline import __main__


@pytest.fixture
def dispatched(monkeypatch):
    """What `main` hands on: (verb, job, overrides)."""
    calls = []
    monkeypatch.setattr(__main__, "dispatch", lambda *given: calls.append(given) or 0)
    return calls


@pytest.mark.parametrize(
    ("typed", "overrides"),
    [
        (["job.yaml", "lora.r=8", "policy=base"], ["lora.r=8", "policy=base"]),
        (["job.yaml", "--lora.r=8", "--policy=base"], ["lora.r=8", "policy=base"]),
        (["job.yaml", "--lora.r", "8", "policy=base"], ["policy=base", "lora.r=8"]),
        (["--lora.r", "8", "job.yaml"], ["lora.r=8"]),
        (["job.yaml", "--run.max_failures", "-1"], ["run.max_failures=-1"]),
    ],
)
def test_a_key_may_be_written_as_an_option(typed, overrides, dispatched):
    assert __main__.main(["dpo", *typed]) == 0
    assert dispatched == [("dpo", "job.yaml", overrides)]


def test_an_option_without_a_value(dispatched, capsys):
    assert __main__.main(["sft", "job.yaml", "--lora.r"]) == 2
    assert capsys.readouterr().err == "error: lora.r: a value is missing; for example lora.r=VALUE\n"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("sfft", "did you mean sft?"), ("eval", "did you mean evaluate?"), ("xyz", "expected one of sft, rm, ")],
)
def test_an_unknown_subcommand_suggests_the_nearest(typed, hint, dispatched, capsys):
    assert __main__.main([typed, "job.yaml"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: unknown subcommand {typed!r}; {hint}") and errors.count("\n") == 1
    assert not dispatched
