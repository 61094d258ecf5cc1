"""Tests that passwords, tokens and keys are removed from texts, and that other text stays."""

import pytest

from pipeline.system import credentials

PLANTED = "planted7f3a/9+c"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://me:planted@host:5000/x", "http://host:5000/x"),
        ("https://planted@github.com/x", "https://github.com/x"),
        (f"s3://AKID:{PLANTED}@bucket/runs?region=eu", "s3://bucket/runs?region=eu"),
        ("postgresql+psycopg://me:plan%40ted@host/db", "postgresql+psycopg://host/db"),
        ("postgresql://me:plan@ted@host/db", "postgresql://host/db"),
        ("http://me:12345@host/x", "http://host/x"),
        ("s3://b/x?access_key=planted&secret_key=planted&region=eu", "s3://b/x?access_key=***&secret_key=***&region=eu"),
        ("https://h/x?sv=1&sig=planted%3D&se=2", "https://h/x?sv=1&sig=***&se=2"),
        ("https://h/k?X-Amz-Credential=planted&X-Amz-Signature=planted", "https://h/k?X-Amz-Credential=***&X-Amz-Signature=***"),
        ("OSError: http://a:planted@h/x, then s3://b:planted@c/y failed", "OSError: http://h/x, then s3://c/y failed"),
    ],
)  # fmt: skip
def test_a_uri_is_shown_without_its_credentials(uri, shown):
    found = credentials.without_credentials(uri)
    assert found == shown and credentials.has_credentials(uri)


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:5000/api/2.0/mlflow and models:/rlhf-sft@champion",
        "http://host:5000/x@champion",
        "hf://datasets/owner/name@main/rows.jsonl",
        "abfss://container@account.dfs.core.windows.net/runs",
        "sqlite:////tmp/a@b/x:y@z/mlflow.db",
        '{"a":"http://h:5000","b":"x@y"}',
        "s3://bucket/rows.jsonl?versionId=3&region=eu-west-1",
    ],
)
def test_text_without_a_secret_stays_also_in_a_variable(text, monkeypatch):
    assert credentials.without_credentials(text) == text and not credentials.has_credentials(text)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", text)
    assert credentials.without_credentials(text) == text


def test_secrets_of_the_environment_are_hidden_in_any_text(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_planted0123")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PLANTED)
    monkeypatch.setenv("SOME_DATABASE", "mysql://me:plan%2Fted-8chars@host/db")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    text = f"KeyError: {{'a': 'hf_planted0123', 'b': '{PLANTED}', 'c': 'plan/ted-8chars', 'd': false}}"
    shown = "KeyError: {'a': '***', 'b': '***', 'c': '***', 'd': false}"
    assert credentials.without_credentials(text) == shown


@pytest.mark.parametrize("password", ["S3'cret Passw0rd", "12345678/x", "a@b:c/d"])
def test_a_password_in_a_variable_is_hidden_whatever_characters_it_has(password, monkeypatch):
    uri = f"http://bob:{password}@127.0.0.1:1/mlflow"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert credentials.user_and_password("http://a%40b:c%2Fd@host") == ("a@b", "c/d")
    shown = credentials.without_credentials(f"{uri!r} does not answer (request to {uri})")
    assert password not in shown and shown.count("127.0.0.1:1/mlflow") == 2
