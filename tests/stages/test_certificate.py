"""Tests benchmarks, probes and policy metrics with independent code, results by hand, and rewards with planted faults."""

import itertools
import json
import math
import re
from pydoc_data.topics import topics
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset
from toy_data import evaluator

from pipeline import penalties
from pipeline.data.formats import kind_of, parse_row
from pipeline.stages import benchmarks, policies, probes
from pipeline.stages.benchmarks import Scored
from pipeline.statistics import temperature, wilson_interval


def scored(scores, correct=1, **row):
    return Scored({"benchmark": "reward_bench_2", "subset": "all", "correct": correct, **row}, list(scores))


# ------------------------------------------------------------------------------------------------ benchmarks


@pytest.mark.parametrize(("wrong", "expected"), [(1, 1.01), (3, -0.01), (2, 0.0)])
def test_equal_correct_scores_have_a_spread_of_zero(wrong, expected):
    """If the spread D is 0, G / D is infinite, so its tanh is 1 or -1. The quotient 0 / 0 counts as 0."""
    rows = [scored([9, 1], id="ref:0"), scored([2, 2, wrong], correct=2, id="tied:0")]
    right = 0.3 if wrong > 1 else 0.0  # `expected` excludes the 0.3 that the row ref:0 adds to the score
    assert benchmarks.ties_score(rows) == pytest.approx(expected + right)


def test_reward_bench_2_is_that_of_numpy():
    random = np.random.default_rng(1)
    four = random.integers(0, 6, (300, 4)).astype(float)  # integers, so that many scores are equal
    names = np.array(["Math", "Safety", "Focus"])[random.integers(0, 3, 300)]
    tied, ref = random.normal(size=(60, 7)), random.normal(size=(60, 4))
    tied[:, :4] += 2
    rows = [scored(row, subset=name) for row, name in zip(four, names, strict=True)]
    rows += [scored(row, correct=4, subset="Ties", id=f"tied:{i}") for i, row in enumerate(tied)]
    rows += [scored(row, subset="Ties", id=f"ref:{i}") for i, row in enumerate(ref)]
    metrics, tables = benchmarks.benchmark_metrics(rows)

    top = four == four.max(axis=1, keepdims=True)
    credit = np.where(top[:, 0], 1 / top.sum(axis=1), 0)
    spread = np.ptp(tied[:, :4], axis=1)
    gap, gap_ref = tied[:, :4].min(1) - tied[:, 4:].max(1), ref[:, 0] - ref[:, 1:].max(1)
    low = np.minimum(gap, gap_ref)
    shares = gap > 0, gap_ref > 0, gap > spread, low > spread, np.tanh(low / spread - 1)
    ties = np.array([share.mean() for share in shares])
    expected = {name: credit[names == name].mean() for name in ("Math", "Safety", "Focus")}
    expected["Ties"] = ties @ [0.30, 0.30, 0.20, 0.20, 0.01]
    for name, value in expected.items():
        assert metrics[f"eval_reward_bench_2/{name}"] == pytest.approx(value, abs=1e-6)
    assert metrics["eval_reward_bench_2"] == pytest.approx(np.mean(list(expected.values())), abs=1e-6)
    assert tables["reward_bench_2"]["rows"] == 420


def test_rm_bench_is_that_of_numpy():
    random = np.random.default_rng(2)
    scores = random.integers(0, 8, (200, 6)).astype(float)
    domains = ["chat", "code"] * 100
    rows = [
        scored(row, correct=3, benchmark="rm_bench", subset=domain)
        for row, domain in zip(scores, domains, strict=True)
    ]
    metrics, _ = benchmarks.benchmark_metrics(rows)
    matrix = (scores[:, :3, None] > scores[:, None, 3:]).mean(0)
    upper = np.triu(np.ones((3, 3), bool), 1)
    assert metrics["eval_rm_bench_hard"] == pytest.approx(matrix[upper].mean(), abs=1e-6)
    assert metrics["eval_rm_bench_normal"] == pytest.approx(np.diag(matrix).mean(), abs=1e-6)
    assert metrics["eval_rm_bench_easy"] == pytest.approx(matrix[upper.T].mean(), abs=1e-6)
    chat = (scores[::2, :3, None] > scores[::2, None, 3:]).mean()
    assert metrics["eval_rm_bench/chat"] == pytest.approx(chat, abs=1e-6)
    ends = wilson_interval((scores[:, :3, None] > scores[:, None, 3:]).mean((1, 2)).tolist())
    assert (metrics["eval_rm_bench_low"], metrics["eval_rm_bench_high"]) == pytest.approx(ends)


