"""Known bugs, each a change of a few lines to one function of the pipeline.

`cause` is a regular expression that one of the messages must match: it points at the fault; any failure is not enough.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import alone
import peft
import torch
from torch import nn

from pipeline.data import encode, kl_pairs, tasks
from pipeline.data.template import ChatTemplate
from pipeline.inference import decoder, rows
from pipeline.inference.rows import Sampling
from pipeline.models import adapter_files, adapters, base
from pipeline.models.adapters import SharedBase
from pipeline.ppo import forward, functional, losses, rewards, rollouts, sampler
from pipeline.ppo import trainer as ppo
from pipeline.ppo.trainer import PPOTrainer
from pipeline.runtime import roles, training

Patch = Any  # pytest's MonkeyPatch
Change = Callable[..., Any]  # takes the original function and its arguments, and stands in for it


@dataclass(frozen=True)
class Fault:
    name: str
    run: str  # of faulty_runs.py: ppo, pair (ppo on two workers), sft, rm, dpo, kto
    changes: dict[tuple[Any, str], Change]  # by owner and name of the function
    cause: str
    settings: Sequence[str] = ()
    unnamed: str = ""  # the reason, where nothing can name it

    def plant(self, patch: Patch) -> None:
        for (owner, name), change in self.changes.items():
            wrapped(patch, owner, name, change)


FAULTS: list[Fault] = []


def fault(name: str, run: str, cause: str, *settings: str, at: Any, unnamed: str = "") -> Callable:
    """Adds a fault: the decorated function stands in for those at `at`, (owner, name) or several of them."""

    def add(change: Change) -> Change:
        owners = [at] if isinstance(at, tuple) else at
        FAULTS.append(Fault(name, run, dict.fromkeys(owners, change), cause, settings, unnamed))
        return change

    return add


def wrapped(patch: Patch, owner: Any, name: str, change: Change) -> None:
    """`owner.name` becomes change(original, *arguments)."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **keys: change(original, *args, **keys))


def afterwards(change: Change) -> Change:
    """The original runs, then change(what it returned, *its arguments)."""

    def call(original, *args, **keys):
        found = original(*args, **keys)
        change(found, *args)
        return found

    return call


# ------------------------------------------------------------------------------------------------ roles, adapters


COPY = "KL to the reference is 0.*copy of the reference"


@fault("the reference is the bare base", "ppo", COPY, at=(roles, "add_policy"))
def _(original, worker, shared, args):
    shared.add("policy", folder=worker.input("policy"), trainable=True)


@fault("the reference is another adapter", "ppo", COPY, at=(roles, "add_policy"))
def _(original, worker, shared, args):
    shared.add("policy", folder=worker.input("policy"), trainable=True)
    shared.add("reference", folder=worker.input("other"))
    return "reference"


@fault(
    "the adapter is not switched", "ppo", "as when it was trained.*another|policy writes as when",
    at=(SharedBase, "_switch"),
)  # fmt: skip
def _(original, self, role):
    self._role = role


@fault(
    "adapters are off outside of training", "ppo", "policy writes as when it was trained",
    at=(SharedBase, "_switch"),
)  # fmt: skip
def _(original, self, role):
    original(self, role if torch.is_grad_enabled() else None)


@fault(
    "LoRA's scaling is lost on loading", "ppo", "as when it was trained.*scaling",
    at=(adapters, "_read_config"),
)  # fmt: skip
@afterwards
def _(config, folder):
    config.lora_alpha = 1


@fault(
    "an adapter is loaded onto another base", "ppo", "as when it was trained.*[Aa]nother base",
    at=(base, "load_base"),
)  # fmt: skip
@afterwards
def _(model, *_):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)


OF_FILE = "reward is the adapter of its file"


@fault(
    "the reward's head is lost on loading", "ppo", f"{OF_FILE}|reward scores as when", at=(SharedBase, "load")
)
@afterwards
def _(_, self, role, folder):
    if role in self.heads:
        self.heads[role].weight.data.normal_(generator=torch.Generator().manual_seed(1))


NO_LEARNER = "only adapters and heads learn.*that should not"


