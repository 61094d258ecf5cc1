"""Keeps one frozen base model with several LoRA adapters in memory.

`SharedBase` contains a causal language model, which never changes, and named roles (`policy`, `reference`, `reward`, `critic`). A
role is a LoRA adapter, and may have a scalar head in fp32. Some roles are only a scalar head on another role's hidden states.
Because all roles share one base, PPO's four models need little more memory than one model. `with shared.use(role)` activates a
role within the block. Methods that run the model take a role as an argument and activate it themselves.

This module works around two pitfalls, one in peft and one in gradient checkpointing. First, peft's `set_adapter` turns off
`requires_grad` of every other adapter. With `set_adapter`, the policy would get no gradients after the critic had been active.
`use` switches only the active adapter of peft's layers, and does not change `requires_grad`. Second, gradient checkpointing runs
a layer's forward again during `backward`, with the adapter that is active at that time. `checkpoint_contexts` makes the second
forward use the role of the first forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from peft import (
    MODEL_TYPE_TO_PEFT_MODEL_MAPPING,
    LoraConfig,
    PeftConfig,
    PeftModel,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.errors import Failure, InputError, in_brief
from pipeline.models import adapter_files
from pipeline.models.adapter_files import HEAD, is_head
from pipeline.models.base import freeze
from pipeline.models.logprobs import per_action
from pipeline.models.lora import FusedLinear, MixedBatch, fuse_lora_layers
from pipeline.models.packing import Batch, pack_alone, pack_together
from pipeline.models.precision import linear_fp32
from pipeline.system.hub import SETTINGS, TENSORS


class SharedBase(nn.Module):
    """A frozen `AutoModelForCausalLM` with named LoRA adapters and scalar heads.

    Raises InputError if the base changes its logits after the lm head in a way that `logits` does not implement.

    Args:
        base_model: a causal language model. The constructor freezes the model and sets every dropout to 0.
        autocast: dtype of the matrix products in all forwards, or None for the dtype of the base. Adapters, heads, log-softmax
            and losses always use fp32.
    """

    def __init__(self, base_model: nn.Module, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.base = base_model
        self.heads = nn.ModuleDict()
        self.configs: dict[str, LoraConfig] = {}
        self.trainable: dict[str, bool] = {}
        self.autocast = autocast
        self.gradient_checkpointing = False
        # role -> name of its adapter; a role that is only a head uses another role's adapter
        self._stored: dict[str, str] = {}
        self._parameters_by_key: dict[str, dict[str, nn.Parameter]] = {}
        self._layers: list[BaseTunerLayer] = []
        self.role: str | None = None  # active role, or None for the bare base
        self._rows: MixedBatch | None = None  # within `use_each`, the adapter of each row of the batch
        self._mixing: list[Any] = []  # hooks that pass `_rows` to the layers
        config = base_model.config.get_text_config()
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self._softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        self._scale = (getattr(config, "logit_scale", None) or 1.0) / (
            getattr(config, "logits_scaling", None) or 1.0
        )
        # Whether this process holds only a shard of the base (shards.py).
        self.sharded = any(isinstance(parameter, DTensor) for parameter in base_model.parameters())
        freeze(self.base)
        if self.device.type != "meta":
            self._check_logits()

    @property
    def device(self) -> torch.device:
        return next(self.base.parameters()).device

    @property
    def roles(self) -> list[str]:
        return list(self._stored)

    # ---------------------------------------------------------------------------------------------- roles

    def add(
        self,
        role: str,
        lora: dict[str, Any] | None = None,
        folder: str | Path | None = None,
        copy_of: str | None = None,
        head_on: str | None = None,
        head: bool = False,
        trainable: bool = False,
    ) -> None:
        """Adds a role, defined by lora, folder, copy_of or head_on. If the method raises an error, no role is added.

        A new adapter does not change the outputs until it is trained, because peft initializes the product B A with 0.

        Args:
            lora: the fields of peft.LoraConfig for a new adapter.
            folder: the folder of a saved adapter. If the folder contains a head, the head is loaded too.
            copy_of: the role to copy.
            head_on: a role whose adapter the new role uses but does not own. The new role owns only a head.
            head: whether the role has a scalar head. The head comes from the folder or the copied role. A new head is
                initialized with 0, because a random critic would predict noise as large as the reward.
            trainable: whether the role's parameters get gradients.

        Raises:
            InputError: if the adapter does not fit the base.
        """
        try:
            if head_on is not None:
                self._stored[role], head = self._stored[head_on], True
            elif folder is not None:
                with errors_of_peft(str(Path(folder) / SETTINGS)):
                    self._inject(role, saved_config(folder), trainable)
                self.load(role, folder)
            elif copy_of is not None:
                self._inject(role, LoraConfig(**self.configs[self._stored[copy_of]].to_dict()), trainable)
                if head and self._head_of(copy_of) is not None:
                    self._new_head(role)
                self.fill(role, self._named(copy_of))
            else:
                with errors_of_peft("lora"):
                    self._inject(role, LoraConfig(**{"task_type": "CAUSAL_LM", **(lora or {})}), trainable)
        except Exception:
            if role in self._stored:
                self.remove(role)
            raise
        if head and role not in self.heads:
            self._new_head(role)
        self.set_trainable(role, trainable)

    def _inject(self, role: str, config: Any, trainable: bool) -> None:
        """Adds the layers of a new adapter to the base, and initializes them."""
        config.lora_dropout = 0.0  # with dropout, PPO's first ratio would not be 1, nor its first KL 0
        config.modules_to_save, config.inference_mode = None, False
        self.configs[role], self._stored[role] = config, role
        inject_adapter_in_model(config, self.base, role)
        fuse_lora_layers(self.base)
        for handle in self._mixing:  # `use_each` adds hooks to all layers later, including the new layers
            handle.remove()
        self._mixing = []
        for parameter in self._adapter(role).values():
            parameter.data = parameter.data.float()
        for name in self.configs:  # peft has changed requires_grad of the other adapters
            for parameter in self._adapter(name).values():
                parameter.requires_grad_(self.trainable.get(name, trainable))
        self.base.eval()
        self._layers_changed()

    def _layers_changed(self) -> None:
        self._layers = [module for module in self.base.modules() if isinstance(module, BaseTunerLayer)]
        self._switch(self.role)

    def _new_head(self, role: str) -> None:
        head = nn.Linear(self.hidden_size, 1, bias=False, device=self.device, dtype=torch.float32)
        head.weight.data.zero_()
        self.heads[role] = head

    def set_trainable(self, role: str, trainable: bool) -> None:
        if not self.is_head(role):
            self.trainable[self._stored[role]] = trainable
        for parameter in self.parameters_of(role):
            parameter.requires_grad_(trainable)

    def is_head(self, role: str) -> bool:
        """Returns whether the role is only a head on another role's hidden states."""
        return role in self.heads and self._stored[role] != role

    def parameters_of(self, role: str) -> list[nn.Parameter]:
        """Returns the parameters of the adapter and the head that a role owns, in a fixed order."""
        return list(self._named(role).values())

    def _named(self, role: str) -> dict[str, nn.Parameter]:
        """Returns {name in peft's files: parameter} for all parameters that a role owns."""
        parameters = {} if self.is_head(role) else dict(self._adapter(self._stored[role]))
        if (head := self._head_of(role)) is not None:
            parameters[HEAD] = head.weight
        return parameters

    def _head_of(self, role: str) -> Any:
        """Returns the role's scalar head, or None."""
        return self.heads[role] if role in self.heads else None  # noqa: SIM401  (a ModuleDict has no get)

    def _adapter(self, adapter: str) -> dict[str, nn.Parameter]:
        """Returns {name in peft's files: parameter} for the parameters of an adapter, without its head."""
        if adapter in self._parameters_by_key:
            return self._parameters_by_key[adapter]
        parameters = self._parameters_by_key[adapter] = {}
        for name, parameter in self.base.named_parameters():
            if "lora_" in name and (f".{adapter}." in name or name.endswith(f".{adapter}")):
                key = f"{name}.".replace(f".{adapter}.", ".").removesuffix(".")
                # The magnitude vector of DoRA is a module in memory, but a plain tensor in the file.
                if "lora_magnitude_vector" in key:
                    key = key.removesuffix(".weight")
                parameters[adapter_files.PREFIX + key] = parameter
        return parameters

    @contextmanager
    def use(self, role: str | None) -> Iterator[SharedBase]:
        """Within the block, forwards of the base use this role's adapter, or no adapter if the role is None."""
        previous = self.role
        if role == previous:
            yield self
            return
        self._switch(role)
        try:
            yield self
        finally:
            self._switch(previous)

    @contextmanager
    def use_each(self, roles: Sequence[str | None]) -> Iterator[SharedBase]:
        """Within the block, row i of a batch uses the adapter of `roles[i]`. Forwards within the block must not need gradients.

        The base processes the full batch. Each adapter processes only the rows that use it.
        """
        names = [None if role is None else self._stored[role] for role in roles]
        if len(set(names)) == 1:
            with self.use(roles[0]):
                yield self
            return
        if not self._mixing:
            self._mixing = [
                layer.register_forward_pre_hook(self._mix, with_kwargs=True) for layer in self._layers
            ]
        rows_of = {
            name: torch.tensor([i for i, row in enumerate(names) if row == name], device=self.device)
            for name in dict.fromkeys(names)
            if name is not None
        }
        self._rows = MixedBatch(rows_of, ["__base__" if name is None else name for name in names])
        previous = self.role
        self._switch(next(role for role in roles if role is not None))
        try:
            yield self
        finally:
            self._rows = None
            self._switch(previous)

    def _mix(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Tells a layer which adapter each row uses. A fused layer gets row indices, and a layer of peft gets adapter names."""
        if self._rows is None:
            return None
        mixed = isinstance(layer, FusedLinear) and layer.mixes(self._rows)
        return args, {**kwargs, **({"mixed": self._rows} if mixed else {"adapter_names": self._rows.names})}

    def remove(self, role: str) -> None:
        """Removes an inactive role. Removes the role's adapter too, unless another role uses the adapter."""
        if self.is_head(role):
            del self.heads[role]
        adapter = self._stored.pop(role)
        if adapter in self._stored.values():
            return
        for module in self.base.modules():
            if isinstance(module, BaseTunerLayer):
                module._active_adapter = []  # otherwise, peft would activate another adapter and print a warning
                module.delete_adapter(adapter)
        for table in (self.configs, self.trainable, self._parameters_by_key, self.heads):
            if adapter in table:
                del table[adapter]
        self._layers_changed()

    def _switch(self, role: str | None) -> None:
        adapter = None if role is None else self._stored[role]
        self.role = role
        for layer in self._layers:
            # Sets private attributes, because layer.set_adapter and enable_adapters change requires_grad. Use public methods when
            # peft can switch adapters without changing requires_grad (https://github.com/huggingface/peft/issues/2759).
            layer._disable_adapters = adapter is None
            if adapter is not None:
                layer._active_adapter = [adapter]

    @torch.no_grad()
    def average(self, dst: str, src: str, decay: float) -> None:
        """Sets dst = decay * dst + (1 - decay) * src for each parameter, so A and B are averaged separately."""
        for target, source in zip(self.parameters_of(dst), self.parameters_of(src), strict=True):
            target.lerp_(source.to(target.device), 1.0 - decay)

    # ----------------------------------------------------------------------------------------------- files

    def save(self, role: str, folder: str | Path) -> dict[str, Any]:
        """Writes an adapter in peft's format, with the head as `score`. Returns the result of adapter_files.write_adapter."""
        config = LoraConfig(**self.configs[self._stored[role]].to_dict())
        config.task_type = "CAUSAL_LM"
        if self._head_of(role) is not None:
            config.task_type, config.modules_to_save = "SEQ_CLS", ["score"]
        name = config.base_model_name_or_path or self.base.config.name_or_path
        config.base_model_name_or_path = name or None
        return adapter_files.write_adapter(folder, config, self.tensors_of(role))

    def tensors_of(self, role: str) -> dict[str, Tensor]:
        """Returns {name in peft's files: tensor on the CPU} for the role's adapter and head."""
        return {key: parameter.data.contiguous().cpu() for key, parameter in self._named(role).items()}

    def fill(self, role: str, tensors: Mapping[str, Tensor]) -> None:
        """Copies tensors into an existing role. The tensors come from `tensors_of`, perhaps in another process."""
        for key, parameter in self._named(role).items():
            parameter.data.copy_(tensors[key])

    def load(self, role: str, folder: str | Path) -> None:
        """Loads an adapter folder into an existing role. Adds the folder's head if the role has none.

        Raises InputError unless the tensors' names and shapes match the role's exactly, and all values are finite.
        """
        adapter_files.read_shapes(folder)
        path = Path(folder) / TENSORS
        actual = load_file(path)
        tensors = {HEAD if is_head(key) else key: tensor for key, tensor in actual.items()}
        if HEAD in tensors and self._head_of(role) is None:
            self._new_head(role)
        expected, actual = (
            {key: tuple(tensor.shape) for key, tensor in group.items()}
            for group in (self._named(role), tensors)
        )
        if names := sorted(k for k in expected | actual if expected.get(k) != actual.get(k)):
            key = names[0]
            raise InputError(
                f"{path}: not an adapter for this role and base ({type(self.base).__name__}): {len(names)} tensors differ, for "
                f"example {key} has shape {actual.get(key, 'none')}; expected {expected.get(key, 'none')}; use the base that it "
                "was trained on"
            )
        if keys := [key for key, tensor in tensors.items() if not tensor.isfinite().all()]:
            raise InputError(f"{path}: {keys[0]} contains NaN or infinity: its training diverged")
        self.fill(role, tensors)

    # ------------------------------------------------------------------------------------------- computing

    def body(self, **inputs: Any) -> Any:
        """Runs the transformer below the lm head with the active role. Accepts the arguments of transformers' base model."""
        # transformers uses gradient checkpointing only in train mode, and then drops the KV cache. Train mode has no other
        # effect, because every dropout is 0.
        training = self.gradient_checkpointing and torch.is_grad_enabled()
        if self.base.training != training:
            self.base.train(training)
        with self._precision():
            return self.base.base_model(**inputs)

    def hidden(self, role: str | None, input_ids: Tensor) -> Tensor:
        """Returns the last hidden states (B, T, H) of rows. Rows are padded on the right, so no token attends to the padding."""
        with self.use(role):
            return self.body(input_ids=input_ids, use_cache=False).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns (..., V) fp32 logits for hidden states (..., H) with the active role.

        If the role has an adapter on the lm head, autocast may round the logits.
        """
        head = self.base.get_output_embeddings()
        if type(head) is nn.Linear:
            logits = linear_fp32(hidden, head, self.autocast)
        else:
            with self._precision():
                logits = head(hidden).float()
        if self._scale != 1.0:
            logits = logits * self._scale
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    def states(self, role: str | None, batch: Batch) -> Tensor:
        """Returns (B, R + 1, H) hidden states at the position before each action, and at the position of the last action."""
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
        if batch.allowed is not None:
            inputs["position_ids"] = batch.position_ids
            inputs["attention_mask"] = self._mask(batch.allowed)
        with self.use(role):
            hidden = self.body(**inputs).last_hidden_state
        # With plain indexing, backward would add the gradients of a shared prompt in an order that varies with thread timing.
        return nn.functional.embedding(batch.indices, hidden.reshape(-1, hidden.shape[-1]))

    def _mask(self, allowed: Tensor) -> Tensor:
        """Converts `Batch.allowed` to the (P, 1, T, T) mask that the base's attention expects."""
        if self._attention != "sdpa":
            allowed = torch.where(allowed, 0.0, torch.finfo(self.base.dtype).min).to(self.base.dtype)
        return allowed.unsqueeze(1)

    @cached_property
    def can_pack(self) -> bool:
        """Returns whether packing (packing.py) leaves the hidden states of completions unchanged.

        A base with sliding windows cannot pack, because its windows count positions in the packed row. Any other base is tested
        with two completions.
        """
        config = self.base.config.get_text_config()
        windows = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        is_full = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        if windows or not is_full or self._attention not in ("sdpa", "eager"):
            return False
        ids = torch.tensor([[0, 1, 2, 3], [0, 1, 6, 7]], device=self.device)
        sizes = torch.full((2,), 2, device=self.device)
        with torch.no_grad():
            try:
                together = self.states(None, pack_together(ids, sizes, sizes, 2, [[0, 1]]))
            except torch.OutOfMemoryError:
                raise
            except (TypeError, ValueError, RuntimeError):  # the base rejects the mask or the position ids
                return False
            apart = self.states(None, pack_alone(ids, sizes, sizes, 2))
        rounding = 1e-5 if self.autocast is None and self.base.dtype == torch.float32 else 3e-2
        return bool(((together - apart).norm(dim=-1) <= rounding * apart.norm(dim=-1)).all())

    @property
    def _attention(self) -> str | None:
        return self.base.config.get_text_config()._attn_implementation

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
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns log-probs (B, R) of actions, and their entropies (B, R) or None, in fp32 nats. Values outside the mask are 0.

        Action t of row b is the token `input_ids[b, starts[b] + t]`. The log-prob of an action comes from the logits one position
        earlier. The lm head is applied only to positions of actions, in chunks, so no tensor of all logits (B, T, V) is
        allocated.

        Args:
            role: the role, or None for the bare base.
            input_ids: (B, T), padded on the right.
            starts: (B,) position of each row's first action.
            mask: (B, R), nonzero at actions.
            temperature: divides the logits.
            barred: token ids that have probability 0 in the first `barred_steps` actions, as when sampling with a minimum length.
            entropy: whether to compute the entropy of each action's distribution.
            states: (B, R + 1, H) hidden states from `states`, or None to compute them.
        """
        if states is None:
            states = self.states(role, pack_alone(input_ids, starts, mask.bool().sum(-1), mask.shape[1]))
        rows, steps = mask.nonzero(as_tuple=True)
        operands = (states[rows, steps], input_ids[rows, starts[rows] + steps], steps < barred_steps)
        zeros = torch.zeros(mask.shape, device=mask.device)
        with self.use(role):
            barred = tuple(barred) if barred_steps else ()
            results = per_action(self, *operands, temperature, barred, want_entropy=entropy)
        logprobs, *entropies = (zeros.index_put((rows, steps), values) for values in results)
        return logprobs, entropies[0] if entropy else None

    @torch.no_grad()
    def mean_logprob(self, role: str | None, ids: Sequence[int]) -> float:
        """Returns the mean log-prob of a sequence's tokens after the first, in nats."""
        row = torch.tensor([list(ids)], device=self.device)
        actions = torch.ones_like(row[:, 1:], dtype=torch.bool)
        return float(self.logprobs(role, row, torch.ones_like(row[:, 0]), actions)[0].mean())

    def head(self, role: str, hidden: Tensor) -> Tensor:
        """Applies the role's scalar head to hidden states (..., H). Returns the head's fp32 output (...)."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self._head_of(role)(hidden.float()).squeeze(-1)

    @torch.no_grad()
    def score(self, role: str, ids: Sequence[int]) -> float:
        """Returns the output of the role's head at the last token of a sequence."""
        hidden = self.hidden(role, torch.tensor([list(ids)], device=self.device))
        return float(self.head(role, hidden[:, -1]))

    # ------------------------------------------------------------------------------------------- internals

    def enable_gradient_checkpointing(self) -> None:
        """Turns on gradient checkpointing: backward recomputes each layer's activations, with the role of the forward."""
        self.base.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": self.checkpoint_contexts}
        )
        self.base.eval()
        self.gradient_checkpointing = True

    def checkpoint_contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Returns two contexts: one for a checkpointed forward, and one for its recomputation."""
        # torch calls this method during the forward, so `self.role` is the role to restore in backward. Remove this method when
        # peft restores the active adapter itself (https://github.com/huggingface/peft/issues/2832).
        return nullcontext(), self.use(self.role)

    def _precision(self) -> AbstractContextManager:
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Raises InputError if the model changes its logits in a way that `logits` does not implement."""
        ids = torch.arange(4, device=self.device).unsqueeze(0)
        with self._precision():
            expected = self.base(input_ids=ids).logits.float()
        if not expected.isfinite().all():
            problem = "the model's logits contain NaN or infinity; fetch or save the model again"
            raise InputError(problem, key="model.name_or_path")
        actual = self.logits(self.body(input_ids=ids, use_cache=False).last_hidden_state)
        # The tolerance is relative to the largest logit, because in half precision the errors of all logits are similarly large.
        if not (expected - actual).abs().max() <= 1e-2 * max(1.0, float(expected.abs().max())):
            raise InputError(
                f"{type(self.base).__name__} changes its logits after the lm head in an unknown way; expected a plain, a "
                "soft-capped or a scaled head",
                key="model.name_or_path",
            )


