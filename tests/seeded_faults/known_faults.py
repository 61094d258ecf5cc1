"""Known bugs, each planted by a patch of a few lines.

`cause` is a regular expression that one of the messages must match: it points at the fault; any failure is not enough.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import peft
import torch
from torch import nn

from pipeline.data import encode, kl_pairs, tasks
from pipeline.data.template import ChatTemplate
from pipeline.inference import decoder, rows
from pipeline.models import adapter_files, base
from pipeline.models.adapters import SharedBase
from pipeline.ppo import forward, functional, losses, rewards, rollouts, sampler
from pipeline.ppo import trainer as ppo
from pipeline.runtime import roles, training

Patch = Any  # pytest's MonkeyPatch


@dataclass(frozen=True)
class Fault:
    name: str
    run: str  # of faulty_runs.py: ppo, pair (ppo on two workers), sft, rm, dpo, kto
    plant: Callable[[Patch], None]
    cause: str
    settings: Sequence[str] = ()
    unnamed: str = ""  # the reason, where nothing can name it


FAULTS: list[Fault] = []


def fault(name: str, run: str, cause: str, *settings: str, unnamed: str = "") -> Callable:
    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        FAULTS.append(Fault(name, run, plant, cause, settings, unnamed))
        return plant

    return add


def wrapped(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """`owner.name` becomes change(original, *arguments)."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **keys: change(original, *args, **keys))


# ------------------------------------------------------------------------------------------------ roles, adapters


@fault("the reference is the bare base", "ppo", "KL to the reference is 0.*copy of the reference")
def _(patch):
    def add(original, worker, shared, args):
        shared.add("policy", folder=worker.input("policy"), trainable=True)

    wrapped(patch, roles, "add_policy", add)


@fault("the reference is another adapter", "ppo", "KL to the reference is 0.*copy of the reference")
def _(patch):
    def add(original, worker, shared, args):
        shared.add("policy", folder=worker.input("policy"), trainable=True)
        shared.add("reference", folder=worker.input("other"))
        return "reference"

    wrapped(patch, roles, "add_policy", add)


@fault("the adapter is not switched", "ppo", "as when it was trained.*another|policy writes as when")
def _(patch):
    patch.setattr(SharedBase, "_switch", lambda self, role: setattr(self, "_role", role))


@fault("adapters are off outside of training", "ppo", "policy writes as when it was trained")
def _(patch):
    original = SharedBase._switch
    patch.setattr(
        SharedBase, "_switch", lambda self, role: original(self, role if torch.is_grad_enabled() else None)
    )


@fault("LoRA's scaling is lost on loading", "ppo", r"as when it was trained.*scaling")
def _(patch):
    from pipeline.models import adapters

    def config(original, folder):
        found = original(folder)
        found.lora_alpha = 1
        return found

    wrapped(patch, adapters, "_read_config", config)


@fault("an adapter is loaded onto another base", "ppo", r"as when it was trained.*[Aa]nother base")
def _(patch):
    def load(original, *args, **keys):
        model = original(*args, **keys)
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
        return model

    wrapped(patch, base, "load_base", load)


@fault(
    "the reward's head is lost on loading", "ppo", "reward is the adapter of its file|reward scores as when"
)
def _(patch):
    def load(original, self, role, folder):
        original(self, role, folder)
        if role in self.heads:
            self.heads[role].weight.data.normal_(generator=torch.Generator().manual_seed(1))

    wrapped(patch, SharedBase, "load", load)


@fault("the critic's head is frozen", "ppo", "only adapters and heads learn.*that should not|only one side")
def _(patch):
    def trainable(original, self, role, on):
        original(self, role, on)
        for head in self.heads.values():
            head.requires_grad_(False)

    wrapped(patch, SharedBase, "set_trainable", trainable)


