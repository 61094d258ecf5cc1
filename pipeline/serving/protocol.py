"""Parses and checks requests of OpenAI's API and of `/v1/feedback`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

TOP_LOGPROBS = 20  # maximum of `top_logprobs`, as in OpenAI's API
TokenId = Annotated[int, Field(ge=0)]
Request = TypeVar("Request", bound=BaseModel)
Completion = TypeVar("Completion", bound="SampledRequest")


class Refused(Exception):
    """Raised if a request is rejected or fails. The server sends this error to the client.

    Args:
        status: the HTTP status.
        param: the key of the request that is invalid, or None.
        code: OpenAI's code for the error, or None if OpenAI has none.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, param, code)  # pickle passes these arguments to __init__
        self.status, self.message, self.param, self.code = status, message, param, code

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unknown_model(kind: str, name: str, names: Iterable[str]) -> Refused:
    """Returns the error for a request with an unknown model id."""
    expected = ", ".join(names)
    expected = f"; expected one of {expected}" if expected else "; this server has none"
    return Refused(404, f"no {kind} {name[:80]!r}{expected}", "model", "model_not_found")


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class SampledRequest(BaseModel):
    """The keys that chat completions and legacy completions share.

    `parse_request` rejects other keys, unless they are in NEUTRAL.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=0, lt=1 << 64)
    stream_options: StreamOptions | None = None
    user: str | None = None  # has no effect

    @model_validator(mode="after")
    def _stops(self) -> SampledRequest:
        if len(self.stops) > 4 or any(not text for text in self.stops):
            raise ValueError("stop: expected up to 4 texts, none of them empty")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """Returns the requested number of alternatives per token, or None if the request does not ask for log-probs."""
        return None


class ChatRequest(SampledRequest):
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
            raise ValueError("top_logprobs: requires logprobs: true")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SampledRequest):
    """The keys of OpenAI's legacy completions, to which no chat template is applied. Prompts may be text or token ids."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(min_length=1)
    stream: Literal[False] = False

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_single else self.prompt  # type: ignore[return-value, list-item]


# {unsupported key that clients often send: values that have no effect}. All other values are rejected.
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
    """Feedback on an answer: a label for a choice, a comparison of two choices, or an edited text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: str  # id of the answer, such as chatcmpl-...
    choice: int = Field(0, ge=0)  # index of the choice that `label` or `edit` is about
    label: bool | None = None
    chosen: int | None = Field(None, ge=0)
    rejected: int | None = Field(None, ge=0)
    edit: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _one(self) -> Feedback:
        pair = (self.chosen, self.rejected)
        if pair != (None, None) and (None in pair or self.chosen == self.rejected):
            raise ValueError("chosen: requires rejected; both are indexes of different choices of the answer")
        if (self.label, self.chosen, self.edit).count(None) != 2:
            raise ValueError("label: expected exactly one of label, edit, or chosen with rejected")
        return self

    @property
    def kind(self) -> str:
        return "labels" if self.label is not None else "edits" if self.edit is not None else "comparisons"


def parse_json(body: bytes) -> Any:
    """Parses the body of a request as JSON. Raises Refused if the body is invalid."""
    try:
        return from_json(body)
    except ValueError as error:
        raise Refused(400, f"the request is not JSON ({error})") from error


def parse_request(kind: type[Request], value: Any) -> Request:
    """Returns a parsed request of class `kind`. Raises Refused, with the first invalid key, if `value` is invalid."""
    if not isinstance(value, dict):
        raise Refused(400, f"found a {type(value).__name__}, expected an object")
    # Many clients send all keys that they know, with null for keys that are not set.
    neutral = NEUTRAL if issubclass(kind, SampledRequest) else {}
    values = {k: v for k, v in value.items() if v is not None and v not in neutral.get(k, ())}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        path = str(problem["loc"][0]) if problem["loc"] else ""
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = "is not supported here"
        if path and problem["type"] != "missing":
            message += f"; found {value.get(path)!r:.80}"
        param = path or message.partition(":")[0]
        raise Refused(400, f"{path}: {message}" if path else message, param) from error