def saved_config(folder: str | Path) -> LoraConfig:
    """Returns the peft configuration of a saved adapter, with the values of adapter_files.exact_settings."""
    exact = adapter_files.exact_settings(folder)
    config = PeftConfig.from_pretrained(str(folder))
    vars(config).update(exact)
    return config


def as_peft_model(base: Any, folder: str | Path, name: str = "default", trainable: bool = False) -> Any:
    """Adds the adapter in a folder to a base or PeftModel, with the values of `saved_config`. Returns the PeftModel."""
    with errors_of_peft(str(Path(folder) / SETTINGS)):
        tensors, config = load_file(Path(folder) / TENSORS), saved_config(folder)
        config.inference_mode = not trainable
        if isinstance(base, PeftModel):
            base.add_adapter(name, config)
        else:
            base = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, PeftModel)(base, config, name)
        set_peft_model_state_dict(base, tensors, name)
    return base


@contextmanager
def errors_of_peft(location: str) -> Iterator[None]:
    """Turns peft's errors about an adapter's settings into an InputError. `location` names the file or key of the settings."""
    try:
        yield
    except (torch.OutOfMemoryError, InputError, Failure):
        raise
    except Exception as error:
        frames = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
        if not any(name.startswith("peft.") for name in frames):
            raise
        raise InputError(f"{location}: peft rejects these settings ({in_brief(error)}); fix them") from error
