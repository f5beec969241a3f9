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


def authenticator_with(key: str | None = "key", **options: int) -> Authenticator:
    return Authenticator(lambda key_id: key, random.Random(2), **options)


def test_both_sides_prove_the_key() -> None:
    asked = auth.make_request("cluster", "key", RNG)
    answer = authenticator_with().authenticate(asked)
    assert answer is not None
    auth.verify_listener(asked, "key", answer)


@pytest.mark.parametrize("key", ["guess", "", "KEY", None])
def test_a_wrong_key_is_rejected(key: str | None) -> None:
    assert authenticator_with(key).authenticate(auth.make_request("cluster", "key", RNG)) is None


def test_an_impostor_is_detected() -> None:
    asked = auth.make_request("cluster", "key", RNG)
    for answer in (
        None,
        AuthResponse("n", "0" * 64),
        AuthResponse(asked.nonce, asked.proof),
        authenticator_with("guess").authenticate(asked),
    ):
        with pytest.raises(Unauthorized, match="does not have the key 'cluster'"):
            auth.verify_listener(asked, "key", answer)


def test_a_request_is_accepted_once() -> None:
    authenticator = authenticator_with()
    asked = auth.make_request("cluster", "key", RNG)
    assert authenticator.authenticate(asked) is not None
    assert authenticator.authenticate(asked) is None


def test_the_memory_for_requests_is_bounded() -> None:
    authenticator = authenticator_with(limit=3)
    first = auth.make_request("cluster", "key", RNG)
    for asked in (first, *(auth.make_request("cluster", "key", RNG) for _ in range(3))):
        assert authenticator.authenticate(asked) is not None
    assert authenticator.authenticate(first) is not None


def test_an_open_listener_accepts_dialers_without_proof() -> None:
    assert authenticator_with("").authenticate(AuthRequest()) is not None
    assert authenticator_with("").authenticate(auth.make_request("", "", RNG)) is not None
    assert authenticator_with("key").authenticate(AuthRequest()) is None
    assert authenticator_with("").authenticate(auth.make_request("", "some key", RNG)) is None


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
    asked = auth.make_request(key_id.encode(errors="replace").decode(), "the secret key", RNG)
    header = auth.write_request(asked)
    assert header.isascii()
    assert header.isprintable()
    assert auth.read_request(header) == asked
    assert "secret" not in header or "secret" in key_id
    answer = AuthResponse("n", "p")
    assert auth.read_response(auth.write_response(answer)) == answer


@given(st.none() | st.text())
def test_any_other_header_proves_nothing(header: str | None) -> None:
    assert auth.read_request(header).proof == ""
    assert auth.read_response(header) is None
