"""Compares `evaluate` with a bootstrap, TRL's evaluation and results counted by hand. Tests the gate of `evaluate`."""

import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import toy_ppo
from datasets import Dataset
from running import ROOT, client, stage
from toy_data import CALLING, USER, WEATHER, encoder, evaluator, write
from toy_models import BASE, tokenizer

from pipeline import statistics
from pipeline.__main__ import main
from pipeline.data.formats import parse_row
from pipeline.run.parts import in_parts
from pipeline.run.summary import subsets_table
from pipeline.stages import comparison as evaluation
from pipeline.stages import pairs
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.rows import Sampling

RM = ["reward=models:/toy-rm@champion", "policy=null", "baseline=null", "judge=null", "data.eval=null"]


# ------------------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize(("share", "rows"), [(0.5, 40), (0.9, 10), (0.98, 60)])
def test_the_interval_holds_the_truth_as_often_as_it_says(share, rows):
    draws, held = random.Random(0), 0
    for _ in range(4000):
        low, high = statistics.wilson_interval([float(draws.random() < share) for _ in range(rows)])
        held += low <= share <= high
    assert held / 4000 == pytest.approx(0.95, abs=0.03)
    assert all(
        statistics.wilson_interval([0.0] * n)[0] >= 0 and statistics.wilson_interval([1.0] * n)[1] <= 1
        for n in range(1, 400)
    )


def test_ties_make_the_interval_no_narrower_than_a_bootstrap():
    shares = [1.0] * 40 + [0.5] * 40 + [0.0] * 20
    low, high = statistics.wilson_interval(shares)
    draws = random.Random(0)
    resampled = sorted(statistics.mean(draws.choices(shares, k=100)) for _ in range(4000))
    assert low < resampled[99] and resampled[3899] < high < resampled[3899] + 0.05


def test_calibration_counts():
    sure, unsure = math.log(0.93 / 0.07), math.log(0.57 / 0.43)
    margins = [sure] * 8 + [-sure] * 2 + [unsure] * 6 + [-unsure] * 4
    error, bins = statistics.calibration(margins)
    assert [(one["pairs"], round(one["accuracy"], 6), round(one["confidence"], 6)) for one in bins] == [
        (10, 0.6, 0.57),
        (10, 0.8, 0.93),
    ]
    assert [(one["accuracy_low"], one["accuracy_high"]) for one in bins] == [
        statistics.wilson_interval([1.0] * right + [0.0] * (10 - right)) for right in (6, 8)
    ]
    assert error == pytest.approx((0.03 + 0.13) / 2)
    assert statistics.calibration([1e9, -1e9])[0] == pytest.approx(0.5)


def test_diversity_and_repetition():
    texts = [("a", [1, 2, 1]), ("b", [1, 2, 3]), ("a", [1])]
    records = [
        {"prompt": "p", "completion": text, "tokens": ids, "reference_nll": 0.5, "reference_tokens": 2}
        for text, ids in texts
    ]
    completions = evaluation.Completions(records)
    assert list(completions.samples) == ["p"], "a prompt that repeats is shown once"
    found = completions.metrics()
    assert found == {
        "unique_fraction": 2 / 3,
        "distinct_1": 3 / 7,
        "distinct_2": 3 / 4,
        "perplexity": pytest.approx(math.exp(0.25)),
    }
    assert evaluation.Completions([records[2]]).metrics().keys() == found.keys() - {"distinct_2"}
    assert statistics.repetition([1, 2, 3, 4, 5]) == 0.0
    assert statistics.repetition([7] * 13) == pytest.approx(0.9)
    assert statistics.correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
    assert statistics.correlation([1, 1], [2, 4]) is None


