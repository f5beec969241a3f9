"""The table of a session against dumb twins, and its verdicts as a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fray.errors import ActorDied, ChannelFull, FrayError, MessageTooLarge, NoSuchActor, ProtocolMismatch, Unauthorized
from fray.model.messages.session import Hello, Refuse, Welcome
from fray.net.channel import session
from fray.net.channel.session import (
    PROTOCOL,
    STALE_S,
    FragmentBudget,
    Heartbeat,
    HeartbeatAction,
    HelloDecision,
    ReceiveState,
    SendQueue,
    SessionRecord,
    decide_hello,
)


class OutboxMachine(RuleBasedStateMachine):
    """An outbox beside its dumb twin: a list of all frames, and two counts."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = SendQueue()
        self.all: list[bytes] = []
        self.acked = self.numbered = 0

    @rule(body=st.binary(min_size=1, max_size=30), whole=st.booleans())
    def push(self, body: bytes, whole: bool) -> None:
        frame = body if whole else (body[:1], memoryview(body)[1:])
        self.outbox.push(frame, len(body))
        self.all.append(body)

    @rule(limit=st.integers(1, 100))
    def take(self, limit: int) -> None:
        taken = b"".join(self.outbox.take(limit))
        begin, total = self.numbered, 0
        while self.numbered < len(self.all) and (
            self.numbered == begin or total + len(self.all[self.numbered]) <= limit
        ):
            total += len(self.all[self.numbered])
            self.numbered += 1
        assert taken == b"".join(self.all[begin : self.numbered])

    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.numbered))
        self.outbox.ack(count)
        self.acked = max(self.acked, count)

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(self.acked, self.numbered))
        self.outbox.rewind(count)
        self.acked = self.numbered = count
        assert self.outbox.size_bytes == sum(map(len, self.all[count:]))

    @precondition(lambda self: self.acked > 0)
    @rule()
    def rewind_too_far(self) -> None:
        with pytest.raises(ProtocolMismatch):
            self.outbox.rewind(self.acked - 1)

    @rule()
    def ack_too_much(self) -> None:
        with pytest.raises(ProtocolMismatch):
            self.outbox.ack(self.numbered + 1)

    @rule()
    def clear(self) -> None:
        self.outbox.clear()
        self.all, self.acked, self.numbered = [], 0, 0

    @invariant()
    def books_are_right(self) -> None:
        box = self.outbox
        assert (box.acked, box.numbered, len(box.unsent)) == (self.acked, self.numbered, len(self.all) - self.numbered)
        assert box.unsent_bytes == sum(map(len, self.all[self.numbered :]))
        assert box.size_bytes >= sum(map(len, self.all[self.acked :]))
        assert box.large == sum(isinstance(frame, tuple) for frame in box.unsent)


TestOutbox = OutboxMachine.TestCase


def test_a_full_send_queue_raises_channel_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "BUFFER_LIMIT_BYTES", 100)
    outbox = SendQueue()
    outbox.push(b"x" * 60, 60)
    outbox.check_room(40)
    with pytest.raises(ChannelFull) as caught:
        outbox.check_room(41)
    assert caught.value.details["held_bytes"] == 60


def test_one_byte_past_the_limit_of_a_key_ends_its_largest_session() -> None:
    budget = FragmentBudget(limit_bytes=100, key_limit_bytes=10)
    assert budget.note("k", "a", 6) is None
    assert budget.note("k", "b", 4) is None
    assert budget.note("l", "c", 10) is None
    assert budget.note("k", "b", 5) == "a"
    assert budget.note("l", "c", 11) == "c"
    assert budget.note("k", "a", 0) is None
    assert budget.note("k", "b", 10) is None


def test_one_byte_past_the_common_limit_ends_the_largest_session_of_the_key_with_most() -> None:
    budget = FragmentBudget(limit_bytes=10, key_limit_bytes=8)
    assert budget.note("k", "a", 3) is None
    assert budget.note("k", "b", 2) is None
    assert budget.note("l", "c", 4) is None
    assert budget.note("m", "d", 1) is None
    assert budget.size_bytes == 10
    assert budget.note("m", "d", 2) == "a"
    for key_id, name in (("k", "a"), ("k", "b"), ("l", "c"), ("m", "d")):
        assert budget.note(key_id, name, 0) is None
    assert budget.size_bytes == 0


