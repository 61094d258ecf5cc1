"""Chats with a policy in the terminal. Prints completions while they are sampled, each with its reward.

    make chat    or    python -m pipeline chat jobs/demo/generate.yaml [policy=models:/NAME/3] [trainer.temperature=0]

`chat` uses a job file of `generate`, but does not read the job's rows. `chat` formats typed text with the chat template that the
policy was trained with. /reset starts a new conversation, /system TEXT sets the system prompt, and /quit ends the program. `chat`
also reads lines from a pipe.
"""

import io
import sys
from collections.abc import Iterator
from typing import Any

from pipeline.data.encode import Encoder, Example
from pipeline.data.formats import Record, kind_of
from pipeline.data.values import RowError
from pipeline.errors import InputError, escape_controls
from pipeline.job import Job
from pipeline.models.template import text_as_chat
from pipeline.run.model_host import ModelHost, load_model_host
from pipeline.settle.inputs import missing_parameter
from pipeline.system import process

HELP = "/reset starts a new conversation, /system TEXT sets or removes the system prompt, /quit exits"


def run(job: Job) -> None:
    host = load_model_host(job)
    for key, source in job.functions.items():
        if parameter := missing_parameter(source, {"messages"}):
            raise InputError(
                f"{source} needs `{parameter}`, which a conversation does not have; set {key}=null, or use a reward "
                "model, e.g. models:/rlhf-rm@champion",
                key=key,
            )
    versions = [f"{key.removesuffix('.0')} {value}" for key, value in host.work.versions.items()]
    print(f"{job.model.name_or_path}: {', '.join(versions) or 'no adapter'}\n{HELP}", flush=True)
    if not text_as_chat(host.tokenizer, job.data.apply_chat_template):
        print(
            "(`chat` applies the chat template to your messages. Training and `generate` do not apply it to plain text, "
            "so a policy that was trained on plain text may answer differently here.)",
            flush=True,
        )
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # invalid UTF-8 must not end the conversation
    Chat(host).talk(sys.stdin)


class Chat:
    """A conversation, with the policy that answers and the rewards that score the answers."""

    def __init__(self, host: ModelHost):
        from pipeline.run import roles
        from pipeline.writing.decoder import SlotDecoder
        from pipeline.writing.rows import Sampling

        self.host = host
        self.shared = roles.shared_base(host)
        self.role = roles.add_frozen(host, self.shared, "policy", "policy")
        self.rewards = roles.add_rewards(host, self.shared)
        self.sampling = Sampling.from_args(host.args, host.tokenizer)
        self.decoder = SlotDecoder(self.shared, 1, host.tokenizer.pad_token_id, look=1)
        self.max_prompt = host.work.room or sys.maxsize
        settings = (self.max_prompt, "error", True, self.sampling.eos, host.work.data.parse_special_tokens)
        self.encoder = Encoder(host.tokenizer, kind_of("generate"), *settings)
        self.system: list[dict[str, str]] = []
        self.turns: list[dict[str, str]] = []
        self.completions = 0  # number of completions so far, the seed of the next completion

    def talk(self, lines: Any) -> None:
        """Reads lines, and prints a completion for each line, until /quit or the last line."""
        for line in _typed(lines):
            command, _, text = line.strip().partition(" ")
            if command == "/quit":
                return
            if command in ("/reset", "/system"):
                self.turns = []
                if command == "/system":
                    self.system = [{"role": "system", "content": text.strip()}] if text.strip() else []
                print("   (a new conversation)", flush=True)
            elif command.startswith("/"):
                print(f"   (no command {escape_controls(command)}: {HELP})", flush=True)
            elif command:
                self.answer(line.strip())

    def answer(self, text: str) -> None:
        """Samples a completion to `text`, and prints it with its reward. Adds the text and the completion to the conversation."""
        from pipeline.scoring.rewards import Samples, weighted_scores
        from pipeline.writing.rows import Row

        self.turns.append({"role": "user", "content": text})
        prompt = self.prompt()
        if prompt is None:
            self.turns.pop()
            return
        row = Row(prompt, self.completions, self.sampling, self.role)
        writer = Writer(self.host.tokenizer)
        try:
            self.decoder.join([row])
            writer.show(row.tokens)
            while not row.done:
                self.decoder.step()
                writer.show(row.tokens)
        except KeyboardInterrupt:
            process.resume()
            self.decoder.reset()
            print(" (stopped)", end="")
        writer.show(row.tokens, last=True)
        self.completions += 1
        notes = []
        if self.rewards and row.tokens:
            rows = [{"prompt": [*self.system, *self.turns]}]
            samples = Samples([prompt], [row.tokens], [row.ended], rows, self.host.tokenizer)
            notes.append(f"reward {weighted_scores(self.rewards, samples, normalize=False)[0]:.2f}")
        if row.tokens and not row.ended:
            notes.append(f"truncated at trainer.response_length={self.sampling.max_new_tokens}")
        print(f"   ({', '.join(notes)})\n" if notes else "", flush=True)
        self.turns.append({"role": "assistant", "content": writer.shown})

    def prompt(self) -> list[int] | None:
        """Returns the token ids of the conversation, or None if the text cannot be encoded.

        Removes the oldest messages if the conversation no longer fits into the model's context.
        """
        for start in range(0, len(self.turns), 2):  # removes the oldest question and its answer
            [[outcome]] = self.encoder.encode([Record([*self.system, *self.turns[start:]])])
            if isinstance(outcome, Example):
                if start:
                    print(f"   (the model's context is full; the oldest {start} messages were removed)")
                self.turns = self.turns[start:]
                return outcome.columns["input_ids"]
            assert isinstance(outcome, RowError)
            if outcome.kind != "overlong":
                reason = f"invalid message: found {escape_controls(outcome.found)}; expected {escape_controls(outcome.expected)}"
                break
            reason = (
                f"too long: {outcome.found}, but {self.max_prompt} fit next to a completion of "
                f"trainer.response_length={self.sampling.max_new_tokens}; shorten your message, or lower this key"
            )
        print(f"   ({reason})", flush=True)
        return None


class Writer:
    """Prints the text of a growing list of tokens. Prints a character only when all of its bytes have been sampled."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.shown = ""

    def show(self, tokens: list[int], last: bool = False) -> None:
        """Prints the text that was not printed yet. If `last` is true, also prints an incomplete character."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        if last or (not text.endswith("\ufffd") and text.startswith(self.shown)):
            print(escape_controls(text[len(self.shown) :]), end="", flush=True)
            self.shown = text


def _typed(lines: Any) -> Iterator[str]:
    """Yields the lines of a pipe, or the lines that a user types in a terminal until Ctrl-C or Ctrl-D."""
    if not lines.isatty():
        yield from lines
        return
    import readline  # noqa: F401  (input() uses it once it is imported)

    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