@pytest.mark.parametrize(("temperature", "like", "fewest"), [(0.0, 1.0, 0), (0.7, 0.7, 0), (0.7, 0.7, 5)])
def test_log_probs_are_those_of_the_sampler_and_greedy_ones_the_models_own(temperature, like, fewest):
    shared = toy_ppo.shared_base(spread=0.1)
    how = Sampling(8, tuple(toy_ppo.EOS), min_new_tokens=fewest, temperature=temperature)
    completion = SlotDecoder(shared, 1, 0).generate("policy", [[5, 6, 7]], [0], how)[0]
    [found] = evaluation.completion_logprobs(shared, "policy", [([5, 6, 7], completion.tokens)], 1, how)
    logits = (
        shared.logits(shared.hidden("policy", torch.tensor([[5, 6, 7, *completion.tokens]])))[0, 2:-1] / like
    )
    for step in range(min(fewest, len(completion.tokens))):
        logits[step, toy_ppo.EOS] = float("-inf")
    own = logits.log_softmax(-1).gather(-1, torch.tensor(completion.tokens)[:, None]).sum().item()
    assert found == pytest.approx(own, abs=1e-4)


def test_a_reference_completion_follows_the_prompt_as_the_policy_gets_it():
    """The prompt includes the tools of the row and the variables of the chat template."""
    data = SimpleNamespace(apply_chat_template=True, parse_special_tokens=False)
    for template, more in (
        (CALLING, {"tools": [WEATHER]}),
        ("{{ tone }}" + CALLING, {"chat_template_kwargs": {"tone": "Nice."}}),
    ):
        made = encoder("evaluate", template=template)
        row = {"prompt": [USER], "completion": "yo", **more}
        [[example]] = made.encode([parse_row(row, made.kind)])
        worker = SimpleNamespace(tokenizer=made.tokenizer, work=SimpleNamespace(context=999, data=data))
        asked = SimpleNamespace(worker=worker, sampling=SimpleNamespace(eos=(made.eos,)))
        found = evaluation.Comparison._references(asked, [{"row": json.loads(example.columns["row"])}])
        assert found[0][0] == example.columns["input_ids"]


def test_metrics_of_pairs():
    some = [
        {"scores": (2.0, 1.0), "lengths": (4, 2), "judge": 1.0, "subset": "a"},
        {"scores": (1.0, 2.0), "lengths": (2, 4), "judge": 1.0, "subset": "b"},
        {"scores": (4.0, 1.0), "lengths": (8, 2), "judge": 2.0, "subset": "b"},
    ]
    metrics, tables = pairs.pair_metrics(some)
    assert metrics["eval_rm_accuracy"] == 2 / 3 and metrics["eval_rm_margin"] == 1.0
    assert (
        metrics["eval_rm_accuracy_chosen_shorter"] == 0.0 and metrics["eval_rm_accuracy_chosen_longer"] == 1.0
    )
    assert metrics["eval_rm_agreement"] == 2 / 3 and metrics["eval_rm_judge_accuracy"] == 1.0
    assert metrics["eval_rm_accuracy/a"] == 1.0 and metrics["eval_rm_accuracy/b"] == 0.5
    assert metrics["eval_rm_length_correlation"] > 0.9
    assert metrics["eval_rm_loss"] == pytest.approx(sum(math.log(1 + math.exp(-m)) for m in (1, -1, 3)) / 3)
    assert tables["subsets"]["b"]["pairs"] == 2
    assert re.search(r"\n   b +2  0\.500  \(0\.095 to 0\.905\)", subsets_table(tables["subsets"]))


# -------------------------------------------------------------------------------------------- a reward model alone


@pytest.fixture(scope="module")
def some_pairs(tmp_path_factory):
    """Returns 64 of the demo's eval pairs, each with a subset."""
    rows = [json.loads(line) for line in (ROOT / "jobs/demo/data/preferences_eval.jsonl").open()][:64]
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    write(path, [{**row, "kind": ("odd", "even")[i % 2]} for i, row in enumerate(rows)])
    return path


@pytest.fixture(scope="module")
def some_settings(some_pairs):
    """Returns settings for an evaluation of pairs, probes, and best-of-3 rows.

    The third completion of a best-of-3 row is the chosen completion of the next row.
    """
    best_of_3 = [
        {**row, "chosen": [row["chosen"]], "rejected": [row["rejected"], other["chosen"]]}
        for row, other in itertools.pairwise(json.loads(line) for line in some_pairs.open())
    ]
    benchmark = write(some_pairs.with_name("best_of_3.jsonl"), best_of_3)
    given = [f"data.pairs={some_pairs}", f"data.benchmarks={benchmark}", "data.subset=kind"]
    return [*RM, *given, "trainer.probes=true", "judge=models:/other-rm/1"]