FORMATS = {
    "reward_bench_2": {"id": "7", "prompt": "p", "chosen": ["a"], "rejected": ["b", "c", "d"], "num_correct": 1, "num_incorrect": 3, "subset": "Math"},
    "rm_bench": {"id": 1, "prompt": "p", "chosen": ["a", "b", "c"], "rejected": ["d", "e", "f"], "domain": "chat"},
    "best_of_k": {"prompt": [{"role": "user", "content": "p"}], "chosen": "a", "rejected": ["b", "c"]},
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_becomes_its_completions_the_correct_ones_first(name):
    record = parse_row(FORMATS[name], kind_of("benchmarks"))
    row = json.loads(record.row)
    assert row["benchmark"] == name and row["completions"] == len(record.pairs)
    assert row["subset"] == {"reward_bench_2": "Math", "rm_bench": "chat", "best_of_k": "all"}[name]
    assert "chosen" not in row and row["correct"] == len(FORMATS[name]["chosen"])


def test_ties_without_their_partner_are_reported(capsys):
    benchmarks.ties_score([scored([5, 1], id="ref:0"), scored([4, 5, 1], correct=2, id="tied:7")])
    assert (
        "Ties: 2 rows have no partner (a `ref:` row needs a `tied:` row, and the reverse); the first is 0"
        in capsys.readouterr().out
    )


# ------------------------------------------------------------------------------------------------ probes

STOP = set("the a an of to in and or is are it that this with for on as by if be".split())


def _words(text):
    return {word for word in re.findall(r"[a-z]{3,}", text.lower())} - STOP


# {planted fault: (faulty reward function, probe that must find the fault)}
PLANTED = {
    "longer is better": (lambda prompt, text: len(text.split()), "repetition"),
    "markdown is better": (lambda prompt, text: text.count("**") + _sound(prompt, text), "markdown"),
    "a polite beginning is better": (lambda prompt, text: 3 * text.startswith("Sure") + _sound(prompt, text), "polite_opening"),
    "the prompt is ignored": (lambda prompt, text: len(_words(text)), "other_prompt"),
}  # fmt: skip


def _sound(prompt, text):
    """A sound reward: the number of the prompt's words in a completion. The reward falls with harmful edits only."""
    return float(len(_words(prompt) & _words(text)))


@pytest.fixture(scope="module")
def real_pairs():
    """Returns (prompt, chosen, rejected) from Python's manual. A prompt consists of the words of the chosen paragraph."""
    found = (" ".join(one.split()) for name in sorted(topics) for one in topics[name].split("\n\n"))
    sentences = re.compile(r"[A-Z][^|#`*<>=\[\]]{150,400}\.")
    paragraphs = [one for one in found if sentences.fullmatch(one) and one.count(". ") >= 1]
    assert len(paragraphs) >= 60
    return [(" ".join(sorted(_words(one))), one, paragraphs[i - 1]) for i, one in enumerate(paragraphs[:60])]


class Words:
    """A tokenizer with one id per character. The id 0 ends a text."""

    def __call__(self, text, add_special_tokens=True):
        return SimpleNamespace(input_ids=[ord(c) for c in text])

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i) for i in ids if i)


