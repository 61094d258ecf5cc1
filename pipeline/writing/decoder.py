"""Decodes on the shared base of training, without a second copy of its weights."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import InputError, in_brief
from pipeline.models.adapters import SharedBase
from pipeline.models.logprobs import bar_tokens
from pipeline.models.lora import cast_once
from pipeline.models.packing import micro_batches
from pipeline.writing.graphs import Steps
from pipeline.writing.rows import Completion, Decoder, Row, RowSettings, Sampling, draw_tokens
from pipeline.writing.slots import SlotCache, live_first

# Maximum tokens in one forward of prompts, including padding. A larger forward would not be faster, and would need more memory.
PREFILL_TOKENS = {"cpu": 1 << 12, "cuda": 1 << 14}
# Decoding steps between two checks for finished rows. On a CPU, a check is free, and each removed row makes the next step
# faster. On a GPU, each check waits for the device, and a step with fewer rows is hardly faster.
STEPS_PER_CHECK = {"cpu": 1, "cuda": 8}
STEPS_PER_GRAPH = 32  # decoding steps between two checks for finished rows, if CUDA graphs replay steps
BUCKET = 64  # a CUDA graph attends to a multiple of this many positions

Drawn = tuple[Tensor, Tensor, Any]  # token ids (B,), their log-probs (B,), and the top-k alternatives or None


class SlotDecoder(Decoder):
    """Decodes all rows in one forward per step. Rows that join at the same time with the same prompt share its forward.

    The KV cache is freed when the last row leaves.

    Args:
        max_rows: maximum rows decoded at the same time, or None.
        max_positions: maximum positions of the KV cache over all rows, or None. Rows that would exceed this limit wait.
        pad: token id that pads prompts.
        look: decoding steps between two checks for finished rows, or None for the default of the device.
        graphs: whether a GPU replays steps as CUDA graphs while all rows have one role. By default, a GPU replays steps whenever
            the base supports CUDA graphs.
    """

    share = True  # whether rows with equal prompts share a forward; benchmarks set it to False

    def __init__(
        self,
        shared: SharedBase,
        max_rows: int | None = None,
        pad: int = 0,
        max_positions: int | None = None,
        look: int | None = None,
        graphs: bool | None = None,
    ) -> None:
        self.shared, self.max_rows, self.pad, self.max_positions = shared, max_rows, pad, max_positions
        config = shared.base.config.get_text_config()
        self.window = getattr(config, "sliding_window", None)
        self.kinds = set(getattr(config, "layer_types", None) or ())
        self.masked = self._takes_masks(config)
        # A CUDA graph cannot contain the collectives that gather a sharded base.
        uses_graphs = shared.device.type == "cuda" and not shared.sharded if graphs is None else graphs
        self.graphs = Steps(self._forward, self._take_back) if uses_graphs and self.masked else None
        self.look = look
        self.rows: list[Row] = []
        self.cache: Any = None  # a SlotCache, or None if there are no rows
        self.settings: RowSettings | None = None
        self.longest = 0  # number of tokens of the longest row in the cache
        self.equal = True  # whether all rows have the same number of tokens in the cache

    def add(self, role: str, folder: str) -> None:
        self.shared.add(role, folder=folder)

    def remove(self, role: str) -> None:
        self.shared.remove(role)

    def changed(self, role: str | None) -> None:
        """Does nothing, because the decoder samples with the same adapter parameters that are trained."""

    def reset(self) -> None:
        self.rows, self.cache, self.settings = [], None, None
        self.longest, self.equal = 0, True
        if self.graphs:
            self.graphs.forget()

    def generate(
        self, role: str | None, prompts: Sequence[Sequence[int]], numbers: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        with cast_once(), self.shared.use(role):  # activate the role once, not in each step
            return super().generate(role, prompts, numbers, sampling)

    def fits(self, joining: Sequence[Row], row: Row) -> bool:
        count = len(self.rows) + len(joining) + 1
        if count == 1:
            return True
        if self.max_rows is not None and count > self.max_rows:
            return False
        if not self.masked:  # rows of different lengths need a mask
            return not self.rows and len(joining[0].prompt) == len(row.prompt)
        if self.max_positions is None:
            return True
        longest = max(x.positions for x in (*self.rows, *joining, row))
        slots, positions = self.cache.size_with(count, longest) if self.cache else (count, longest)
        return slots * positions <= self.max_positions

    @torch.no_grad()
    def join(self, rows: Sequence[Row]) -> None:
        device, first = self.shared.device, len(self.rows)
        size = first + len(rows), max(row.positions for row in (*self.rows, *rows))
        if self.cache is None:
            self.cache = SlotCache(self.shared.base.config, *size, device)
        else:
            self.cache.reserve(*size)
        hidden = self._read(rows)
        self.cache.lengths[first : size[0]] = torch.tensor([len(row.prompt) for row in rows], device=device)
        settings = RowSettings.of(rows, device)
        self.settings = self.settings.and_of(settings) if self.settings else settings
        self.rows = [*self.rows, *rows]
        self._look_at_rows()
        with self.shared.use_each([row.role for row in rows]):
            drawn = self._draw(hidden, slice(first, size[0]))
        self._note([drawn], first)

    @torch.no_grad()
    def step(self) -> None:
        self._leave()
        if not self.rows:
            return
        roles = [row.role for row in self.rows]
        graphs = self.graphs if len(set(roles)) == 1 and self.graphs and self.graphs.works else None
        interval = self.look or (STEPS_PER_GRAPH if graphs else STEPS_PER_CHECK[self.shared.device.type])
        steps = min(interval, *(row.sampling.max_new_tokens - len(row.tokens) for row in self.rows))
        draws = []
        with self.shared.use_each(roles):
            for ahead in reversed(range(steps)):
                self.longest += 1
                count, seen = len(self.rows), self.longest
                if graphs:
                    seen = min(-(-seen // BUCKET) * BUCKET, self.cache.positions)
                    hidden = graphs((count, seen, roles[0]), count, seen, ahead)
                else:
                    hidden = self._forward(count, seen)
                draws.append(self._draw(hidden, slice(0, count)))
        self._note(draws, 0)

    # ------------------------------------------------------------------------------------------ forwards

    def _read(self, rows: Sequence[Row]) -> Tensor:
        """Reads the prompts of B new rows into the cache. Returns the (B, H) hidden states of the prompts' last tokens."""
        device, first, cache = self.shared.device, len(self.rows), self.cache
        slots_of: dict[Any, list[int]] = {}  # (role, prompt) -> slots of its rows
        for slot, row in enumerate(rows, first):
            slots_of.setdefault((row.role, *row.prompt) if self.share else slot, []).append(slot)
        slots = list(slots_of.values())
        distinct = [rows[group[0] - first] for group in slots]
        lengths = [len(row.prompt) for row in distinct]
        batches = micro_batches(lengths, None, PREFILL_TOKENS[device.type], device.type)
        if cache.other_layers:  # layers without slots need all prompts in one forward
            batches = [list(range(len(distinct)))]
        states: dict[int, Tensor] = {}
        for batch in batches:
            width = max(lengths[i] for i in batch)
            ids = torch.tensor(
                [[*distinct[i].prompt, *[self.pad] * (width - lengths[i])] for i in batch], device=device
            )
            pairs = sorted((slot, index) for index, i in enumerate(batch) for slot in slots[i])
            targets, prompts = torch.tensor(pairs, device=device).T
            cache.joining = targets, prompts
            with self.shared.use_each([distinct[i].role for i in batch]):
                hidden = self._body(ids, None, torch.arange(width, device=device).expand(len(batch), -1))
            last = torch.tensor([lengths[i] - 1 for i in batch], device=device)
            states |= zip((slot for slot, _ in pairs), hidden[prompts, last[prompts]], strict=True)
            for layer in cache.other_layers:
                layer.reorder_cache(prompts)
        cache.joining = None
        return torch.stack([states[slot] for slot in sorted(states)])

    def _forward(self, count: int, seen: int) -> Tensor:
        """Runs a forward on the newest tokens of `count` rows, which attend to `seen` positions. Returns (B, H) hidden states."""
        cache = self.cache
        cache.seen, lengths = seen, cache.lengths[:count]
        needs_mask = not self.equal or self.graphs or (self.window and seen > self.window)
        mask = self._mask(lengths, seen) if needs_mask and self.masked else None
        hidden = self._body(cache.newest[:count, None], mask, lengths.unsqueeze(-1))[:, -1]
        lengths += 1
        return hidden

    def _take_back(self, count: int) -> None:
        self.cache.lengths[:count] -= 1

    def _body(self, ids: Tensor, mask: Any, positions: Tensor) -> Tensor:
        """Runs a forward on tokens (B, T), and adds the tokens to the cache. Returns the tokens' hidden states (B, T, H)."""
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return self.shared.body(**inputs, past_key_values=self.cache, use_cache=True).last_hidden_state

    def _mask(self, lengths: Tensor, seen: int) -> Any:
        """Returns the (B, 1, 1, seen) attention mask of each row's newest token: 0 for visible tokens, and -inf for others.

        For a model with full attention and sliding windows, returns {kind of layer: mask}.
        """
        columns, newest = self.cache.columns[:seen], lengths.unsqueeze(-1)
        visible = columns <= newest
        has_sliding = any(layer.is_sliding for layer in self.cache.slot_layers)
        window = visible & (columns > newest - self.window) if has_sliding and self.window else visible
        if {"full_attention", "sliding_attention"} <= self.kinds:
            return {"full_attention": self._bias(visible), "sliding_attention": self._bias(window)}
        return self._bias(window)

    def _bias(self, mask: Tensor) -> Tensor:
        bias = mask.new_zeros(mask.shape, dtype=self.shared.autocast or self.shared.base.dtype)
        return bias.masked_fill(~mask, float("-inf"))[:, None, None]

    def _takes_masks(self, config: Any) -> bool:
        """Returns whether rows of different lengths can be decoded together.

        The base's attention must accept an additive mask, and must take positions from `position_ids`.
        """
        cache = SlotCache(self.shared.base.config, 1, 1, self.shared.device)
        takes_positions = "position_ids" in inspect.signature(self.shared.base.base_model.forward).parameters
        return (
            takes_positions
            and not cache.other_layers
            and not getattr(config, "alibi", False)
            and self.kinds <= {"full_attention", "sliding_attention"}
            and config._attn_implementation in ("sdpa", "eager")
        )

    # -------------------------------------------------------------------------------------------- tokens

    def _draw(self, hidden: Tensor, rows: slice) -> Drawn:
        """Draws the next token of the given rows from the hidden states of their last tokens."""
        assert self.settings
        noise, temperature, top_p, minimum, written = (values[rows] for values in self.settings)
        logits, drawn_rows = self.shared.logits(hidden), self.rows[rows]
        if any(row.sampling.min_new_tokens for row in drawn_rows):
            logits = bar_tokens(logits, written < minimum, drawn_rows[0].sampling.eos)
        nucleus = any(row.sampling.top_p < 1 for row in drawn_rows)
        token, logprob = draw_tokens(
            logits,
            noise.gather(1, written.unsqueeze(-1)).squeeze(-1),
            temperature,
            top_p if nucleus else None,
            [row.sampling.temperature == 0 for row in drawn_rows],
        )
        alternatives = None
        if any(row.top is not None for row in drawn_rows):
            model_logprobs = logits.log_softmax(-1)
            reports_model = torch.tensor([row.top is not None for row in drawn_rows], device=logits.device)
            logprob = model_logprobs.gather(-1, token.unsqueeze(-1)).squeeze(-1).where(reports_model, logprob)
            if top_k := max(row.top or 0 for row in drawn_rows):
                alternatives = model_logprobs.topk(top_k, dim=-1)
        self.cache.newest[rows] = token
        written += 1
        return token, logprob, alternatives

    def _note(self, draws: list[Drawn], first: int) -> None:
        """Appends drawn tokens to the rows from index `first` on, and removes finished rows."""
        tokens, logprobs = (torch.stack([step[i] for step in draws], 1).tolist() for i in (0, 1))
        tops = [(x.indices.tolist(), x.values.tolist()) if x else None for _, _, x in draws]
        for i, row in enumerate(self.rows[first:]):
            for token, logprob, top in zip(tokens[i], logprobs[i], tops, strict=True):
                if row.done:
                    break
                row.tokens.append(token)
                row.logprobs.append(logprob)
                row.ended = token in row.sampling.eos
                if row.top and top:
                    ids, values = (x[i][: row.top] for x in top)
                    row.tops.append(list(zip(ids, values, strict=True)))
        self._leave()

    def _leave(self) -> None:
        """Removes finished rows. Frees the cache when no row is left."""
        live = [not row.done for row in self.rows]
        if all(live):
            return
        if not any(live):
            self.reset()
            return
        assert self.settings
        order = live_first(live)
        self.settings = self.settings.take(torch.tensor(order, device=self.shared.device))
        self.cache.keep(order, self.longest)
        self.rows = [self.rows[i] for i in order]
        self._look_at_rows()

    def _look_at_rows(self) -> None:
        """Updates `longest` and `equal`. The cache contains all tokens of a row except the newest one."""
        lengths = [len(row.prompt) + max(0, len(row.tokens) - 1) for row in self.rows]
        self.longest, self.equal = max(lengths), len(set(lengths)) == 1

    # --------------------------------------------------------------------------------------------- check

    @torch.no_grad()
    def check(self) -> None:
        """Decodes three short prompts that join and leave at different steps, as a test.

        Raises InputError if the log-probs differ from a forward without a cache."""
        shared, size = self.shared, min(self.shared.vocab_size, 97)
        limit = 1e-3 if shared.autocast is None and shared.base.dtype == torch.float32 else 0.2
        reason, worst = "log-probs of decoding differ from those of a forward without a cache", 0.0
        prompts = [[(7 * i + 3 * j) % size for i in range(2 + 3 * j)] for j in range(3)]
        greedy = [Sampling(length, (), temperature=0.0) for length in (1, 4, 3)]
        rows = [Row(prompt, 0, sampling, top=1) for prompt, sampling in zip(prompts, greedy, strict=True)]
        waiting = list(rows)
        try:
            while waiting or self.rows:
                if waiting and self.fits([], waiting[0]):
                    self.join([waiting.pop(0)])
                self.step()
            for row in rows:
                ids = torch.tensor([[*row.prompt, *row.tokens]], device=shared.device)
                expected = shared.logits(shared.hidden(None, ids))[0].log_softmax(-1)
                drawn = zip(row.tokens, row.logprobs, strict=True)
                for position, (token, logprob) in enumerate(drawn, len(row.prompt)):
                    difference = (expected[position - 1, token] - logprob).abs()
                    worst = max(worst, float(difference.nan_to_num(torch.inf)))
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            worst, reason = torch.inf, in_brief(error)
        if worst > limit:
            raise InputError(
                f"{type(shared.base).__name__}: rows cannot be decoded together on this base ({reason}); expected a decoder-only "
                "model such as Llama, Mistral, Gemma or Qwen",
                key="model.name_or_path",
            )
