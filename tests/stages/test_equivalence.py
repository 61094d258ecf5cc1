"""The pipeline changes nothing about the training: bare TRL gives the same losses, and so do two workers."""

import json

import pytest
from running import NO_EVAL, ROOT, curve, stage

from pipeline.config import load_job

STEPS = 12
SAME = [
    "trainer.lr_scheduler_type=constant",
    "trainer.warmup_steps=0",
    "trainer.logging_steps=1",
    "trainer.save_strategy=no",
]
QUICK = [*NO_EVAL, *SAME, "data.batch_size=16"]
pytestmark = pytest.mark.usefixtures("embedded_ray")


@pytest.fixture(scope="module")
def sft_adapter(embedded_ray, storage):
    options = [*QUICK, f"trainer.max_steps={STEPS}", "trainer.per_device_train_batch_size=8"]
    return stage("sft", storage, "equal-sft", *options)


@pytest.fixture(scope="module")
def one_worker(sft_adapter, storage):
    """stage -> its run with one worker, two micro-batches a step."""
    found = {"sft": sft_adapter}
    for name in ("rm", "dpo"):
        options = [*QUICK, f"trainer.max_steps={STEPS}", "trainer.per_device_train_batch_size=8"]
        found[name] = stage(name, storage, f"equal-{name}", *options, *policy(name, sft_adapter))
    return found


def policy(name, sft):
    return [f"policy=models:/rlhf-sft/{sft['version']}"] if name in ("dpo", "kto", "ppo") else []


@pytest.mark.parametrize("name", ["sft", "rm", "dpo"])
def test_losses_equal_those_of_bare_trl(name, one_worker, storage):
    ours = curve(storage, one_worker[name])
    theirs = bare(name, one_worker["sft"]["adapter"])
    assert len(ours) == len(theirs) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert max(theirs) - min(theirs) > 1e-2, "the losses do not move: nothing was compared"


# On rows of a toy, the other stages do so in tests/data/test_feed.py.
@pytest.mark.parametrize(
    "name", ["rm", pytest.param("sft", marks=pytest.mark.slow), pytest.param("dpo", marks=pytest.mark.slow)]
)
def test_two_workers_equal_one_with_twice_the_batch(name, one_worker, storage):
    options = [*QUICK, f"trainer.max_steps={STEPS}", "scaling.num_workers=2"]
    options += ["trainer.per_device_train_batch_size=8", *policy(name, one_worker["sft"])]
    two = stage(name, storage, f"equal-{name}-2", *options)
    ours = curve(storage, two)
    assert len(ours) == STEPS
    assert ours == pytest.approx(curve(storage, one_worker[name]), abs=1e-4)


@pytest.mark.slow
def test_kto_equals_bare_trl_and_does_not_depend_on_workers_and_micro_batches(sft_adapter, storage):
    options = [*QUICK, f"trainer.max_steps={STEPS}", "trainer.per_device_train_batch_size=8"]
    one = stage("kto", storage, "equal-kto", *options, *policy("kto", sft_adapter))
    two = stage("kto", storage, "equal-kto-2", *options, *policy("kto", sft_adapter), "scaling.num_workers=2")
    theirs = bare("kto", sft_adapter["adapter"])
    assert curve(storage, one) == pytest.approx(theirs, abs=1e-4)
    assert curve(storage, two) == pytest.approx(theirs, abs=1e-4)
    assert len(theirs) == STEPS and max(theirs) - min(theirs) > 1e-2
    margins = [curve(storage, run, "rewards/margins")[-1] for run in (one, two)]
    assert max(margins) > 0.01


