"""Proofs of a key that never travels."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.errors import Unauthorized
from fray.net import auth
from fray.net.auth import Authenticator, AuthRequest, AuthResponse

RNG = random.Random(1)


def door(key: str | None = "key", **options: int) -> Authenticator:
    return Authenticator(lambda key_id: key, random.Random(2), **options)


def test_both_sides_prove_that_they_know_the_key() -> None:
    asked = auth.ask("cluster", "key", RNG)
    answer = door().admit(asked)
    assert answer is not None
    auth.verify_listener(asked, "key", answer)


@pytest.mark.parametrize("key", ["guess", "", "KEY", None])
def test_a_wrong_key_is_turned_away(key: str | None) -> None:
    assert door(key).admit(auth.ask("cluster", "key", RNG)) is None


def test_an_impostor_is_found_out() -> None:
    asked = auth.ask("cluster", "key", RNG)
    for answer in (
        None,
        AuthResponse("n", "0" * 64),
        AuthResponse(asked.nonce, asked.proof),
        door("guess").admit(asked),
    ):
        with pytest.raises(Unauthorized, match="does not know the key 'cluster'"):
            auth.verify_listener(asked, "key", answer)


def test_a_request_is_good_once() -> None:
    keeper = door()
    asked = auth.ask("cluster", "key", RNG)
    assert keeper.admit(asked) is not None
    assert keeper.admit(asked) is None


def test_the_memory_for_requests_is_bounded() -> None:
    keeper = door(limit=3)
    first = auth.ask("cluster", "key", RNG)
    for asked in (first, *(auth.ask("cluster", "key", RNG) for _ in range(3))):
        assert keeper.admit(asked) is not None
    assert keeper.admit(first) is not None


def test_an_open_door_admits_those_without_proof() -> None:
    assert door("").admit(AuthRequest()) is not None
    assert door("").admit(auth.ask("", "", RNG)) is not None
    assert door("key").admit(AuthRequest()) is None
    assert door("").admit(auth.ask("", "some key", RNG)) is None


def test_proofs_depend_on_everything() -> None:
    proofs = {
        auth.prove(*words)
        for words in [
            ("k", "dial", "a", "b"),
            ("l", "dial", "a", "b"),
            ("k", "listen", "a", "b"),
            ("k", "dial", "b", "a"),
        ]
    }
    assert len(proofs) == 4


@given(st.text(max_size=100))
def test_headers_carry_any_key_id_and_no_key(key_id: str) -> None:
    asked = auth.ask(key_id.encode(errors="replace").decode(), "the secret key", RNG)
    header = auth.write_ask(asked)
    assert header.isascii()
    assert header.isprintable()
    assert auth.read_ask(header) == asked
    assert "secret" not in header or "secret" in key_id
    answer = AuthResponse("n", "p")
    assert auth.read_answer(auth.write_answer(answer)) == answer


@given(st.none() | st.text())
def test_any_other_header_proves_nothing(header: str | None) -> None:
    assert auth.read_ask(header).proof == ""
    assert auth.read_answer(header) is None
