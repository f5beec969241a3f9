"""Two releases on one channel: what they have in common, refusals on both sides, and messages that only one knows."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from fray.errors import FrayError, ProtocolMismatch, Unsupported
from fray.model.messages.client import Explain, ListJobs, Text
from fray.model.messages.node import ObservedState
from fray.model.messages.session import VERSION, Hello, Refuse, Welcome
from fray.model.specs import EndReason, ObservedAttempt, Outcome, Phase
from fray.net import codec
from fray.net.channel import versions
from fray.net.channel.requests import Requests
from fray.net.channel.session import PROTOCOL
from fray.net.channel.versions import CAPABILITIES, WIRE_VERSIONS, Release, common_version, release_of
from fray.net.codec import ACK, Bytes, Kind, encode_frame
from fray.net.transport import Transport
from tests.net.test_channel import PATIENT, Harness, Recorder, answer, control, hello, introduce, open_harness

OLDEST, NEWEST = WIRE_VERSIONS


def release(name: str, oldest: int, newest: int) -> Release:
    return Release(name=name, versions=(oldest, newest), capabilities=frozenset())


@pytest.mark.parametrize(
    ("dialer", "listener", "version"),
    [((1, 2), (1, 2), 2), ((1, 2), (2, 3), 2), ((2, 3), (1, 2), 2), ((1, 1), (1, 5), 1)],
)
def test_the_newest_version_that_both_speak_counts(
    dialer: tuple[int, int], listener: tuple[int, int], version: int
) -> None:
    assert common_version(release("a", *dialer), release("b", *listener)) == version


def test_without_a_common_version_the_error_says_which_side_to_upgrade_first() -> None:
    with pytest.raises(ProtocolMismatch) as caught:
        common_version(release("0.1.0", 1, 2), release("0.4.0", 4, 5))
    assert str(caught.value) == (
        "no common version of the wire format: fray 0.1.0 dials and speaks versions 1 to 2, fray 0.4.0 listens and "
        "speaks versions 4 to 5; upgrade the dialing side first, without leaving out a minor release (docs/upgrade.md)"
    )
    with pytest.raises(ProtocolMismatch, match=r"an earlier fray listens and speaks version 1; upgrade the listening"):
        common_version(release("0.4.0", 4, 5), release("", 1, 1))


def test_what_a_peer_says_of_itself_is_bounded_and_printed_in_one_line() -> None:
    name = "9\n\x1b[31m" + "x" * 100
    found = release_of(
        Hello(
            protocol=PROTOCOL,
            session="s",
            incarnation="i",
            release=name,
            versions=(-5, 10**30),
            capabilities=("unsupported", "y" * 10**6),
        )
    )
    assert found.versions == (0, 9_999)
    assert found.capabilities == {"unsupported"}
    assert str(found) == "fray 9[31m" + "x" * 33


# The handshake -------------------------------------------------------------------------------------------------------


def test_hello_welcome_and_refusal_have_the_fields_that_every_release_reads() -> None:
    """Earlier releases send these texts, so they are never changed."""
    first = control("Hello", [b""], protocol=[2, 0], session="s", incarnation="i", dial=3, news=1)
    second = control(
        "Hello",
        [b""],
        protocol=[2, 0],
        session="s",
        incarnation="i",
        release="0.1.0",
        versions=[1, 2],
        capabilities=["unsupported", "x"],
    )
    old, new = (codec.decode_message(body)[0] for body in (first, second))
    assert release_of(old) == Release(name="", versions=(1, 1), capabilities=frozenset())
    assert release_of(new) == Release(name="0.1.0", versions=(1, 2), capabilities=frozenset({"unsupported"}))
    welcome = control("Welcome", [b""], protocol=[2, 0], incarnation="h", instance="n", resumed=False, received=0)
    refusal = control("Refuse", [], protocol=[2, 0], incarnation="h", error={"error": "FrayError", "message": "no"})
    assert isinstance(codec.decode_message(welcome)[0], Welcome)
    assert isinstance(codec.decode_message(refusal)[0], Refuse)


async def test_both_ends_know_what_the_other_runs(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        near = await harness.dial()
        far = harness.recorders[0]
        own = Release(name=VERSION, versions=WIRE_VERSIONS, capabilities=frozenset(CAPABILITIES))
        assert near.channel.peer_release == far.channel.peer_release == own


async def test_a_dialer_from_before_versions_is_welcome(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        body = control("Hello", [b"hi"], protocol=[2, 0], session="s", incarnation="i")
        welcome = await answer(await introduce(harness, encode_frame(Kind.HELLO, 0, body)))
        assert isinstance(welcome, Welcome)
        assert harness.recorders[0].channel.peer_release == Release(name="", versions=(1, 1), capabilities=frozenset())


async def test_a_dialer_without_a_common_version_is_refused_by_one_line(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_harness() as harness:
        later = {"release": "0.9.0", "versions": (NEWEST + 2, NEWEST + 3)}
        refuse = await answer(await introduce(harness, hello(**later)))
        assert isinstance(refuse, Refuse)
        text = refuse.error["message"]
        assert refuse.error["error"] == "ProtocolMismatch"
        assert f"fray 0.9.0 dials and speaks versions {NEWEST + 2} to {NEWEST + 3}" in text
        assert f"fray {VERSION} listens" in text
        assert "upgrade the listening side first" in text
        assert "\n" not in text
        assert text in caplog.text
        assert refuse.versions == WIRE_VERSIONS


async def serve_release(harness: Harness, **fields: Any) -> None:
    """Listen at ``memory:later`` as another release, which welcomes every dialer."""

    async def serve(transport: Transport) -> None:
        await transport.receive()
        body = control("Welcome", [b""], protocol=[2, 0], incarnation="h", instance="n", resumed=False, **fields)
        await transport.send([ACK.pack(0), encode_frame(Kind.WELCOME, 0, body)])
        await transport.receive()

    await harness.nursery.start(harness.network.listen, "memory:later", lambda key_id: "key", serve)


async def test_a_dialer_refuses_a_listener_without_a_common_version(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        await serve_release(harness, release="0.9.0", versions=[NEWEST + 1, NEWEST + 1])
        with pytest.raises(ProtocolMismatch, match=r"fray 0\.9\.0 listens .*; upgrade the dialing side first"):
            await harness.dial(addresses=("memory:later",))


async def test_a_listener_of_a_neighbouring_release_is_accepted(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        known = [*CAPABILITIES, "new"]
        await serve_release(harness, release="0.9.0", versions=[NEWEST, NEWEST + 1], capabilities=known, more=[1])
        near = await harness.dial(addresses=("memory:later",))
        assert near.channel.peer_release.name == "0.9.0"
        assert near.channel.peer_release.capabilities == set(CAPABILITIES)


async def test_a_release_too_far_away_that_took_over_ends_no_channel(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator who has started the wrong release may start the right one again."""
    async with open_harness() as harness:
        near = await harness.dial(policy=PATIENT)
        monkeypatch.setattr(versions, "WIRE_VERSIONS", (NEWEST + 2, NEWEST + 3))
        monkeypatch.setattr("fray.net.channel.dialer.own_fields", lambda: {"versions": WIRE_VERSIONS})
        harness.network.drop("driver")
        await near.wait_event("suspended")
        with trio.move_on_after(20):
            await near.wait_event("end")
        assert "no common version" in caplog.text
        assert near.channel.error is None
        monkeypatch.undo()
        await near.wait_event("resumed")


