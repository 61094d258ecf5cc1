"""Self-checks of the TRL stages on their first rows, before the first optimizer step.

The checks compare TRL's loss on the prepared rows with a plain forward pass of the model on single rows, without padding, packing
or a collator. Without these checks, a fault would waste the whole run. One odd row does not stop the run. Only a fault in *all*
the first rows, or a pair with equal completions, stops the run.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.checks import CheckResult, same_tensors
from pipeline.data.messages import SIDES
from pipeline.models.adapter_files import is_head
from pipeline.models.precision import precision_of
from pipeline.models.template import GENERATION, user_header_and_generation_prompt
from pipeline.models.tokenizer import eos_ids
from pipeline.run.worker import Worker
from pipeline.stages.kl_pairs import pair_rows
from pipeline.system.hub import TENSORS

CHECKED_ROWS = 64  # number of rows whose tokens are checked
FORWARD_ROWS = 4  # number of rows that also go through the model
MAX_LOGITS = 1 << 28  # maximum number of logits of a row that goes through the model, 1 GiB in fp32
ADAPTERS = {"policy": "default", "reference": "ref"}  # {role: TRL's name of the adapter}

Row = dict[str, Any]
Completion = tuple[list[int], list[int]]  # token ids of a prompt, and of its (last) trained completion


def first_step_checks(worker: Worker, trainer: Any) -> list[CheckResult]:
    """Runs the checks before the first step, and returns their results. Does not change the trainer.

    Every rank calls this function.
    """
    dataset = trainer.train_dataset.select(range(min(CHECKED_ROWS, len(trainer.train_dataset))))
    rows = [dict(row) for row in dataset]
    model, stage = trainer.accelerator.unwrap_model(trainer.model), worker.work.identity.stage
    completions = [completion for row in rows for completion in completions_of(row)]
    tokenizer = worker.tokenizer
    results = [
        only_adapters_learn(trainer, model),
        *special_tokens(tokenizer, completions),
        ends_learned(worker, completions),
        *(starts_as_its_file(model, worker, role) for role in ADAPTERS if role in worker.work.inputs),
    ]
    if worker.world > 1:
        numbers = [row for part in worker.gather(trainer.first_rows()) for row in part]
        duplicates = len(numbers) - len(set(numbers))
        message = f"{duplicates} of {len(numbers)} rows of the first micro-batch occur twice"
        results.append(CheckResult("workers train on different rows", message, not duplicates))
    if stage != "rm":
        results.append(loss_after_generation_prompt(tokenizer, completions))
    if stage == "sft":
        results.append(labels_are_tokens(trainer, rows))
    if stage in ("rm", "dpo"):
        equal_pairs = sum(row["chosen_ids"] == row["rejected_ids"] for row in rows)
        message = f"{equal_pairs} of {len(rows)} pairs have the same tokens in chosen and rejected"
        results.append(CheckResult("chosen and rejected completions differ", message, not equal_pairs))
    if stage == "kto" and trainer.calculate_KL:
        results.append(pairs_other_rows(trainer))
    training, metrics = model.training, copy.deepcopy(trainer._metrics)
    tokens = trainer._total_train_tokens
    model.eval()  # eval mode, so that TRL's means over training steps do not change
    try:
        with torch.no_grad():
            return results + compare_with_single_rows(
                stage, trainer, model, rows, same_start="reference" not in worker.work.named
            )
    finally:
        model.train(training)
        trainer._metrics, trainer._total_train_tokens = metrics, tokens


def compare_with_single_rows(
    stage: str, trainer: Any, model: Any, rows: list[Row], same_start: bool = True
) -> list[CheckResult]:
    """Compares the trainer's numbers on a batch with forward passes of the model on single rows. Returns the results.

    Args:
        same_start: whether the policy equals the reference at the start.
    """
    few, results = affordable_rows(model, rows), []
    if not few:  # no row is within MAX_LOGITS
        return []
    if stage in ("dpo", "kto"):
        trainer._metrics["eval"].clear()
        trainer.compute_loss(model, collate_rows(trainer, model, few))  # adds the batch's metrics to _metrics
        if same_start:
            results.append(policy_is_reference(trainer, model, few))
    numbers, limit = NUMBERS[stage](trainer, model, few)
    if numbers:
        name, batched, single = max(numbers, key=lambda number: abs(number[1] - number[2]))
        text = f"{name} is {batched:.6g} in the trainer's batch, but {single:.6g} from the rows alone"
        if not math.isfinite(single):
            text = (
                f"{name} of the first rows is {single}; the base or an input adapter contains NaN or infinity"
            )
        holds = all(abs(batched - single) <= limit for _, batched, single in numbers)
        results.append(CheckResult("the trainer's numbers equal those from the rows alone", text, holds))
    if stage == "rm":
        scores = torch.tensor([batched for _, batched, _ in numbers])
        text = "the head computes in bfloat16, which rounds close scores to equal numbers"
        is_rounded = scores.equal(scores.bfloat16().float())
        results.append(CheckResult("scores are computed in fp32", text, not is_rounded))
    return results


# ----------------------------------------------------------------------------------------------------- tokens


def completions_of(row: Row) -> Iterator[Completion]:
    """Yields (prompt, completion) of a row as token ids. In SFT, the completion is the last contiguous span of trained tokens."""
    if "labels" in row:
        for part in _unpacked(row):
            ids, positions = part["input_ids"], [i for i, label in enumerate(part["labels"]) if label != -100]
            if positions:
                untrained = (i for i in reversed(range(positions[-1])) if part["labels"][i] == -100)
                start = next(untrained, -1) + 1
                yield ids[:start], ids[start : positions[-1] + 1]
    elif "completion_ids" in row:
        yield row["prompt_ids"], row["completion_ids"]
    else:  # a pair; in rm, both completions include the prompt
        yield from ((row.get("prompt_ids", []), row[f"{side}_ids"]) for side in SIDES)


def _unpacked(row: Row) -> list[Row]:
    """Returns the rows inside a packed row, or the row itself if it is not packed."""
    parts, start = [], 0
    for length in row.get("seq_lengths") or [len(row["input_ids"])]:
        parts.append({key: row[key][start : start + length] for key in ("input_ids", "labels")})
        start += length
    return parts


def only_adapters_learn(trainer: Any, model: Any) -> CheckResult:
    """Checks that only adapter and head are trainable, and that their parameters are fp32 and in the optimizer."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    tensors = {
        "of the base require gradients": [name for name in trainable if ".default" not in name],
        "of the adapter are frozen": [name for name in frozen if ".default." in name],
        "are not fp32": [name for name, p in trainable.items() if p.dtype != torch.float32],
        "are not in the optimizer": [name for name, p in trainable.items() if id(p) not in optimized],
    }
    faults = [
        f"{len(names)} tensors {fault}, for example {names[0]}" for fault, names in tensors.items() if names
    ]
    message = "; ".join([f"{sum(p.numel() for p in trainable.values()):,} parameters learn", *faults])
    return CheckResult("only adapters and heads learn", message, bool(trainable) and not faults)


