"""Self-checks that only kto has: its loss by the formula, and the rows that its KL term pairs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from pipeline.data.kl_pairs import paired
from pipeline.findings import Finding
from pipeline.runtime.trl_checks import (
    Row,
    affordable,
    collated,
    completion_logprob,
    ends_learned,
    loss_after_generation_prompt,
    one_bos,
    policy_is_reference,
    starts_as_its_file,
    tolerance,
)
from pipeline.runtime.worker import Worker

# Standard deviation of the noise on the adapter's B that moves the policy away from the reference
NUDGE = 0.02


def unpaired(worker: Worker, trainer: Any, model: Any, rows: list[Row]) -> list[Finding]:
    """Returns the findings that only kto has."""
    completions = [(row["prompt_ids"], row["completion_ids"]) for row in rows]
    few = _of_both_labels(model, rows)
    return [
        one_bos(worker.tokenizer, [prompt + completion for prompt, completion in completions]),
        loss_after_generation_prompt(worker.tokenizer, completions),
        ends_learned(worker, completions),
        *([starts_as_its_file(model, worker.input("policy"))] if "policy" in worker.work.inputs else []),
        policy_is_reference(trainer, model, _with_others(few), [len(row["completion_ids"]) for row in few]),
        loss_by_the_formula(trainer, model, few),
        pairs_other_rows(trainer),
    ]


def _of_both_labels(model: Any, rows: list[Row]) -> list[Row]:
    """Returns the longest two desirable rows that can be afforded, and the longest undesirable one.

    Unequal numbers: swapped labels show even if all log-ratios are equal.
    """

    def length(row: Row) -> int:
        return len(row["prompt_ids"]) + len(row["completion_ids"])

    desirable, undesirable = ([row for row in rows if row["label"] is label] for label in (True, False))
    return affordable(model, desirable, length)[-2:] + affordable(model, undesirable, length)[-1:]


def loss_by_the_formula(trainer: Any, model: Any, rows: list[Row]) -> Finding:
    """Checks TRL's loss of a padded batch against eq. 7 of the paper (Ethayarajh et al. 2024) on single completions.

    If policy and reference were equal, swapped labels would not show: the adapter is moved a little for this check.
    """
    name = "the loss is the paper's on the completions alone"
    if trainer.aux_loss_enabled or not rows:
        return Finding(name, "not checked: the rows are too long, or experts are balanced", None)
    with _nudged(model):
        loss = float(trainer.compute_loss(model, collated(trainer, model, _with_others(rows))))
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
    # A swapped label or a wrong z0 changes the loss by about beta times the log-ratios. Rounding errors grow with the log-probs.
    doubt = tolerance(trainer, model) * (max(map(abs, [*ratios, z0])) + 0.02 * max(sizes))
    limit = 1e-5 * max(1.0, expected) + doubt * trainer.beta * max(weights.values())
    return Finding(name, found, abs(loss - expected) <= limit)


def pairs_other_rows(trainer: Any) -> Finding:
    """Checks the KL term of the first batch: it is over prompts with completions of other rows of the same step."""
    name = "the KL term pairs prompts with other rows' completions"
    if not trainer.calculate_KL:
        return Finding(name, "not checked: the loss has no KL term", None)
    loader = trainer.get_train_dataloader()
    drawn = next(iter(loader.batch_sampler))
    count = len(drawn) // 2
    own, others = drawn[:count], drawn[count:]
    rows = trainer.train_dataset.select(drawn)
    batch = loader.collate_fn(list(rows))
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


def _with_others(rows: list[Row]) -> list[Row]:
    """Returns the rows, each with the completion of a different row for TRL's KL term."""
    return [paired(row, other) for row, other in zip(rows, _others(rows), strict=True)]


def _log_ratio(model: Any, prompt: list[int], completion: list[int]) -> tuple[float, float]:
    """Returns (log policy - log reference, |log policy|) of a completion."""
    from trl.trainer.utils import use_adapter

    policy = completion_logprob(model, prompt, completion)
    with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
        reference = completion_logprob(model, prompt, completion)
    return policy - reference, abs(policy)


@contextlib.contextmanager
def _nudged(model: Any) -> Iterator[None]:
    """Moves the adapter away from the reference within the block, and restores it exactly."""
    parameters = dict(model.named_parameters())
    before = {name: p.data for name, p in parameters.items() if "lora_B.default" in name}
    generator = torch.Generator().manual_seed(0)
    for name, data in before.items():
        noise = NUDGE * torch.randn(data.shape, generator=generator)
        parameters[name].data = data + noise.to(data)
    try:
        yield
    finally:
        for name, data in before.items():
            parameters[name].data = data