@fault("heads are rounded to bf16", "ppo", "reward is the adapter of its file")
def _(patch):
    def add(original, self, role, **keys):
        original(self, role, **keys)
        for head in self.heads.values():
            head.weight.data = head.weight.data.bfloat16().float()

    wrapped(patch, SharedBase, "add", add)


@fault("adapters are bf16", "ppo", "only adapters and heads learn.*are not fp32")
def _(patch):
    def add(original, self, role, **keys):
        original(self, role, **keys)
        for parameter in self.parameters_of(role):
            parameter.data = (
                parameter.data.bfloat16().float() if role != "policy" else parameter.data.bfloat16()
            )

    wrapped(patch, SharedBase, "add", add)


@fault("the base learns, too", "ppo", "only adapters and heads learn.*that should not")
def _(patch):
    def init(original, self, *args, **keys):
        original(self, *args, **keys)
        self.shared.base.get_input_embeddings().weight.requires_grad_(True)

    wrapped(patch, ppo.PPOTrainer, "__init__", init)


@fault(
    "the optimizer lost the policy's parameters",
    "ppo",
    r"[1-9]\d* are on one side only of optimizer|not the optimizer's",
)
def _(patch):
    def init(original, self, *args, **keys):
        original(self, *args, **keys)
        group = self.optimizer.param_groups[0]
        group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]

    wrapped(patch, ppo.PPOTrainer, "__init__", init)


@fault("dropout is on while the policy learns", "ppo", "dropout")
def _(patch):
    def body(original, self, **inputs):
        learning = torch.is_grad_enabled()
        for module in self.base.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.2 if learning else 0.0
                module.train(learning)
        with self._precision():
            return self.base.base_model(**inputs)

    wrapped(patch, SharedBase, "body", body)


@fault(
    "a checkpointed layer is recomputed with another role",
    "ppo",
    "checkpointed gradients are the plain ones",
    "trainer.gradient_checkpointing=true",
    "trainer.critic=adapter",
)
def _(patch):
    patch.setattr(
        SharedBase, "checkpoint_contexts", lambda self: (contextlib.nullcontext(), self.use("critic"))
    )


# ---------------------------------------------------------------------------------------- prompts, ends of text


@fault("prompts begin with two begin tokens", "ppo", "begin with BOS twice")
def _(patch):
    wrapped(patch, encode.Encoder, "one_bos", lambda original, self, ids: [self.bos, *original(self, ids)])


@fault("prompts lack the generation prompt", "ppo", "generation prompt")
def _(patch):
    wrapped(patch, ChatTemplate, "render", lambda original, self, turns, asks: original(self, turns, False))


@fault("the end token is outside the mask", "ppo", "end token is inside the mask")
def _(patch):
    def collate(original, *args):
        episodes = original(*args)
        last = (episodes.counts - 1).unsqueeze(-1)
        episodes.mask.scatter_(1, last, episodes.mask.gather(1, last) & ~episodes.ended.unsqueeze(-1))
        return episodes

    for owner in (rollouts, sampler):
        wrapped(patch, owner, "collate", collate)


@fault(
    "sampling stops on one of two end tokens",
    "ppo",
    "sampling goes on after",
)
def _(patch):
    def of(original, args, tokenizer, shared):
        sampling = original(args, tokenizer, shared)
        return replace(sampling, eos=(tokenizer.convert_tokens_to_ids("<|end_of_text|>"),))

    original = rows.Sampling.from_args
    patch.setattr(rows.Sampling, "from_args", staticmethod(lambda *args: of(original, *args)))


@fault("no token ends a completion", "ppo", "sampling goes on after")
def _(patch):
    original = rows.Sampling.from_args
    patch.setattr(rows.Sampling, "from_args", staticmethod(lambda *args: replace(original(*args), eos=())))


# -------------------------------------------------------------------------------------------------- the sampler


@fault("the sampler has no temperature", "ppo", "sampler and trainer agree", "trainer.temperature=0.7")
def _(patch):
    wrapped(
        patch,
        decoder,
        "draw",
        lambda original, logits, noise, t, *rest: original(logits, noise, torch.ones_like(t), *rest),
    )