def special_tokens(tokenizer: Any, rows: Sequence[Completion]) -> list[CheckResult]:
    """Checks that the pad token is not EOS, and that rows do not begin with BOS from both the template and the tokenizer."""
    ends, bos = eos_ids(tokenizer), tokenizer.bos_token_id
    pad = f"pad is {tokenizer.pad_token!r}, completions end with {tokenizer.convert_ids_to_tokens(ends)}"
    double_bos = sum(bos is not None and (prompt + ids)[:2] == [bos, bos] for prompt, ids in rows)
    bos_message = f"{double_bos} of {len(rows)} rows begin with {tokenizer.bos_token} twice"
    return [
        # If the pad token is EOS, collators mask EOS, and the model never learns to stop.
        CheckResult("the pad token is no EOS token", pad, tokenizer.pad_token_id not in ends),
        CheckResult("at most one BOS per row", bos_message, double_bos < max(1, len(rows))),
    ]


def ends_learned(worker: Worker, rows: Sequence[Completion]) -> CheckResult:
    """Checks that completions end with a trained EOS token. Without a trained EOS, the model never learns to stop."""
    ends, limit = set(eos_ids(worker.tokenizer)), worker.work.data.max_length or float("inf")
    # Leaves out rows that reach the length limit, because they may be truncated.
    untruncated = [ids for prompt, ids in rows if len(prompt) + len(ids) < limit]
    ended = sum(bool(ids) and ids[-1] in ends for ids in untruncated)
    message = f"{ended} of {len(untruncated)} completions end with a trained EOS token"
    return CheckResult("completions end with a trained EOS", message, ended > 0 or not untruncated)


def loss_after_generation_prompt(tokenizer: Any, rows: Sequence[Completion]) -> CheckResult:
    """Checks that training begins right after the template's generation prompt."""
    name = "the loss starts after the generation prompt"
    if not any(prompt for prompt, _ in rows):
        message = f"in none of {len(rows)} rows: the loss also covers the prompt, from its first token"
        return CheckResult(name, message, False)
    _, suffix = user_header_and_generation_prompt(tokenizer)
    # Decodes only the start of a completion. Later text may contain more turns, each with its own generation prompt.
    texts = [(tokenizer.decode(prompt), tokenizer.decode(prompt + ids[:8])) for prompt, ids in rows]
    # This check does not apply if the chat template marks the trained tokens ({% generation %}).
    marked = GENERATION.search(tokenizer.chat_template or "")
    applies = suffix and not marked and any(suffix in text for _, text in texts)
    aligned = sum(suffix in prompt and prompt.rfind(suffix) == text.rfind(suffix) for prompt, text in texts)
    message = (
        f"in {aligned} of {len(rows)} completions, training starts right after the template's last {suffix!r}"
    )
    return CheckResult(name, message, aligned > 0 or not applies)


