"""What all kinds of rows share on the way to tokens: lengths, and completions without content."""

import pytest
from toy_data import encoded, parsed, tokenizer

from pipeline.data.encode import Encoder
from pipeline.data.shapes import kind_of
from pipeline.data.tasks import sample
from pipeline.data.values import Dropped, RowError


def test_too_long():
    row = {"prompt": "abc", "completion": "defghij"}
    for too_long, outcome in (("error", RowError), ("drop", Dropped)):
        assert isinstance(encoded("sft", row, max_length=8, too_long=too_long)[1][0], outcome)
    tok, (example,) = encoded("sft", row, max_length=8, too_long="truncate")
    assert tok.decode(example.columns["input_ids"]) == "<s>abcdefg" and example.truncated
    pair = {"prompt": "abc", "chosen": "same then a", "rejected": "same then b"}
    for stage in ("rm", "dpo"):
        options = {"max_length": 10, "too_long": "truncate"}
        assert encoded(stage, pair, **options)[1] == [Dropped("equal_after_truncation")]
    tok, (example,) = encoded("ppo", {"prompt": "abcdefghij"}, max_length=4, too_long="truncate")
    assert tok.decode(example.columns["input_ids"]) == "<s>hij"
    assert encoded("sft", row, max_length=3, too_long="truncate")[1] == [Dropped("prompt_too_long")]


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "score", "ppo"])
def test_words_that_the_tokenizer_does_not_see_are_none(stage):
    """A normaliser may strike out all that a text says."""
    from tokenizers import normalizers

    tok = tokenizer()
    tok.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    row = {"prompt": "\u200b" if stage == "ppo" else "hi", "completion": "\u200b"}
    row |= {"chosen": "yo", "rejected": "\u200b"} if stage in ("rm", "dpo") else {}
    (outcome,) = Encoder(tok, kind_of(stage), 99, "error", False, [tok.eos_token_id]).encode(
        [parsed(row, stage)]
    )[0]
    assert isinstance(outcome, RowError), outcome
    assert outcome.kind == ("empty_prompt" if stage == "ppo" else "empty_completion")


def test_a_token_that_spans_the_border_belongs_to_the_completion():
    """As in TRL; and what the report shows of a pair of rm begins where the completions do, not inside a word."""
    tok = tokenizer()
    tok.backend_tokenizer.add_tokens(["ab"])
    pair = {"prompt": "xa", "chosen": "b is north", "rejected": "b is not"}
    for stage, name in (("rm", "chosen_ids"), ("dpo", "chosen_ids"), ("kto", "completion_ids")):
        outcomes = Encoder(tok, kind_of(stage), 99, "error", False, [tok.eos_token_id]).encode(
            [parsed(pair, stage)]
        )
        example = outcomes[0][0]
        assert tok.decode(example.columns[name]).endswith("ab is north</s>") and example.prompt_tokens == 2
    _, (example,) = encoded("rm", {"prompt": "q", "chosen": " the north", "rejected": " the nose"})
    assert sample(tok, example.columns, example.prompt_tokens) == (
        "<s>q\n  chosen   ⟦ the north</s>⟧\n  rejected ⟦ the nose</s>⟧"
    )