@fault("the critic's head is frozen", "ppo", f"{NO_LEARNER}|only one side", at=(SharedBase, "set_trainable"))
@afterwards
def _(_, self, role, on):
    for head in self.heads.values():
        head.requires_grad_(False)


@fault("heads are rounded to bf16", "ppo", OF_FILE, at=(SharedBase, "add"))
@afterwards
def _(_, self, *args):
    for head in self.heads.values():
        head.weight.data = head.weight.data.bfloat16().float()


@fault("adapters are bf16", "ppo", "only adapters and heads learn.*are not fp32", at=(SharedBase, "add"))
@afterwards
def _(_, self, role, *args):
    for parameter in self.parameters_of(role):
        rounded = parameter.data.bfloat16()
        parameter.data = rounded if role == "policy" else rounded.float()


@fault("the base learns, too", "ppo", NO_LEARNER, at=(PPOTrainer, "__init__"))
@afterwards
def _(_, self, *args):
    self.shared.base.get_input_embeddings().weight.requires_grad_(True)


@fault(
    "the optimizer lost the policy's parameters", "ppo", r"[1-9]\d* are on one side only of optimizer|not the optimizer's",
    at=(PPOTrainer, "__init__"),
)  # fmt: skip
@afterwards
def _(_, self, *args):
    group = self.optimizer.param_groups[0]
    group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]


@fault("dropout is on while the policy learns", "ppo", "dropout", at=(SharedBase, "body"))
def _(original, self, **inputs):
    learning = torch.is_grad_enabled()
    for module in self.base.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2 if learning else 0.0
            module.train(learning)
    with self._precision():
        return self.base.base_model(**inputs)


@fault(
    "a checkpointed layer is recomputed with another role", "ppo", "checkpointed gradients are the plain ones",
    "trainer.gradient_checkpointing=true", "trainer.critic=adapter", at=(SharedBase, "checkpoint_contexts"),
)  # fmt: skip
def _(original, self):
    return contextlib.nullcontext(), self.use("critic")


# ---------------------------------------------------------------------------------------- prompts, ends of text


@fault("prompts begin with two begin tokens", "ppo", "begin with BOS twice", at=(encode.Encoder, "one_bos"))
def _(original, self, ids):
    return [self.bos, *original(self, ids)]


@fault("prompts lack the generation prompt", "ppo", "generation prompt", at=(ChatTemplate, "render"))
def _(original, self, turns, asks):
    return original(self, turns, False)


COLLATES = [(rollouts, "collate"), (sampler, "collate")]


@fault("the end token is outside the mask", "ppo", "end token is inside the mask", at=COLLATES)
@afterwards
def _(episodes, *_):
    last = (episodes.counts - 1).unsqueeze(-1)
    episodes.mask.scatter_(1, last, episodes.mask.gather(1, last) & ~episodes.ended.unsqueeze(-1))


FROM_ARGS = (Sampling, "from_args")


@fault("sampling stops on one of two end tokens", "ppo", "sampling goes on after", at=FROM_ARGS)
def _(original, args, tokenizer, *rest):
    sampling = original(args, tokenizer, *rest)
    return replace(sampling, eos=(tokenizer.convert_tokens_to_ids("<|end_of_text|>"),))


@fault("no token ends a completion", "ppo", "sampling goes on after", at=FROM_ARGS)
def _(original, *args):
    return replace(original(*args), eos=())


# -------------------------------------------------------------------------------------------------- the sampler


AGREE, WHOLE = "sampler and trainer agree", "whole distribution.*top-p"
DRAW = (decoder, "draw")
MANY = ("trainer.batch_size=256", "trainer.total_episodes=256", "trainer.per_device_train_batch_size=256")


def nucleus(logits: torch.Tensor, p: float) -> torch.Tensor:
    ordered, index = logits.softmax(-1).sort(descending=True)
    out = ordered.cumsum(-1) - ordered > p
    return logits.masked_fill(torch.zeros_like(out).scatter(-1, index, out), float("-inf"))