def starts_as_its_file(model: Any, worker: Worker, role: str) -> CheckResult:
    """Checks that the adapter of a role (policy or reference) equals its file."""
    from peft import get_peft_model_state_dict

    folder = worker.input(role)
    stored = {key: tensor.float() for key, tensor in load_file(os.path.join(folder, TENSORS)).items()}
    tensors = get_peft_model_state_dict(model, adapter_name=ADAPTERS[role], save_embedding_layers=False)
    loaded = {key: tensor.cpu() for key, tensor in tensors.items()}
    return same_tensors(f"the {role} equals its adapter file", loaded, stored, folder)


def labels_are_tokens(trainer: Any, rows: list[Row]) -> CheckResult:
    """Checks that a batch has as many trained tokens as its rows, and that each label equals the token at its position."""
    batch = trainer.data_collator([dict(row) for row in rows])
    expected = sum(label != -100 for row in rows for part in _unpacked(row) for label in part["labels"][1:])
    is_trained = batch["labels"] != -100
    is_trained[:, 0] = False  # nothing predicts the first token of a row
    if "position_ids" in batch:  # packed
        is_trained &= batch["position_ids"] != 0
    count, mismatches = int(is_trained.sum()), int((batch["input_ids"] != batch["labels"])[is_trained].sum())
    message = f"{count} tokens are trained in a batch of {len(rows)} rows"
    if count != expected:
        message += f", but {expected} in the rows themselves: the collator masks or adds labels"
    if mismatches:
        message += f"; {mismatches} labels differ from the token at their position"
    return CheckResult("labels are the rows' tokens", message, count == expected and not mismatches)


def pairs_other_rows(trainer: Any) -> CheckResult:
    """Checks that the KL term of the first batch pairs each prompt with the completion of another row of the same step."""
    loader = trainer.get_train_dataloader()
    numbers = next(iter(loader.batch_sampler))
    count = len(numbers) // 2  # the second half of a batch has the paired rows
    rows = list(trainer.train_dataset.select(numbers))
    batch = loader.collate_fn([dict(row) for row in rows])
    self_pairs = mismatches = 0
    for i in range(count):
        self_pairs += numbers[i] == numbers[count + i]
        ids = batch["KL_input_ids"][i][batch["KL_attention_mask"][i].bool()].tolist()
        mismatches += ids != rows[i]["prompt_ids"] + rows[count + i]["completion_ids"]
    message = (
        f"of {count} rows in the first micro-batch, {self_pairs} are paired with their own completion, and {mismatches} have "
        "tokens that differ from those of their pair"
    )
    holds = not mismatches and (not self_pairs or len(trainer.train_dataset) == 1)
    return CheckResult("the KL term pairs prompts with other rows' completions", message, holds)


# ---------------------------------------------------------------------------- numbers of a batch, and of single rows


def policy_is_reference(trainer: Any, model: Any, rows: list[Row]) -> CheckResult:
    """Checks with TRL's metrics that policy and reference have equal log-probs before the first step."""
    # TRL's rewards are beta times the log-ratio of policy and reference.
    metrics = trainer._metrics["eval"]
    rewards = {side: metrics[f"rewards/{side}"][-1] for side in SIDES if f"rewards/{side}" in metrics}
    message = ", ".join(f"reward of the {side} {value:.3g}" for side, value in rewards.items())
    longest = max(len(completion) for row in rows for _, completion in completions_of(row))
    limit = rounding_tolerance(trainer, model) * trainer.args.beta * longest
    holds = all(abs(value) <= limit for value in rewards.values())
    return CheckResult("the policy starts as the reference", message, holds)


# ([(name, the trainer's value for a padded batch, the value computed row by row)], the largest difference due to rounding).
# The list is empty if the job's loss has other terms.
Numbers = tuple[list[tuple[str, float, float]], float]


def sft_numbers(trainer: Any, model: Any, rows: list[Row]) -> Numbers:
    """Compares the trainer's loss with the mean of -log p over the trained tokens."""
    args = trainer.args
    if args.loss_type not in (None, "nll") or args.label_smoothing_factor or trainer.aux_loss_enabled:
        return [], 0.0
    loss = float(trainer.compute_loss(model, collate_rows(trainer, model, rows)))
    parts = [part for row in rows for part in _unpacked(row)]
    masks = [torch.tensor(part["labels"][1:]) != -100 for part in parts]
    logprobs = [logprobs_alone(model, part["input_ids"])[m] for part, m in zip(parts, masks, strict=True)]
    expected = -float(torch.cat(logprobs).mean())
    return [("loss", loss, expected)], rounding_tolerance(trainer, model) * max(1.0, expected)