GATE = ("gate.eval_rm_accuracy_low=>= 0.01", "mlflow.alias=judged")


@pytest.fixture(scope="module")
def alone(models, storage, some_settings):
    return stage("evaluate", storage, "alone", *some_settings, *GATE)


def test_a_subset_that_is_no_column_is_refused(models, storage, some_pairs, capsys):
    given = [*RM, f"data.pairs={some_pairs}", "data.subset=nosuch"]
    assert stage("evaluate", storage, "no-subset", *given, status=2) == {}
    assert "data.subset: found 'nosuch'" in (said := capsys.readouterr().err) and "kind" in said


def conversation(prompt, completion):
    """Returns the token ids of a prompt, and of the conversation up to its last end token."""
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    head = tokenizer().apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer().apply_chat_template(turns, return_dict=False)
    while whole[-1] not in (817, 825):
        whole.pop()
    return head, whole


def test_its_accuracy_is_that_of_trl(alone, models, some_pairs, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    rows = [json.loads(line) for line in some_pairs.open()]
    ids = {
        f"{side}_ids": [conversation(row["prompt"], row[side])[1] for row in rows]
        for side in ("chosen", "rejected")
    }
    base = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1, dtype=torch.float32)
    base.config.pad_token_id = tokenizer().pad_token_id
    trainer = RewardTrainer(
        model=PeftModel.from_pretrained(base, models["toy-rm"]),
        args=RewardConfig(
            output_dir=str(tmp_path), per_device_eval_batch_size=16, max_length=None, bf16=False, use_cpu=True,
            report_to="none", gradient_checkpointing=False, disable_tqdm=True,
        ),
        eval_dataset=Dataset.from_dict(ids),
        train_dataset=Dataset.from_dict(ids),
        processing_class=tokenizer(),
    )  # fmt: skip
    theirs = trainer.evaluate()
    ours = alone["metrics"]
    assert 0 < theirs["eval_accuracy"] < 1
    assert ours["eval_rm_accuracy"] == theirs["eval_accuracy"]
    assert ours["eval_rm_margin"] == pytest.approx(theirs["eval_margin"], abs=1e-5)
    assert ours["eval_rm_loss"] == pytest.approx(theirs["eval_loss"], abs=1e-5)


def test_it_leaves_tables_and_metrics(alone, storage, models):
    found = json.loads((storage / "alone" / "evaluation.json").read_text())
    metrics = alone["metrics"]
    assert found["metrics"] == metrics and found["pairs"]["pairs"] == 64
    assert sum(one["pairs"] for one in found["pairs"]["reliability"]) == 64
    subsets = found["pairs"]["subsets"]
    assert {name: one["pairs"] for name, one in subsets.items()} == {"odd": 32, "even": 32}
    assert sum(one["accuracy"] for one in subsets.values()) / 2 == pytest.approx(metrics["eval_rm_accuracy"])
    assert 0 < metrics["eval_rm_agreement"] < 1
    logged = client(storage).get_run(alone["mlflow_run_id"]).data.metrics
    for name in ("eval_rm_accuracy", "eval_rm_ece", "eval_rm_length_correlation", "eval_rm_accuracy/odd"):
        assert logged[name] == pytest.approx(metrics[name])


def test_its_benchmark_and_its_probes(alone, storage):
    found = json.loads((storage / "alone" / "evaluation.json").read_text())
    table = found["benchmarks"]["best_of_k"]
    assert table["rows"] == table["subsets"]["all"]["rows"] == 63
    assert alone["metrics"]["eval_best_of_k"] == table["score"]
    # the chosen completion has the best score less often among three completions than among two
    assert table["score"] < alone["metrics"]["eval_rm_accuracy"]
    probes = found["probes"]
    assert {"empty", "order", "polite_closing"} <= probes.keys() and probes["order"]["verdict"] == "ok"
    assert alone["metrics"]["eval_rm_probe/empty"] == probes["empty"]["effect"] != 0
    for one in probes.values():
        assert one["low"] <= one["effect"] <= one["high"] and len(one["worst"]) == 3


