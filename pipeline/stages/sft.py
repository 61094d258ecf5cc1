"""Supervised fine-tuning: trains an adapter on demonstrations.

    make sft    or    python -m pipeline sft jobs/demo/sft.yaml [section.key=value ...]

This stage runs TRL's SFTTrainer with a loss on completions only. dpo, kto and ppo continue the adapter.
"""

from typing import Any

from pipeline.run.launch import Recipe
from pipeline.run.worker import Worker

SAMPLES = 8  # eval prompts in the report
# Maximum tokens of a prompt and of a sampled completion, so that sampling needs less memory than training.
PROMPT_TOKENS, SAMPLE_TOKENS = 512, 128


def _at_ends(inputs: Any, ends: list[int]) -> Any:
    """Returns a mask that is True at the end tokens in the labels of a batch. Omits the first label of each row."""
    import torch

    labels = inputs["labels"][:, 1:]
    return torch.isin(labels, torch.tensor(ends, device=labels.device))


def train(worker: Worker) -> dict[str, Any]:
    import torch
    from trl import SFTConfig, SFTTrainer

    from pipeline.models.base import check_ends
    from pipeline.models.tokenizer import eos_ids
    from pipeline.stages import trl_trainer
    from pipeline.stages.exact_batches import ExactBatches

    class Trainer(ExactBatches, SFTTrainer):
        """TRL's trainer, with each row exactly once per epoch over all workers, and the metric `eos_accuracy`."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            outputs: list[Any] = []
            hook = model.register_forward_hook(lambda *call: outputs.append(call[-1]))
            try:
                result = super().compute_loss(model, inputs, *args, **options)
            finally:
                hook.remove()
            is_end = _at_ends(inputs, ends)
            counts = torch.stack([(outputs[-1].is_top1 * is_end).sum(), is_end.sum()])
            predicted, count = self.accelerator.gather(counts).view(-1, 2).sum(0).tolist()
            if count:
                mode = "train" if self.model.training else "eval"
                self._metrics[mode]["eos_accuracy"].append(predicted / count)
            return result

        def _weight(self, metric: str, inputs: Any, weight: int) -> int:
            return int(_at_ends(inputs, ends).sum()) if metric == "eos_accuracy" else weight

    # The rows are already tokenized, truncated and packed, and have labels.
    prepared = {"skip_prepare_dataset": True}
    args = trl_trainer.make_arguments(worker, SFTConfig, dataset_kwargs=prepared, max_length=None)
    rows, base = worker.rows("train"), worker.load_base()
    ends = eos_ids(worker.tokenizer)
    learned = {token for row in rows.select(range(min(64, len(rows))))["labels"] for token in row}
    check_ends(base, worker.tokenizer, learned.intersection(ends))
    trainer = trl_trainer.make_trainer(
        Trainer,
        worker.work.lora,
        model=base,
        args=args,
        train_dataset=rows,
        eval_dataset=worker.rows("eval"),
        processing_class=worker.tokenizer,
    )
    outcome = trl_trainer.train_trl(worker, trainer)
    if trainer.eval_dataset is not None:
        outcome.samples = greedy_samples(worker, trainer, ends)
    return trl_trainer.finish_trl(worker, trainer, outcome)


RECIPE = Recipe(train)


def greedy_samples(worker: Worker, trainer: Any, ends: list[int]) -> list[dict[str, Any]]:
    """Returns the first short eval prompts with greedy completions of the base and of the trained adapter."""
    import torch
    from transformers import GenerationConfig

    from pipeline.stages.rm import as_text

    prompts: dict[str, list[int]] = {}
    longest = min(PROMPT_TOKENS, worker.work.context - 1)
    for row in trainer.eval_dataset:
        start = next((i for i, label in enumerate(row["labels"]) if label != -100), 0)
        ids = row["input_ids"][:start]
        if 0 < start <= longest:
            prompts.setdefault(as_text(worker.tokenizer, ids, ids)[0], ids)
        if len(prompts) == SAMPLES:
            break
    if not prompts:
        return []
    rows = {"input_ids": [*prompts.values()]}
    batch = worker.tokenizer.pad(rows, padding_side="left", return_tensors="pt").to(worker.device)
    length = batch["input_ids"].shape[1]
    config = GenerationConfig(
        max_new_tokens=min(SAMPLE_TOKENS, worker.work.context - length),
        do_sample=False,
        repetition_penalty=1.0,  # the base's generation config may set a penalty
        eos_token_id=ends,
        pad_token_id=worker.tokenizer.pad_token_id,
    )
    model = trainer.accelerator.unwrap_model(trainer.model).eval()

    def completions() -> list[str]:
        with torch.no_grad(), trainer.compute_loss_context_manager():
            ids = model.generate(**batch, generation_config=config)[:, length:]
        return worker.tokenizer.batch_decode(ids, skip_special_tokens=True)

    with model.disable_adapter():
        base_completions = completions()
    return [
        {"prompt": prompt, "before": {"completion": base.strip()}, "after": {"completion": tuned.strip()}}
        for prompt, base, tuned in zip(prompts, base_completions, completions(), strict=True)
    ]
