"""The text of a completion while it is written."""

import pytest
from toy_models import tokenizer

from pipeline.serving.text import Text

TEXTS = ("The capital of Peru is Lima.", "Ünïcode \U0001f600 漢字, and\n\n  spaces ", "a" * 50, "")


def streamed(text, *stops):
    """(what was shown piece by piece, the text, whether a stop text ended it)."""
    writer, shown = Text(tokenizer(), list(stops)), []
    for token in tokenizer()(text, add_special_tokens=False).input_ids:
        shown.append(writer.add(token))
        if writer.stopped:
            break
    shown.append(writer.close())
    return shown, writer.text, writer.stopped


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_are_the_text_and_no_character_comes_in_parts(text):
    shown, whole, stopped = streamed(text)
    assert "".join(shown) == whole == text and not stopped
    assert not any("\ufffd" in piece for piece in shown)
    assert len(text) < 10 or sum(map(bool, shown)) > 3, "it is shown while it is written"


def test_special_tokens_are_no_text():
    writer = Text(tokenizer(), [])
    ids = tokenizer()("Lima", add_special_tokens=False).input_ids
    for token in [*ids, tokenizer().eos_token_id]:
        writer.add(token)
    writer.close()
    assert writer.text == "Lima"


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (("Peru",), "The capital of "),
        (("is Lima", "Peru is"), "The capital of "),
        (("of P",), "The capital "),
        (("T",), ""),
        (("Chile",), TEXTS[0]),
        (("Lima.x",), TEXTS[0]),
        (("ita", "tital"), "The cap"),
    ],
)
def test_a_stop_text_ends_it_and_nothing_of_it_is_shown(stops, expected):
    shown, whole, stopped = streamed(TEXTS[0], *stops)
    assert "".join(shown) == whole == expected
    assert stopped == (expected != TEXTS[0])