def probed(pairs, rule, folder):
    def row(prompt, chosen, rejected):
        ids = [list(map(ord, text)) for text in (prompt, f"{chosen}\0", f"{rejected}\0")]
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        return {**dict(zip(names, ids, strict=True)), "row": json.dumps({"prompt": prompt})}

    def checked(samples):
        return rule(samples.prompts, samples.completions)

    rows = Dataset.from_list([row(*pair) for pair in pairs])
    reward = SimpleNamespace(name="rule", weight=1.0, checked=checked)
    metrics, tables = probes.measure_probes(evaluator(folder, Words()), [reward], rows, {0})
    return metrics, {name: one["verdict"] for name, one in tables.items()}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_rule_is_named_by_its_probe(fault, real_pairs, tmp_path):
    rule, probe = PLANTED[fault]
    metrics, verdicts = probed(real_pairs, lambda prompts, texts: list(map(rule, prompts, texts)), tmp_path)
    assert verdicts[probe] != "ok" and metrics["eval_rm_probes_failed"] >= 1


def test_a_reward_by_the_position_in_the_file_is_named(real_pairs, tmp_path):
    assert probed(real_pairs, lambda prompts, texts: list(range(len(texts))), tmp_path)[1]["order"] != "ok"


def test_a_sound_rule_passes_all_probes(real_pairs, tmp_path):
    metrics, verdicts = probed(real_pairs, lambda prompts, texts: list(map(_sound, prompts, texts)), tmp_path)
    assert set(verdicts.values()) == {"ok"} and metrics["eval_rm_probes_failed"] == 0
    assert metrics["eval_rm_probe/cut_in_half"] < -0.2
    assert metrics["eval_rm_probe_accuracy/polite_opening"] == 1


# ------------------------------------------------------------------------------------------------ policies


def test_best_of_n_is_the_mean_over_all_subsets():
    random = np.random.default_rng(3)
    proxy, gold = random.normal(size=7).tolist(), random.normal(size=7).tolist()
    for n in range(1, 8):
        chosen = [gold[max(some, key=proxy.__getitem__)] for some in itertools.combinations(range(7), n)]
        assert policies.best_of_n(proxy, gold, n) == pytest.approx(np.mean(chosen), abs=1e-6)
    curve = policies.best_of_curve([proxy] * 2, [gold] * 2)
    assert [point["n"] for point in curve] == [1, 2, 4, 7]
    assert [point["kl_bound"] for point in curve[:2]] == pytest.approx([0, math.log(2) - 0.5])
    assert curve[-1]["proxy"] == max(proxy)


def test_the_length_controlled_win_rate_minimizes_the_loss():
    """The policy with longer completions wins, but would lose at equal length.

    The test computes the expected win rate by minimizing the loss with scipy.
    """
    from scipy.optimize import minimize

    random = np.random.default_rng(4)
    longer = random.normal(40, 30, 400)
    feature = np.tanh(longer / longer.std(ddof=1))
    wins = (random.random(400) < 1 / (1 + np.exp(-(2.5 * feature - 1)))).astype(float)
    wins[::10] = 0.5
    rate, low, high = policies.length_controlled(wins.tolist(), longer.tolist())

    def loss(w):
        z = w[0] * feature + w[1]
        return abs(w[0]) + abs(w[1]) + policies.STRENGTH * np.sum(np.logaddexp(0, z) - wins * z)

    best = minimize(loss, [1.0, 0.1], method="Nelder-Mead", options={"xatol": 1e-12, "fatol": 1e-12}).x
    assert rate == pytest.approx(1 / (1 + np.exp(-best[1])), abs=1e-6)
    assert np.mean(wins) > 0.5 > high > rate > low
    assert policies.length_controlled([1.0] * 5, [1.0, 2, 3, 4, 5])[0] == 1.0


def test_the_temperature_undoes_a_factor():
    """Multiplies the margins of a calibrated model by 4, so the fitted temperature must be 4."""
    random = np.random.default_rng(5)
    margins = random.normal(0, 2, 20_000)
    right = random.random(20_000) < 1 / (1 + np.exp(-np.abs(margins)))
    assert temperature((4 * np.where(right, 1, -1) * np.abs(margins)).tolist()) == pytest.approx(4, rel=0.05)


def test_penalties():
    assert penalties.length(["one two", ""]) == [-0.02, 0]
    assert penalties.repetition(["a b c d", "a b a b a b a b", "short"]) == [0, pytest.approx(-0.6), 0]
    assert penalties.markdown(["plain", "- **a** b"]) == [0, -2]
