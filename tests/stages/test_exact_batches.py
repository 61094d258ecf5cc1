"""Tests that an epoch has each row exactly once, and that losses and metrics do not depend on the number of workers."""

import json
import os
import random
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from forked import in_processes
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from torch.utils.data import DataLoader
from toy_data import tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from pipeline.data.read import to_hf
from pipeline.stages.exact_batches import EvaluationSampler, ExactBatches, ExactBatchSampler
from pipeline.stages.kl_pairs import PairedBatches, PairedEvaluationSampler, mismatched_rows

TRL = {
    "sft": (SFTTrainer, SFTConfig),
    "rm": (RewardTrainer, RewardConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
}


def flat(lists):
    return list(chain.from_iterable(lists))


def ranks(rows, size, world, seed, epoch, **options):
    samplers = [ExactBatchSampler(rows, size, rank, world, seed, **options) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 120),
    size=st.integers(1, 7),
    world=st.integers(1, 5),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 3),
)
def test_each_row_once_and_equal_steps(rows, size, world, seed, epoch):
    batches = ranks(rows, size, world, seed, epoch)
    one = ranks(rows, size * world, 1, seed, epoch)[0]
    assert {*map(len, batches), len(ExactBatchSampler(rows, size, 0, world, seed))} == {len(one)}
    for step, whole in enumerate(one):
        parts = [of_rank[step] for of_rank in batches]
        # the rows of all workers are the rows that a single worker would have in this step
        assert flat(parts) == whole
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert sorted(flat(one)) == list(range(rows))


@settings(max_examples=80, deadline=None)
@given(rows=st.integers(1, 90), size=st.integers(1, 7), world=st.integers(1, 5))
def test_eval_batches_do_not_depend_on_workers(rows, size, world):
    dealt = [list(EvaluationSampler(rows, size, rank, world)) for rank in range(world)]
    assert {len(batches) for batches in dealt} == {len(EvaluationSampler(rows, size, 0, world))}
    in_turn = [batch for step in zip(*dealt, strict=True) for batch in step if batch]
    assert in_turn == list(EvaluationSampler(rows, size, 0, 1)) and flat(in_turn) == list(range(rows))


def test_arrow_blocks_are_not_copied():
    class Shard:
        def iter_batches(self, **_):
            yield from blocks

    ids = pa.array([[1, 2], [3]], pa.list_(pa.int32()))
    blocks = [pa.table({"input_ids": ids}), pa.table({"input_ids": ids})]
    rows = to_hf(Shard(), "abc")
    assert rows["input_ids"][:] == [[1, 2], [3], [1, 2], [3]] and rows._fingerprint == "abc"
    assert rows.data.column("input_ids").chunk(1).buffers()[3].address == ids.buffers()[3].address
    assert rows.__getitems__([]) == []


@pytest.mark.parametrize(
    ("rows", "before"),
    [([3, 3, 4, 3], None), ([5, 5, 5, 6], [1]), ([7], [7, 2]), ([8, 8], [1, 8])],
)
def test_a_repeated_row_of_kto_does_not_get_its_own_completion(rows, before):
    rows, before = torch.tensor(rows), None if before is None else torch.tensor(before)
    assert not (mismatched_rows(rows, before) == rows).any()


def test_eval_rows_of_kto_get_completions_from_half_the_dataset_away():
    for batch in PairedEvaluationSampler(11, 2, 0, 1):
        half = len(batch) // 2
        assert batch[half:] == [(row + 5) % 11 for row in batch[:half]]


# ---- two workers compared with one -----------------------------------------------------------------------------

STEPS = 6  # optimizer steps: two epochs of 21 or 23 rows with a global batch of 8


