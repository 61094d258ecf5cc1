"""One measurement of plain forwards: `python tests/bench/evaluate_plain.py SIZE`, started by `make bench`.

The same completions through transformers and peft, sorted by length and padded, in batches as large as those of `evaluate`. A
step is a pair; only the forwards count, without tokenization.
"""

import sys
from pathlib import Path

from sizes import LORA, WORK, Clock, high_water, model_folder, raw_rows, tokenizer

PAIRS = {"toy": 4, "demo": 200, "large": 96}
ROWS = 16  # completions of a forward


def reward(name: str) -> Path:
    """The folder of a reward adapter of random numbers, made once."""
    import torch
    from transformers import AutoModelForCausalLM

    from pipeline.models.adapters import SharedBase

    folder = WORK / name / "reward"
    if not (folder / "adapter_model.safetensors").exists():
        shared = SharedBase(AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=torch.float32))
        torch.manual_seed(0)
        shared.add("reward", lora=LORA, head=True)
        shared.save("reward", folder)
    return folder


def main(name: str) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    folder = reward(name)
    tokens, clock = tokenizer(name), Clock()
    base = AutoModelForSequenceClassification.from_pretrained(
        model_folder(name), num_labels=1, dtype="float32"
    )
    base.config.pad_token_id = tokens.pad_token_id
    model = PeftModel.from_pretrained(base, folder).eval()
    pairs = list(raw_rows("rm", name))[: PAIRS[name]]
    texts = [pair["prompt"] + pair[side] for pair in pairs for side in ("chosen", "rejected")]
    rows = sorted((tokens.apply_chat_template(one, return_dict=False) for one in texts), key=len)
    clock.step(0)
    with torch.no_grad():
        for first in range(0, len(rows), ROWS):
            batch = {"input_ids": rows[first : first + ROWS]}
            model(**tokens.pad(batch, return_tensors="pt")).logits.tolist()
    clock.step(PAIRS[name])
    clock.write(high_water(), warmup=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