def test_fragments_are_bounded_and_joined() -> None:
    inbox = ReceiveState()
    inbox.add_fragment(b"abc", 6)
    inbox.add_fragment(memoryview(b"def"), 6)
    assert inbox.take_fragments() == b"abcdef"
    inbox.add_fragment(b"abc", 6)
    with pytest.raises(MessageTooLarge):
        inbox.add_fragment(b"defg", 6)


@pytest.mark.parametrize(("frames", "size_bytes", "due"), [(127, 0, False), (128, 0, True), (1, 256 * 1024, True)])
def test_an_acknowledgement_is_due_after_frames_or_bytes(frames: int, size_bytes: int, due: bool) -> None:
    inbox = ReceiveState(received=1000 + frames, acked=1000, unacked_bytes=size_bytes)
    assert inbox.is_ack_due() is due
    assert inbox.take_ack() == 1000 + frames
    assert not inbox.is_ack_due()


# Verdicts of a listener ---------------------------------------------------------------------------------------------


def hello(**changes: Any) -> Hello:
    return Hello(**{"protocol": PROTOCOL, "session": "s", "incarnation": "d1", "dial": 5, **changes})


def seat(*, confirmed: bool = True, numbered: int = 10, acked: int = 4) -> SessionRecord:
    outbox = SendQueue(numbered=numbered, acked=acked)
    return SessionRecord(key_id="k", incarnation="d1", instance="A", dial=4, outbox=outbox, confirmed=confirmed)


@pytest.mark.parametrize(
    ("says", "known", "verdict"),
    [
        (hello(), None, HelloDecision.FRESH),
        (hello(resume=True, instance="A", received=7), None, HelloDecision.FRESH),
        (hello(resume=True, instance="A", received=4), seat(), HelloDecision.RESUME),
        (hello(resume=True, instance="A", received=10), seat(), HelloDecision.RESUME),
        (hello(resume=True, instance="A", received=3), seat(), HelloDecision.FRESH),
        (hello(resume=True, instance="A", received=11), seat(), HelloDecision.FRESH),
        (hello(resume=True, instance="A", received=4, dial=3), seat(), HelloDecision.STALE),
        (hello(resume=True, instance="B", received=4), seat(), HelloDecision.FRESH),
        (hello(resume=True, instance="B", received=4), seat(confirmed=False), HelloDecision.OFFER),
        (hello(), seat(confirmed=False), HelloDecision.OFFER),
        (hello(), seat(), HelloDecision.FRESH),
        (hello(incarnation="d2", dial=1), seat(), HelloDecision.FRESH),
        (hello(incarnation="d2", dial=1), seat(confirmed=False), HelloDecision.FRESH),
        (hello(protocol=(2, 99), expects="h1"), None, HelloDecision.FRESH),
    ],
)
def test_decisions_of_a_listener(says: Hello, known: SessionRecord | None, verdict: HelloDecision) -> None:
    assert decide_hello(says, "k", known, "h1") is verdict


@pytest.mark.parametrize(
    ("says", "key_id", "error"),
    [
        (hello(protocol=(1, 0)), "k", ProtocolMismatch),
        (hello(protocol=(0, 9)), "k", ProtocolMismatch),
        (hello(expects="h0"), "k", ActorDied),
        (hello(), "other", Unauthorized),
        (hello(resume=True, instance="A", received=5), "other", Unauthorized),
    ],
)
def test_refusals_of_a_listener(says: Hello, key_id: str, error: type[FrayError]) -> None:
    with pytest.raises(error):
        decide_hello(says, key_id, seat(), "h1")


def test_a_dialer_checks_the_welcome() -> None:
    welcome = Welcome(protocol=PROTOCOL, incarnation="h1", instance="A", resumed=False)
    session.check_welcome(welcome, None)
    session.check_welcome(welcome, "h1")
    with pytest.raises(ActorDied):
        session.check_welcome(welcome, "h0")
    with pytest.raises(ProtocolMismatch):
        session.check_welcome(Welcome(protocol=(1, 0), incarnation="h1", instance="A", resumed=False), "h1")