def of_all(logits: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Log-probs of tokens under the whole distribution, at temperature 1."""
    return logits.log_softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)


@fault("the sampler has no temperature", "ppo", AGREE, "trainer.temperature=0.7", at=DRAW)
def _(original, logits, noise, temperature, *rest):
    return original(logits, noise, torch.ones_like(temperature), *rest)


@fault("top-p is on, log-probs are of the whole distribution", "ppo", WHOLE, *MANY, at=DRAW)
def _(original, logits, *rest):
    token, _ = original(nucleus(logits, 0.8), *rest)
    return token, of_all(logits, token)


@fault("top-p is on, log-probs are of what it leaves", "ppo", AGREE, at=DRAW)
def _(original, logits, *rest):
    return original(nucleus(logits, 0.8), *rest)


@fault("completions are greedy", "ppo", WHOLE, at=DRAW)
def _(original, logits, *rest):
    token = logits.argmax(-1)
    return token, of_all(logits, token)


@fault(
    "a prompt's completions share their random numbers", "ppo", "completions of each prompt are the same",
    "trainer.num_generations=2", at=(rows, "uniforms"),
)  # fmt: skip
def _(original, row):
    return original(replace(row, number=row.number // 2))


@fault(
    "the sampler keeps the first policy", "ppo", "the sampler follows the policy",
    at=(decoder.SlotDecoder, "generate"),
)  # fmt: skip
def _(original, self, role, *rest):
    return original(self, "reference", *rest)


@fault("the sampler attends to padding", "ppo", AGREE, at=(decoder.SlotDecoder, "_look_at_rows"))
@afterwards
def _(_, self):
    # They join: all prompts end where the longest one does, behind their padding.
    if not self.rows[0].tokens:
        self.cache.lengths[: len(self.rows)] = self.longest


@fault(
    "the minimum length holds in sampling only", "ppo", f"{AGREE}|minimum length", "trainer.min_new_tokens=8",
    at=(SharedBase, "logprobs"),
)  # fmt: skip
def _(original, self, role, ids, starts, mask, temperature, barred, steps, *rest):
    return original(self, role, ids, starts, mask, temperature, (), 0, *rest)


# -------------------------------------------------------------------------------------- log-probs, values, scores


@fault(
    "log-probs are read one place late", "ppo", "log-probs are those of the model's own forward",
    at=(forward, "states"),
)  # fmt: skip
def _(original, shared, role, part, **keys):
    found = original(shared, role, part, **keys)
    return found.roll(-1, 1) if role in ("policy", "reference") else found


BEFORE, VALUES = "values are read before each action", (PPOTrainer, "values")


@fault("a head's values are read after the action", "ppo", BEFORE, "trainer.critic=head", at=VALUES)
@fault("values are read after the action", "ppo", BEFORE, at=VALUES)
def _(original, self, part, states=None):
    found, last = original(self, part, states)
    return found.roll(-1, 1), last


@fault("the critic reads the bare base", "ppo", BEFORE, "trainer.critic=head", at=VALUES)
def _(original, self, part, states=None):
    return original(self, part, forward.states(self.shared, None, part))


PACKED, SHARED = (forward, "packed"), "trainer.num_generations=8"


@fault("completions in one row see each other", "ppo", AGREE, SHARED, at=PACKED)
def _(original, *rows):
    batch = original(*rows)
    return replace(batch, allowed=torch.ones_like(batch.allowed).tril())


@fault("positions go on from completion to completion", "ppo", AGREE, SHARED, at=PACKED)
def _(original, *rows):
    batch = original(*rows)
    return replace(batch, position_ids=torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids))


def scored(change: Callable[[list[int], int], list[int]]) -> Change:
    """Reward adapters read completions that `change(token ids, longest)` makes of them."""

    def collate(original, prompts, completions, device):
        longest = max(map(len, completions))
        return original(prompts, [change(tokens, longest) for tokens in completions], device)

    return collate


LAST, COLLATE = "last token of the completion", (rewards, "collate_ids")


@fault("the reward is read at the end of the padding", "ppo", LAST, at=COLLATE)
@scored
def _(tokens, longest):
    return tokens + [0] * (longest - len(tokens))


@fault("the reward is read before the end token", "ppo", f"{LAST}|reward scores as when", at=COLLATE)
@scored
def _(tokens, longest):
    return tokens[:-1]


@fault("rewards are not normalised as the reward model says", "ppo", LAST, at=(ppo, "combined"))
def _(original, rewards, raw, normalize):
    return original(rewards, raw, False)


# ------------------------------------------------------------------------------------------- rewards, advantages


PAID, SIGN = "score is paid once|where the score is paid", "KL's sign or coefficient"
TOKEN_REWARDS, GAE, WHITEN = (losses, "token_rewards"), (functional, "gae"), (losses, "whiten")
DIFFER = "advantages of .* differ"


@fault("the score is paid one place early", "ppo", PAID, at=TOKEN_REWARDS)
def _(original, scores, kl, mask, coefficient):
    plain = original(torch.zeros_like(scores), kl, mask, coefficient)
    return plain + (original(scores, kl, mask, coefficient) - plain).roll(-1, -1)


@fault("the score is paid on every token", "ppo", PAID, at=TOKEN_REWARDS)
def _(original, scores, kl, mask, coefficient):
    return original(scores * 0, kl, mask, coefficient) + scores[:, None] * mask


@fault("the KL is rewarded instead of paid for", "ppo", "KL's sign", at=(losses, "kl_estimate"))
def _(original, a, b, estimator):
    return original(b, a, estimator)


@fault("the KL is paid for twice", "ppo", SIGN, at=TOKEN_REWARDS)
def _(original, scores, kl, mask, coefficient):
    return original(scores, kl, mask, 2 * coefficient)


@fault("GAE runs over the padding", "ppo", DIFFER, at=GAE)
def _(original, rewards, values, mask, *rest):
    return original(rewards.where(mask, 0.3), values.where(mask, 0.5), torch.ones_like(mask), *rest)


@fault("GAE ignores lambda", "ppo", DIFFER, at=GAE)
def _(original, rewards, values, mask, gamma, lam, last):
    return original(rewards, values, mask, gamma, 1.0, last)


@fault(
    "the value after the end is not 0", "ppo", "value after the end|what follows the last action", at=GAE,
)  # fmt: skip
def _(original, rewards, values, mask, gamma, lam, last):
    return original(rewards, values, mask, gamma, lam, torch.full_like(last, 0.7))


@fault(
    "rewards lose their mean in whitening", "ppo", "token rewards of", "trainer.whiten_rewards=true",
    at=WHITEN,
)  # fmt: skip
def _(original, x, mask, shift_mean=True, **keys):
    return original(x, mask, True, **keys)


@fault(
    "rloo's baseline contains the completion itself", "ppo", DIFFER, "trainer.advantage_estimator=rloo",
    "trainer.num_generations=2", at=(losses, "estimate_advantages"),
)  # fmt: skip
def _(original, *args):
    return original(*args) / 2


@fault(
    "groups are made of other prompts' completions", "ppo", "another prompt than the seed gives",
    "trainer.advantage_estimator=grpo", "trainer.num_generations=2", at=(rollouts, "collate"),
)  # fmt: skip
def _(original, prompts, completions, indices, pad, device):
    return original(prompts, completions, [*indices[::2], *indices[1::2]], pad, device)


# ------------------------------------------------------------------------------------------------------- losses


@fault("the policy loss has the wrong sign", "ppo", "sign of the policy loss", at=(losses, "policy_loss"))
@fault(
    "the value loss has the wrong sign", "ppo", "values move away from the returns", at=(losses, "value_loss")
)
def _(original, *args, **keys):
    loss, *rest = original(*args, **keys)
    return -loss, *rest


@fault(
    "the KL in the loss has the wrong sign", "ppo", "sign of the KL in the loss",
    "trainer.kl_in=loss", "trainer.kl_estimator=k3", at=(losses, "kl_estimate"),
)  # fmt: skip
def _(original, *args):
    return -original(*args)


@fault(
    "the policy's backward is forgotten", "ppo", "gradients reach the learning roles",
    at=(losses, "policy_objective"),
)  # fmt: skip
def _(original, *args):
    loss, stats = original(*args)
    return (loss * 0).nan_to_num(), stats


@fault(
    "the saved policy lacks a layer", "ppo", "does not reload as it was|tensors differ",
    at=(SharedBase, "tensors_of"),
)  # fmt: skip
def _(original, self, role):
    found = original(self, role)
    return {key: t for key, t in found.items() if "layers.0." not in key} if role == "policy" else found


# -------------------------------------------------------------------------------------------------- two workers


@fault("whitening is per worker", "pair", "whitening over other rows", at=WHITEN)
def _(original, x, mask, **keys):
    return original(x, mask)


@fault("both workers have the same episodes", "pair", "on several", at=(PPOTrainer, "rollout"))
def _(original, self):
    rank, self.rank = self.rank, 0
    try:
        return original(self)
    finally:
        self.rank = rank


@fault(
    "gradients are not summed over the workers", "pair", "not summed over all of them",
    at=(PPOTrainer, "sync"),
)  # fmt: skip
def _(original, self, stats, policy):
    workers, self.workers = self.workers, 1
    try:
        return original(self, stats, policy)
    finally:
        self.workers = workers


# ----------------------------------------------------------------------------------------------- demonstrations


FIT = (encode.Encoder, "_fit_labels")
WRITE, RUN, LOAD_TOKENIZER = (tasks.PartWriter, "add"), (training, "run"), (alone, "load_tokenizer")


def of_columns(change: Callable[[dict[str, Any]], None]) -> Change:
    """The columns of every tokenized row are changed in place."""
    return lambda original, writer, columns: (change(columns), original(writer, columns))[1]


def before_training(change: Callable[[Any], None]) -> Change:
    """change(trainer) happens before the stage's training."""
    return lambda original, worker, trainer: (change(trainer), original(worker, trainer))[1]


def of_batches(change: Callable[[dict[str, Any]], None]) -> Change:
    """Every batch of the stage's trainer is changed in place."""

    def replace_collator(trainer):
        collator = trainer.data_collator

        def changed(rows, *args, **keys):
            batch = collator(rows, *args, **keys)
            change(batch)
            return batch

        trainer.data_collator = changed

    return before_training(replace_collator)


def at_the_start(change: Callable[[Any], None]) -> Change:
    """change(trainer) happens when the stage's training begins, before the checks look."""
    from transformers import TrainerCallback

    def add_callback(trainer):
        class Changed(TrainerCallback):
            def on_train_begin(self, *args, **keys):
                change(trainer)

        trainer.add_callback(Changed())

    return before_training(add_callback)


@fault("the loss is over prompts, too", "sft", "prompt is trained", at=FIT)
def _(original, encoder, ids, trained):
    return original(encoder, ids, [True] * len(ids))


@fault("the end token is not trained", "sft", "completions end with a trained EOS", at=FIT)
def _(original, encoder, ids, trained):
    return original(encoder, ids, [*trained[:-1], False])


@fault("rows begin with two begin tokens", "sft", "at most one BOS per row", at=WRITE)
@of_columns
def _(columns):
    columns["input_ids"] = [columns["input_ids"][0], *columns["input_ids"]]
    columns["labels"] = [-100, *columns["labels"]]


def header_trained(original, encoder, ids, trained):
    first = trained.index(True)
    return original(encoder, ids, [on or first - 4 <= i < first for i, on in enumerate(trained)])


@afterwards
def unmarked(tokenizer, *_):
    """A template that does not mark its completions."""
    tokenizer.chat_template = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", tokenizer.chat_template)


FAULTS.append(
    Fault(
        "the template's header is trained",
        "sft",
        {LOAD_TOKENIZER: unmarked, FIT: header_trained},
        "the loss starts after the generation prompt",
    )
)


@fault(
    "labels are shifted twice", "sft", "labels are the rows' tokens|not the token that stands there", at=RUN,
)  # fmt: skip
@of_batches
def _(batch):
    batch["labels"] = batch["labels"].roll(-1, 1)


@fault("the collator masks the end token", "sft", "collator masks labels", at=RUN)
@of_batches
def _(batch):
    """As a collator does that masks labels equal to pad, where pad is the end token: the last label of each row goes."""
    for row in batch["labels"]:
        trained = (row != -100).nonzero()
        if len(trained):
            row[int(trained[-1])] = -100


@fault(
    "packed rows attend to each other", "sft", "loss .* from the rows alone", "trainer.packing=true",
    at=RUN,
)  # fmt: skip
@of_batches
def _(batch):
    if "position_ids" in batch:
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    for key in [key for key in batch if key.startswith(("cu_seq", "max_length"))]:
        del batch[key]


@fault("pad is the end token", "sft", "the pad token is no EOS token", at=LOAD_TOKENIZER)
@afterwards
def _(tokenizer, *_):
    tokenizer.pad_token = tokenizer.eos_token


@fault("sft's optimizer lost the adapter", "sft", "are not in the optimizer", at=RUN)
@before_training
def _(trainer):
    def create(*args, **keys):
        copies = [nn.Parameter(p.detach().clone()) for p in trainer.model.parameters() if p.requires_grad]
        trainer.optimizer = torch.optim.AdamW(copies, lr=1e-3)
        return trainer.optimizer

    trainer.create_optimizer = create


@fault("sft's adapter is bf16", "sft", "are not fp32", at=RUN)
@at_the_start
def _(trainer):
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()


@fault(
    "the saved adapter has another scaling", "sft", "does not reload as it was", at=(adapter_files, "write"),
)  # fmt: skip
def _(original, folder, config, tensors):
    changed = copy.deepcopy(config)
    changed.lora_alpha = 1
    return original(folder, changed, tensors)


# -------------------------------------------------------------------------------------------------- reward models


@fault(
    "the head is frozen and random", "rm", "of the adapter are frozen", at=RUN,
)  # fmt: skip
@before_training
def _(trainer):
    for name, parameter in trainer.model.named_parameters():
        if "score" in name:
            parameter.requires_grad_(False)


@fault("the head computes in bf16", "rm", "the head computes in", "trainer.bf16=true", at=(base, "fp32_head"))
def _(original, model):
    return None


@fault("pooling stops before the end token", "rm", "score .* from the rows alone", at=RUN)
@at_the_start
def _(trainer):
    trainer.model.config.pad_token_id = trainer.processing_class.convert_tokens_to_ids("<|eot_id|>")


@fault("truncation makes both sides equal", "rm", "same tokens on both sides", at=WRITE)
@of_columns
def _(columns):
    columns["chosen_ids"] = columns["rejected_ids"] = columns["chosen_ids"][:12]


@fault(
    "chosen and rejected are swapped", "rm", "",
    at=WRITE, unnamed="tokens cannot tell which of two completions somebody preferred: `validate` shows the first pairs",
)  # fmt: skip
@of_columns
def _(columns):
    columns["chosen_ids"], columns["rejected_ids"] = columns["rejected_ids"], columns["chosen_ids"]


# ------------------------------------------------------------------------------------------------------- dpo, kto


STARTS, PAPER = "policy starts as the reference", "loss .* from the rows alone"


@fault("dpo's reference is the bare base", "dpo", STARTS, at=RUN)
@fault("kto's reference is the bare base", "kto", STARTS, at=RUN)
@before_training
def _(trainer):
    for name, parameter in trainer.model.named_parameters():
        if ".ref." in name:
            parameter.data.zero_()


@fault(
    "dpo's log-probs include the prompt", "dpo", "log-prob .* from the rows alone", at=RUN,
)  # fmt: skip
@fault("kto's loss is over the prompts, too", "kto", PAPER, at=RUN)
@of_batches
def _(batch):
    batch["completion_mask"] = batch["attention_mask"].clone()


@fault(
    "dpo's policy is a new adapter on the bare base", "dpo", "policy is the adapter of its file",
    at=(peft.PeftModel, "from_pretrained"),
)  # fmt: skip
@afterwards
def _(model, *_):
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()


@fault("dpo's pairs are equal", "dpo", "same tokens on both sides", at=WRITE)
@of_columns
def _(columns):
    columns["rejected_ids"] = list(columns["chosen_ids"])


@fault("kto's labels are swapped in the loss", "kto", PAPER, at=RUN)
@of_batches
def _(batch):
    batch["label"] = ~batch["label"]


@fault(
    "kto's KL term is over the rows' own completions", "kto", "paired with their own completion",
    at=(kl_pairs.PairedBatchSampler, "__iter__"),
)  # fmt: skip
def _(original, self):
    for batch in original(self):
        own = batch[: len(batch) // 2]
        yield own + own


@fault(
    "kto's KL term is read with other prompts", "kto", "other tokens than those of their pair",
    at=(kl_pairs, "paired"),
)  # fmt: skip
def _(original, row, other):
    return {**other, **original(other, row)}