def rm_numbers(trainer: Any, model: Any, rows: list[Row]) -> Numbers:
    """Compares the model's scores with the head's output, in fp32, on the last token of each row."""
    batch, base = collate_rows(trainer, model, rows), model.get_base_model()
    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.flatten()
    head = next(p for name, p in base.named_parameters() if is_head(name) and "default" in name).float()
    expected = []
    for ids in [row[f"{side}_ids"] for side in SIDES for row in rows]:
        with trainer.compute_loss_context_manager():
            hidden = base.base_model(input_ids=torch.tensor([ids], device=model.device)).last_hidden_state
        expected.append(float(head.flatten() @ hidden[0, -1].float()))
    limit = rounding_tolerance(trainer, model) * max(1.0, *map(abs, expected))
    return [("score", *pair) for pair in zip(scores.tolist(), expected, strict=True)], limit


def preference_numbers(trainer: Any, model: Any, rows: list[Row]) -> Numbers:
    """Compares the mean log-probs of chosen and rejected completions under policy and reference.

    In KTO, only the label determines whether a completion counts as chosen.
    """
    from trl.trainer.utils import use_adapter

    if getattr(trainer, "ld_alpha", None) is not None:  # with `ld_alpha`, dpo weights the log-probs of tokens
        return [], 0.0
    numbers, metrics = [], trainer._metrics["eval"]
    for role, adapter in ADAPTERS.items():
        logprobs: dict[str, list[float]] = {}
        with use_adapter(model, adapter if adapter in model.peft_config else None):
            for row in rows:
                if "label" in row:
                    completions = {"chosen" if row["label"] else "rejected": row["completion_ids"]}
                else:
                    completions = {side: row[f"{side}_ids"] for side in SIDES}
                for side, completion in completions.items():
                    all_logprobs = logprobs_alone(model, row["prompt_ids"] + completion)
                    logprob = float(all_logprobs[len(row["prompt_ids"]) - 1 :].sum())
                    logprobs.setdefault(side, []).append(logprob)
        for side, values in logprobs.items():
            reported = sum(metrics[f"logps/{side}"])
            if role == "reference":  # TRL's reward is beta times the log-ratio
                reported -= sum(metrics[f"rewards/{side}"]) / trainer.beta
            numbers.append((f"the {role}'s log-prob of the {side}", reported, sum(values) / len(values)))
    return numbers, rounding_tolerance(trainer, model) * max(1.0, *(abs(logprob) for *_, logprob in numbers))


NUMBERS = {"sft": sft_numbers, "rm": rm_numbers, "dpo": preference_numbers, "kto": preference_numbers}


# ----------------------------------------------------------------------------------------------------- helpers


def affordable_rows(model: Any, rows: list[Row]) -> list[Row]:
    """Returns the shortest rows and the longest row within MAX_LOGITS, because most faults come from padding."""

    def length(row: Row) -> int:
        if "labels" in row:  # `labels` include tokens after the last trained token
            return max(row.get("seq_lengths") or [len(row["input_ids"])])
        return max((len(prompt) + len(completion) for prompt, completion in completions_of(row)), default=0)

    vocab_size = model.config.get_text_config().vocab_size
    fitting = sorted((row for row in rows if length(row) * vocab_size <= MAX_LOGITS), key=length)
    return [*fitting[: FORWARD_ROWS - 1], *fitting[FORWARD_ROWS - 1 :][-1:]]


def collate_rows(trainer: Any, model: Any, rows: list[Row]) -> dict[str, Any]:
    """Returns the trainer's batch of some rows, on the model's device. In kto, each row is paired with the previous row."""
    if "label" in rows[0]:
        rows = [pair_rows(row, partner) for row, partner in zip(rows, [*rows[-1:], *rows[:-1]], strict=True)]
    batch = trainer.data_collator([dict(row) for row in rows])
    return {k: value.to(model.device) if isinstance(value, Tensor) else value for k, value in batch.items()}


def logprobs_alone(model: Any, ids: list[int]) -> Tensor:
    """Returns the log-probs (T - 1,) of the tokens after the first, on the CPU, from a forward pass of this row alone."""
    row = torch.tensor([ids], device=model.device)
    logits = model(input_ids=row).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, row[0, 1:].unsqueeze(-1)).squeeze(-1).cpu()


def rounding_tolerance(trainer: Any, model: Any) -> float:
    """Returns the largest relative difference that rounding can explain between batches with different padding."""
    return 1e-3 if trainer_precision(trainer, model) == "fp32" else 0.05


def trainer_precision(trainer: Any, model: Any) -> str:
    return precision_of(model, trainer.args.bf16 or trainer.args.fp16)
