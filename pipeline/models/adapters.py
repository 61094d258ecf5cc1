"""One frozen base, and everything else is an adapter on it.

`SharedBase` holds a causal language model that is never written to, and under names (`policy`, `reference`, `reward`,
`critic`) LoRA adapters with, where a role needs one, a scalar head in fp32. The four models of PPO then cost the
weights of one. A role is chosen for the length of a `with shared.use(role)`; the methods that compute do it themselves.

Two traps are closed here. peft's `set_adapter` turns `requires_grad` of every other adapter off, so that an optimizer
loses the policy while the critic runs: `use` switches the active adapter of the tuner layers and nothing else. And
gradient checkpointing runs a layer's forward again during `backward`, with whichever adapter is active *then*: the
checkpoint is given a context that brings back the role it was made under.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.errors import InputError
from pipeline.models import adapter_files
from pipeline.models.adapter_files import HEAD_NAMES, PREFIX
from pipeline.models.adapter_files import is_head as is_head
from pipeline.models.lora import fuse

HEAD = f"{PREFIX}score.weight"  # a scalar head in the files that we write
LOGIT_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 26}  # logits made at a time, in numbers: 16 and 256 MiB of fp32


class SharedBase(nn.Module):
    """A frozen `AutoModelForCausalLM` with named LoRA adapters and scalar heads.

    `autocast` (None, or torch.bfloat16) is the dtype of the matrix products of every forward alike, so that sampling,
    old, reference and new log-probs are of one make; adapters, heads, log-softmax and losses are fp32 always.
    """

    def __init__(self, base_model: nn.Module, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.base = base_model
        self.heads = nn.ModuleDict()
        self.configs: dict[str, LoraConfig] = {}
        self.trainable: dict[str, bool] = {}
        self.autocast = autocast
        self.gradient_checkpointing = False
        # role -> the adapter that serves it (two frozen roles may share one)
        self._stored: dict[str, str] = {}
        self._folders: dict[str, str] = {}  # folder -> the frozen adapter loaded from it
        self._parameters_by_key: dict[str, dict[str, nn.Parameter]] = {}
        self._layers: list[BaseTunerLayer] = []
        self._role: str | None = None
        config = base_model.config.get_text_config()
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self._softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        self._scale = (getattr(config, "logit_scale", None) or 1.0) / (
            getattr(config, "logits_scaling", None) or 1.0
        )
        self.base.requires_grad_(False)
        self._no_dropout()
        if self.device.type != "meta":  # shapes alone: there are no logits
            self._check_logits()

    @property
    def device(self) -> torch.device:
        return next(self.base.parameters()).device

    @property
    def roles(self) -> list[str]:
        return list(self._stored)

    def same_adapter(self, one: str, other: str) -> bool:
        """Whether two roles are served by one and the same adapter."""
        return self._stored[one] == self._stored[other]

    # ---------------------------------------------------------------------------------------------- roles

    def add(
        self,
        role: str,
        lora: dict[str, Any] | None = None,
        folder: str | Path | None = None,
        copy_of: str | None = None,
        head: bool = False,
        trainable: bool = False,
    ) -> None:
        """Add a role: a new adapter (`lora`: fields of peft.LoraConfig), one from a `folder`, or a copy of a role.

        `head` asks for a scalar head: the one of the folder or of the copied role, else a new one. A folder's head is
        loaded in any case. A new adapter changes nothing until it is trained (peft's B is 0). Two frozen roles of one
        folder are one adapter in memory. Raises InputError for a folder that does not fit this base.
        """
        if role in self._stored:
            raise ValueError(f"role {role!r} is there already; roles: {self.roles}")
        if sum(x is not None for x in (lora, folder, copy_of)) != 1:
            raise ValueError(f"role {role!r}: give exactly one of lora, folder, copy_of")
        if folder is not None:
            key = str(Path(folder).resolve())
            if not trainable and key in self._folders and (not head or self._folders[key] in self.heads):
                self._stored[role] = self._folders[key]
                return
            self._inject(role, _read_config(Path(folder)), trainable)
            self.load(role, folder)
            if not trainable:
                self._folders[key] = role
        elif copy_of is not None:
            source = self._stored[copy_of]
            self._inject(role, LoraConfig(**self.configs[source].to_dict()), trainable)
            for name, parameter in self._adapter(role).items():
                parameter.data.copy_(self._adapter(source)[name].data)
            if head and source in self.heads:
                self._new_head(role, self.heads[source].weight.data.clone())
        else:
            self._inject(role, LoraConfig(**{"task_type": "CAUSAL_LM", **(lora or {})}), trainable)
        if head and role not in self.heads:
            # small, as OpenAI's and TRL's value heads: the first values are near 0, not noise of the reward's size
            self._new_head(role, torch.randn(1, self.hidden_size) / math.sqrt(self.hidden_size + 1))
        self.set_trainable(role, trainable)

    def _inject(self, role: str, config: LoraConfig, trainable: bool) -> None:
        """Put the (still empty) adapter into the base's layers."""
        if not role.isidentifier():
            raise ValueError(f"role {role!r}: a role is a Python identifier, as parameter names contain it")
        if config.bias != "none" or (set(config.modules_to_save or []) - set(HEAD_NAMES)):
            raise InputError(
                f"lora: bias={config.bias!r}, modules_to_save={config.modules_to_save}: these train weights of the base, "
                "which all roles share; expected bias: none and no modules_to_save but the head"
            )
        config.lora_dropout = 0.0  # dropout makes the first ratio differ from 1 and the KL from 0
        config.modules_to_save, config.inference_mode = None, False
        inject_adapter_in_model(config, self.base, role)
        self.configs[role] = config
        self._stored[role] = role
        fuse(self.base)
        self._layers = [m for m in self.base.modules() if isinstance(m, BaseTunerLayer)]
        for parameter in self._adapter(role).values():
            parameter.data = parameter.data.float()
        for name in self.configs:  # injecting touches requires_grad of what was there
            self.set_trainable(name, self.trainable.get(name, trainable))
        self._no_dropout()
        self._switch(self._role)

    def _new_head(self, role: str, weight: Tensor) -> None:
        head = nn.Linear(weight.shape[1], 1, bias=False, device=self.device, dtype=torch.float32)
        head.weight.data.copy_(weight)
        self.heads[role] = head

    def set_trainable(self, role: str, trainable: bool) -> None:
        """Whether the role's parameters get gradients. Serving several roles, an adapter cannot be trained."""
        stored = self._stored[role]
        if trainable and list(self._stored.values()).count(stored) > 1:
            raise ValueError(
                f"role {role!r} shares its adapter with another role; add it as a copy to train it"
            )
        self.trainable[stored] = trainable
        for parameter in self.parameters_of(role):
            parameter.requires_grad_(trainable)

    def parameters_of(self, role: str) -> list[nn.Parameter]:
        """Adapter and head parameters of a role, in a fixed order."""
        stored = self._stored[role]
        head = list(self.heads[stored].parameters()) if stored in self.heads else []
        return list(self._adapter(stored).values()) + head

    def _adapter(self, stored: str) -> dict[str, nn.Parameter]:
        """peft's file name -> parameter, of one adapter."""
        if stored in self._parameters_by_key:
            return self._parameters_by_key[stored]
        found = self._parameters_by_key[stored] = {}
        for name, parameter in self.base.named_parameters():
            if "lora_" in name and (f".{stored}." in name or name.endswith(f".{stored}")):
                key = f"{name}.".replace(f".{stored}.", ".").removesuffix(".")
                if "lora_magnitude_vector" in key:  # DoRA: a module in memory, a plain tensor in the file
                    key = key.removesuffix(".weight")
                found[PREFIX + key] = parameter
        return found

    @contextmanager
    def use(self, role: str | None) -> Iterator[SharedBase]:
        """Within it, forwards of the base go through this role's adapter; None: through none."""
        before = self._role
        self._switch(role)
        try:
            yield self
        finally:
            self._switch(before)

    def _switch(self, role: str | None) -> None:
        stored = None if role is None else self._stored[role]
        self._role = role
        for layer in self._layers:
            # Not layer.set_adapter or enable_adapters: both rewrite requires_grad, and peft 0.21 has no other way
            # (https://github.com/huggingface/peft/issues/2759). Remove when it has; tests/test_upstream.py.
            layer._disable_adapters = stored is None
            if stored is not None:
                layer._active_adapter = [stored]

    @torch.no_grad()
    def average(self, dst: str, src: str, decay: float) -> None:
        """dst = decay * dst + (1 - decay) * src, tensor by tensor (A and B apart: it is their average, not that of BA)."""
        if others := [role for role in self.roles if role != dst and self.same_adapter(role, dst)]:
            raise ValueError(f"role {dst!r} shares its adapter with {others}, which must not move with it")
        for mine, theirs in zip(self.parameters_of(dst), self.parameters_of(src), strict=True):
            mine.lerp_(theirs.to(mine.device), 1.0 - decay)

    # ----------------------------------------------------------------------------------------------- files

    def save(self, role: str, folder: str | Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors as peft writes them, the head as its `score`."""
        folder, stored = Path(folder), self._stored[role]
        folder.mkdir(parents=True, exist_ok=True)
        config = LoraConfig(**self.configs[stored].to_dict())
        config.inference_mode, config.task_type = True, "CAUSAL_LM"
        config.base_model_name_or_path = (
            config.base_model_name_or_path or self.base.config.name_or_path or None
        )
        if stored in self.heads:
            config.task_type, config.modules_to_save = "SEQ_CLS", ["score"]
        save_file(self.tensors_of(role), folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(folder))

    def tensors_of(self, role: str) -> dict[str, Tensor]:
        """The role's adapter and head under peft's file names, on the CPU."""
        stored = self._stored[role]
        tensors = {key: p.data.contiguous().cpu() for key, p in self._adapter(stored).items()}
        if stored in self.heads:
            tensors[HEAD] = self.heads[stored].weight.data.contiguous().cpu()
        return tensors

    def load(self, role: str, folder: str | Path) -> None:
        """Fill an existing role from an adapter folder; every tensor must be there, and none be left over."""
        adapter_files.tensors(folder)
        path, stored = Path(folder) / adapter_files.TENSORS, self._stored[role]
        tensors = load_file(path)
        heads = [key for key in tensors if is_head(key)]
        if heads:
            weight = tensors.pop(heads[0])
            if len(heads) > 1 or weight.shape != (1, self.hidden_size):
                raise InputError(
                    f"{path}: head {heads} of shape {tuple(weight.shape)}; expected one weight of shape (1, {self.hidden_size})"
                )
            if stored in self.heads:
                self.heads[stored].weight.data.copy_(weight)
            else:
                self._new_head(stored, weight)
        elif stored in self.heads:
            raise InputError(f"{path}: role {role!r} has a scalar head, and there is none in this file")
        mine = self._adapter(stored)
        if different := sorted(mine.keys() ^ tensors.keys()):
            raise InputError(
                f"{path}: not an adapter for this base ({type(self.base).__name__}): {len(different)} tensors are on one "
                f"side only, {different[0]} for one"
            )
        for key, parameter in mine.items():
            if parameter.shape != tensors[key].shape:
                raise InputError(
                    f"{path}: {key} has shape {tuple(tensors[key].shape)}, this base takes {tuple(parameter.shape)}: "
                    "the adapter was trained on another base"
                )
            parameter.data.copy_(tensors[key])

    # ------------------------------------------------------------------------------------------- computing

    def body(self, **inputs: Any) -> Any:
        """The transformer under the lm head, in the role in use. Not checkpointed unless gradients are on."""
        # transformers checkpoints in train mode, and then drops the KV cache: train mode only where it is wanted.
        # (It turns on nothing else: every dropout is 0.)
        training = self.gradient_checkpointing and torch.is_grad_enabled()
        if self.base.training != training:
            self.base.train(training)
        with self._precision():
            return self.base.base_model(**inputs)

    def hidden(self, role: str | None, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, T, H) last hidden states. Without a mask rows are padded on the right, where causal attention never looks."""
        inputs = {"input_ids": input_ids, "use_cache": False}
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask
            inputs["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        with self.use(role):
            return self.body(**inputs).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., V) fp32 logits of hidden states, in the role in use."""
        with self._precision():
            logits = self.base.get_output_embeddings()(hidden)
        logits = logits.float()
        if self._scale != 1.0:
            logits = logits * self._scale
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    def logprobs(
        self,
        role: str | None,
        input_ids: Tensor,
        starts: Tensor,
        mask: Tensor,
        temperature: float = 1.0,
        barred: Sequence[int] = (),
        barred_steps: int = 0,
        entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs (B, R) in fp32 of the actions `input_ids[b, starts[b] + t]` where `mask[b, t]`; 0 elsewhere.

        Action t is scored by the logits one place earlier. Rows are padded on the right. Only the action places go
        through the lm head, a chunk at a time, and no chunk's logits are kept for backward: (B, T, V) never exists. In the first `barred_steps` actions the tokens `barred` have probability 0, as in
        sampling with a minimum length. The second result is the entropy (B, R) of each place's distribution, or None.
        """
        hidden = self.hidden(role, input_ids)
        rows, steps = mask.nonzero(as_tuple=True)
        places = starts[rows] + steps
        chosen, targets, early = hidden[rows, places - 1], input_ids[rows, places], steps < barred_steps
        with self.use(role):
            logprobs = self._per_action(
                chosen, targets, early, temperature, tuple(barred), want_entropy=False
            )
            found = (
                self._per_action(chosen, targets, early, temperature, tuple(barred), True)
                if entropy
                else None
            )
        blank = torch.zeros(mask.shape, device=mask.device)
        spread = [None if x is None else blank.index_put((rows, steps), x) for x in (logprobs, found)]
        return spread[0], spread[1]

    def _per_action(
        self,
        hidden: Tensor,
        targets: Tensor,
        early: Tensor,
        temperature: float,
        barred: tuple[int, ...],
        want_entropy: bool,
    ) -> Tensor:
        """(N,) log-probs, or entropies, from hidden states (N, H): through the lm head, a chunk of rows at a time."""
        head = self.base.get_output_embeddings()
        size = max(1, LOGIT_CHUNK.get(hidden.device.type, LOGIT_CHUNK["cpu"]) // self.vocab_size)
        # no action: still part of the graph
        pieces = [hidden.sum(-1).float() * 0.0] if len(hidden) == 0 else []
        for at in range(0, len(hidden), size):
            part = slice(at, at + size)
            run = partial(_from_logits, self, targets[part], early[part], temperature, barred, want_entropy)
            if not torch.is_grad_enabled():
                pieces.append(run(hidden[part]))
            elif isinstance(head, BaseTunerLayer):  # an adapter on the lm head learns, too
                contexts = self._checkpoint_contexts
                pieces.append(checkpoint(run, hidden[part], use_reentrant=False, context_fn=contexts))
            else:
                pieces.append(_RowWise.apply(hidden[part], run))
        return torch.cat(pieces)

    def _head(self, role: str, hidden: Tensor) -> Tensor:
        stored = self._stored[role]
        if stored not in self.heads:
            raise ValueError(
                f"role {role!r} has no scalar head; add it with head=True or from a reward adapter"
            )
        with torch.autocast(hidden.device.type, enabled=False):
            return self.heads[stored](hidden.float()).squeeze(-1)

    def values(self, role: str, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, T) fp32: the role's head at every place."""
        return self._head(role, self.hidden(role, input_ids, attention_mask))

    def scores(
        self,
        role: str,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """(B,) fp32: the role's head at the last token of each row, by mask, or by `lengths` of right-padded rows."""
        if (attention_mask is None) == (lengths is None):
            raise ValueError(
                "scores: give one of attention_mask and lengths; the last token is never guessed from ids"
            )
        hidden = self.hidden(role, input_ids, attention_mask)
        if lengths is not None:
            last = lengths - 1
        else:
            assert attention_mask is not None
            last = (torch.arange(hidden.shape[1], device=hidden.device) * attention_mask.bool()).argmax(-1)
        return self._head(role, hidden[torch.arange(len(hidden), device=hidden.device), last])

    # --------------------------------------------------------------------------------------------- inside

    def enable_gradient_checkpointing(self) -> None:
        """Keep one layer's input instead of its activations; the layer runs again in backward, in its own role."""
        self.base.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": self._checkpoint_contexts}
        )
        self.base.eval()
        self.gradient_checkpointing = True

    def _checkpoint_contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        # called while the forward runs: the role it runs under is the one to bring back
        # (https://github.com/huggingface/peft/issues/2832). Remove when peft keeps the active adapter for the rerun.
        return nullcontext(), self.use(self._role)

    def _precision(self) -> AbstractContextManager:
        kind = self.device.type
        return (
            torch.autocast(kind, self.autocast, enabled=True) if self.autocast is not None else nullcontext()
        )

    def _no_dropout(self) -> None:
        """Every dropout 0, LoRA's too, whatever the mode: with dropout the first ratio is not 1 nor the first KL 0."""
        self.base.eval()
        for module in self.base.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = 0.0  # of functional attention

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Our way from hidden states to logits must be the model's own; some families scale or cap on the way."""
        ids = torch.arange(4, device=self.device).unsqueeze(0)
        with self._precision():
            own = self.base(input_ids=ids).logits.float()
        ours = self.logits(self.body(input_ids=ids, use_cache=False).last_hidden_state)
        if not torch.allclose(own, ours, rtol=1e-2, atol=1e-2):
            raise InputError(
                f"{type(self.base).__name__} changes its logits after the lm head in a way that is "
                f"unknown here (largest difference {(own - ours).abs().max():.3g}); expected a plain, a soft-capped or a "
                "scaled head",
                key="model.name_or_path",
            )


class _RowWise(torch.autograd.Function):
    """y[n] = run(x)[n], where y[n] depends on the row x[n] alone and `run` has no parameters to learn.

    Then the gradient of sum(y) holds every row's own derivative. It is taken right in the forward, while the chunk's logits
    are there, and (N, H) is kept instead of (N, V): two products with the lm head, where recomputing takes three.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = run(leaf)
            (slope,) = torch.autograd.grad(y.sum(), leaf)
        ctx.save_for_backward(slope)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return (grads[0].unsqueeze(-1) * slope).to(slope.dtype), None


def _from_logits(
    shared: SharedBase,
    targets: Tensor,
    early: Tensor,
    temperature: float,
    barred: tuple[int, ...],
    want_entropy: bool,
    hidden: Tensor,
) -> Tensor:
    """Log-prob of each row's target, or each row's entropy; fp32."""
    logits = shared.logits(hidden)
    if temperature != 1.0:  # a pass over the largest tensor there is
        logits = logits / temperature
    if barred:
        logits = bar(logits, early, barred)
    if not want_entropy:
        return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == float("-inf"), 0.0)).sum(-1)


def bar(logits: Tensor, rows: Tensor, tokens: Sequence[int]) -> Tensor:
    """Logits (N, V) with `tokens` at -inf in the rows (N,) that are on: in sampling and in log-probs alike."""
    hit = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    hit[list(tokens)] = True
    return logits.masked_fill(rows.unsqueeze(-1) & hit, float("-inf"))


def _read_config(folder: Path) -> LoraConfig:
    adapter_files.settings(folder)
    config = PeftConfig.from_pretrained(str(folder))
    assert isinstance(config, LoraConfig)
    return config
