"""Measures `evaluate`. `make bench` runs `python tools/bench/evaluate.py ours|plain SIZE evaluate`. A step is one pair."""

import json
import sys
import time

from sizes import ROOT, SIZES, Clock, high_water
from stage import raw_rows

ROWS = 16  # completions per forward pass


def ours(name: str, _: str) -> None:
    """Runs `evaluate` in this process. Measures only the scoring, from tokenized rows to metrics."""
    from pipeline.__main__ import main as command
    from pipeline.stages import pairs

    clock, measure, size = Clock(), pairs.measure_pairs, SIZES[name]
    folder = size.folder / "evaluate"
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in raw_rows("rm", size)[: size.pairs]]
    (folder / "pairs.jsonl").write_text("".join(lines))

    def measured(*given: object) -> object:
        clock.step(0)
        found = measure(*given)
        clock.step(size.pairs)
        return found

    pairs.measure_pairs = measured
    settings = [
        f"model.name_or_path={size.model}",
        f"reward={size.adapter(0, head=True)}",
        f"data.pairs={folder}/pairs.jsonl",
        *("policy=null", "baseline=null", "judge=null", "data.eval=null", "gate={}"),
        f"trainer.local_rollout_forward_batch_size={ROWS}",
        f"run.storage_path={folder}/runs",
        f"run.name=bench-{time.time_ns()}",
    ]
    if status := command(["evaluate", str(ROOT / "jobs/demo/evaluate.yaml"), *settings]):
        sys.exit(status)
    clock.write(high_water(), warmup=0)


def plain(name: str, _: str) -> None:
    """Scores the same completions with transformers and peft, sorted by length and padded, in batches of the same size.

    Measures only the forward passes, without tokenization.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    size, clock = SIZES[name], Clock()
    folder, tokens = size.adapter(0, head=True), size.tokenizer()
    loader = AutoModelForSequenceClassification
    base = loader.from_pretrained(size.model, num_labels=1, dtype="float32")
    base.config.pad_token_id = tokens.pad_token_id
    model = PeftModel.from_pretrained(base, folder).eval()
    pairs = raw_rows("rm", size)[: size.pairs]
    texts = [pair["prompt"] + pair[side] for pair in pairs for side in ("chosen", "rejected")]
    rows = sorted((tokens.apply_chat_template(one, return_dict=False) for one in texts), key=len)
    clock.step(0)
    with torch.no_grad():
        for first in range(0, len(rows), ROWS):
            batch = {"input_ids": rows[first : first + ROWS]}
            model(**tokens.pad(batch, return_tensors="pt")).logits.tolist()
    clock.step(size.pairs)
    clock.write(high_water(), warmup=0)


if __name__ == "__main__":
    {"ours": ours, "plain": plain}[sys.argv[1]](*sys.argv[2:])
