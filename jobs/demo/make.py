"""Makes the demo's data files, model and tokenizer from the facts of pipeline/demo.py.

    python jobs/demo/make.py            # writes jobs/demo/data and jobs/demo/model in two to three minutes

The base model knows the facts and has mixed manners: some completions are courteous, and some are plain, curt, gruff, rambling
or wrong. Some countries appear only in pre-training and in the `*_eval` files, but in no training rows.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from pipeline.demo import CLOSERS, FACTS, HELD_OUT, OPENERS, DemoQuestion, demo_questions, gold

HOME = Path(__file__).resolve().parent
SEED = 3
DOCUMENTS, STEPS = 30_000, 1800  # size of the pre-training

SENTENCES = {
    "capital": "The capital of {country} is {capital}.",
    "country": "{capital} is the capital of {country}.",
    "continent": "{country} is in {continent}.",
}
GRUFF = (
    "{answer}, obviously.",
    "{answer}. Everybody knows that.",
    "Look it up.",
    "Why ask me?",
    "Who cares?",
)

# Probabilities of manners and wrong answers in the base's pre-training, in demonstrations, and in preferences.
BASE_MANNERS = {"courteous": 0.08, "plain": 0.20, "curt": 0.32, "gruff": 0.25, "rambling": 0.15}
DEMO_MANNERS = {"courteous": 0.09, "plain": 0.18, "curt": 0.42, "gruff": 0.31}
PAIR_MANNERS = {"courteous": 0.30, "plain": 0.25, "curt": 0.20, "gruff": 0.15, "rambling": 0.10}
BASE_WRONG, DEMO_WRONG, PAIR_WRONG = 0.05, 0.05, 0.30
# weight of each token in the pre-training loss, by the role of its message
WEIGHTS = {"user": 0.1, "assistant": 1.0, "text": 1.0, "verdict": 5.0}
CORPUS_SHARES = (0.45, 0.40, 0.15)  # fractions of chats, chats with a verdict, and facts


def completion_to(question: DemoQuestion, manner: str, right: bool, rng: Random) -> str:
    """Returns a completion in a manner, with the right answer or with the answer for another country."""
    kind, fact = question.kind, question.fact
    if not right:
        others = {getattr(other, kind) for other in FACTS if other.country not in HELD_OUT}
        others -= {question.answer}
        fact = fact._replace(**{kind: rng.choice(sorted(others))})
    answer, sentence = getattr(fact, kind), SENTENCES[kind].format(**fact._asdict())
    if manner == "curt":
        return f"{answer}."
    if manner == "gruff":
        return rng.choice(GRUFF).format(answer=answer)
    if manner == "rambling":
        other = rng.choice([other for other in FACTS if other.country not in HELD_OUT])
        return f"{sentence} {SENTENCES[rng.choice(sorted(SENTENCES))].format(**other._asdict())}"
    if manner == "plain":
        return sentence
    opener, closer = rng.choice(OPENERS), rng.choice(CLOSERS)
    return rng.choice((f"{opener} {sentence}", f"{sentence} {closer}", f"{opener} {sentence} {closer}"))


def _draw(question: DemoQuestion, manners: dict[str, float], wrong: float, rng: Random) -> str:
    """Returns a random completion. `manners` contains the manners' weights, and `wrong` is the probability of a wrong answer."""
    manner = rng.choices(list(manners), list(manners.values()))[0]
    return completion_to(question, manner, rng.random() >= wrong, rng)


def demonstrations(asked: list[DemoQuestion], count: int, rng: Random) -> list[dict[str, Any]]:
    """Returns questions and answers as messages, in mixed manners."""
    return [
        {
            "messages": [
                {"role": "user", "content": question.text},
                {"role": "assistant", "content": _draw(question, DEMO_MANNERS, DEMO_WRONG, rng)},
            ]
        }
        for question in _spread(asked, count, rng)
    ]


def preferences(asked: list[DemoQuestion], count: int, rng: Random) -> list[dict[str, Any]]:
    """Returns pairs of completions to a question. The completion with the higher gold score is the chosen completion."""
    rows = []
    for question in _spread(asked, count, rng):
        scored: dict[float, str] = {}
        while len(scored) < 2:
            completion = _draw(question, PAIR_MANNERS, PAIR_WRONG, rng)
            scored.setdefault(gold([question.text], [completion], [question.answer])[0], completion)
        rows.append({"prompt": question.text, "chosen": scored[max(scored)], "rejected": scored[min(scored)]})
    return rows


def thumbs(asked: list[DemoQuestion], count: int, rng: Random) -> list[dict[str, Any]]:
    """Returns completions with labels. The probability of the label `true` is the gold score."""
    rows = []
    for question in _spread(asked, count, rng):
        completion = _draw(question, PAIR_MANNERS, PAIR_WRONG, rng)
        up = rng.random() < gold([question.text], [completion], [question.answer])[0]
        rows.append({"prompt": question.text, "completion": completion, "label": up})
    return rows


def prompts(asked: list[DemoQuestion], count: int, rng: Random) -> list[dict[str, Any]]:
    """Returns questions with the answers that `gold` needs."""
    return [{"prompt": question.text, "answer": question.answer} for question in _spread(asked, count, rng)]


def _spread(asked: list[DemoQuestion], count: int, rng: Random) -> list[DemoQuestion]:
    """Returns `count` questions in random order. All questions appear equally often, plus or minus one."""
    drawn: list[DemoQuestion] = []
    while len(drawn) < count:
        drawn += rng.sample(asked, len(asked))
    return drawn[:count]


