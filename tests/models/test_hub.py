"""The files of a base on the hub: what each error of the hub says to do."""

import pytest
from huggingface_hub import errors

from pipeline.errors import InputError
from pipeline.models import hub


def answer(status: int):
    import httpx2

    return httpx2.Response(status, request=httpx2.Request("HEAD", "https://huggingface.co/x"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            lambda: errors.GatedRepoError("gated", response=answer(401)),
            r"is gated \(HTTP 401\); accept its license",
        ),
        (lambda: errors.GatedRepoError("gated", response=answer(403)), r"is gated \(HTTP 403\)"),
        (
            lambda: errors.RepositoryNotFoundError("none", response=answer(404)),
            "neither a folder here nor a model on the hub",
        ),
        (lambda: errors.RevisionNotFoundError("none", response=answer(404)), "model.revision"),
        (lambda: errors.LocalEntryNotFoundError("offline"), "the hub cannot be reached"),
        (lambda: errors.HfHubHTTPError("broken", response=answer(503)), "the hub answered with an error"),
    ],
)
def test_hub_errors_say_what_to_do(monkeypatch, error, message):
    def fail(*args, **kwargs):
        raise error()

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    monkeypatch.setattr(hub, "_hub_answers", lambda: True)
    with pytest.raises(InputError, match=message):
        hub.base_config("owner/model", "v1")
