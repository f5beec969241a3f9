"""Proofs of a key that never travels, each good for one connection to one listener."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.errors import Unauthorized
from fray.net import auth
from fray.net.auth import Authenticator, AuthRequest, AuthResponse, Challenge, DialerProof, Rejection

RNG = random.Random(1)
NAMES = frozenset({"tcp:10.0.0.1:7421"})


def challenge_of(key: str | None = "key", names: frozenset[str] = NAMES, binding: str = "") -> Challenge:
    return Authenticator(lambda key_id: key, random.Random(2)).challenge(names, binding)


def dialer(key: str = "key", names: frozenset[str] = NAMES, binding: str = "") -> DialerProof:
    return DialerProof("cluster", key, names, binding)


def test_both_sides_prove_the_key() -> None:
    challenge, proof = challenge_of(), dialer()
    response = challenge.authenticate(proof.answer(challenge.nonce, RNG))
    assert isinstance(response, AuthResponse)
    proof.verify(response)


@pytest.mark.parametrize("key", ["guess", "", "KEY", None])
def test_a_wrong_key_is_rejected(key: str | None) -> None:
    challenge = challenge_of(key)
    assert challenge.authenticate(dialer().answer(challenge.nonce, RNG)) is Rejection.KEY


def test_an_impostor_is_detected() -> None:
    proof = dialer()
    challenge = challenge_of("guess")
    request = proof.answer(challenge.nonce, RNG)
    guessed = auth.prove("guess", auth.LISTEN, challenge.nonce, request.nonce, "cluster", request.names, "")
    for response in (None, AuthResponse("0" * 64), AuthResponse(request.proof), AuthResponse(guessed)):
        with pytest.raises(Unauthorized, match="does not have the key 'cluster'"):
            proof.verify(response)


def test_a_challenge_is_answered_once() -> None:
    challenge = challenge_of()
    request = dialer().answer(challenge.nonce, RNG)
    assert isinstance(challenge.authenticate(request), AuthResponse)
    assert challenge.authenticate(request) is Rejection.KEY


def test_a_failed_answer_is_the_only_one() -> None:
    challenge = challenge_of()
    assert challenge.authenticate(AuthRequest("cluster", proof="guess")) is Rejection.KEY
    assert challenge.authenticate(dialer().answer(challenge.nonce, RNG)) is Rejection.KEY


def test_an_answer_to_another_challenge_is_rejected() -> None:
    authenticator = Authenticator(lambda key_id: "key", random.Random(2))
    recorded = dialer().answer(authenticator.challenge(NAMES).nonce, RNG)
    assert authenticator.challenge(NAMES).authenticate(recorded) is Rejection.KEY


def test_a_proof_for_another_listener_is_rejected_while_the_challenge_is_new() -> None:
    """An impostor hands on the challenge of the real listener, whose address the dialer has not dialed."""
    real = challenge_of()
    answered_to_impostor = dialer(names=frozenset({"tcp:10.9.9.9:7421"})).answer(real.nonce, RNG)
    assert real.authenticate(answered_to_impostor) is Rejection.ADDRESS


def test_an_impostor_cannot_put_the_real_address_into_a_proof() -> None:
    real = challenge_of()
    answered = dialer(names=frozenset({"tcp:10.9.9.9:7421"})).answer(real.nonce, RNG)
    forged = AuthRequest(answered.key_id, answered.nonce, auth.write_names(NAMES), answered.proof)
    assert real.authenticate(forged) is Rejection.KEY


def test_one_of_the_names_is_enough() -> None:
    challenge = challenge_of(names=frozenset({"tcp:10.0.0.1:7421", "tcp:lab.example:7421"}))
    translated = dialer(names=frozenset({"tcp:192.0.2.7:7421", "tcp:lab.example:7421"}))
    assert isinstance(challenge.authenticate(translated.answer(challenge.nonce, RNG)), AuthResponse)


def test_with_a_certificate_the_binding_decides_and_no_name() -> None:
    elsewhere = frozenset({"tcp:192.0.2.7:443"})
    for seen, accepted in (("aa11", True), ("bb22", False), ("", False)):
        challenge = challenge_of(binding="aa11")
        response = challenge.authenticate(dialer(names=elsewhere, binding=seen).answer(challenge.nonce, RNG))
        assert (response is not Rejection.KEY) is accepted
        assert isinstance(response, AuthResponse) is accepted


def test_an_open_listener_accepts_dialers_without_proof() -> None:
    assert isinstance(challenge_of("").authenticate(AuthRequest()), AuthResponse)
    assert challenge_of("key").authenticate(AuthRequest()) is Rejection.KEY
    challenge = challenge_of("")
    assert challenge.authenticate(DialerProof("", "some key", NAMES).answer(challenge.nonce, RNG)) is Rejection.KEY


def test_proofs_depend_on_everything_and_on_where_it_begins() -> None:
    subjects = ["a", "b", "c", "d", "e"]
    changed = [[*subjects[:n], "x", *subjects[n + 1 :]] for n in range(5)]
    shifted = [
        ["ab", "", "c", "d", "e"],
        ["", "ab", "c", "d", "e"],
        ["a,1:b", "c", "d", "e"],
        ["a", "b", "c", "d", "e", ""],
    ]
    proofs = {auth.prove("k", auth.DIAL, *words) for words in (subjects, *changed, *shifted)}
    proofs |= {auth.prove("l", auth.DIAL, *subjects), auth.prove("k", auth.LISTEN, *subjects)}
    assert len(proofs) == 1 + len(changed) + len(shifted) + 2


def test_derived_keys_of_different_kinds_differ() -> None:
    keys = {auth.derive_key(b"secret", *words) for words in (("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""))}
    assert len(keys | {auth.derive_key(b"other", "ab", "c")}) == 5


@given(st.text(max_size=100), st.lists(st.text(max_size=30), min_size=1, max_size=3))
def test_headers_carry_any_key_id_and_no_key(key_id: str, names: list[str]) -> None:
    key_id, *names = (text.encode(errors="replace").decode() for text in (key_id, *names))
    request = DialerProof(key_id, "the secret key", names).answer("nonce", RNG)
    header = auth.write_request(request)
    assert header.isascii()
    assert header.isprintable()
    assert auth.read_request(header) == request
    assert auth.read_names(request.names) == set(names)
    assert "secret" not in header or "secret" in key_id + "".join(names)
    assert not auth.is_challenge_wanted(header)
    assert auth.is_challenge_wanted(auth.write_request(AuthRequest(key_id)))
    response = AuthResponse("p")
    assert auth.read_response(auth.write_response(response)) == response
    assert auth.read_challenge(auth.write_challenge("n")) == "n"


@given(st.none() | st.text())
def test_any_other_header_proves_nothing(header: str | None) -> None:
    assert auth.read_request(header).proof == ""
    assert auth.read_response(header) is None
    assert auth.read_challenge(header) == ""
