"""One measurement of bare TRL: `python tests/bench/stage_bare.py STAGE SIZE`, started by `make bench`.

The same raw rows, base and arguments as the pipeline's run, in one plain process, TRL templating and tokenising.
"""

import sys
from typing import Any

from sizes import LORA, SIZES, WORK, Clock, arguments, high_water, model_folder, raw_rows, tokenizer


def main(stage: str, name: str) -> None:
    import datasets
    import trl
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

    clock, size = Clock(), SIZES[name]

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: object) -> None:
            if "loss" in logs:
                clock.step(state.global_step)

    scores = stage == "rm"
    kind = {"sft": "SFT", "rm": "Reward", "dpo": "DPO"}[stage]
    loader = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = loader.from_pretrained(
        model_folder(name), dtype="float32", **({"num_labels": 1} if scores else {})
    )
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(WORK / name / "bare"), report_to="none", disable_tqdm=True, **arguments(stage, name)
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_list(list(raw_rows(stage, name))),
        processing_class=tokenizer(name),
        peft_config=LoraConfig(task_type="SEQ_CLS" if scores else "CAUSAL_LM", **LORA),
        callbacks=[Watch()],
    )
    trainer.train()
    clock.write(high_water(), size.warmup)


if __name__ == "__main__":
    main(*sys.argv[1:])
