"""End of a driver's session, as its calls and its jobs see it."""

from __future__ import annotations

import pytest

from fray.errors import SessionEnded, Unauthorized
from fray.model.messages.client import ClientHello, Role
from fray.runtime.controller_client.client import ControllerClient


def test_calls_fail_before_the_ends_of_jobs_cancel_their_scopes() -> None:
    client = ControllerClient(ClientHello(session="session-1", role=Role.DRIVER))
    order: list[str] = []
    client.on_session_end = lambda error: order.append(f"calls: {type(error).__name__}")
    record, _ = client.jobs.get_or_add("a-1", "a")
    record.callbacks.append(lambda: order.append("job"))
    client.on_end(SessionEnded("away for too long"))
    assert order == ["calls: SessionEnded", "job"]


def test_a_session_that_its_own_process_ends_fails_no_call() -> None:
    client = ControllerClient(ClientHello(session="session-1", role=Role.DRIVER))
    order: list[str] = []
    client.on_session_end = lambda error: order.append("calls")
    client.is_closing = True
    client.on_end(SessionEnded("driver left"))
    assert order == []


@pytest.mark.parametrize(("role", "seen"), [(Role.JOB, SessionEnded), (Role.DRIVER, Unauthorized)])
def test_the_key_of_a_process_is_refused_when_its_attempt_was_given_up(role: Role, seen: type[Exception]) -> None:
    client = ControllerClient(ClientHello(session="session-1", role=role))
    client.on_end(Unauthorized("the key is not accepted: check the token", key_refused=True))
    assert type(client.ended) is seen
