"""KTO's rows come in random order with every loss, with a KL term or without."""

import pytest
import toy_ppo as toy
from toy_data import tokenizer

from pipeline.config.schema_of import WORDS
from pipeline.data.kl_pairs import PairedBatches
from pipeline.stages.kto import sampling


def trainer(loss, folder):
    """TRL's trainer as the stage makes it, on 32 thumbs."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import LlamaForCausalLM
    from trl import KTOConfig, KTOTrainer

    class Trainer(PairedBatches, KTOTrainer):
        def _prepare_dataset(self, dataset, *_):
            return dataset

    rows = [{"prompt_ids": [3], "completion_ids": [4 + i, 5], "label": bool(i % 2)} for i in range(32)]
    words = tokenizer()
    args = KTOConfig(
        output_dir=str(folder), report_to="none", disable_tqdm=True, use_cpu=True, bf16=False, max_length=None, max_steps=2,
        gradient_checkpointing=False, per_device_train_batch_size=4, loss_type=loss, train_sampling_strategy=sampling(loss),
    )  # fmt: skip
    return Trainer(
        model=LlamaForCausalLM(toy.config(vocab_size=len(words))), args=args, train_dataset=Dataset.from_list(rows),
        processing_class=words, peft_config=LoraConfig(task_type="CAUSAL_LM", **toy.LORA),
    )  # fmt: skip


@pytest.mark.parametrize("loss", WORDS["KTOConfig.loss_type"].split())
def test_rows_are_shuffled(loss, tmp_path):
    made = trainer(loss, tmp_path)
    own = 4 if made.calculate_KL else None  # behind its own rows a batch has those that it is paired with
    batches = made.get_train_dataloader().batch_sampler
    order = [row for batch in batches for row in list(batch)[:own]]
    assert sorted(order) == list(range(32)) and order != sorted(order)
