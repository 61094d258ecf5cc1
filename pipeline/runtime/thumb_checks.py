"""What kto checks on its first rows: those of checks.py, its loss by the formula, and the rows that its KL term pairs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from pipeline.data.kl_pairs import paired
from pipeline.findings import Finding
from pipeline.runtime.checks import (
    collated,
    ends_learned,
    logprobs_alone,
    loss_after_generation_prompt,
    one_bos,
    shortest,
    starts_as_its_file,
    tolerance,
    with_truncation,
)
from pipeline.runtime.worker import Worker

NUDGE = 0.02  # standard deviation of what the adapter's B is moved by, for a policy that is not the reference

Row = dict[str, Any]


def check(worker: Worker, trainer: Any, model: Any, rows: list[Row]) -> list[Finding]:
    tokenizer = worker.tokenizer
    prompts = [row["prompt_ids"] for row in rows]
    few = _of_both_labels(model, rows)
    return [
        one_bos(tokenizer, [row["prompt_ids"] + row["completion_ids"] for row in rows]),
        # A completion may hold further turns; of each, the beginning shows whether the prompt's end is in it.
        loss_after_generation_prompt(
            tokenizer, prompts, [row["prompt_ids"] + row["completion_ids"][:8] for row in rows]
        ),
        ends_learned(
            tokenizer, *with_truncation(worker, [(row["prompt_ids"], row["completion_ids"]) for row in rows])
        ),
        *([starts_as_its_file(model, worker.input("policy"))] if "policy" in worker.work.inputs else []),
        starts_as_the_reference(trainer, model, few),
        loss_by_the_formula(trainer, model, few),
        pairs_other_rows(trainer),
    ]


def _of_both_labels(model: Any, rows: list[Row]) -> list[Row]:
    """Of the rows that can be afforded the longest two that are desirable, and the longest that is not.

    Unequal numbers: swapped labels show even where all log-ratios are the same.
    """

    def length(row: Row) -> int:
        return len(row["prompt_ids"]) + len(row["completion_ids"])

    desirable, undesirable = ([row for row in rows if row["label"] is label] for label in (True, False))
    return shortest(model, desirable, length)[-2:] + shortest(model, undesirable, length)[-1:]


def starts_as_the_reference(trainer: Any, model: Any, rows: list[Row]) -> Finding:
    """Before the first step policy and reference agree."""
    name, mode = "the policy starts as the reference", trainer._metrics["eval"]
    if not rows:
        return Finding(name, "not checked: the rows are too long", None)
    mode.clear()
    trainer.compute_loss(model, _batch(trainer, model, rows))
    rewards = {
        side: mode[f"rewards/{side}"][-1] for side in ("chosen", "rejected") if f"rewards/{side}" in mode
    }
    longest = max(len(row["completion_ids"]) for row in rows)
    limit = tolerance(trainer, model) * trainer.beta * longest
    same = all(abs(value) <= limit for value in rewards.values())
    found = ", ".join(f"reward of the {side} {value:.3g}" for side, value in rewards.items())
    if not same:
        found += ": the reference is another adapter, or the bare base, or dropout is on in one of the two"
    return Finding(name, found, same)


def loss_by_the_formula(trainer: Any, model: Any, rows: list[Row]) -> Finding:
    """TRL's loss of a padded batch is eq. 7 of the paper on the log-probs of each completion alone.

    Equal policy and reference would hide swapped labels: the adapter is moved a little for this, and back.
    """
    name = "the loss is the paper's on the completions alone"
    if trainer.aux_loss_enabled or not rows:
        return Finding(name, "not checked: the rows are too long, or experts are balanced", None)
    with _nudged(model):
        loss = float(trainer.compute_loss(model, _batch(trainer, model, rows)))
        ratios, sizes = zip(
            *(_log_ratio(model, row["prompt_ids"], row["completion_ids"]) for row in rows), strict=True
        )
        mismatched = [
            _log_ratio(model, row["prompt_ids"], other["completion_ids"])
            for row, other in zip(rows, _others(rows), strict=True)
        ]
    z0 = max(0.0, sum(ratio for ratio, _ in mismatched) / len(rows)) if trainer.calculate_KL else 0.0
    weights = {True: trainer.desirable_weight, False: trainer.undesirable_weight}
    terms = []
    for row, ratio in zip(rows, ratios, strict=True):
        gain = (ratio - z0) if row["label"] else (z0 - ratio)
        terms.append(weights[row["label"]] / (1 + math.exp(trainer.beta * gain)))
    expected = sum(terms) / len(terms)
    found = f"{loss:.6g} by the trainer, {expected:.6g} from {len(rows)} rows one by one; z0 {z0:.3g}"
    # A swapped label, or another z0, changes it by the order of beta times the ratios; rounding by that of the log-probs.
    doubt = tolerance(trainer, model) * (max(map(abs, [*ratios, z0])) + 0.02 * max(sizes))
    limit = 1e-5 * max(1.0, expected) + doubt * trainer.beta * max(weights.values())
    return Finding(name, found, abs(loss - expected) <= limit)


def pairs_other_rows(trainer: Any) -> Finding:
    """In the first batch the KL term is over prompts with the completions of other rows of the same step."""
    name = "the KL term pairs prompts with other rows' completions"
    if not trainer.calculate_KL:
        return Finding(name, "not checked: the loss has no KL term", None)
    loader = trainer.get_train_dataloader()
    drawn = next(iter(loader.batch_sampler))
    own, others = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
    rows = trainer.train_dataset.select(drawn)
    batch = loader.collate_fn(list(rows))
    count = len(own)
    expected = [
        row["prompt_ids"] + other["completion_ids"]
        for row, other in zip(rows.select(range(count)), rows.select(range(count, 2 * count)), strict=True)
    ]
    masks = batch["KL_attention_mask"].bool()
    read = [ids[mask].tolist() for ids, mask in zip(batch["KL_input_ids"], masks, strict=True)]
    themselves = sum(a == b for a, b in zip(own, others, strict=True))
    wrong = sum(a != b for a, b in zip(read, expected, strict=True))
    found = f"{count} rows in the first micro-batch"
    if themselves:
        found += (
            f"; {themselves} are paired with their own completion: KTO's reward would be compared with itself"
        )
    if wrong:
        found += f"; {wrong} are read with other tokens than those of their pair"
    return Finding(name, found, not wrong and (not themselves or len(trainer.train_dataset) == 1))


# ----------------------------------------------------------------------------------------------------- helpers


def _others(rows: list[Row]) -> list[Row]:
    return [*rows[-1:], *rows[:-1]]


def _batch(trainer: Any, model: Any, rows: list[Row]) -> dict[str, Any]:
    return collated(
        trainer, model, [paired(row, other) for row, other in zip(rows, _others(rows), strict=True)]
    )


def _log_ratio(model: Any, prompt: list[int], completion: list[int]) -> tuple[float, float]:
    """(log policy - log reference, |log policy|) of a completion."""
    from trl.trainer.utils import use_adapter

    ids, start = prompt + completion, len(prompt) - 1
    policy = logprobs_alone(model, ids)[start:].sum()
    with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
        reference = logprobs_alone(model, ids)[start:].sum()
    return float(policy - reference), abs(float(policy))


@contextlib.contextmanager
def _nudged(model: Any) -> Iterator[None]:
    """For the block, an adapter that is not the reference's; afterwards the one that it was, to the bit."""
    kept = {n: p.data for n, p in model.named_parameters() if "lora_B.default" in n}
    generator = torch.Generator().manual_seed(0)
    parameters = dict(model.named_parameters())
    for name, data in kept.items():
        noise = NUDGE * torch.randn(data.shape, generator=generator)
        parameters[name].data = data + noise.to(data)
    try:
        yield
    finally:
        for name, data in kept.items():
            parameters[name].data = data