def trainer(
    stage: str, rows: int, size: int, accumulate: int, folder: str, mixed: bool = True, held_out: int = 5
):
    """Returns a small TRL trainer that trains and evaluates on random rows. If `mixed` is False, TRL makes the batches."""
    random.seed(0)
    torch.set_num_threads(1)

    def ids(low, high):
        return [random.randrange(3, 250) for _ in range(random.randrange(low, high))]

    def row():
        if stage == "sft":
            tokens = ids(5, 30)
            return {"input_ids": tokens, "labels": [-100] * 3 + tokens[3:]}
        if stage == "rm":
            return {"chosen_ids": ids(5, 30), "rejected_ids": ids(5, 30)}
        if stage == "dpo":
            return {"prompt_ids": ids(3, 9), "chosen_ids": ids(4, 20), "rejected_ids": ids(4, 20)}
        return {"prompt_ids": ids(3, 9), "completion_ids": ids(4, 20), "label": random.random() < 0.3}

    data = Dataset.from_list([row() for _ in range(rows)])
    base, config = TRL[stage]
    ours = PairedBatches if stage == "kto" else ExactBatches

    class Trainer(*((ours, base) if mixed else (base,))):
        def _prepare_dataset(self, dataset, *_):
            return dataset

        def get_train_dataloader(self):
            if mixed or stage != "kto":
                return super().get_train_dataloader()
            # TRL's dataloader keeps the row order of the file.
            return in_our_order(self.train_dataset, size, self.data_collator)

    tok = tokenizer()
    shape = LlamaConfig(
        vocab_size=len(tok), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=tok.pad_token_id, num_labels=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = (LlamaForSequenceClassification if stage == "rm" else LlamaForCausalLM)(shape)
    options = {"dataset_kwargs": {"skip_prepare_dataset": True}} if stage == "sft" else {}
    lora = (
        LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        if stage in ("dpo", "kto")
        else None
    )
    args = config(
        output_dir=folder, per_device_train_batch_size=size, per_device_eval_batch_size=held_out, gradient_accumulation_steps=accumulate, max_length=None,
        max_steps=STEPS, logging_steps=1, save_steps=4, learning_rate=1e-2, report_to="none", disable_tqdm=True,
        bf16=False, use_cpu=True, gradient_checkpointing=False, **options,
    )  # fmt: skip
    held_out_rows = data
    if stage == "kto" and not mixed:  # TRL's KTOTrainer reads the column KL_completion_ids
        half = [row["completion_ids"] for row in data]
        held_out_rows = data.add_column("KL_completion_ids", half[rows // 2 :] + half[: rows // 2])
    sets = {"train_dataset": data, "eval_dataset": held_out_rows}
    return Trainer(model=model, args=args, **sets, processing_class=tok, peft_config=lora)


def in_our_order(data, size: int, collator):
    """Returns a dataloader with the row order of ExactBatches. The KL term pairs a row with the previous row, as in TRL."""

    def collate(rows):
        kl = [rows[-1]["completion_ids"]] + [row["completion_ids"] for row in rows[:-1]]
        return collator([{**row, "KL_completion_ids": ids} for row, ids in zip(rows, kl, strict=True)])

    class Epochs:
        epoch = -1

        def __iter__(self):
            self.epoch += 1
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(42 + self.epoch))
            yield from (part.tolist() for part in order.split(size))

        def __len__(self):
            return -(-len(data) // size)

    return DataLoader(data, batch_sampler=Epochs(), collate_fn=collate)


def losses(stage, rows, size, accumulate, folder, mixed=True, resume=None):
    made = trainer(stage, rows, size, accumulate, str(folder), mixed)
    made.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def evaluated(stage, rows, folder, mixed=True, held_out=5):
    """Returns the eval metrics of a trainer before training."""
    made = trainer(stage, rows, 2, 2, str(folder), mixed, held_out)
    if stage == "kto":  # changes the policy, so that it differs from the reference
        for name, parameter in made.model.named_parameters():
            if "lora_B" in name:
                parameter.data += 0.1
    made.evaluate()
    [figures] = [entry for entry in made.state.log_history if "eval_loss" in entry]
    times = ("_runtime", "per_second", "preparation_time")
    return {name: value for name, value in figures.items() if not name.endswith(times)}


QUICK, SLOW = [("sft", 21), ("kto", 21)], [("rm", 23), ("dpo", 21)]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


def losses_of_all(rank: int, folder: str, port: str, cases: list[tuple[str, int]]) -> None:
    """Runs in each of the two processes, with 2 rows per micro-batch and 2 micro-batches per step."""
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
    }

    for stage, rows in cases:
        own = Path(folder) / f"{stage}{rows}"
        figures = {"metrics": evaluated(stage, rows, own), "losses": losses(stage, rows, 2, 2, own)}
        if rank == 0:
            (own / "figures.json").write_text(json.dumps(figures))
    torch.distributed.barrier()  # if a rank exits before the other rank is ready, the other rank may abort
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    """Returns a function that maps a case to the results and the folder of a run on two workers.

    All quick cases run in the same two processes, because imports take most of the time.
    """
    folders = {}

    def run(stage, rows):
        cases = QUICK if (stage, rows) in QUICK else SLOW
        if stage not in folders:
            folder = tmp_path_factory.mktemp("two")
            port = str(random.SystemRandom().randrange(20000, 30000))
            in_processes(losses_of_all, str(folder), port, cases)
            folders.update({one: folder for one, _ in cases})
        folder = folders[stage] / f"{stage}{rows}"
        return json.loads((folder / "figures.json").read_text()), folder

    return run


@pytest.mark.parametrize("stage,rows", CASES)
def test_two_workers_have_the_losses_of_one(stage, rows, two_workers, tmp_path, monkeypatch):
    """With 23 rows, the last batch has unequal shares. With 21 rows, only one worker has a row in the last micro-batch."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    figures, folder = two_workers(stage, rows)
    # TRL's trainer computes the full batch at once, so its loss is a plain mean over rows or tokens.
    stock = losses(stage, rows, 8, 1, tmp_path / "stock", mixed=False)
    assert len(stock) == STEPS
    assert figures["losses"] == pytest.approx(stock, abs=1e-5)
    assert losses(stage, rows, 4, 2, tmp_path / "accumulated") == pytest.approx(stock, abs=1e-5)
    resumed = losses(stage, rows, 4, 2, tmp_path / "resumed", resume=str(folder / "checkpoint-4"))
    assert resumed[-2:] == pytest.approx(stock[-2:], abs=1e-5)  # one worker resumes the run of two workers


@pytest.mark.parametrize("stage,rows", CASES)
def test_eval_metrics_do_not_depend_on_the_number_of_workers(stage, rows, two_workers, tmp_path):
    """The metrics equal the metrics of one batch with all rows, so a short last batch weighs less than a full batch."""
    figures, _ = two_workers(stage, rows)
    alone = evaluated(stage, rows, tmp_path)
    assert figures["metrics"] == alone  # bit-identical
    at_once = evaluated(stage, rows, tmp_path, mixed=False, held_out=32)
    changing = ["min_reward", "max_reward"]
    if stage == "kto":  # KTO's z0 depends on the batch
        assert alone["eval_rewards/margins"] and alone["eval_kl"]
        changing += ["eval_kl", "eval_loss"]
    if stage in (
        "dpo",
        "kto",
    ):  # TRL averages token metrics over tokens, and ExactBatches averages them over rows
        changing += ["logits", "entropy", "token"]
    same = [name for name in at_once if not any(part in name for part in changing)]
    assert {"eval_loss" if stage != "kto" else "eval_rewards/margins"} < set(same)
    assert {k: alone[k] for k in same} == pytest.approx({k: at_once[k] for k in same}, abs=1e-5)