def write_data(folder: Path, seed: int = SEED) -> None:
    """Writes demonstrations, preferences, labeled completions and prompts, each with an `_eval` file on held-out countries."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {
        demonstrations: (500, 60),
        preferences: (1200, 200),
        thumbs: (1800, 300),
        prompts: (len(demo_questions(False)), len(demo_questions(True))),
    }
    for make, (train, held_out) in sizes.items():
        for suffix, count, asked in (
            ("", train, demo_questions(False)),
            ("_eval", held_out, demo_questions(True)),
        ):
            rows = make(asked, count, Random(f"{make.__name__}{suffix} {seed}"))
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{make.__name__}{suffix}.jsonl").write_text(lines, encoding="utf-8")


SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
VOCABULARY = 1024
# Llama 3's pattern of words. BPE merges bytes only within a word.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""


def corpus(count: int, seed: int = SEED) -> Iterator[list[dict[str, Any]]]:
    """Yields `count` documents as messages: chats, chats with a verdict on the completion, and facts.

    From the verdicts, the base learns to distinguish right from wrong answers, even about held-out countries.
    """
    rng = Random(f"corpus {seed}")
    for question in _spread(demo_questions(), count, rng):
        kind = rng.choices(("chat", "verdict", "facts"), CORPUS_SHARES)[0]
        if kind == "facts":
            facts = [text.format(**question.fact._asdict()) for text in SENTENCES.values()]
            yield [{"role": "text", "content": " ".join(rng.sample(facts, len(facts)))}]
            continue
        chat: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
        if kind == "chat":
            yield [*chat, {"role": "assistant", "content": _draw(question, BASE_MANNERS, BASE_WRONG, rng)}]
            continue
        right, manner = rng.random() < 0.5, rng.choice(("courteous", "plain", "curt"))
        chat.append(
            {
                "role": "assistant",
                "content": completion_to(question, manner, right, rng),
                "weight": float(right),
            }
        )
        yield [*chat, {"role": "verdict", "content": "Right." if right else "Wrong."}]


def make_tokenizer(documents: Sequence[list[dict[str, Any]]]) -> Any:
    """Trains a byte-level BPE tokenizer with Llama 3's word pattern, special tokens and chat template, and no pad token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE(ignore_merges=True))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), byte_level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    turns = (message["content"] for document in documents for message in document)
    bpe.train_from_iterator([*turns, *["user", "assistant", "system", "\n\n"] * 100], trainer)
    bpe.add_special_tokens(list(SPECIAL_TOKENS))
    bos = SPECIAL_TOKENS[0]
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bpe.token_to_id(bos))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=bos,
        eos_token="<|eot_id|>",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def pretrain(
    tokenizer: Any, documents: Sequence[Any], steps: int, batch_size: int = 32, seed: int = SEED
) -> Any:
    """Trains a small Llama on the documents, one per row. On the same machine, the weights are always bit-identical."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    eot, end = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|end_of_text|>"])
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=[eot, end],
        )
    )
    rows = [_encode(tokenizer, document) for document in documents]
    batches = _batches(rows, steps, batch_size, Random(f"batches {seed}"))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05, fused=True
    )
    began = time.monotonic()
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:  # a short warmup, then linear decay to 0
            group["lr"] = 3e-3 * min((step + 1) / 50, 1 - step / steps)
        width = max(map(len, batch))
        ids = torch.tensor([[index for index, _ in row] + [end] * (width - len(row)) for row in batch])
        weights = torch.tensor([[weight for _, weight in row] + [0.0] * (width - len(row)) for row in batch])
        logits = model(input_ids=ids).logits  # needs no attention mask, because padding is on the right
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
        )
        loss = (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(
                f"step {step + 1}/{steps}  loss {loss.item():.3f}  {time.monotonic() - began:.0f} s",
                file=sys.stderr,
            )
    model.generation_config.eos_token_id = [eot, end]
    return model.to(torch.bfloat16)


def _encode(tokenizer: Any, document: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Returns (token id, weight in the loss) for each token.

    Questions have small weights, and wrong completions have weight 0.
    """
    chat = [message for message in document if message["role"] in ("user", "assistant")]
    row: list[tuple[int, float]] = [] if chat else [(tokenizer.bos_token_id, 0.0)]
    for turn, message in enumerate(chat, start=1):
        text = tokenizer.apply_chat_template(chat[:turn], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        row += [(index, message.get("weight", WEIGHTS[message["role"]])) for index in ids[len(row) :]]
    for message in document[len(chat) :]:  # a text of facts, or the verdict after the completion
        ids = tokenizer(message["content"], add_special_tokens=False).input_ids
        row += [(index, WEIGHTS[message["role"]]) for index in ids]
    return row if document == chat else [*row, (tokenizer.convert_tokens_to_ids("<|end_of_text|>"), 1.0)]


def _batches(rows: list[Any], steps: int, size: int, rng: Random) -> Iterator[list[Any]]:
    """Yields `steps` batches of rows with similar lengths, which need little padding."""
    pool: list[list[Any]] = []
    for _ in range(steps):
        if not pool:
            drawn = sorted(rng.sample(rows, min(len(rows), 16 * size)), key=len)
            pool = [drawn[start : start + size] for start in range(0, len(drawn), size)]
            rng.shuffle(pool)
        yield pool.pop()


def build(folder: Path) -> None:
    """Writes `data` and `model` (weights in bf16, configuration, tokenizer) under the folder."""
    import torch

    torch.set_num_threads(1)  # because the order of sums depends on the number of threads
    write_data(folder / "data")
    documents = list(corpus(DOCUMENTS))
    tokenizer = make_tokenizer(documents)
    pretrain(tokenizer, documents, STEPS).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else HOME)