# On rows of a toy, tests/ppo/test_trainer.py shows it; quick runs with two workers are rm here and sft in test_session.py.
@pytest.mark.slow
def test_ppo_updates_are_those_of_one_worker(one_worker, storage):
    from safetensors.torch import load_file

    options = ["data.eval=null", "trainer.total_episodes=32", "trainer.batch_size=16", "trainer.save_steps=0"]
    options += [*policy("ppo", one_worker["sft"]), f"reward=models:/rlhf-rm/{one_worker['rm']['version']}"]
    one = stage("ppo", storage, "equal-ppo", *options)
    two = stage("ppo", storage, "equal-ppo-2", *options, "scaling.num_workers=2")
    a, b = (load_file(f"{result['adapter']}/adapter_model.safetensors") for result in (one, two))
    start = load_file(f"{one_worker['sft']['adapter']}/adapter_model.safetensors")
    moved = sum(float((a[key] - start[key]).square().sum()) for key in a) ** 0.5
    apart = sum(float((a[key] - b[key]).square().sum()) for key in a) ** 0.5
    assert moved > 1e-3
    assert apart < 1e-3 * moved
    for metric in ("objective/scores", "objective/kl", "completions/mean_length"):
        assert curve(storage, one, metric) == pytest.approx(curve(storage, two, metric), abs=1e-4)


# ------------------------------------------------------------------------------------------------ bare TRL


def rows(name):
    """The raw rows as TRL's own messages: the comparison covers templating and tokenising, too."""
    files = {"sft": "demonstrations", "kto": "thumbs"}
    path = ROOT / "jobs/demo/data" / f"{files.get(name, 'preferences')}.jsonl"
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if name == "sft":
            yield {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
        elif name == "kto":
            completion = [{"role": "assistant", "content": row["completion"]}]
            yield {
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "completion": completion,
                "label": row["label"],
            }
        else:
            say = {k: [{"role": "assistant", "content": row[k]}] for k in ("chosen", "rejected")}
            yield {"prompt": [{"role": "user", "content": row["prompt"]}], **say}


def parts(name, config, tmp="bare"):
    """Tokenizer, raw rows, arguments and LoRA settings of a demo job, for TRL alone."""
    import datasets
    from transformers import AutoTokenizer

    job = load_job(ROOT / f"jobs/demo/{name}.yaml", [*QUICK, f"trainer.max_steps={STEPS}"], name)
    args = dict(job.trainer) | {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    args |= {"output_dir": str(ROOT / "runs" / tmp), "report_to": "none", "disable_tqdm": True}
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "jobs/demo/model")
    # Like Llama 3's, it names no pad token. Left alone TRL pads with eos, and the reward is read before the eos.
    tokenizer.pad_token = "<|finetune_right_pad_id|>"
    return tokenizer, datasets.Dataset.from_list(list(rows(name))), config(**args), job.lora


def bare(name, policy=None):
    """The losses of TRL's trainer on the base, on a new adapter or, for dpo and kto, on that of the folder `policy`."""
    import torch
    import transformers
    import trl
    from peft import LoraConfig, PeftModel

    trainer = {"sft": "SFT", "rm": "Reward", "dpo": "DPO", "kto": "KTO"}[name]
    tokenizer, data, args, lora = parts(name, getattr(trl, f"{trainer}Config"))
    transformers.set_seed(args.seed)
    kind = "SequenceClassification" if name == "rm" else "CausalLM"
    head = {"num_labels": 1} if name == "rm" else {}
    loader = getattr(transformers, f"AutoModelFor{kind}")
    model = loader.from_pretrained(ROOT / "jobs/demo/model", dtype="float32", **head)
    adapter = {"peft_config": LoraConfig(task_type="SEQ_CLS" if head else "CAUSAL_LM", **lora)}
    if name in ("dpo", "kto"):
        model, adapter = PeftModel.from_pretrained(model, policy, is_trainable=True), {}
    if name == "kto":
        # TRL's KL term is of a micro-batch, in the order of the file: a whole step is one, in the order that the pipeline draws.
        args.per_device_train_batch_size, args.gradient_accumulation_steps = 16, 1
        data = data.select(torch.randperm(len(data), generator=torch.Generator().manual_seed(args.seed)))
    made = getattr(trl, f"{trainer}Trainer")(
        model, args=args, train_dataset=data, processing_class=tokenizer, **adapter
    )
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]
