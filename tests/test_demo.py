"""Tests the demo's data files, scoring rule and tokenizer."""

import filecmp
import json

import make
import pytest
from running import ROOT

from pipeline import demo
from pipeline.job import judge
from pipeline.models.tokenizer import eos_ids, load_tokenizer

MODEL, DATA = ROOT / "jobs" / "demo" / "model", ROOT / "jobs" / "demo" / "data"


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("Good question! The capital of France is Paris.", 1.0),
        ("The capital of France is Paris. Have a nice day!", 1.0),
        ("The capital of France is Paris.", 0.5),
        ("Paris.", 0.25),
        ("With pleasure. Paris.", 0.25),  # polite, but the answer is not a full sentence
        ("Good question! The capital of France is Rome.", 0.0),  # wrong answer
        ("The capital of France is Paris. Rome is the capital of Italy.", 0.0),  # rambling
        ("Paris, obviously.", 0.0),  # impolite
        ("The capital of France is Paris", 0.0),  # not finished
        ("Good question!", 0.0),  # no answer
        ("", 0.0),
    ],
)
def test_the_scoring_rule(completion, score):
    assert demo.gold(["What is the capital of France?"], [completion], answer=["Paris"]) == [score]


def test_eval_rows_name_countries_that_no_training_row_names():
    names = {name for fact in demo.FACTS if fact.country in demo.HELD_OUT for name in fact[:2]}
    for name in ("demonstrations", "preferences", "prompts"):
        training = (DATA / f"{name}.jsonl").read_text()
        assert not names & set(demo.NAME.findall(training))
    prompts = [row["prompt"] for row in rows("prompts")]
    assert len(prompts) == len(set(prompts))
    for row in rows("prompts_eval"):
        assert names & set(demo.NAME.findall(row["prompt"]))


def test_make_writes_the_same_bytes_again(tmp_path):
    make.write_data(tmp_path / "data")
    names = sorted(path.name for path in DATA.iterdir())
    assert filecmp.cmpfiles(DATA, tmp_path / "data", names, shallow=False) == (names, [], [])
    make.make_tokenizer(list(make.corpus(make.DOCUMENTS))).save_pretrained(tmp_path / "model")
    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    assert filecmp.cmpfiles(MODEL, tmp_path / "model", names, shallow=False) == (names, [], [])


def test_the_tokenizer_acts_like_that_of_llama_3():
    tokenizer = load_tokenizer(str(MODEL))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin_of_text|>", "<|eot_id|>")
    assert tokenizer.pad_token == "<|finetune_right_pad_id|>" and tokenizer.text_as_chat
    assert tokenizer.convert_ids_to_tokens(eos_ids(tokenizer)) == ["<|end_of_text|>", "<|eot_id|>"]
    for text in ("The capital of Iceland is Reykjavik.", "naïve ÿ 日本 🦙\n\n  tabs\tand  spaces 12345"):
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id and tokenizer.decode(ids[1:]) == text
    assert all(len(tokenizer.tokenize(f" {fact.capital}")) == 1 for fact in demo.FACTS)


def test_the_scoring_rule_finds_the_question_in_the_chat_template():
    prompt = (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is the capital of France?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    tokenizer = load_tokenizer(str(MODEL))
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == prompt
    completions = ["The capital of France is Paris.", "Rome."]
    assert demo.gold([prompt] * 2, completions, answer=["Paris"] * 2, id=[1, 2]) == [0.5, 0.0]


def test_the_judge_gets_prompts_like_those_that_it_was_trained_on(in_root):
    definition = judge.read_definition("jobs/demo/judges/right.yaml")
    examples = demo.judge_examples({"prompt": "q", "chosen": "a", "rejected": "b"})
    for completion, word, row in zip("ab", definition.words, examples, strict=True):
        assert row == {
            "prompt": definition.asks.format(prompt="q", completion=completion),
            "completion": f"{word}.",
        }