def test_a_gate_that_holds_moves_the_alias(alone, storage):
    assert (alone["registered_model"], alone["version"], alone["alias"]) == ("toy-rm", "1", "judged")
    assert str(client(storage).get_model_version_by_alias("toy-rm", "judged").version) == "1"
    tags = client(storage).get_model_version("toy-rm", "1").tags
    assert tags["evaluate.eval_rm_accuracy"] == f"{alone['metrics']['eval_rm_accuracy']:.6g}"
    assert tags["evaluate.gate"] == "passed"


def test_a_gate_that_does_not_hold_leaves_it(policy, storage):
    result = policy[0]
    assert (result["registered_model"], result["alias"]) == ("toy-policy", None)
    assert "judged" not in client(storage).get_registered_model("toy-policy").aliases
    gate = client(storage).get_model_version("toy-policy", "1").tags["evaluate.gate"]
    assert gate == result["gate"] and gate.startswith("failed: eval_win_rate_low = ")


# ------------------------------------------------------------------------------------------------------- a policy


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_three_times_it_ends_with_the_same_metrics(workers, models, storage, some_settings, in_root):
    """Kills the command three times, each time after the command has written more parts of its results."""
    prompts = storage / "few_prompts.jsonl"
    rows = (ROOT / "jobs/demo/data/prompts_eval.jsonl").read_text().splitlines(keepends=True)
    prompts.write_text("".join(rows[:16]))
    settings = [*some_settings, "policy=models:/toy-policy/1", f"data.eval={prompts}", "trainer.best_of_n=4"]
    settings += ["trainer.local_rollout_forward_batch_size=2", "run.report=false"]
    whole = stage("evaluate", storage, "not-killed", *settings)
    folder = storage / f"killed-{workers}"
    settings += [f"scaling.num_workers={workers}", "gate={}"]
    command = [sys.executable, "-m", "pipeline", "evaluate", "jobs/demo/evaluate.yaml", *settings]
    command += [f"run.storage_path={storage}", f"run.name={folder.name}"]
    for count in sorted(random.Random(workers).sample(range(1, 50), 3)):
        with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and len(list(folder.glob("parts/*.jsonl"))) < count:
                time.sleep(0.002)
            os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
    assert len(list(folder.glob("parts/*.jsonl"))) >= count
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result = json.loads((folder / "result.json").read_text())
    assert result["metrics"] == whole["metrics"] and result["samples"] == whole["samples"]
    tables = [json.loads((one / "evaluation.json").read_text()) for one in (folder, storage / "not-killed")]
    assert tables[0] == tables[1] and not (folder / "parts").exists()


@pytest.fixture(scope="module")
def policy(models, storage, tmp_path_factory):
    rows = [json.loads(line) for line in (ROOT / "jobs/demo/data/prompts_eval.jsonl").open()][:24]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    write(path, [{**row, "completion": f"It is {row['answer']}."} for row in rows])
    settings = ["policy=models:/toy-policy/1", "baseline=null", "reward=models:/toy-rm/1"]
    settings += ["judge=models:/other-rm/1", "gate.eval_win_rate_low=>= 0.99", "mlflow.alias=judged"]
    settings += [f"data.eval={path}", "data.pairs=null", "trainer.best_of_n=4"]
    return stage("evaluate", storage, "policy", *settings), rows


def test_a_policy_is_judged_by_a_second_reward_model(policy):
    metrics = policy[0]["metrics"]
    for key in ("eval_win_rate", "eval_judge_win_rate"):
        assert metrics[f"{key}_low"] < metrics[key] < metrics[f"{key}_high"]
    assert metrics["eval_judge"] != metrics["eval_reward"]
    for key in ("eval_win_rate_lc", "eval_judge_win_rate_lc"):
        assert 0 <= metrics[f"{key}_low"] <= metrics[key] <= metrics[f"{key}_high"] <= 1
    assert 0 < metrics["eval_distinct_1"] < metrics["eval_distinct_2"] <= 1
    assert 0 <= metrics["eval_repetition"] < 1
    assert metrics["eval_kl"] != 0
    assert policy[0]["inputs"]["judge"] == "models:/other-rm/1"


