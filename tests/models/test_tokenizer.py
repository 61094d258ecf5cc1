"""Tests how a tokenizer gets its pad token, its end-of-sequence tokens, its chat template and its digest."""

import json
import pickle
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pipeline.errors import InputError
from pipeline.models.tokenizer import eos_ids, load_tokenizer, template_digest, tokenizer_digest

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi? "},
    {"role": "assistant", "content": "Hello."},
]


def make_folder(
    folder: Path,
    special: list[str],
    *,
    begin: str | None = None,
    alphabet: bool = True,
    template: str | None = None,
    **roles: str,
) -> str:
    """Writes a byte-level BPE tokenizer with special tokens (`roles` such as eos_token), and a config.json."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet else []
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, show_progress=False)
    bpe.train_from_iterator(["Human: hello, how are you? Assistant: Hi."] * 3, trainer)
    bpe.add_special_tokens(special)
    if begin is not None:
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, bpe.token_to_id(begin))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **roles)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = {"model_type": "llama", "vocab_size": len(tokenizer)}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def changed(folder: Path, file: str, change) -> str:
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))
    return str(folder)


LLAMA_3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|eot_id|>"]
LLAMA_31 = [*LLAMA_3[:3], "<|finetune_right_pad_id|>", "<|eot_id|>"]
QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_pad|>"]


GPT2 = "<|endoftext|>"
PADS = {
    "own pad": (["<s>", "</s>", "<pad>"], {"eos": "</s>", "pad": "<pad>"}, "<pad>"),
    "Llama 3.1": (LLAMA_31, {"eos": "<|eot_id|>"}, "<|finetune_right_pad_id|>"),
    "Llama 3.0": (LLAMA_3, {"eos": "<|eot_id|>"}, "<|reserved_special_token_0|>"),
    "pad is eos": (LLAMA_31, {"eos": "<|eot_id|>", "pad": "<|eot_id|>"}, "<|finetune_right_pad_id|>"),
    "Qwen base": (QWEN, {"eos": GPT2, "pad": GPT2}, "<|fim_pad|>"),
    "unk": (["<unk>", "<s>", "</s>"], {"eos": "</s>", "bos": "<s>", "unk": "<unk>"}, "<unk>"),
    "other special": (["<s>", "</s>", "<mask>"], {"eos": "</s>", "bos": "<s>"}, "<mask>"),
    "GPT-2: a byte that no text has": ([GPT2], {"eos": GPT2, "bos": GPT2, "unk": GPT2}, "ÿ"),
}  # fmt: skip


@pytest.mark.parametrize("kind", PADS)
def test_the_pad_token_is_the_first_candidate_that_fits(tmp_path, kind):
    special, roles, pad = PADS[kind]
    tokens = {f"{role}_token": token for role, token in roles.items()}
    tokenizer = load_tokenizer(make_folder(tmp_path, special, **tokens))
    assert tokenizer.pad_token == pad
    assert tokenizer.pad_token_id == tokenizer.convert_tokens_to_ids(pad)
    assert tokenizer.pad_token_id not in eos_ids(tokenizer)


def test_the_pad_token_has_an_embedding_row_and_is_not_a_second_eos(tmp_path):
    special = ["<s>", "</s>", "<unk>", "<pad>"]
    roles = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    folder = make_folder(tmp_path, special, **roles)
    # an embedding with pad_token_id rows has no row for <pad>
    rows = load_tokenizer(folder).pad_token_id
    changed(tmp_path, "config.json", lambda config: config.update(vocab_size=rows))
    assert load_tokenizer(folder).pad_token == "<unk>"
    changed(tmp_path, "config.json", lambda config: config.update(vocab_size=rows + 1))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [rows, -1]}))
    assert load_tokenizer(folder).pad_token == "<unk>" and -1 not in eos_ids(load_tokenizer(folder))


def test_a_tokenizer_without_any_token_that_can_pad_is_an_error(tmp_path):
    folder = make_folder(tmp_path, ["<|endoftext|>"], alphabet=False, eos_token="<|endoftext|>")
    with pytest.raises(InputError, match=r"pad_token in its tokenizer_config\.json"):
        load_tokenizer(folder)


def test_a_byte_as_pad_token_does_not_become_special_when_it_is_saved_and_loaded(tmp_path):
    """If ÿ became a special token, the letter ÿ in a text would be encoded as the pad token."""
    tokenizer = load_tokenizer(make_folder(tmp_path / "base", ["<|endoftext|>"], eos_token="<|endoftext|>"))
    tokenizer.save_pretrained(tmp_path / "again")
    (tmp_path / "again" / "config.json").write_text((tmp_path / "base" / "config.json").read_text())
    again = load_tokenizer(str(tmp_path / "again"))
    assert again.pad_token_id == tokenizer.pad_token_id
    assert again("ÿ").input_ids == tokenizer("ÿ").input_ids
    assert tokenizer.pad_token_id not in again("ÿ").input_ids
    assert tokenizer_digest(again) == tokenizer_digest(tokenizer)


def test_the_eos_token_can_come_from_the_generation_config(tmp_path):
    folder = make_folder(tmp_path, ["<s>", "</s>", "<pad>"], pad_token="<pad>")
    with pytest.raises(InputError, match="no end-of-sequence token"):
        load_tokenizer(folder)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token_id == 3
    assert eos_ids(tokenizer) == [3, 5]


def test_eos_ids_include_the_end_of_turn_if_the_template_writes_it(tmp_path):
    roles = {"eos_token": "<|endoftext|>", "pad_token": "<|fim_pad|>"}
    chat = load_tokenizer(make_folder(tmp_path / "chat", QWEN, template=CHATML, **roles))
    assert set(chat.convert_ids_to_tokens(eos_ids(chat))) == {"<|endoftext|>", "<|im_end|>"}
    base = load_tokenizer(make_folder(tmp_path / "base", QWEN, **roles))
    assert base.convert_ids_to_tokens(eos_ids(base)) == ["<|endoftext|>"]


def test_a_tokenizer_without_a_template_gets_the_plain_template(tmp_path):
    special = ["<s>", "</s>", "<pad>"]
    roles = {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>"}
    tokenizer = load_tokenizer(make_folder(tmp_path, special, begin="<s>", **roles))
    assert tokenizer.text_as_chat is False
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text == "<s>Be brief.\n\nHuman: Hi?\n\nAssistant: Hello.</s>"
    asked = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert asked == "<s>Be brief.\n\nHuman: Hi?\n\nAssistant:"
    marked = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    learned = [i for i, on in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if on]
    assert tokenizer.decode(learned) == " Hello.</s>"
    adds_no_bos = load_tokenizer(make_folder(tmp_path, special, **roles))
    assert adds_no_bos.apply_chat_template(CHAT[1:2], tokenize=False) == "\n\nHuman: Hi?"


def test_a_job_can_choose_the_template(tmp_path):
    roles = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    folder = make_folder(tmp_path, QWEN, template=CHATML, **roles)
    own = load_tokenizer(folder)
    assert own.text_as_chat is True and own.chat_template == CHATML
    plain = load_tokenizer(folder, chat_template="plain")
    assert plain.text_as_chat is True and "Human" in plain.chat_template
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}!")
    mine = load_tokenizer(folder, chat_template=str(file))
    assert mine.apply_chat_template(CHAT, tokenize=False) == "Be brief.!"
    assert len({template_digest(own), template_digest(plain), template_digest(mine)}) == 3
    with pytest.raises(InputError, match=r"model\.chat_template: there is no file 'chatml'"):
        load_tokenizer(folder, chat_template="chatml")


def test_the_digest_changes_only_with_the_tokens(tmp_path):
    tokenizer = load_tokenizer(make_folder(tmp_path / "a", LLAMA_31, eos_token="<|eot_id|>"))
    digest = tokenizer_digest(tokenizer)
    tokenizer(["hello", "hello, how are you?"], padding=True, truncation=True, max_length=4)
    # A call that sets padding and truncation does not change the digest.
    assert tokenizer_digest(tokenizer) == digest
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert tokenizer_digest(copy) == digest
    assert copy.text_as_chat is False and copy.pad_token == tokenizer.pad_token
    other = load_tokenizer(make_folder(tmp_path / "b", [*LLAMA_31, "<more>"], eos_token="<|eot_id|>"))
    assert tokenizer_digest(other) != digest


# ------------------------------------------------------------------------------------------------ damaged files


@pytest.fixture
def chatty(tmp_path) -> Path:
    return Path(make_folder(tmp_path, LLAMA_31, eos_token="<|eot_id|>"))


@pytest.mark.parametrize("content", [b"{}", None], ids=str)
def test_a_damaged_or_missing_tokenizer_is_an_error(content, chatty):
    (chatty / "tokenizer.json").unlink()
    if content is not None:
        (chatty / "tokenizer.json").write_bytes(content)
    with pytest.raises(
        InputError, match=r"^model\.name_or_path: no tokenizer can be read from .*; expected tokenizer\.json"
    ):
        load_tokenizer(str(chatty))


def test_a_vocabulary_larger_than_the_embedding_is_an_error(chatty):
    folder = changed(chatty, "tokenizer.json", lambda content: content["model"]["vocab"].update(zzz=5000))
    with pytest.raises(
        InputError,
        match=r"^model\.name_or_path: .*2 tokens beyond the \d+ rows of the embedding .*use the tokenizer",
    ):
        load_tokenizer(folder)


def test_special_tokens_beyond_the_embedding_are_an_error_only_if_they_are_used(chatty):
    rows = json.loads((chatty / "config.json").read_text())["vocab_size"]
    folder = changed(chatty, "config.json", lambda content: content.update(vocab_size=rows - 1))
    with pytest.raises(InputError, match=r"1 tokens beyond the .*'<\|eot_id\|>' with id"):
        load_tokenizer(folder)
    assert load_tokenizer(
        changed(chatty, "tokenizer_config.json", lambda c: c.update(eos_token="<|end_of_text|>"))
    )
