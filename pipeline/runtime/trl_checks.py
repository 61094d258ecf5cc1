"""Self-checks of the TRL stages on their first rows, before the first optimizer step.

The prepared rows, and the loss that TRL computes on them, are compared with a plain forward of the model on single rows,
without padding, packing or a collator. A fault found here costs seconds; later it costs the run. One odd row stops nothing:
only a fault of *all* the first rows does, or a pair with equal sides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.findings import Finding, same_tensors
from pipeline.models.adapter_files import is_head
from pipeline.models.files import TENSORS
from pipeline.models.template import GENERATION, user_header_and_generation_prompt
from pipeline.models.tokenizer import eos_ids
from pipeline.runtime.worker import Worker

CHECKED_ROWS = 64  # rows whose tokens are checked
FORWARD_ROWS = 4  # of these, the shortest, which go through the model
MAX_LOGITS = 1 << 28  # fp32 numbers per row, a GiB; longer rows do not go through the model
ANSWERS = ("chosen", "rejected")
SIDES = ("chosen_ids", "rejected_ids")

Row = dict[str, Any]
Check = Callable[[Worker, Any, Any, list[Row]], list[Finding]]


def check(worker: Worker, trainer: Any, of_stage: Check) -> list[Finding]:
    """Returns the findings of a stage whose trainer is about to make its first step. No state changes; every rank calls it.

    Args:
        of_stage: the checks that only this stage has, on the unwrapped model and the first rows.
    """
    rows = [
        dict(row)
        for row in trainer.train_dataset.select(range(min(CHECKED_ROWS, len(trainer.train_dataset))))
    ]
    model = trainer.accelerator.unwrap_model(trainer.model)
    training, metrics = model.training, copy.deepcopy(trainer._metrics)
    tokens = trainer._total_train_tokens
    model.eval()  # TRL's means over training steps stay as they are
    try:
        with torch.no_grad():
            findings = of_stage(worker, trainer, model, rows)
    finally:
        model.train(training)
        trainer._metrics, trainer._total_train_tokens = metrics, tokens
    return [
        pad_is_no_eos(worker),
        only_adapters_learn(trainer, model),
        *findings,
        each_row_once(worker, trainer),
    ]


# ------------------------------------------------------------------------------------------------- every stage


def pad_is_no_eos(worker: Worker) -> Finding:
    """Checks that the pad token ends no completion: else collators mask EOS, and it is never learned."""
    tokenizer = worker.tokenizer
    ends = eos_ids(tokenizer)
    found = f"pad is {tokenizer.pad_token!r}, completions end with {tokenizer.convert_ids_to_tokens(ends)}"
    return Finding("the pad token is no EOS token", found, tokenizer.pad_token_id not in ends)


def only_adapters_learn(trainer: Any, model: Any) -> Finding:
    """Checks that exactly adapter and head require gradients, in fp32, and that the optimizer has them."""
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    wrong = {
        "of the base learn": [name for name in learning if ".default" not in name],
        "of the adapter are frozen": [
            name
            for name, p in model.named_parameters()
            if not p.requires_grad and ".default." in name and "lora_" in name
        ],
        "are not fp32": [name for name, p in learning.items() if p.dtype != torch.float32],
        "are not in the optimizer": [name for name, p in learning.items() if id(p) not in optimized],
    }
    found = f"{sum(p.numel() for p in learning.values()):,} parameters learn"
    for what, names in wrong.items():
        if names:
            found += f"; {len(names)} tensors {what}, for example {names[0]}"
    return Finding("only adapters and heads learn", found, bool(learning) and not any(wrong.values()))


def each_row_once(worker: Worker, trainer: Any) -> Finding:
    """Checks that the first micro-batch has different rows on each worker."""
    name = "workers train on different rows"
    if worker.world == 1:
        return Finding(name, "one worker", None)
    drawn = [row for part in worker.gather(trainer.first_rows()) for row in part]
    twice = len(drawn) - len(set(drawn))
    found = f"{len(drawn)} rows in the first micro-batch of {worker.world} workers"
    return Finding(name, found + (f", {twice} of them twice" if twice else ""), not twice)


def one_bos(tokenizer: Any, rows: Sequence[list[int]]) -> Finding:
    """Checks that rows do not begin with two BOS: one of the template, one of the tokenizer."""
    bos = tokenizer.bos_token_id
    twice = sum(bos is not None and ids[:2] == [bos, bos] for ids in rows)
    found = f"{len(rows)} rows" + (f"; {twice} begin with {tokenizer.bos_token} twice" if twice else "")
    return Finding("at most one BOS per row", found, twice < max(1, len(rows)))


def ends_learned(worker: Worker, rows: Sequence[tuple[list[int], list[int]]]) -> Finding:
    """Checks that completions end with a trained EOS token: else the model never learns to stop.

    Args:
        rows: token ids of (prompt, completion). A row as long as data.max_length may be truncated, and is skipped.
    """
    name, ends = "completions end with a trained EOS", set(eos_ids(worker.tokenizer))
    limit = worker.job.data.max_length or float("inf")
    complete = [completion for prompt, completion in rows if len(prompt) + len(completion) < limit]
    if not complete:
        return Finding(name, f"not checked: all of the first {len(rows)} rows are truncated", None)
    ended = sum(bool(ids) and ids[-1] in ends for ids in complete)
    found = f"{ended} of {len(complete)} completions end with an EOS token among the trained ones"
    return Finding(name, found, ended > 0)


def loss_after_generation_prompt(tokenizer: Any, rows: Sequence[tuple[list[int], list[int]]]) -> Finding:
    """Checks that training begins right after the template's generation prompt.

    Args:
        rows: token ids of (prompt, last trained completion).
    """
    name = "the loss starts after the generation prompt"
    with_prompt = sum(bool(prompt) for prompt, _ in rows)
    if not with_prompt:
        found = f"in none of {len(rows)} rows: the prompt is trained, too, from its first token"
        return Finding(name, found, False)
    if GENERATION.search(tokenizer.chat_template or ""):
        return Finding(name, "the template marks its completions itself ({% generation %})", None)
    _, asks = user_header_and_generation_prompt(tokenizer)
    # A completion may hold further turns: its beginning shows whether the prompt's end is in it.
    texts = [(tokenizer.decode(p), tokenizer.decode(p + completion[:8])) for p, completion in rows]
    if not asks or not any(asks in text for _, text in texts):
        return Finding(name, f"{with_prompt} of {len(rows)} rows have a prompt that is not trained", True)
    after = sum(asks in prompt and prompt.rfind(asks) == text.rfind(asks) for prompt, text in texts)
    found = f"{after} of {len(rows)} completions are trained from the end of the template's last {asks!r}"
    return Finding(name, found, after > 0)


def sides_differ(rows: Sequence[Row]) -> Finding:
    """Checks that chosen and rejected of each pair are different token ids."""
    equal = sum(row["chosen_ids"] == row["rejected_ids"] for row in rows)
    found = f"{len(rows)} pairs" + (f"; {equal} have the same tokens on both sides" if equal else "")
    return Finding("the sides of a pair differ", found, not equal)


def starts_as_its_file(model: Any, folder: str, role: str = "policy", adapter: str = "default") -> Finding:
    """Checks that an adapter in memory equals its file: the one that learns, or the frozen reference."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    stored = {key: t.float() for key, t in load_file(f"{folder}/{TENSORS}").items()}
    tensors = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    loaded = {key: tensor.cpu() for key, tensor in tensors.items()}
    return same_tensors(f"the {role} is the adapter of its file", loaded, stored, folder)