def test_a_refusal_has_one_reason() -> None:
    def reason(expects: str | None, protocol: tuple[int, int] = PROTOCOL) -> FrayError:
        return session.check_refuse(Refuse(protocol=protocol, incarnation="h1", error={}), expects, NoSuchActor("x"))

    assert type(reason(None)) is NoSuchActor
    assert type(reason("h1")) is NoSuchActor
    assert type(reason("h0")) is ActorDied
    assert type(reason("h0", (1, 0))) is ProtocolMismatch


# Heartbeat ----------------------------------------------------------------------------------------------------------


def run_heart(
    silent_from: float, answers: Callable[[float], bool], until: float = 200.0
) -> list[tuple[float, HeartbeatAction]]:
    """Return the due actions and their times, if the peer answers at once."""
    heart, events = Heartbeat(0.0, 0.0), []
    while (now := heart.next_at()) < until:
        beat = heart.beat(now, 0.0)
        if beat is not HeartbeatAction.WAIT:
            events.append((now, beat))
        if beat is HeartbeatAction.DROP:
            break
        if beat is HeartbeatAction.PING and answers(now):
            heart.received_at = now
    return events


def test_an_idle_peer_is_pinged_each_period_and_dropped_after_three_silent_ones() -> None:
    assert run_heart(0, lambda now: True, 70) == [
        (20, HeartbeatAction.PING),
        (40, HeartbeatAction.PING),
        (60, HeartbeatAction.PING),
    ]
    assert run_heart(0, lambda now: now < 30) == [
        (20, HeartbeatAction.PING), (40, HeartbeatAction.PING), (42, HeartbeatAction.SILENT),
        (60, HeartbeatAction.PING), (80, HeartbeatAction.DROP)
    ]  # fmt: skip


def test_a_peer_that_acknowledges_nothing_is_pinged_and_then_silent() -> None:
    heart = Heartbeat(0.0, 0.0)
    assert heart.beat(10.0, 0.0, owes=True) is HeartbeatAction.WAIT
    assert heart.next_at() == 10.5
    assert heart.beat(10.5, 0.0, owes=True) is HeartbeatAction.PING
    assert heart.next_at() == 12.0
    assert heart.beat(12.0, 0.0, owes=True) is HeartbeatAction.SILENT
    assert heart.beat(12.5, 0.0, owes=True) is HeartbeatAction.WAIT, "once"


def test_whatever_a_peer_sends_ends_its_silence() -> None:
    heart = Heartbeat(0.0, 0.0)
    assert heart.beat(10.0, 0.0, owes=True) is HeartbeatAction.WAIT
    heart.received_at = 10.2
    assert heart.beat(12.0, 0.0, owes=True) is HeartbeatAction.WAIT
    assert heart.owed_since == 12.0, "what is owed now was sent since"


def test_a_process_that_was_late_itself_does_not_call_its_peer_silent() -> None:
    heart = Heartbeat(0.0, 0.0)
    assert heart.beat(10.0, 0.0, owes=True) is HeartbeatAction.WAIT
    assert heart.beat(12.5, 2.0, owes=True) is HeartbeatAction.WAIT
    assert heart.next_at() == 13.0


def test_a_suspended_process_gives_the_peer_time() -> None:
    heart = Heartbeat(0.0, 0.0)
    assert heart.beat(100.0, late_s=80.0) is HeartbeatAction.PING
    assert heart.beat(140.0, late_s=0.0) is HeartbeatAction.PING
    assert heart.beat(160.0, late_s=0.0) is HeartbeatAction.DROP


def test_a_process_suspended_for_minutes_drops_old_messages() -> None:
    assert Heartbeat(0.0, 0.0, stale_s=STALE_S).beat(500.0, late_s=480.0) is HeartbeatAction.DROP


@given(st.floats(0, 1e9), st.floats(0.001, 1e3))
def test_the_heartbeat_acts_whenever_it_is_due(start: float, period_s: float) -> None:
    heart = Heartbeat(start, start, period_s)
    for _ in range(4):
        now = heart.next_at()
        assert now > start or period_s < 1e-6
        beat = heart.beat(now, 0.0)
        assert beat is not HeartbeatAction.WAIT
        if beat is HeartbeatAction.DROP:
            break
