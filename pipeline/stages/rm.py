"""Reward model: trains an adapter and a scalar head to score the chosen completion of a pair above the rejected one.

    make rm    or    python -m pipeline rm jobs/demo/rm.yaml [section.key=value ...]

This stage runs TRL's RewardTrainer (Bradley-Terry loss, optional margin and centering). The registered version has the mean and
standard deviation of its scores on eval completions, with which PPO normalizes scores.
"""

from typing import Any

from pipeline.data.messages import SIDES, shared_length
from pipeline.run.launch import Recipe
from pipeline.run.parts import share_rows
from pipeline.run.worker import Worker
from pipeline.run_folder import DOUBTFUL, PAIRS
from pipeline.system.progress import Bar

TABLE, WORST = (
    4096,
    8,
)  # maximum number of pairs in the report's chart, and of pairs whose text the report shows


def train(worker: Worker) -> dict[str, Any]:
    import numpy as np
    from transformers import set_seed
    from trl import RewardConfig, RewardTrainer

    from pipeline.stages import trl_trainer
    from pipeline.stages.exact_batches import ExactBatches

    class Trainer(ExactBatches, RewardTrainer):
        """TRL's trainer, with each pair exactly once per epoch over all workers."""

    rows, held_out = worker.rows("train"), worker.rows("eval")
    # max_length is None, because pairs that are too long have been dropped already.
    args = trl_trainer.make_arguments(worker, RewardConfig, max_length=None)
    set_seed(args.seed)  # every rank initializes the head with the same random numbers
    trainer = trl_trainer.make_trainer(
        Trainer,
        worker.work.lora,
        task_type="SEQ_CLS",  # with another task type, peft would freeze the random head
        model=worker.load_base(worker.tokenizer),
        args=args,
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=worker.tokenizer,
    )
    outcome = trl_trainer.train_trl(worker, trainer)
    # Without eval rows, measures the mean and standard deviation of scores on some random training rows.
    indices = sorted(np.random.default_rng(args.seed).permutation(len(rows))[:4096].tolist())
    pairs = score_pairs(worker, trainer, held_out if held_out is not None else rows.select(indices))
    scores = [pair[side] for side in SIDES for pair in pairs]
    mean = sum(scores) / len(scores)
    std = (sum((s - mean) ** 2 for s in scores) / max(1, len(scores) - 1)) ** 0.5
    outcome.lineage = {"reward": {"mean": mean, "std": std}}
    if held_out is not None:
        # Averages over pairs. TRL averages over batches, which gives a short last batch too much weight.
        margins = [pair["chosen"] - pair["rejected"] for pair in pairs]
        outcome.metrics["eval_accuracy"] = sum(margin > 0 for margin in margins) / len(margins)
        outcome.metrics["eval_margin"] = sum(margins) / len(margins)
        outcome.tables = {PAIRS: pairs[:TABLE], DOUBTFUL: lowest_margins(worker, held_out, pairs)}
    return trl_trainer.finish_trl(worker, trainer, outcome)


RECIPE = Recipe(train)


def score_pairs(worker: Worker, trainer: Any, rows: Any) -> list[dict[str, float]]:
    """Returns {chosen, rejected, chosen_tokens, rejected_tokens} of each pair, in order.

    `chosen` and `rejected` are the scores of the completions, and the lengths in tokens include the prompt.
    """
    import torch

    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    size = trainer.args.per_device_eval_batch_size
    if worker.rank == 0:
        print(f"scoring {len(rows)} pairs", flush=True)

    def scored(numbers: range) -> list[dict[str, float]]:
        pairs: list[dict[str, float]] = []
        progress = Bar(total=-(-len(numbers) // size), desc="scoring pairs: batch")
        for start in range(0, len(numbers), size):
            part = [dict(row) for row in rows.select(numbers[start : start + size])]
            batch = trainer.data_collator(part)
            batch = {key: batch[key].to(model.device) for key in ("input_ids", "attention_mask")}
            with torch.no_grad(), trainer.compute_loss_context_manager():
                scores = model(**batch).logits.squeeze(-1).float()
            for row, chosen, rejected in zip(part, *[side.tolist() for side in scores.chunk(2)], strict=True):
                lengths = {f"{side}_tokens": len(row[f"{side}_ids"]) for side in SIDES}
                pairs.append({"chosen": chosen, "rejected": rejected, **lengths})
            if worker.rank == 0:
                progress.update()
        return pairs

    return share_rows(worker, len(rows), scored)


def lowest_margins(worker: Worker, rows: Any, pairs: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Returns the distinct pairs with the lowest margins as text. Such pairs show errors of the model or of the data."""
    examples: dict[tuple[str, str, str], dict[str, Any]] = {}
    for index in sorted(range(len(pairs)), key=lambda i: pairs[i]["chosen"] - pairs[i]["rejected"]):
        if len(examples) == WORST:
            break
        row, scores = rows[index], pairs[index]
        texts = as_text(worker.tokenizer, row["chosen_ids"], row["rejected_ids"])
        example: dict[str, Any] = {"prompt": texts[0]}
        for side, text in zip(SIDES, texts[1:], strict=True):
            example[side] = {"text": text, "score": scores[side]}
        examples.setdefault(texts, example)
    return list(examples.values())


def as_text(tokenizer: Any, chosen: list[int], rejected: list[int]) -> tuple[str, str, str]:
    """Returns the texts of the prompt and of both completions of a token pair.

    A completion begins after the last generation prompt.
    """
    messages = [{"role": "user", "content": "?"}]
    prefix, _, suffix = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    ).partition("?")
    texts = [tokenizer.decode(ids).removeprefix(prefix) for ids in (chosen, rejected)]
    if not suffix or not all(suffix in text for text in texts):  # raw text, without a template
        length = shared_length(chosen, rejected)
        spans = [chosen[:length], chosen[length:], rejected[length:]]
        prompt, *completions = tokenizer.batch_decode(spans, skip_special_tokens=True)
        return prompt.strip(), *completions
    completions = [text.rpartition(suffix)[2] for text in texts]
    for token in tokenizer.all_special_tokens:
        completions = [completion.replace(token, "") for completion in completions]
    prompt = texts[0].rpartition(suffix)[0].strip().removeprefix(tokenizer.bos_token or "").strip()
    return prompt, completions[0], completions[1]