def policy_is_reference(trainer: Any, model: Any, rows: list[Row], lengths: list[int]) -> Finding:
    """Checks by TRL's metrics that policy and reference agree before the first step. Leaves the metrics in the trainer.

    Args:
        rows: for the collator; none if all are too long.
        lengths: tokens of their completions.
    """
    name, metrics = "the policy starts as the reference", trainer._metrics["eval"]
    metrics.clear()
    if rows:
        trainer.compute_loss(model, collated(trainer, model, rows))
    # TRL's rewards: beta times the log-ratio of policy and reference
    rewards = {key: metrics[f"rewards/{key}"][-1] for key in ANSWERS if f"rewards/{key}" in metrics}
    if not rewards:  # another implementation of the loss keeps no such metrics
        return Finding(
            name, "not checked: rows are too long, or the loss has no metrics of single rows", None
        )
    found = ", ".join(f"reward of the {key} {value:.3g}" for key, value in rewards.items())
    limit = tolerance(trainer, model) * trainer.args.beta * max(lengths)
    same = all(abs(value) <= limit for value in rewards.values())
    if not same:
        found += ": the reference is another adapter, or the bare base, or dropout is on in one of the two"
    return Finding(name, found, same)


# --------------------------------------------------------------------------------------------------------- sft


def demonstrations(worker: Worker, trainer: Any, model: Any, rows: list[Row]) -> list[Finding]:
    """Returns the findings that only sft has."""
    last = []  # (what precedes the last trained run of tokens, that run)
    for part in (part for row in rows for part in _unpacked(row)):
        ids, trained = part["input_ids"], [i for i, label in enumerate(part["labels"]) if label != -100]
        if trained:
            before = (i for i in reversed(range(trained[-1])) if part["labels"][i] == -100)
            start = next(before, -1) + 1
            last.append((ids[:start], ids[start : trained[-1] + 1]))
    return [
        one_bos(worker.tokenizer, [prompt + completion for prompt, completion in last]),
        loss_after_generation_prompt(worker.tokenizer, last),
        ends_learned(worker, last),
        labels_are_tokens(trainer, rows),
        loss_of_single_rows(trainer, model, rows),
    ]