def nucleus(logits: torch.Tensor, p: float) -> torch.Tensor:
    ordered, index = logits.softmax(-1).sort(descending=True)
    out = ordered.cumsum(-1) - ordered > p
    return logits.masked_fill(torch.zeros_like(out).scatter(-1, index, out), float("-inf"))


def of_all(logits: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Log-probs of tokens under the whole distribution, at temperature 1."""
    return logits.log_softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)


MANY = ("trainer.batch_size=256", "trainer.total_episodes=256", "trainer.per_device_train_batch_size=256")


@fault("top-p is on, log-probs are of the whole distribution", "ppo", "whole distribution.*top-p", *MANY)
def _(patch):
    def draw(original, logits, *rest):
        token, _ = original(nucleus(logits, 0.8), *rest)
        return token, of_all(logits, token)

    wrapped(patch, decoder, "draw", draw)


@fault("top-p is on, log-probs are of what it leaves", "ppo", "sampler and trainer agree")
def _(patch):
    wrapped(patch, decoder, "draw", lambda original, logits, *rest: original(nucleus(logits, 0.8), *rest))


@fault("completions are greedy", "ppo", "whole distribution.*top-p")
def _(patch):
    def draw(original, logits, *rest):
        token = logits.argmax(-1)
        return token, of_all(logits, token)

    wrapped(patch, decoder, "draw", draw)


@fault(
    "a prompt's completions share their random numbers",
    "ppo",
    "completions of each prompt are the same",
    "trainer.num_generations=2",
)
def _(patch):
    wrapped(patch, rows, "uniforms", lambda original, row: original(replace(row, number=row.number // 2)))


@fault("the sampler keeps the first policy", "ppo", "the sampler follows the policy")
def _(patch):
    def generate(original, self, role, *rest):
        return original(self, "reference", *rest)

    wrapped(patch, decoder.SlotDecoder, "generate", generate)


@fault("the sampler attends to padding", "ppo", "sampler and trainer agree")
def _(patch):
    def look(original, self):
        original(self)
        if not self.rows[
            0
        ].tokens:  # they join: all prompts end where the longest one does, behind their padding
            self.cache.lengths[: len(self.rows)] = self.longest

    wrapped(patch, decoder.SlotDecoder, "_look_at_rows", look)


@fault(
    "the minimum length holds in sampling only",
    "ppo",
    "sampler and trainer agree|minimum length",
    "trainer.min_new_tokens=8",
)
def _(patch):
    def logprobs(original, self, role, ids, starts, mask, temperature, barred, steps, *rest):
        return original(self, role, ids, starts, mask, temperature, (), 0, *rest)

    wrapped(patch, SharedBase, "logprobs", logprobs)


# -------------------------------------------------------------------------------------- log-probs, values, scores


@fault("log-probs are read one place late", "ppo", "log-probs are those of the model's own forward")
def _(patch):
    def states(original, shared, role, part, **keys):
        found = original(shared, role, part, **keys)
        return found.roll(-1, 1) if role in ("policy", "reference") else found

    wrapped(patch, forward, "states", states)


def values_late(patch):
    def values(original, self, part, states=None):
        found, last = original(self, part, states)
        return found.roll(-1, 1), last

    wrapped(patch, ppo.PPOTrainer, "values", values)


fault("values are read after the action", "ppo", "values are read before each action")(values_late)
fault(
    "a head's values are read after the action",
    "ppo",
    "values are read before each action",
    "trainer.critic=head",
)(values_late)


@fault("the critic reads the bare base", "ppo", "values are read before each action", "trainer.critic=head")
def _(patch):
    def values(original, self, part, states=None):
        return original(self, part, forward.states(self.shared, None, part))

    wrapped(patch, ppo.PPOTrainer, "values", values)


@fault(
    "completions in one row see each other", "ppo", "sampler and trainer agree", "trainer.num_generations=8"
)
def _(patch):
    def packed(original, *rows):
        batch = original(*rows)
        return replace(batch, allowed=torch.ones_like(batch.allowed).tril())

    wrapped(patch, forward, "packed", packed)


@fault(
    "positions go on from completion to completion",
    "ppo",
    "sampler and trainer agree",
    "trainer.num_generations=8",
)
def _(patch):
    def packed(original, *rows):
        batch = original(*rows)
        return replace(batch, position_ids=torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids))

    wrapped(patch, forward, "packed", packed)


def scored(patch, change):
    """Reward adapters read completions that `change(token ids, longest)` makes of them."""

    def collate(original, prompts, completions, device):
        longest = max(map(len, completions))
        return original(prompts, [change(tokens, longest) for tokens in completions], device)

    wrapped(patch, rewards, "collate_ids", collate)


@fault("the reward is read at the end of the padding", "ppo", "last token of the completion")
def _(patch):
    scored(patch, lambda tokens, longest: tokens + [0] * (longest - len(tokens)))


@fault("the reward is read before the end token", "ppo", "last token of the completion|reward scores as when")
def _(patch):
    scored(patch, lambda tokens, longest: tokens[:-1])


@fault("rewards are not normalised as the reward model says", "ppo", "last token of the completion")
def _(patch):
    wrapped(
        patch,
        ppo,
        "combined",
        lambda original, rewards, raw, normalize: original(rewards, raw, False),
    )


# ------------------------------------------------------------------------------------------- rewards, advantages


@fault("the score is paid one place early", "ppo", "score is paid once|where the score is paid")
def _(patch):
    def token_rewards(original, scores, kl, mask, coefficient):
        plain = original(torch.zeros_like(scores), kl, mask, coefficient)
        return plain + (original(scores, kl, mask, coefficient) - plain).roll(-1, -1)

    wrapped(patch, losses, "token_rewards", token_rewards)


@fault("the score is paid on every token", "ppo", "score is paid once|where the score is paid")
def _(patch):
    wrapped(
        patch,
        losses,
        "token_rewards",
        lambda original, scores, kl, mask, c: original(scores * 0, kl, mask, c) + scores[:, None] * mask,
    )


@fault("the KL is rewarded instead of paid for", "ppo", "KL's sign")
def _(patch):
    wrapped(patch, losses, "kl_estimate", lambda original, a, b, estimator: original(b, a, estimator))


@fault("the KL is paid for twice", "ppo", "KL's sign or coefficient")
def _(patch):
    wrapped(patch, losses, "token_rewards", lambda original, s, kl, mask, c: original(s, kl, mask, 2 * c))


@fault("GAE runs over the padding", "ppo", "advantages of .* differ")
def _(patch):
    wrapped(
        patch,
        functional,
        "gae",
        lambda original, rewards, values, mask, *args: original(
            rewards.where(mask, 0.3), values.where(mask, 0.5), torch.ones_like(mask), *args
        ),
    )


@fault("GAE ignores lambda", "ppo", "advantages of .* differ")
def _(patch):
    wrapped(
        patch,
        functional,
        "gae",
        lambda original, r, v, mask, gamma, lam, b: original(r, v, mask, gamma, 1.0, b),
    )


@fault("the value after the end is not 0", "ppo", "value after the end|what follows the last action")
def _(patch):
    wrapped(
        patch,
        functional,
        "gae",
        lambda original, r, v, mask, gamma, lam, b: original(r, v, mask, gamma, lam, torch.full_like(b, 0.7)),
    )


@fault("rewards lose their mean in whitening", "ppo", "token rewards of", "trainer.whiten_rewards=true")
def _(patch):
    wrapped(
        patch,
        losses,
        "whiten",
        lambda original, x, mask, shift_mean=True, **keys: original(x, mask, True, **keys),
    )


@fault(
    "rloo's baseline contains the completion itself",
    "ppo",
    "advantages of .* differ",
    "trainer.advantage_estimator=rloo",
    "trainer.num_generations=2",
)
def _(patch):
    wrapped(patch, losses, "estimate_advantages", lambda original, *args: original(*args) / 2)


@fault(
    "groups are made of other prompts' completions",
    "ppo",
    "another prompt than the seed gives",
    "trainer.advantage_estimator=grpo",
    "trainer.num_generations=2",
)
def _(patch):
    def collate(original, prompts, completions, indices, pad, device):
        return original(prompts, completions, [*indices[::2], *indices[1::2]], pad, device)

    wrapped(patch, rollouts, "collate", collate)


# ------------------------------------------------------------------------------------------------------- losses


def negated(original, *args, **keys):
    loss, *rest = original(*args, **keys)
    return -loss, *rest


@fault("the policy loss has the wrong sign", "ppo", "sign of the policy loss")
def _(patch):
    wrapped(patch, losses, "policy_loss", negated)


@fault("the value loss has the wrong sign", "ppo", "values move away from the returns")
def _(patch):
    wrapped(patch, losses, "value_loss", negated)


@fault(
    "the KL in the loss has the wrong sign",
    "ppo",
    "sign of the KL in the loss",
    "trainer.kl_in=loss",
    "trainer.kl_estimator=k3",
)
def _(patch):
    wrapped(patch, losses, "kl_estimate", lambda original, a, b, estimator: -original(a, b, estimator))


@fault("the policy's backward is forgotten", "ppo", "gradients reach the learning roles")
def _(patch):
    def objective(original, *args):
        loss, stats = original(*args)
        return (loss * 0).nan_to_num(), stats

    wrapped(patch, losses, "policy_objective", objective)


@fault("the saved policy lacks a layer", "ppo", "does not reload as it was|tensors differ")
def _(patch):
    def tensors(original, self, role):
        found = original(self, role)
        return {key: t for key, t in found.items() if "layers.0." not in key} if role == "policy" else found

    wrapped(patch, SharedBase, "tensors_of", tensors)


# -------------------------------------------------------------------------------------------------- two workers


@fault("whitening is per worker", "pair", "whitening over other rows")
def _(patch):
    wrapped(patch, losses, "whiten", lambda original, x, mask, **keys: original(x, mask))


@fault("both workers have the same episodes", "pair", "on several")
def _(patch):
    def rollout_(original, self):
        rank, self.rank = self.rank, 0
        try:
            return original(self)
        finally:
            self.rank = rank

    wrapped(patch, ppo.PPOTrainer, "rollout", rollout_)


@fault("gradients are not summed over the workers", "pair", "not summed over all of them")
def _(patch):
    def sync(original, self, stats, policy):
        workers, self.workers = self.workers, 1
        try:
            return original(self, stats, policy)
        finally:
            self.workers = workers

    wrapped(patch, ppo.PPOTrainer, "sync", sync)


# ----------------------------------------------------------------------------------------------- demonstrations


@fault("the loss is over prompts, too", "sft", "prompt is trained")
def _(patch):
    wrapped(
        patch,
        encode.Encoder,
        "_fit_labels",
        lambda original, encoder, ids, trained: original(encoder, ids, [True] * len(ids)),
    )


@fault("the end token is not trained", "sft", "completions end with a trained EOS")
def _(patch):
    wrapped(
        patch,
        encode.Encoder,
        "_fit_labels",
        lambda original, encoder, ids, trained: original(encoder, ids, [*trained[:-1], False]),
    )


@fault("rows begin with two begin tokens", "sft", "at most one BOS per row")
def _(patch):
    def write(original, self, name, example):
        columns = example.columns
        columns["input_ids"] = [columns["input_ids"][0], *columns["input_ids"]]
        columns["labels"] = [-100, *columns["labels"]]
        return original(self, name, example)

    wrapped(patch, tasks.Task, "write", write)


@fault("the template's header is trained", "sft", "the loss starts after the generation prompt")
def _(patch):
    def fit(original, encoder, ids, trained):
        first = trained.index(True)
        return original(encoder, ids, [on or first - 4 <= i < first for i, on in enumerate(trained)])

    def load(original, *args, **keys):  # a template that does not mark its completions
        tokenizer = original(*args, **keys)
        tokenizer.chat_template = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", tokenizer.chat_template)
        return tokenizer

    import alone

    wrapped(patch, alone, "load_tokenizer", load)
    wrapped(patch, encode.Encoder, "_fit_labels", fit)


def of_collator(patch: Patch, change: Callable[[dict[str, Any]], None]) -> None:
    """Every batch of the stage's trainer is changed in place."""

    def run(original, worker, trainer):
        collator = trainer.data_collator

        def changed(rows, *args, **keys):
            batch = collator(rows, *args, **keys)
            change(batch)
            return batch

        trainer.data_collator = changed
        return original(worker, trainer)

    wrapped(patch, training, "run", run)


@fault("labels are shifted twice", "sft", "labels are the rows' tokens|not the token that stands there")
def _(patch):
    of_collator(patch, lambda batch: batch.update(labels=batch["labels"].roll(-1, 1)))


@fault("the collator masks the end token", "sft", "collator masks labels")
def _(patch):
    of_collator(patch, _mask_ends)


def _mask_ends(batch):
    """As a collator does that masks labels equal to pad, where pad is the end token: the last label of each row goes."""
    for row in batch["labels"]:
        trained = (row != -100).nonzero()
        if len(trained):
            row[int(trained[-1])] = -100


@fault("packed rows attend to each other", "sft", "loss is that of the rows alone", "trainer.packing=true")
def _(patch):
    def joined(batch):
        if "position_ids" in batch:
            batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
        for key in [key for key in batch if key.startswith(("cu_seq", "max_length"))]:
            del batch[key]

    of_collator(patch, joined)


@fault("pad is the end token", "sft", "the pad token is no EOS token")
def _(patch):
    import alone

    def load(original, *args, **keys):
        tokenizer = original(*args, **keys)
        tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    wrapped(patch, alone, "load_tokenizer", load)


@fault("sft's optimizer lost the adapter", "sft", "are not in the optimizer")
def _(patch):
    def run(original, worker, trainer):
        def create(*args, **keys):
            copies = [nn.Parameter(p.detach().clone()) for p in trainer.model.parameters() if p.requires_grad]
            trainer.optimizer = torch.optim.AdamW(copies, lr=1e-3)
            return trainer.optimizer

        trainer.create_optimizer = create
        return original(worker, trainer)

    wrapped(patch, training, "run", run)


def at_the_start(patch: Patch, change: Callable[[Any], None]) -> None:
    """change(trainer) when the stage's training begins, before the checks look."""
    from transformers import TrainerCallback

    class Changed(TrainerCallback):
        def __init__(self, trainer):
            self.trainer = trainer

        def on_train_begin(self, *args, **keys):
            change(self.trainer)

    def run(original, worker, trainer):
        trainer.add_callback(Changed(trainer))
        return original(worker, trainer)

    wrapped(patch, training, "run", run)


@fault("sft's adapter is bf16", "sft", "are not fp32")
def _(patch):
    def cast(trainer):
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()

    at_the_start(patch, cast)


@fault("the saved adapter has another scaling", "sft", "does not reload as it was")
def _(patch):
    def write(original, folder, config, tensors):
        changed = copy.deepcopy(config)
        changed.lora_alpha = 1
        return original(folder, changed, tensors)

    wrapped(patch, adapter_files, "write", write)


# -------------------------------------------------------------------------------------------------- reward models


@fault("the head is frozen and random", "rm", "it is frozen, and random|of the adapter are frozen")
def _(patch):
    def run(original, worker, trainer):
        for name, parameter in trainer.model.named_parameters():
            if "score" in name:
                parameter.requires_grad_(False)
        return original(worker, trainer)

    wrapped(patch, training, "run", run)


@fault("the head computes in bf16", "rm", "the head computes in", "trainer.bf16=true")
def _(patch):
    patch.setattr(base, "fp32_head", lambda model: None)


@fault("pooling stops before the end token", "rm", "scores are read at the last token")
def _(patch):
    def pad(trainer):
        trainer.model.config.pad_token_id = trainer.processing_class.convert_tokens_to_ids("<|eot_id|>")

    at_the_start(patch, pad)


@fault("truncation makes both sides equal", "rm", "same tokens on both sides")
def _(patch):
    def write(original, self, name, example):
        for side in ("chosen_ids", "rejected_ids"):
            example.columns[side] = example.columns["chosen_ids"][:12]
        return original(self, name, example)

    wrapped(patch, tasks.Task, "write", write)


@fault(
    "chosen and rejected are swapped",
    "rm",
    "",
    unnamed="tokens cannot tell which of two completions somebody preferred: `validate` shows the first pairs",
)
def _(patch):
    def write(original, self, name, example):
        columns = example.columns
        columns["chosen_ids"], columns["rejected_ids"] = columns["rejected_ids"], columns["chosen_ids"]
        return original(self, name, example)

    wrapped(patch, tasks.Task, "write", write)


# ------------------------------------------------------------------------------------------------------------ dpo


@fault("dpo's reference is the bare base", "dpo", "policy starts as the reference")
def _(patch):
    def run(original, worker, trainer):
        for name, parameter in trainer.model.named_parameters():
            if ".ref." in name:
                parameter.data.zero_()
        return original(worker, trainer)

    wrapped(patch, training, "run", run)


@fault("dpo's log-probs include the prompt", "dpo", "log-probs are those of the completions alone")
def _(patch):
    of_collator(patch, lambda batch: batch.update(completion_mask=batch["attention_mask"].clone()))


@fault("dpo's policy is a new adapter on the bare base", "dpo", "policy is the adapter of its file")
def _(patch):
    def load(*args, **keys):
        model = original(*args, **keys)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.zero_()
        return model

    original = peft.PeftModel.from_pretrained
    patch.setattr(peft.PeftModel, "from_pretrained", load)


@fault("dpo's pairs are equal", "dpo", "same tokens on both sides")
def _(patch):
    def write(original, self, name, example):
        example.columns["rejected_ids"] = list(example.columns["chosen_ids"])
        return original(self, name, example)

    wrapped(patch, tasks.Task, "write", write)


# ------------------------------------------------------------------------------------------------------------ kto


@fault("kto's labels are swapped in the loss", "kto", "the loss is the paper's")
def _(patch):
    of_collator(patch, lambda batch: batch.update(label=~batch["label"]))


@fault("kto's loss is over the prompts, too", "kto", "the loss is the paper's")
def _(patch):
    of_collator(patch, lambda batch: batch.update(completion_mask=batch["attention_mask"].clone()))


@fault("kto's KL term is over the rows' own completions", "kto", "paired with their own completion")
def _(patch):
    def batches(original, self):
        for batch in original(self):
            own = batch[: len(batch) // 2]
            yield own + own

    wrapped(patch, kl_pairs.PairedBatchSampler, "__iter__", batches)


@fault("kto's KL term is read with other prompts", "kto", "other tokens than those of their pair")
def _(patch):
    wrapped(patch, kl_pairs, "paired", lambda original, row, other: {**other, **original(other, row)})


@fault("kto's reference is the bare base", "kto", "policy starts as the reference")
def _(patch):
    def run(original, worker, trainer):
        for name, parameter in trainer.model.named_parameters():
            if ".ref." in name:
                parameter.data.zero_()
        return original(worker, trainer)

    wrapped(patch, training, "run", run)
