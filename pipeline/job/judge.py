"""Reads the file of an LLM judge, which a job sets as `{judge: FILE}`. The file defines the model, the question, and the
conversion of answers to scores between 0 and 1.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import math
import re
import unicodedata
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le

from pipeline.errors import InputError, show_value
from pipeline.job import schema
from pipeline.job.ranges import Rows, Seconds, Weight
from pipeline.job.yaml_tree import Tree, read_tree

CLASS = "pipeline.job.judge.Definition"
PLACEHOLDER = re.compile(r"\{(\w+)\}")
MARKS = re.compile(r"""[*_`#\[\]"'“”‘’]""")  # Markdown and quotes
# {form: default question}
PROMPTS = {
    "score": """Judge the response to the request.

Request:
{prompt}

Response:
{completion}

Explain your judgment in one or two sentences. Then end with one line that says `Score: ` and a number from {low} (worst) to
{high} (best).""",
    "yes": """Request:
{prompt}

Response:
{completion}

Is this a good response to the request? Answer {words}.""",
    "rank": """Compare the responses to the request.

Request:
{prompt}

{completions}

Explain your judgment in one or two sentences. Then end with one line that says `Ranking: ` and the letters of all responses,
from the best to the worst, with `>` between them.""",
    "rubric": """Judge the response to the request by each of the criteria.

Request:
{prompt}

Response:
{completion}

Criteria, each with its possible choices:
{criteria}

Answer with one line for each criterion: its name, a colon, and one of its choices.""",
}
# keys that affect neither the question nor the score
LIMITS = """concurrency requests_per_minute tokens_per_minute timeout_s api_key_variable
    dollars_per_million_input dollars_per_million_output most_calls most_dollars""".split()


@dataclass(frozen=True)
class Definition:
    """The keys in the file of an LLM judge."""

    model: str
    """The model id that the endpoint returns in its answers."""
    form: Literal["score", "yes", "rank", "rubric"]
    """Form of the answers. score: a line `Score: NUMBER`. yes: the probability that the answer begins with Yes, not No. rank: a
    line `Ranking: B > A`, for all completions of a prompt in one request. rubric: a line `NAME: CHOICE` for each criterion."""
    endpoint: str = "http://127.0.0.1:8000/v1"
    """Address of a server with OpenAI's chat completions API, for example of `serve`."""
    api_key_variable: str | None = None
    """Environment variable with the API key of the endpoint. By default, requests have no API key."""
    system: str | None = None
    """A system message before the question."""
    prompt: str | None = None
    """The question, with {prompt}, {completion} ({completions} for rank), {criteria}, {words}, and columns of
    the rows, such as {answer}. By default, each form has a built-in question."""
    words: list[str] = field(default_factory=lambda: ["Yes", "No"])
    """For `form: yes`: the first word of an answer about a good completion, and about a bad completion."""
    low: float = 1.0
    """For `form: score`: the worst number, which becomes the score 0."""
    high: float = 10.0
    """For `form: score`: the best number, which becomes the score 1."""
    criteria: list[dict[str, Any]] | None = None
    """For `form: rubric`: a list of {name: ..., text: ..., choices: [worst, ..., best]}. Each criterion may have a weight."""
    orders: Literal["drawn", "both"] = "drawn"
    """Order of the completions for `form: rank`, also when `collect` labels pairs. drawn: one random order. both: a random order,
    and the same order reversed."""
    draws: Annotated[int, Ge(1), Le(64)] = 1
    """Number of answers to each question. The score is the mean over the answers."""
    body: dict[str, Any] = field(default_factory=dict)
    """Fields that are merged into each request. null removes a field. Use `body` for endpoints that expect other
    fields than `temperature` and `max_tokens`."""
    temperature: Annotated[float, Ge(0), Le(100)] = 0.0
    """Temperature of the judge's answers. With a temperature above 0, each request has a seed."""
    max_tokens: Rows = 512
    """Maximum number of tokens in an answer. `form: yes` needs only one token."""
    concurrency: Annotated[int, Ge(1), Le(4096)] = 16
    """Maximum number of concurrent requests of one process."""
    requests_per_minute: Annotated[float, Gt(0), Le(10**9)] | None = None
    """Maximum number of requests per minute and process. By default, there is no limit."""
    tokens_per_minute: Annotated[float, Gt(0), Le(10**12)] | None = None
    """Maximum number of tokens per minute and process, including answers. By default, there is no limit."""
    timeout_s: Seconds = 120.0
    """Seconds to wait for an answer before the request is repeated."""
    dollars_per_million_input: Weight = 0.0
    """Price of a million input tokens in dollars."""
    dollars_per_million_output: Weight = 0.0
    """Price of a million output tokens in dollars."""
    most_calls: Annotated[int, Ge(1), Le(10**12)] | None = None
    """Maximum number of paid answers in a run. At this limit, the run ends. By default, there is no limit."""
    most_dollars: Annotated[float, Gt(0), Le(10**9)] | None = None
    """Maximum cost of a run in dollars. At this limit, the run ends. By default, there is no limit."""

    @property
    def asks(self) -> str:
        """Returns the question, in which placeholders are not filled in yet."""
        return self.prompt or PROMPTS[self.form]

    @property
    def longest(self) -> int:
        """Returns the maximum number of tokens of an answer."""
        limit = self.body.get("max_completion_tokens")  # OpenAI's name
        return limit if isinstance(limit, int) else 1 if self.form == "yes" else self.max_tokens

    @cached_property
    def digest(self) -> str:
        """Returns a digest of the keys that affect the scores: all keys except LIMITS."""
        content = {key: value for key, value in asdict(self).items() if key not in LIMITS}
        content["prompt"] = self.asks
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def columns(self) -> set[str]:
        """Returns the columns of the rows that the question has placeholders for."""
        built_in = {"prompt", "completion", "completions", "criteria", "words", "low", "high"}
        return {*PLACEHOLDER.findall(self.asks)} - built_in

    def dollars(self, input_tokens: float, output_tokens: float) -> float:
        """Returns the price of `input_tokens` and `output_tokens` in dollars."""
        prices = self.dollars_per_million_input, self.dollars_per_million_output
        return (input_tokens * prices[0] + output_tokens * prices[1]) / 1e6


def normalize_answer(text: str) -> str:
    """Normalizes a text for comparisons. Removes Markdown, quotes, and dots at the ends of lines, and ignores case."""
    # NFKC converts full-width characters and non-breaking spaces to ordinary characters
    lines = MARKS.sub("", unicodedata.normalize("NFKC", text)).casefold().splitlines()
    return "\n".join(" ".join(line.split()).rstrip(". ") for line in lines)


def read_definition(path: str) -> Definition:
    """Reads and checks a judge's file. Raises InputError with the line if the file is invalid."""
    tree = read_tree(path, [])
    for key, problem in schema.wrong_keys(tree.data, schema.keys(CLASS)):
        raise tree.error(key, problem)
    definition = Definition(**tree.data)
    for key, problem in _problems(definition):
        raise tree.error(key, problem)
    _check_criteria(tree, definition)
    return definition


def _problems(definition: Definition) -> list[tuple[str, str]]:
    """Returns (key, problem) for values that are invalid, alone or in combination with the values of other keys."""
    problems = []
    url = urlsplit(definition.endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        expected = "expected http:// or https://, for example http://127.0.0.1:8000/v1"
        problems.append(("endpoint", f"found {show_value(definition.endpoint)}, {expected}"))
    elif url.scheme == "http" and definition.api_key_variable and not _is_loopback(url.hostname):
        problems.append(("endpoint", "found http:// with a key, which others could read; use https://"))
    words = sorted(map(normalize_answer, definition.words))
    if len(words) != 2 or words[1].startswith(words[0]):
        expected = "two different words, neither of which begins with the other"
        problems.append(("words", f"found {show_value(definition.words)}, expected {expected}"))
    if definition.low == definition.high:
        problems.append(
            ("high", f"found {definition.high:g}, the same value as `low`; expected another number")
        )
    placeholders = {*PLACEHOLDER.findall(definition.asks)}
    required, excess = ("completions", "completion")[:: 1 if definition.form == "rank" else -1]
    if required not in placeholders:
        problems.append(("prompt", f"lacks {{{required}}}, which `form: {definition.form}` needs; add it"))
    if excess in placeholders:
        problems.append(("prompt", f"shows {{{excess}}}, which `form: {definition.form}` lacks; remove it"))
    if definition.form == "rubric" and "criteria" not in placeholders:
        problems.append(("prompt", "lacks {criteria}, which `form: rubric` needs; add it"))
    if (definition.form == "rubric") != bool(definition.criteria):
        problems.append(("criteria", "`form: rubric` needs criteria, and other forms must not have criteria"))
    if definition.draws > 1 and (definition.temperature == 0 or definition.form == "yes"):
        problem = "but all answers are equal with temperature 0, and with `form: yes`; use 1"
        problems.append(("draws", f"found {definition.draws}, {problem}"))
    return problems


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_criteria(tree: Tree, definition: Definition) -> None:
    """Raises InputError if a criterion has invalid keys, or if its name or choices are ambiguous in an answer."""
    names: set[str] = set()
    for index, item in enumerate(definition.criteria or []):
        name, choices, weight = item.get("name"), item.get("choices"), item.get("weight", 1)
        texts = [str(choice) for choice in choices] if isinstance(choices, list) else []
        has_keys = isinstance(item.get("text"), str) and not set(item) - {"name", "text", "choices", "weight"}
        has_name = isinstance(name, str) and "\n" not in name and normalize_answer(name) not in {"", *names}
        has_choices = len({*map(normalize_answer, texts)} - {""}) == len(texts) > 1 and not re.search(
            "[,\n]", "".join(texts)
        )
        note = "; case, Markdown, quotes and a final dot are ignored"
        for is_right, expected in (
            (has_keys, "{name: NAME, text: TEXT, choices: [WORST, ..., BEST]}, and perhaps a weight"),
            (has_name, f"a unique name on one line{note}"),
            (has_choices, f"two or more different choices, on one line and without commas{note}"),
            (type(weight) in (int, float) and 0 < weight < math.inf, "a weight above 0"),
        ):
            if not is_right:
                raise tree.error("criteria", f"{index}: found {show_value(item)}, expected {expected}")
        names.add(normalize_answer(str(name)))


def at_version(source: str) -> tuple[str, str]:
    """Splits `judge:FILE@DIGEST` into file and digest. For `judge:FILE`, the digest is empty."""
    path, _, digest = source.removeprefix("judge:").partition("@")
    return path, digest


def pin_judge(source: str) -> str:
    """Returns `judge:FILE@DIGEST` for `judge:FILE`. Raises InputError if the file is invalid."""
    path, _ = at_version(source)
    return f"judge:{path}@{read_definition(path).digest[:16]}"


def load_pinned(version: str) -> Definition:
    """Returns the definition of a pinned judge. Raises InputError if the file has changed since the judge was pinned."""
    path, digest = at_version(version)
    definition = read_definition(path)
    if definition.digest[:16] != digest:
        raise InputError(
            f"{path} has changed since the run began (digest {digest}, now {definition.digest[:16]}); restore the file, choose another "
            "run.name, or set run.overwrite=true"
        )
    return definition