def _unpacked(row: Row) -> list[Row]:
    """Returns the rows that a packed row was made of, or the row itself if it is not packed."""
    parts, start = [], 0
    for length in row.get("seq_lengths") or [len(row["input_ids"])]:
        parts.append({key: row[key][start : start + length] for key in ("input_ids", "labels")})
        start += length
    return parts


def labels_are_tokens(trainer: Any, rows: list[Row]) -> Finding:
    """Checks that the collated batch trains the same number of tokens as the rows, each as itself."""
    batch = trainer.data_collator([dict(row) for row in rows])
    expected = sum(label != -100 for row in rows for part in _unpacked(row) for label in part["labels"][1:])
    labels = batch["labels"]
    begins = (
        batch["position_ids"] == 0 if "position_ids" in batch else torch.zeros_like(labels, dtype=torch.bool)
    )
    begins[:, 0] = True  # nothing predicts the first token of a row
    trained = (labels != -100) & ~begins
    others = int((batch["input_ids"] != labels)[trained].sum())
    found = f"{int(trained.sum())} tokens are trained in a batch of {len(rows)} rows"
    if int(trained.sum()) != expected:
        found += f", {expected} in the rows themselves: the collator masks labels, or adds some"
    if others:
        found += f"; {others} labels are not the token that stands there"
    return Finding("labels are the rows' tokens", found, int(trained.sum()) == expected and not others)


def loss_of_single_rows(trainer: Any, model: Any, rows: list[Row]) -> Finding:
    """Checks TRL's loss on a padded or packed batch: the mean over its tokens of what each row alone gives."""
    name = "the loss is that of the rows alone"
    few = affordable(model, rows, lambda row: max(row.get("seq_lengths") or [len(row["input_ids"])]))
    args = trainer.args
    if args.loss_type not in (None, "nll") or args.label_smoothing_factor or trainer.aux_loss_enabled:
        return Finding(name, "not checked: the job has another loss", None)
    if not few:
        return Finding(name, "not checked: the rows are too long", None)
    loss = float(trainer.compute_loss(model, collated(trainer, model, few)))
    total, count = 0.0, 0
    for part in (part for row in few for part in _unpacked(row)):
        learned = torch.tensor(part["labels"][1:]) != -100
        total -= float(logprobs_alone(model, part["input_ids"])[learned].sum())
        count += int(learned.sum())
    plain = total / max(count, 1)
    found = f"{loss:.5g} by the trainer, {plain:.5g} from {count} tokens of {len(few)} rows one by one"
    return Finding(name, found, abs(loss - plain) <= tolerance(trainer, model) * max(1.0, plain))


# ----------------------------------------------------------------------------------------------------- dpo, rm


def preferences(worker: Worker, trainer: Any, model: Any, rows: list[Row]) -> list[Finding]:
    """Returns the findings that only dpo has."""
    chosen = [(row["prompt_ids"], row["chosen_ids"]) for row in rows]
    adapters = {"policy": "default", "reference": "ref"}
    return [
        one_bos(worker.tokenizer, [prompt + completion for prompt, completion in chosen]),
        loss_after_generation_prompt(worker.tokenizer, chosen),
        ends_learned(worker, [(row["prompt_ids"], row[side]) for row in rows for side in SIDES]),
        sides_differ(rows),
        *(
            starts_as_its_file(model, worker.input(role), role, adapter)
            for role, adapter in adapters.items()
            if role in worker.work.inputs
        ),
        *(starts_as_the_reference(trainer, model, rows) if not worker.job.reference else []),
    ]


