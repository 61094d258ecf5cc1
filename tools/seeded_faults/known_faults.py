"""Known bugs, each of which changes a few lines of one function of the pipeline.

A fault is named if a message of its run matches the regular expression `cause`. Other failures do not name the fault.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import alone
import torch
from torch import nn
from transformers import TrainerCallback

from pipeline.data import encode, tasks
from pipeline.data.template import ChatTemplate
from pipeline.models import adapter_files, adapters, base
from pipeline.models.adapters import SharedBase
from pipeline.ppo import functional, losses, rollouts, sampler
from pipeline.ppo import trainer as ppo
from pipeline.ppo.trainer import PPOTrainer
from pipeline.run import roles
from pipeline.scoring import forward
from pipeline.stages import kl_pairs, trl_trainer
from pipeline.writing import decoder, rows
from pipeline.writing.rows import Sampling

Place = tuple[Any, str]  # owner and name of a function
Change = Callable[..., Any]  # replacement, called with the original function and the function's arguments


@dataclass(frozen=True)
class Fault:
    name: str
    run: str  # kind of run in faulty_runs.py: ppo, pair (ppo on two workers), sft, rm, dpo, kto
    cause: str
    at: Place | Sequence[Place]  # functions of the pipeline that `change` replaces
    change: Change
    settings: str = ""  # overrides of the job in which the fault is planted
    quick: bool = False  # whether `make test` also plants this fault
    unnamed: str = ""  # the reason, if no check can name the fault

    def is_named(self, said: list[str]) -> bool:
        return bool(self.cause) and any(re.search(self.cause, line, re.DOTALL) for line in said)

    def plant(self, patch: Any) -> None:
        """Plants the fault with pytest's MonkeyPatch."""
        for owner, name in [self.at] if isinstance(self.at, tuple) else self.at:
            self._wrap(patch, owner, name, getattr(owner, name))

    def _wrap(self, patch: Any, owner: Any, name: str, original: Any) -> None:
        patch.setattr(owner, name, lambda *args, **keys: self.change(original, *args, **keys))


def afterwards(change: Change) -> Change:
    """Runs the original function, and then calls change(result, *arguments)."""

    def call(original, *args, **keys):
        found = original(*args, **keys)
        change(found, *args)
        return found

    return call


