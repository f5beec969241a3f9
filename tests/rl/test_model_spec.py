"""Specifications of models and the tokenizer of characters, without torch."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.rl.model_spec import CharTokenizer, TinyLlama


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chars": "0120$"}, "chars='0120$': ['0'] occur more than once; each once"),
        ({"chars": ""}, "chars='': it is empty"),
        ({"eos": "#"}, "eos='#' must be one of the characters of chars='0123456789+=>$ '"),
        ({"width": 60}, "width=60 must be a multiple of 2 × heads = 8"),
        ({"layers": 0}, "layers=0: TinyLlama needs an integer of at least 1"),
        ({"max_length": 2.5}, "max_length=2.5: TinyLlama needs an integer of at least 1"),
    ],
)
def test_a_model_that_cannot_be_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TinyLlama(**options)


def test_the_ids_of_characters_are_their_positions() -> None:
    tokenizer = TinyLlama().tokenizer
    assert tokenizer.encode("407>407$") == [4, 0, 7, 12, 4, 0, 7, 13]
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocabulary_size) == (13, 13, 15)


@given(st.text(alphabet="abc$"))
def test_texts_are_decoded_as_they_were(text: str) -> None:
    tokenizer = CharTokenizer("abc$", "$")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_what_has_no_token_is_named() -> None:
    tokenizer = CharTokenizer("ab$", "$")
    with pytest.raises(
        ValueError, match=re.escape("no token for ['x', 'z'] in 'axz'; the tokenizer has the characters")
    ):
        tokenizer.encode("axz")
    with pytest.raises(ValueError, match="token 3 is outside the vocabulary of 3 characters"):
        tokenizer.decode([0, 3])


def test_a_conversation_that_continues_another_begins_with_its_tokens() -> None:
    tokenizer = TinyLlama().tokenizer
    first = [{"role": "user", "content": "1+2="}]
    then = [*first, {"role": "assistant", "content": "3$"}, {"role": "assistant", "content": None}]
    assert tokenizer.apply_chat_template(then) == [*tokenizer.apply_chat_template(first), 3, 13]