def starts_as_the_reference(trainer: Any, model: Any, rows: list[Row]) -> list[Finding]:
    """Checks that policy and reference agree before the first step, and that batched log-probs equal single ones."""
    few = affordable(model, rows, lambda row: len(row["prompt_ids"]) + max(len(row[side]) for side in SIDES))
    reference = policy_is_reference(trainer, model, few, [len(row[side]) for row in few for side in SIDES])
    if reference.holds is None or trainer.ld_alpha is not None:
        return [reference]
    found, holds = [], True
    for side in ANSWERS:
        ours = trainer._metrics["eval"][f"logps/{side}"][-1]
        logprobs = [completion_logprob(model, row["prompt_ids"], row[f"{side}_ids"]) for row in few]
        plain = sum(logprobs) / len(few)
        found.append(f"{side} {ours:.4g} by the trainer, {plain:.4g} alone")
        holds &= abs(ours - plain) <= tolerance(trainer, model) * max(1.0, abs(plain))
    return [reference, Finding("log-probs are those of the completions alone", ", ".join(found), holds)]


def comparisons(worker: Worker, trainer: Any, model: Any, rows: list[Row]) -> list[Finding]:
    """Returns the findings that only rm has."""
    return [
        one_bos(worker.tokenizer, [row["chosen_ids"] for row in rows]),
        ends_learned(worker, [([], row[side]) for row in rows for side in SIDES]),
        sides_differ(rows),
        scores_of_single_rows(trainer, model, rows),
    ]


def scores_of_single_rows(trainer: Any, model: Any, rows: list[Row]) -> Finding:
    """Checks that scores in a padded batch are the head's output, in fp32, on the last token of each row alone."""
    name = "scores are read at the last token, in fp32"
    few = affordable(model, rows, lambda row: max(len(row[side]) for side in SIDES))
    if not few:
        return Finding(name, "not checked: the rows are too long", None)
    head = next((p for key, p in model.named_parameters() if p.requires_grad and _of_head(key)), None)
    if head is None:
        return Finding(name, "no scalar head learns: it is frozen, and random or the base's own", False)
    owner = next(m for m in model.modules() if any(p is head for p in m.parameters(recurse=False)))
    types: list[torch.dtype] = []
    hook = owner.register_forward_hook(lambda module, inputs, output: types.append(output.dtype))
    batch = collated(trainer, model, few)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    scores = model(**inputs).logits.squeeze(-1).float().cpu()
    hook.remove()
    body = model.get_base_model().base_model
    plain = []
    for ids in [row[side] for side in SIDES for row in few]:
        with trainer.compute_loss_context_manager():
            hidden = body(input_ids=torch.tensor([ids], device=model.device)).last_hidden_state[0, -1]
        plain.append(float(head.flatten().float() @ hidden.float()))
    largest = float((scores - torch.tensor(plain)).abs().max())
    limit = tolerance(trainer, model) * max(1.0, max(map(abs, plain)))
    found = f"they differ by up to {largest:.2g} from the head's output on the last token of the rows alone"
    low = [kind for kind in types if kind != torch.float32]
    if low:
        found += f"; the head computes in {low[0]}, in which close scores are equal"
    return Finding(name, found, largest <= limit and not low)


def _of_head(name: str) -> bool:
    return is_head(
        name.replace(".modules_to_save.default", "").replace("base_model.model.base_model", "base_model")
    )


# ----------------------------------------------------------------------------------------------------- helpers


def affordable(model: Any, rows: list[Row], length: Callable[[Row], int]) -> list[Row]:
    """Returns the shortest rows, and the longest that the model can be run on: most faults are about padding."""
    vocab_size = model.config.get_text_config().vocab_size
    fitting = sorted((row for row in rows if length(row) * vocab_size <= MAX_LOGITS), key=length)
    return [*fitting[: FORWARD_ROWS - 1], *fitting[FORWARD_ROWS - 1 :][-1:]]


def collated(trainer: Any, model: Any, rows: list[Row]) -> dict[str, Any]:
    """Returns the trainer's batch of some rows, on the model's device."""
    batch = trainer.data_collator([dict(row) for row in rows])
    return {
        key: value.to(model.device) if isinstance(value, Tensor) else value for key, value in batch.items()
    }


def logprobs_alone(model: Any, ids: list[int]) -> Tensor:
    """Returns the log-probs (T - 1,) of a row's tokens after its first, by a forward of the row alone, on the CPU."""
    row = torch.tensor([ids], device=model.device)
    logits = model(input_ids=row).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, row[0, 1:].unsqueeze(-1)).squeeze(-1).cpu()


def completion_logprob(model: Any, prompt: list[int], completion: list[int]) -> float:
    """Returns the log-prob of a completion, by a forward of the row alone."""
    return float(logprobs_alone(model, prompt + completion)[len(prompt) - 1 :].sum())


def tolerance(trainer: Any, model: Any) -> float:
    """Returns the relative difference that rounding explains: batches differ in padding."""
    low = trainer.args.bf16 or trainer.args.fp16 or model.dtype != torch.float32
    return 0.05 if low or getattr(model, "is_quantized", False) else 1e-3