def of_columns(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Changes the columns of each tokenized row in place."""
    return lambda original, writer, columns: (change(columns), original(writer, columns))[1]


def before_training(change: Callable[[Any], Any]) -> Change:
    """Calls change(trainer) before the stage's training."""
    return lambda original, worker, trainer: (change(trainer), original(worker, trainer))[1]


def of_batches(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Changes each batch of the stage's trainer in place."""

    def replace_collator(trainer):
        collator = trainer.data_collator

        def changed(rows, *args, **keys):
            batch = collator(rows, *args, **keys)
            change(batch)
            return batch

        trainer.data_collator = changed

    return before_training(replace_collator)


def at_the_start(change: Callable[[Any], Any]) -> Change:
    """Calls change(trainer) when training starts, before the self-checks."""

    def add_callback(trainer):
        class Changed(TrainerCallback):
            def on_train_begin(self, *args, **keys):
                change(trainer)

        trainer.add_callback(Changed())

    return before_training(add_callback)


def reference_is_other(original, worker, shared, args):
    shared.add("policy", folder=worker.input("policy"), trainable=True)
    shared.add("reference", folder=worker.input("other"))
    return "reference"


def head_is_lost(_, self, role, folder):
    if role in self.heads:
        self.heads[role].weight.data.normal_(generator=torch.Generator().manual_seed(1))


def heads_are_rounded(_, self, *args):
    for head in self.heads.values():
        head.weight.data = head.weight.data.bfloat16().float()


def adapters_are_bf16(_, self, role, *args):
    for parameter in self.parameters_of(role):
        rounded = parameter.data.bfloat16()
        parameter.data = rounded if role == "policy" else rounded.float()


def copies(parameters):
    return [nn.Parameter(p.detach().clone()) for p in parameters]


def optimizer_lost_the_policy(_, self, *args):
    group = self.optimizer.param_groups[0]
    group["params"] = copies(group["params"])


def dropout_in_learning(original, self, **inputs):
    learning = torch.is_grad_enabled()
    for module in self.base.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2 if learning else 0.0
            module.train(learning)
    with self._precision():
        return self.base.base_model(**inputs)


def end_outside_the_mask(episodes, *_):
    last = (episodes.counts - 1).unsqueeze(-1)
    episodes.mask.scatter_(1, last, episodes.mask.gather(1, last) & ~episodes.ended.unsqueeze(-1))


def one_of_two_ends(original, args, tokenizer, *rest):
    end = tokenizer.convert_tokens_to_ids("<|end_of_text|>")
    return replace(original(args, tokenizer, *rest), eos=(end,))


def nucleus(logits: torch.Tensor, p: float = 0.8) -> torch.Tensor:
    ordered, index = logits.softmax(-1).sort(descending=True)
    out = ordered.cumsum(-1) - ordered > p
    return logits.masked_fill(torch.zeros_like(out).scatter(-1, index, out), float("-inf"))


def of_all(logits: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens, and their log-probs under the full distribution at temperature 1."""
    return token, logits.log_softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)


def padding_is_attended(_, self):
    # All prompts end at the same position, after their padding.
    if not self.rows[0].tokens:
        self.cache.lengths[: len(self.rows)] = self.longest


def logprobs_are_late(original, shared, role, part, **keys):
    found = original(shared, role, part, **keys)
    return found.roll(-1, 1) if role in ("policy", "reference") else found


def values_are_late(original, self, part, states=None):
    found, last = original(self, part, states)
    return found.roll(-1, 1), last


def rows_see_each_other(original, *rows):
    batch = original(*rows)
    return replace(batch, allowed=torch.ones_like(batch.allowed).tril())


def positions_go_on(original, *rows):
    batch = original(*rows)
    return replace(batch, position_ids=torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids))


def padded(original, prompts, completions, device):
    longest = max(map(len, completions))
    return original(prompts, [tokens + [0] * (longest - len(tokens)) for tokens in completions], device)


def score_one_place_early(original, scores, kl, mask, coefficient):
    plain = original(torch.zeros_like(scores), kl, mask, coefficient)
    return plain + (original(scores, kl, mask, coefficient) - plain).roll(-1, -1)


def gae_over_padding(original, rewards, values, mask, *rest):
    return original(rewards.where(mask, 0.3), values.where(mask, 0.5), torch.ones_like(mask), *rest)


def wrong_sign(original, *args, **keys):
    loss, *rest = original(*args, **keys)
    return -loss, *rest


def no_backward(original, *args):
    loss, stats = original(*args)
    return (loss * 0).nan_to_num(), stats


def lacks_a_layer(original, self, role):
    found = original(self, role)
    return {key: t for key, t in found.items() if "layers.0." not in key} if role == "policy" else found


def with_attribute(name: str, value: Any) -> Change:
    """Sets an attribute of the trainer while the original function runs."""

    def call(original, self, *args):
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            return original(self, *args)
        finally:
            setattr(self, name, before)

    return call


def second_begin(columns):
    columns["input_ids"] = [columns["input_ids"][0], *columns["input_ids"]]
    columns["labels"] = [-100, *columns["labels"]]


def header_is_trained(original, *args):
    """Simulates a chat template that does not mark completions, so that headers of turns are trained too."""
    if original.__name__ == "load_tokenizer":
        tokenizer = original(*args)
        tokenizer.chat_template = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", tokenizer.chat_template)
        return tokenizer
    encoder, ids, trained = args
    first = trained.index(True)
    return original(encoder, ids, [on or first - 4 <= i < first for i, on in enumerate(trained)])


def last_label_is_masked(batch):
    """Simulates a collator that masks labels equal to the pad token. The pad token is EOS, so each row loses its last label."""
    for row in batch["labels"]:
        trained = (row != -100).nonzero()
        if len(trained):
            row[int(trained[-1])] = -100


def packing_is_forgotten(batch):
    if "position_ids" in batch:
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    for key in [key for key in batch if key.startswith(("cu_seq", "max_length"))]:
        del batch[key]


def optimizer_lost_the_adapter(trainer):
    def create(*args, **keys):
        learning = copies(p for p in trainer.model.parameters() if p.requires_grad)
        trainer.optimizer = torch.optim.AdamW(learning, lr=1e-3)
        return trainer.optimizer

    trainer.create_optimizer = create


def adapter_is_bf16(trainer):
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()


def other_scaling(original, folder, config, tensors):
    changed = copy.deepcopy(config)
    changed.lora_alpha = 1
    return original(folder, changed, tensors)


def pooling_stops_early(trainer):
    trainer.model.config.pad_token_id = trainer.processing_class.convert_tokens_to_ids("<|eot_id|>")


def sides_are_swapped(columns):
    columns["chosen_ids"], columns["rejected_ids"] = columns["rejected_ids"], columns["chosen_ids"]


def without(part: str) -> Callable[[nn.Module], None]:
    """Sets all parameters whose names contain `part` to zero."""

    def call(model):
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.data.zero_()

    return call


def own_completions(original, self):
    for batch in original(self):
        own = batch[: len(batch) // 2]
        yield own + own


ADD_POLICY, SWITCH, ADD = (roles, "add_policy"), (SharedBase, "_switch"), (SharedBase, "add")
INIT, VALUES = (PPOTrainer, "__init__"), (PPOTrainer, "values")
COLLATES = [(rollouts, "collate"), (sampler, "collate")]
FROM_ARGS, DRAW, PACKED = (Sampling, "from_args"), (decoder, "draw_tokens"), (forward, "pack_together")
COLLATE, TOKEN_REWARDS = (forward, "collate_ids"), (losses, "token_rewards")
GAE, WHITEN = (functional, "gae"), (losses, "whiten")
FIT, WRITE = (encode.Encoder, "_fit_labels"), (tasks.PartWriter, "add")
RUN, LOAD_TOKENIZER = (trl_trainer, "train_trl"), (alone, "load_tokenizer")

COPY = "KL to the reference is 0.*copy of the reference"
OF_FILE = "reward equals its adapter file"
NO_LEARNER = "only adapters and heads learn.*by mistake"
AGREE, WHOLE = "sampler and trainer agree", "whole distribution.*top-p"
MANY = "trainer.batch_size=256 trainer.total_episodes=256 trainer.per_device_train_batch_size=256"
BEFORE, LAST = "values are read before each action", "last token of the completion"
SHARED = "trainer.num_generations=8"
PAID, SIGN = "score is paid once|which token gets the score", "sign and coefficient of the KL"
DIFFER = "advantages of .* differ"
STARTS, ALONE = "policy starts as the reference", "loss .* from the rows alone"
LOGPROBS = "log-prob .* from the rows alone"
BOTH = "same tokens (on both sides|in chosen and rejected)"
UNKNOWABLE = "no check can know which of two completions a person preferred; `validate` shows the first pairs"

# Each `change` gets the original function as its argument `call`.
FAULTS = [
    # roles and adapters
    Fault("the reference is the bare base", "ppo", COPY, ADD_POLICY,
          lambda call, worker, shared, args: shared.add("policy", folder=worker.input("policy"), trainable=True)),
    Fault("the reference is another adapter", "ppo", COPY, ADD_POLICY, reference_is_other),
    Fault("the adapter is not switched", "ppo", "as when it was trained.*another|policy writes as when", SWITCH,
          lambda call, self, role: setattr(self, "role", role), quick=True),
    Fault("adapters are off outside of training", "ppo", "policy writes as when it was trained", SWITCH,
          lambda call, self, role: call(self, role if torch.is_grad_enabled() else None)),
    Fault("loading loses LoRA's scaling", "ppo", "as when it was trained.*scaling", (SharedBase, "_inject"),
          lambda call, self, role, config, on: (setattr(config, "lora_alpha", 1), call(self, role, config, on))),
    Fault("an adapter is loaded onto another base", "ppo", "as when it was trained.*[Aa]nother base", (base, "load_base"),
          afterwards(lambda model, *_: model.model.layers[0].mlp.down_proj.weight.data.mul_(1.5))),
    Fault("loading loses the reward's head", "ppo", f"{OF_FILE}|reward scores as when", (SharedBase, "load"),
          afterwards(head_is_lost)),
    Fault("the critic's head is frozen", "ppo", NO_LEARNER, (SharedBase, "set_trainable"),
          afterwards(lambda _, self, role, on: self.heads.requires_grad_(False))),
    Fault("heads are rounded to bf16", "ppo", OF_FILE, ADD, afterwards(heads_are_rounded)),
    Fault("adapters are bf16", "ppo", "only adapters and heads learn.*are not fp32", ADD, afterwards(adapters_are_bf16)),
    Fault("the base learns", "ppo", NO_LEARNER, INIT,
          afterwards(lambda _, self, *args: self.shared.base.get_input_embeddings().weight.requires_grad_(True))),
    Fault("the optimizer lost the policy's parameters", "ppo",
          r"[1-9]\d* are in the optimizer or in the roles, but|the optimizer lacks", INIT, afterwards(optimizer_lost_the_policy),
          quick=True),
    Fault("dropout is on while the policy learns", "ppo", "dropout", (SharedBase, "body"), dropout_in_learning),
    Fault("a checkpointed layer is recomputed with another role", "ppo", "checkpointing does not change gradients",
          (SharedBase, "checkpoint_contexts"), lambda call, self: (contextlib.nullcontext(), self.use("critic")),
          "trainer.gradient_checkpointing=true trainer.critic=adapter"),
    # faults in prompts and in the ends of texts
    Fault("prompts begin with two begin tokens", "ppo", "begin with BOS twice", (encode.Encoder, "one_bos"),
          lambda call, self, ids: [self.bos, *call(self, ids)]),
    Fault("prompts lack the generation prompt", "ppo", "generation prompt", (ChatTemplate, "render"),
          lambda call, self, turns, asks: call(self, turns, False), quick=True),
    Fault("the end token is outside the mask", "ppo", "end token is inside the mask", COLLATES,
          afterwards(end_outside_the_mask)),
    Fault("sampling stops on one of two end tokens", "ppo", "sampling continues after", FROM_ARGS, one_of_two_ends, quick=True),
    Fault("no token ends a completion", "ppo", "sampling continues after", FROM_ARGS,
          lambda call, *args: replace(call(*args), eos=())),
    # the sampler
    Fault("the sampler ignores the temperature", "ppo", AGREE, DRAW,
          lambda call, logits, noise, temperature, *rest: call(logits, noise, torch.ones_like(temperature), *rest),
          "trainer.temperature=0.7"),
    Fault("top-p is on, but log-probs are those of the full distribution", "ppo", WHOLE, DRAW,
          lambda call, logits, *rest: of_all(logits, call(nucleus(logits), *rest)[0]), MANY),
    Fault("top-p is on, and log-probs are those of the truncated distribution", "ppo", AGREE, DRAW,
          lambda call, logits, *rest: call(nucleus(logits), *rest)),
    Fault("completions are greedy", "ppo", WHOLE, DRAW,
          lambda call, logits, *rest: of_all(logits, logits.argmax(-1)), quick=True),
    Fault("a prompt's completions share their random numbers", "ppo", "completions of each prompt are the same",
          (rows, "uniforms"), lambda call, row: call(replace(row, number=row.number // 2)), "trainer.num_generations=2"),
    Fault("the sampler keeps the first policy", "ppo", "the sampler uses the policy's weights", (decoder.SlotDecoder, "generate"),
          lambda call, self, role, *rest: call(self, "reference", *rest), quick=True),
    Fault("the sampler attends to padding", "ppo", AGREE, (decoder.SlotDecoder, "_look_at_rows"),
          afterwards(padding_is_attended)),
    Fault("the minimum length applies only to sampling", "ppo", f"{AGREE}|minimum length", (SharedBase, "logprobs"),
          lambda call, self, role, ids, starts, mask, temperature=1.0, barred=(), steps=0, *rest:
              call(self, role, ids, starts, mask, temperature, (), 0, *rest), "trainer.min_new_tokens=8"),
    # faults in log-probs, values and scores
    Fault("log-probs are those of the next token", "ppo", "log-probs are those of the model's own forward", (forward, "action_states"),
          logprobs_are_late, quick=True),
    Fault("values are those after the action", "ppo", BEFORE, VALUES, values_are_late, quick=True),
    Fault("values of a head are those after the action", "ppo", BEFORE, VALUES, values_are_late, "trainer.critic=head"),
    Fault("the critic reads the bare base", "ppo", BEFORE, VALUES,
          lambda call, self, part, states=None: call(self, part, forward.action_states(self.shared, None, part)),
          "trainer.critic=head"),
    Fault("completions in one row see each other", "ppo", AGREE, PACKED, rows_see_each_other, SHARED, quick=True),
    Fault("positions continue from one completion to the next", "ppo", AGREE, PACKED, positions_go_on, SHARED),
    Fault("the reward is read at the end of the padding", "ppo", LAST, COLLATE, padded),
    Fault("the reward is read before the end token", "ppo", f"{LAST}|reward scores as when", COLLATE,
          lambda call, prompts, completions, device: call(prompts, [tokens[:-1] for tokens in completions], device)),
    Fault("scores are not normalized", "ppo", LAST, (ppo, "weighted_sum"),
          lambda call, rewards, raw, normalize: call(rewards, raw, False), quick=True),
    # rewards, advantages
    Fault("the score is added one token too early", "ppo", PAID, TOKEN_REWARDS, score_one_place_early),
    Fault("the score is added to each token", "ppo", PAID, TOKEN_REWARDS,
          lambda call, scores, kl, mask, coefficient: call(scores * 0, kl, mask, coefficient) + scores[:, None] * mask),
    Fault("the KL penalty is added instead of subtracted", "ppo", "sign and coefficient of the KL", (losses, "kl_estimate"),
          lambda call, a, b, estimator: call(b, a, estimator), quick=True),
    Fault("the KL penalty counts twice", "ppo", SIGN, TOKEN_REWARDS,
          lambda call, scores, kl, mask, coefficient: call(scores, kl, mask, 2 * coefficient)),
    Fault("GAE includes the padding", "ppo", DIFFER, GAE, gae_over_padding),
    Fault("GAE ignores lambda", "ppo", DIFFER, GAE,
          lambda call, rewards, values, mask, gamma, lam, last: call(rewards, values, mask, gamma, 1.0, last)),
    Fault("the value after the end is not 0", "ppo", "value after the end|value after the last action", GAE,
          lambda call, *args: call(*args[:-1], torch.full_like(args[-1], 0.7))),
    Fault("whitening removes the mean of rewards", "ppo", "token rewards of", WHITEN,
          lambda call, x, mask, shift_mean=True, **keys: call(x, mask, True, **keys), "trainer.whiten_rewards=true"),
    Fault("rloo's baseline contains the completion itself", "ppo", DIFFER, (losses, "estimate_advantages"),
          lambda call, *args: call(*args) / 2, "trainer.advantage_estimator=rloo trainer.num_generations=2"),
    Fault("a group has completions of different prompts", "ppo", "another prompt than the seed determines", (rollouts, "collate"),
          lambda call, prompts, completions, indices, *rest:
              call(prompts, completions, [*indices[::2], *indices[1::2]], *rest),
          "trainer.advantage_estimator=grpo trainer.num_generations=2", quick=True),
    # losses
    Fault("the policy loss has the wrong sign", "ppo", "sign of the policy loss", (losses, "policy_loss"), wrong_sign,
          quick=True),
    Fault("the value loss has the wrong sign", "ppo", "values move away from the returns", (losses, "value_loss"), wrong_sign),
    Fault("the KL in the loss has the wrong sign", "ppo", "sign of the KL in the loss", (losses, "kl_estimate"),
          lambda call, *args: -call(*args), "trainer.kl_in=loss trainer.kl_estimator=k3"),
    Fault("the policy's backward is forgotten", "ppo", "gradients reach the learning roles", (losses, "policy_objective"),
          no_backward),
    Fault("the saved policy lacks a layer", "ppo", "does not reload as it was|tensors differ", (SharedBase, "tensors_of"),
          lacks_a_layer),
    # two workers
    Fault("whitening is per worker", "pair", "whether whitening covers all rows", WHITEN, lambda call, x, mask, **keys: call(x, mask)),
    Fault("both workers sample the same episodes", "pair", "on several", (PPOTrainer, "rollout"), with_attribute("rank", 0)),
    Fault("gradients are not summed over the workers", "pair", "not summed over all workers", (PPOTrainer, "sync"),
          with_attribute("workers", 1)),
    # demonstrations
    Fault("the loss includes prompts", "sft", "the loss also covers the prompt", FIT,
          lambda call, encoder, ids, trained: call(encoder, ids, [True] * len(ids)), quick=True),
    Fault("the end token is not trained", "sft", "completions end with a trained EOS", FIT,
          lambda call, encoder, ids, trained: call(encoder, ids, [*trained[:-1], False]), quick=True),
    Fault("rows begin with two begin tokens", "sft", "at most one BOS per row", WRITE, of_columns(second_begin), quick=True),
    Fault("the header of a completion is trained", "sft", "the loss starts after the generation prompt", [LOAD_TOKENIZER, FIT],
          header_is_trained),
    Fault("labels are shifted twice", "sft", "labels are the rows' tokens|differ from the token at their position", RUN,
          of_batches(lambda batch: batch.update(labels=batch["labels"].roll(-1, 1)))),
    Fault("the collator masks the end token", "sft", "collator masks or adds labels", RUN, of_batches(last_label_is_masked), quick=True),
    Fault("packed rows attend to each other", "sft", ALONE, RUN, of_batches(packing_is_forgotten), "trainer.packing=true",
          quick=True),
    Fault("pad is the end token", "sft", "the pad token is no EOS token", LOAD_TOKENIZER,
          afterwards(lambda tokenizer, *_: setattr(tokenizer, "pad_token", tokenizer.eos_token)), quick=True),
    Fault("sft's optimizer lost the adapter", "sft", "are not in the optimizer", RUN,
          before_training(optimizer_lost_the_adapter), quick=True),
    Fault("sft's adapter is bf16", "sft", "are not fp32", RUN, at_the_start(adapter_is_bf16)),
    Fault("the saved adapter has another scaling", "sft", "does not reload as it was", (adapter_files, "write_adapter"), other_scaling),
    # reward models
    Fault("the head is frozen and random", "rm", "of the adapter are frozen", RUN,
          before_training(lambda trainer: trainer.model.get_submodule("base_model.model.score").requires_grad_(False)),
          quick=True),
    Fault("the head computes in bf16", "rm", "the head computes in", (base, "fp32_head"), lambda call, model: None,
          "trainer.bf16=true"),
    Fault("pooling stops before the end token", "rm", "score .* from the rows alone", RUN, at_the_start(pooling_stops_early),
          quick=True),
    Fault("truncation makes both sides equal", "rm", BOTH, WRITE,
          of_columns(lambda columns: columns.update(dict.fromkeys(("chosen_ids", "rejected_ids"), columns["chosen_ids"][:12]))),
          quick=True),
    Fault("chosen and rejected are swapped", "rm", "", WRITE, of_columns(sides_are_swapped), unnamed=UNKNOWABLE),
    # dpo and kto
    Fault("dpo's reference is the bare base", "dpo", STARTS, RUN, before_training(lambda t: without(".ref.")(t.model)),
          quick=True),
    Fault("kto's reference is the bare base", "kto", STARTS, RUN, before_training(lambda t: without(".ref.")(t.model))),
    Fault("dpo's log-probs include the prompt", "dpo", LOGPROBS, RUN,
          of_batches(lambda batch: batch.update(completion_mask=batch["attention_mask"].clone())), quick=True),
    Fault("kto's loss includes prompts", "kto", LOGPROBS, RUN,
          of_batches(lambda batch: batch.update(completion_mask=batch["attention_mask"].clone()))),
    Fault("dpo's policy is a new adapter on the bare base", "dpo", "policy equals its adapter file",
          (adapters, "set_peft_model_state_dict"), lambda call, *_: None, quick=True),
    Fault("dpo's pairs are equal", "dpo", BOTH, WRITE,
          of_columns(lambda columns: columns.update(rejected_ids=list(columns["chosen_ids"])))),
    Fault("kto's labels are swapped in the loss", "kto", LOGPROBS, RUN,
          of_batches(lambda batch: batch.update(label=~batch["label"])), quick=True),
    Fault("kto's KL term is over the rows' own completions", "kto", "paired with their own completion",
          (kl_pairs.PairedBatchSampler, "__iter__"), own_completions, quick=True),
    Fault("kto's KL term uses other prompts", "kto", "tokens that differ from those of their pair", (kl_pairs, "pair_rows"),
          lambda call, row, other: {**other, **call(other, row)}),
]  # fmt: skip