# Messages that only one side knows -----------------------------------------------------------------------------------


class Asker(Recorder):
    """Dialer's handler with requests."""

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        if not self.requests.on_frame(kind, flags, target, ref, body):
            super().on_frame(kind, flags, target, ref, body)

    @property
    def requests(self) -> Requests:
        if not hasattr(self, "_requests"):
            self._requests = Requests(self.channel)
        return self._requests


class Answerer(Recorder):
    """Listener's handler, which decodes whatever comes, as those of controller and node do."""

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        message, _ = codec.decode_message(body)
        super().on_frame(kind, flags, target, ref, body)
        if kind == Kind.REQUEST:
            self.channel.reply(ref, Text(text=type(message).__name__))


async def ask_raw(near: Recorder, ref: int, body: bytes) -> FrayError:
    """Send a request as another release writes it, and return the error in its answer."""
    count = len(near.bodies)
    near.channel.send_nowait(Kind.REQUEST, ref, body)
    await near.wait_bodies(count + 1)
    assert near.frames[-1][0] == Kind.ERROR
    assert near.frames[-1][3] == ref
    return codec.decode_error(near.bodies[-1])


async def test_an_unknown_greeting_is_refused_with_the_release_that_it_needs(autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        harness.refusal = Unsupported("unknown message type 'RobotHello'")
        refuse = await answer(await introduce(harness, hello(release="0.9.0", versions=(1, NEWEST + 1))))
        assert isinstance(refuse, Refuse)
        assert refuse.error["error"] == "Unsupported"
        assert f"its sender, fray 0.9.0 (wire version {NEWEST + 1}), or a later one" in refuse.error["message"]


UNKNOWN = [
    (control("Teleport", [], job="x"), "unknown message type 'Teleport'"),
    (control("ClientHello", [], session="s", role="robot"), "'robot' is not a valid Role @ ClientHello.role"),
]


@pytest.mark.parametrize(("body", "what"), UNKNOWN)
async def test_an_unknown_request_or_value_costs_one_request(body: bytes, what: str, autojump_clock: MockClock) -> None:
    async with open_harness() as harness:
        harness.make = Answerer
        near = await harness.dial()
        error = await ask_raw(near, 7, body)
        assert type(error) is Unsupported
        assert str(error).startswith(f"unsupported: {what}")
        assert f"It needs the release of its sender, fray {VERSION} (wire version {NEWEST}), or a later one" in str(
            error
        )
        assert f"this process runs fray {VERSION}" in str(error)
        near.channel.send_nowait(Kind.REQUEST, 8, codec.encode_message(ListJobs()))
        await near.wait_bodies(2)
        assert near.frames[-1][0] == Kind.REPLY
        assert near.channel.error is None


@pytest.mark.parametrize(("body", "what"), UNKNOWN)
async def test_an_unknown_notice_is_ignored_and_logged(
    body: bytes, what: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_harness() as harness:
        harness.make = Answerer
        near = await harness.dial()
        near.channel.send_nowait(Kind.NOTICE, 0, body)
        near.channel.notice(Text(text="after"))
        await harness.recorders[0].wait_bodies(1)
        assert what in caplog.text
        assert near.channel.error is None


async def test_damage_still_ends_the_channel(autojump_clock: MockClock) -> None:
    """A number where a value of an enumeration belongs does not come of a later release."""
    async with open_harness() as harness:
        harness.make = Answerer
        near = await harness.dial()
        near.channel.send_nowait(Kind.NOTICE, 0, control("ClientHello", [], session="s", role=5))
        await near.wait_event("end")
        assert isinstance(near.error, ProtocolMismatch)
        assert not isinstance(near.error, Unsupported)


def test_unknown_fields_are_ignored_and_missing_ones_have_their_defaults() -> None:
    message, _ = codec.decode_message(control("Explain", [], job="x", teleport=True))
    assert message == Explain(job="x")
    assert codec.decode_message(control("ListJobs", []))[0] == ListJobs()


async def test_a_message_is_not_sent_to_a_peer_that_lacks_its_capability(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(versions._guards, "Explain", "explains")
    async with open_harness() as harness:
        harness.make = Answerer
        near = await harness.dial(make=Asker)
        assert isinstance(near, Asker)
        with pytest.raises(Unsupported) as caught:
            await near.requests.request(Explain(job="x"))
        assert str(caught.value) == (
            f"Explain is not known to the other side, which runs fray {VERSION} without the capability 'explains': it "
            f"needs the release that runs here (fray {VERSION}) or a later one there"
        )
        with pytest.raises(Unsupported):
            near.channel.notice(Explain(job="x"))
        assert len(near.requests) == 0
        assert await near.requests.request(ListJobs()) == (Text(text="ListJobs"), [])
        near.channel.peer_release = Release(capabilities=frozenset({"explains"}))
        assert await near.requests.request(Explain(job="x")) == (Text(text="Explain"), [])


def test_a_peer_of_an_earlier_release_gets_the_substitute_of_a_new_value() -> None:
    def report(cause: EndReason) -> ObservedState:
        outcome = Outcome(cause=cause, message="no_account")
        ended = ObservedAttempt(attempt_id="no_account", phase=Phase.ENDED, outcome=outcome)
        running = ObservedAttempt(attempt_id="b", phase=Phase.RUNNING)
        return ObservedState(full=True, observed=(running, ended), busy={"gpu0": "no_account"})

    message = report(EndReason.NO_ACCOUNT)
    # Texts that are equal to the value stay.
    assert release("", 1, 1).adapt(message) == report(EndReason.PORT_TAKEN)
    assert Release().adapt(message) is message
    unchanged = report(EndReason.PORT_TAKEN)
    assert release("", 1, 1).adapt(unchanged) is unchanged


async def test_substitutes_are_sent_as_notice_answer_and_request(autojump_clock: MockClock) -> None:
    def attempt(cause: EndReason) -> ObservedState:
        ended = ObservedAttempt(attempt_id="a", phase=Phase.ENDED, outcome=Outcome(cause=cause))
        return ObservedState(full=True, observed=(ended,))

    async with open_harness() as harness:
        near = await harness.dial(make=Asker)
        assert isinstance(near, Asker)
        far = harness.recorders[0]
        near.channel.peer_release = far.channel.peer_release = release("", 1, 1)
        message, sent = attempt(EndReason.NO_ACCOUNT), attempt(EndReason.PORT_TAKEN)
        near.channel.notice(message)
        await far.wait_bodies(1)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                assert await near.requests.request(message) == (sent, [])

            nursery.start_soon(ask)
            await far.wait_bodies(2)
            far.channel.reply(far.frames[1][3], message)
        assert [codec.decode_message(body)[0] for body in far.bodies] == [sent, sent]


def test_every_substitute_is_guarded_by_its_capability() -> None:
    for capability, values in versions.SUBSTITUTES.items():
        assert {f"{type(value).__name__}.{value}" for value in values} <= set(CAPABILITIES[capability])


def test_an_error_that_was_explained_is_passed_on_unchanged() -> None:
    first = versions.explain_unsupported(Unsupported("unknown message type 'X'"), release("0.3.0", 3, 4))
    assert first.details == {"needs": "0.3.0", "runs": VERSION}
    assert versions.explain_unsupported(first, release("0.1.0", 1, 2)) is first
    assert PROTOCOL[0] == 2
    assert Hello(protocol=PROTOCOL, session="s", incarnation="i").versions == (1, 1)
