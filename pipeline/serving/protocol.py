"""Reads requests, OpenAI's completions and `/v1/feedback`, and rejects invalid ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

TOP_LOGPROBS = 20  # maximum number of alternatives to a token, as at OpenAI
Text = Annotated[str, Field(max_length=1 << 16)]
TokenId = Annotated[int, Field(ge=0)]
Request = TypeVar("Request", bound=BaseModel)
Asked = TypeVar("Asked", bound="Sampled")

# HTTP status of a refused request -> its default `code`, a word for programs
CODES = {
    400: "invalid_value",
    401: "invalid_api_key",
    404: "not_found",
    408: "timeout",
    409: "already_given",
    413: "too_large",
    429: "rate_limit_exceeded",
    500: "internal_error",
    503: "unavailable",
    504: "timeout",
    507: "full",
}


class Refused(Exception):
    """A refused request.

    Args:
        status: the HTTP status.
        param: the wrong key of the request.
        code: a word for programs. None means the status's word.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, param, code)  # exceptions are pickled with their args
        self.status, self.message, self.param, self.code = status, message, param, code or CODES.get(status)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unknown(what: str, name: str, known: Iterable[str]) -> Refused:
    """Returns the answer to an unknown model id."""
    expected = ", ".join(known)
    expected = f"; expected one of {expected}" if expected else "; none is served here"
    return Refused(404, f"no {what} {name[:80]!r}{expected}", "model", "model_not_found")


class StreamOptions(BaseModel):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Sampled(BaseModel):
    """The keys of both kinds of completions. `read` rejects all other keys by name, unless they are NEUTRAL."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: Text
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: Text | list[Text] | None = None
    seed: int | None = Field(None, ge=0, lt=1 << 64)
    stream_options: StreamOptions | None = None
    user: Text | None = None  # changes nothing

    @model_validator(mode="after")
    def _stops(self) -> Sampled:
        if len(self.stops) > 4 or any(not text for text in self.stops):
            raise ValueError("stop: expected up to 4 texts, none of them empty")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """Returns the number of alternatives to a token in the answer, or None without log-probs."""
        return None


class ChatRequest(Sampled):
    """The keys of OpenAI's chat completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the chat template, as in vLLM
    stream: bool = False
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)

    @model_validator(mode="after")
    def _together(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: goes with logprobs: true")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Sampled):
    """A request to complete prompts without the chat template. Evaluation tools send the prompts as ids."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(min_length=1)
    stream: Literal[False] = False

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        alone = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if alone else self.prompt  # type: ignore[return-value, list-item]


# {unsupported key that clients often send: its values that change nothing}. Other values are rejected.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}


class Feedback(BaseModel):
    """Feedback on an answer: a `label`, a comparison of two choices (`chosen`, `rejected`), or a better text (`edit`)."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: Annotated[str, Field(max_length=128)]  # id of the answer, chatcmpl-...
    choice: int = Field(0, ge=0)  # the choice that `label` or `edit` is about
    label: bool | None = None
    chosen: int | None = Field(None, ge=0)
    rejected: int | None = Field(None, ge=0)
    edit: Annotated[str, Field(min_length=1, max_length=1 << 20)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Feedback:
        pair = (self.chosen, self.rejected)
        if pair != (None, None) and (None in pair or self.chosen == self.rejected):
            raise ValueError("chosen: goes with rejected, the numbers of two choices of the answer")
        if (self.label, self.chosen, self.edit).count(None) != 2:
            raise ValueError("label: expected one of label, chosen with rejected, and edit")
        return self

    @property
    def kind(self) -> str:
        return "labels" if self.label is not None else "edits" if self.edit is not None else "comparisons"


def decoded(body: bytes) -> Any:
    """Returns the JSON value of a body. Raises Refused."""
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(400, f"the request is not JSON ({error})", code="invalid_json") from error


def read(kind: type[Request], value: Any) -> Request:
    """Returns the value as a request of a kind. Raises Refused, naming the first field that is wrong."""
    if not isinstance(value, dict):
        raise Refused(400, f"found a {type(value).__name__}, expected an object", code="invalid_json")
    # Many clients send all keys that they know, with null for unset ones.
    neutral = NEUTRAL if issubclass(kind, Sampled) else {}
    given = {k: v for k, v in value.items() if v is not None and v not in neutral.get(k, ())}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        path = str(first["loc"][0]) if first["loc"] else ""
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "is not supported here"
        if path and first["type"] != "missing":
            message += f"; found {value.get(path)!r:.80}"
        param = path or message.partition(":")[0]
        raise Refused(400, f"{path}: {message}" if path else message, param) from error