def test_more_completions_to_choose_from_raise_the_reward(policy, storage):
    """If the same reward chooses the best of n completions, the best completion's reward cannot fall as n grows."""
    curve = json.loads((storage / "policy" / "evaluation.json").read_text())["best_of_n"]
    assert [point["n"] for point in curve] == [1, 2, 4]
    assert curve[0]["proxy"] < curve[1]["proxy"] < curve[2]["proxy"]
    assert policy[0]["metrics"]["eval_best_of_n"] == curve[-1]["gold"] != curve[-1]["proxy"]


def test_perplexity_is_that_of_plain_transformers(policy, models):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, models["toy-policy"]).eval()
    nats = tokens = 0.0
    for row in policy[1]:
        head, whole = conversation(row["prompt"], f"It is {row['answer']}.")
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([whole])).logits[0, len(head) - 1 : -1].log_softmax(-1)
        nats -= logits.gather(-1, torch.tensor(whole[len(head) :])[:, None]).sum().item()
        tokens += len(whole) - len(head)
    assert policy[0]["metrics"]["eval_perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert policy[0]["metrics"]["initial_perplexity"] != policy[0]["metrics"]["eval_perplexity"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["policy=null"], r"policy: missing; `evaluate` needs a policy to answer data\.eval.*set data\.eval=null"),
        (["data.eval=null"], r"data\.eval: missing; `evaluate` needs prompts"),
        (["data.subset=kind", "data.pairs=null"], r"data\.subset: needs data\.pairs; set the missing keys"),
        (["reward=python:pipeline.demo:gold"], r"reward: .*asks for `answer`, which the rows of data\.pairs do not have"),
        (["judge=models:/toy-policy/1"], r"judge: models:/toy-policy/1 is an adapter without a scalar head"),
        (["data.benchmarks={single}"], r"data\.benchmarks: .*single\.jsonl: row 1 matches no format of `benchmarks`"),
        (["policy=base", "gate.eval_reward=>= 0"], r"gate: found a gate, but 'base' is not a registered version"),
    ],
)  # fmt: skip
def test_wrong_input_is_answered(overrides, says, models, storage, tmp_path, capsys, in_root):
    (tmp_path / "single.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    given = ["policy=models:/toy-policy/1", "baseline=null", "reward=models:/toy-rm/1", "judge=null"]
    given += [f"run.storage_path={storage}", "run.name=never", *overrides]
    given = [one.format(single=tmp_path / "single.jsonl") for one in given]
    assert main(["evaluate", "jobs/demo/evaluate.yaml", *given]) == 2
    assert re.search(says, capsys.readouterr().err)
    assert not (storage / "never").exists()


def test_a_part_that_is_there_is_not_made_again(tmp_path):
    begun = []

    def answer(numbers):
        begun.append(numbers.start)
        if begun == [0, 8, 16]:
            raise InterruptedError
        return [{"number": number, "third": number / 3} for number in numbers]

    worker = evaluator(tmp_path, rows_per_forward=2)
    with pytest.raises(InterruptedError):
        list(in_parts(worker, "pairs-", 20, answer))
    records = list(in_parts(worker, "pairs-", 20, answer))
    assert begun == [0, 8, 16, 16]
    assert records == [{"number": number, "third": number / 3} for number in range(20)]


def test_a_completion_that_was_truncated_has_not_ended(tmp_path):
    """A reward model with its own tokenizer adds an end token only to completions that ended."""
    end, seen, seeds = 9, [], []

    class Reward:
        name, weight = "rm", 1.0

        def checked(self, samples):
            seen.append(samples.ended)
            seeds.append(samples.seeds)
            return [0.0] * len(samples.ended)

    rows = Dataset.from_list(
        [
            {"prompt_ids": [1], "chosen_ids": [2, last], "rejected_ids": [3, end], "row": "{}"}
            for last in (end, 4)
        ]
    )
    pairs.measure_pairs(evaluator(tmp_path), [Reward()], None, rows, {end})
    assert seen == [[True, True, False, True]]
    first, second = seeds[0][::2]
    assert seeds == [[first, first, second, second]] and first != second  # one seed per pair
