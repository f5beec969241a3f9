"""The dialing end of a channel: dial, say hello, serve, and dial again until there is a reason to stop."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import trio
from attrs import define, field, frozen

from fray.errors import (
    ChannelClosed,
    ConnectionFailed,
    FrayError,
    MessageTooLarge,
    ProtocolMismatch,
    Refused,
    Unreachable,
)
from fray.model.backoff import backoff_s
from fray.model.ids import mint
from fray.model.messages.session import Hello, Refuse, Welcome
from fray.net import codec
from fray.net.channel.channel import Channel, Handler, HandlerFactory
from fray.net.channel.connection import Connection
from fray.net.channel.session import (
    PROTOCOL,
    check_refuse,
    check_welcome,
)
from fray.net.codec import ACK, Kind
from fray.net.transport import Credential, Network, Transport, is_relayed

RELAY_AFTER_S = 0.5
"""How long direct addresses are dialed before the relay is tried beside them; at once when they all have failed."""
STOPPED_S = 2.5
"""Waking up later than asked by more than this means that this process was stopped."""
AFTER_STOP_S = 30.0
"""Who was stopped for longer than its patience tries for so long before it gives up (`RedialPolicy.sleeps`)."""
GARBAGE_LIMIT = 3
"""Connections in a row that end by a protocol error, without any progress, before the channel does."""


@frozen(kw_only=True)
class RedialPolicy:
    """How patient a dialer is. The pause after the n-th failure is ``first_s * 2**n``, at most ``most_s``, times a
    random number between 0.5 and 1.
    """

    refused_is_final: bool
    """Nobody listening at any of the addresses is proof of death (a listener lives exactly as long as its process)."""
    give_up_s: float | None
    """Longest time without a connection; None: for ever."""
    excludes_suspension: bool = True
    """Time for which this process was stopped is nobody's absence. False: it counts, but for the last 30 s."""
    first_s: float = 0.05
    most_s: float = 2.0
    dial_timeout_s: float = 5.0
    """For a dial and the answer to the hello. Doubled with each round in which that was too short, up to
    ``dial_timeout_most_s``: thousands of nodes that come back to a new controller at once are all let in, one by one,
    only if none of them gives up its place in the line too early."""
    dial_timeout_most_s: float = 60.0

    def timeout_s(self, late: int) -> float:
        """For one dial, after so many rounds that were too short."""
        return max(self.dial_timeout_s, backoff_s(self.dial_timeout_s, self.dial_timeout_most_s, late + 1))

    def pause_s(self, failures: int, rng: random.Random) -> float:
        """The pause after so many failures in a row (from 1)."""
        return backoff_s(self.first_s, self.most_s, failures) * rng.uniform(0.5, 1.0)


@frozen
class Failure:
    """Why one address did not do. ``final``: no use to try again."""

    error: FrayError
    final: bool


def decide_outcome(failures: Sequence[Failure], refused_ends: bool) -> Failure:
    """What a round over all addresses comes to: a final error wins, then refusal by all of them, then patience."""
    for failure in failures:
        if failure.final:
            return failure
    if refused_ends and failures and all(isinstance(failure.error, Refused) for failure in failures):
        return Failure(failures[-1].error, True)
    patient = [failure for failure in failures if not isinstance(failure.error, Refused)]
    return (patient or list(failures))[-1]


def is_final(error: FrayError) -> bool:
    """Whether a failed dial proves anything but that there is no connection now."""
    return not isinstance(error, ConnectionFailed) or type(error) not in (
        ConnectionFailed,
        Unreachable,
        Refused,
        ChannelClosed,
    )


async def run_dialed(
    network: Network,
    addresses: Sequence[str],
    credential: Credential | None,
    *,
    greeting: Callable[[], bytes],
    handler: Handler | HandlerFactory,
    incarnation: str,
    expects: str | None = None,
    policy: RedialPolicy,
    rng: random.Random,
    session: str | None = None,
    task_status: trio.TaskStatus[Channel] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Hold a channel to whoever listens at ``addresses`` (tried in order) until it ends.

    Reports the channel as started after the first welcome (`Handler.on_reset` has been called then) and returns when it
    has ended (`Handler.on_end` has been called then). If it is cancelled it sends what is queued and says goodbye, at
    most 1 s long.

    Args:
        greeting: called for each hello; handed to the listener's ``on_greeting`` when it does not know the session.
        handler: told of everything; or a function that makes one for the channel.
        incarnation: of this process.
        expects: incarnation of the listener's process; another one ends the channel with `ActorDied`. None: any.
        session: name of the session, random by default.

    Raises:
        FrayError: the first connection could not be made, for this reason. The handler was not told of anything then.
    """
    dialer = _Dialer(
        network=network,
        addresses=tuple(addresses),
        credential=credential,
        greeting=greeting,
        handler=handler,
        incarnation=incarnation,
        expects=expects,
        policy=policy,
        rng=rng,
        session=session or mint(rng, 20),
    )
    await dialer.run(task_status)


@frozen
class _Connected:
    transport: Transport
    welcome: Welcome
    greeting: bytes


@define(kw_only=True)
class _Dialer:
    network: Network
    addresses: tuple[str, ...]
    credential: Credential | None
    greeting: Callable[[], bytes]
    handler: Handler | HandlerFactory
    incarnation: str
    expects: str | None
    policy: RedialPolicy
    rng: random.Random
    session: str
    channel: Channel | None = None
    life: str = ""
    dials: int = 0
    failures: int = 0
    """In a row. A connection without progress counts; one that did not last leaves one."""
    late: int = 0
    """Rounds in a row in which an address did not answer in time."""
    garbage: int = 0
    slept_since: float | None = None
    """When the connection that was lost by a stop of this process last brought something."""
    answered: set[str] = field(factory=set)
    """Addresses at which the listener has been met."""
    direct: tuple[str, ...] = ()
    by_relay: tuple[str, ...] = ()
    _scope: trio.CancelScope = field(factory=trio.CancelScope)

    def __attrs_post_init__(self) -> None:
        self.direct = tuple(address for address in self.addresses if not is_relayed(address))
        self.by_relay = tuple(address for address in self.addresses if is_relayed(address))

    async def run(self, task_status: trio.TaskStatus[Channel]) -> None:
        try:
            with self._scope:
                await self._serve(task_status)
        except FrayError as error:
            if self.channel is None:
                raise
            self.channel.end(error)
        finally:
            if self.channel is not None:
                self.channel.end(ChannelClosed("this side has ended the conversation", reason="cancelled"))

    async def _serve(self, task_status: trio.TaskStatus[Channel]) -> None:
        started = False
        while True:
            channel, link = self._attach(await self._connect())
            if not started:
                started = True
                task_status.started(channel)
            await link.run()
            self._after(link, channel)

    # Serving

    def _attach(self, connected: _Connected) -> tuple[Channel, Connection]:
        welcome = connected.welcome
        if self.channel is None:
            self.channel = self._new_channel(connected)
        channel = self.channel
        resumed = welcome.resumed and welcome.instance == self.life
        if resumed:
            channel.outbox.rewind(welcome.received)
        else:
            channel.outbox.clear()
            channel.inbox.clear()
        self.life = welcome.instance
        channel.incarnation, channel.remote = welcome.incarnation, connected.transport.peer.remote
        link = Connection(channel, connected.transport, polite=True)
        channel.attach(link, None if resumed else connected.greeting)
        return channel, link

    def _new_channel(self, connected: _Connected) -> Channel:
        channel = Channel(
            session=self.session, incarnation=connected.welcome.incarnation, remote=connected.transport.peer.remote
        )
        handler: Any = self.handler
        channel.begin(handler if hasattr(handler, "on_frame") else handler(channel))
        channel.on_ended = self._scope.cancel
        return channel

    def _after(self, link: Connection, channel: Channel) -> None:
        channel.suspend(link)
        self.slept_since = link.received_at if link.was_stopped else None
        lasted_s = trio.current_time() - link.began
        if not link.received_any:
            self.failures += 1
        else:
            self.failures = 0 if lasted_s >= self.policy.most_s else 1
        poisoned = isinstance(link.error, ProtocolMismatch | MessageTooLarge) and not link.received_any
        self.garbage = self.garbage + 1 if poisoned else 0
        if self.garbage >= GARBAGE_LIMIT and link.error is not None:
            raise link.error

    # Dialing

    async def _connect(self) -> _Connected:
        """A welcomed connection.

        Raises:
            FrayError: there is no use in trying on.
        """
        since = self._begin_waiting()
        last: FrayError | None = None
        while True:
            began = trio.current_time()
            if self.failures:
                since = self._without_stop(since, await self._pause(since))
            if last is not None and self._patience_s(since) <= 0:
                raise self._given_up(last)
            round_ = _ConnectAttempt()
            await (self._race(round_, since) if self.by_relay and self.direct else self._try_all(round_, since))
            if round_.connected is not None:
                self.late = 0
                return round_.connected
            if self.channel is not None and trio.current_time() - began >= self.channel.stale_s:
                self.channel.was_stopped = True
            self.late = self.late + 1 if round_.is_late else 0
            outcome = decide_outcome(round_.failures, self.policy.refused_is_final)
            if outcome.final:
                raise outcome.error
            self.failures += 1
            last = outcome.error

    def _begin_waiting(self) -> float:
        """Since when patience counts."""
        now, slept_since = trio.current_time(), self.slept_since
        if self.policy.excludes_suspension or slept_since is None:
            return now
        return self._without_stop(slept_since, now - slept_since)

    def _without_stop(self, since: float, stopped_s: float) -> float:
        """Since when patience counts after this process was stopped for so long (a laptop slept)."""
        if self.policy.excludes_suspension or not stopped_s or self.policy.give_up_s is None:
            return since + stopped_s
        return max(since, trio.current_time() - self.policy.give_up_s + AFTER_STOP_S)

    async def _pause(self, since: float) -> float:
        """Wait before the next round; returns for how long we were stopped meanwhile."""
        pause_s = min(self.policy.pause_s(self.failures, self.rng), self._patience_s(since))
        before = trio.current_time()
        await trio.sleep(pause_s)
        late_s = trio.current_time() - before - pause_s
        return late_s if late_s > STOPPED_S else 0.0

    async def _try_all(self, round_: _ConnectAttempt, since: float) -> None:
        await self._try(round_, self.addresses, since)

    async def _race(self, round_: _ConnectAttempt, since: float) -> None:
        """Direct addresses first; the relay beside them when none has answered for a while."""
        async with trio.open_nursery() as nursery:
            over = trio.Event()

            async def directly() -> None:
                await self._try(round_, self.direct, since)
                over.set()
                if round_.is_decided:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(directly)
            with trio.move_on_after(RELAY_AFTER_S):
                await over.wait()
            if not round_.is_decided:
                await self._try(round_, self.by_relay, since)
            if round_.is_decided:
                nursery.cancel_scope.cancel()

    async def _try(self, round_: _ConnectAttempt, addresses: Sequence[str], since: float) -> None:
        for address in addresses:
            try:
                found = await self._dial(
                    address, min(self.policy.timeout_s(self.late), self._patience_s(since)), round_
                )
            except _RefusedByPeer as refusal:
                round_.failures.append(Failure(refusal.error, True))
            except FrayError as error:
                round_.failures.append(self._judge(address, error))
            else:
                if found is not None:
                    round_.connected = found
                    self.answered.add(address)
            if round_.connected is not None:
                return

    def _judge(self, address: str, error: FrayError) -> Failure:
        """Beside a relay, an address may never have led to the listener: seen from here it may be nobody's, or somebody
        else's. So until the listener has answered there, no answer from there proves anything."""
        if not self.by_relay or is_relayed(address) or not self.policy.refused_is_final:
            return Failure(error, is_final(error))
        if address in self.answered:
            return Failure(error, is_final(error) or isinstance(error, Refused))
        if not is_final(error):
            return Failure(error, False)
        elsewhere = Refused(f"somebody else listens at {address}: {error}", address=address)
        elsewhere.__cause__ = error
        return Failure(elsewhere, False)

    def _patience_s(self, since: float) -> float:
        """Seconds left before giving up."""
        if self.policy.give_up_s is None:
            return float("inf")
        return max(0.0, since + self.policy.give_up_s - trio.current_time())

    def _given_up(self, last: FrayError) -> FrayError:
        where = ", ".join(self.addresses)
        error = Unreachable(
            f"no connection to {where} for {self.policy.give_up_s} s; the last attempt: {last}",
            addresses=list(self.addresses),
            give_up_s=self.policy.give_up_s,
        )
        error.__cause__ = last
        return error

    async def _dial(self, address: str, timeout_s: float, round_: _ConnectAttempt) -> _Connected | None:
        transport = None
        with trio.move_on_after(timeout_s):
            transport = await self.network.dial(address, self.credential, timeout_s=timeout_s)
            try:
                async with round_.introducing:
                    if round_.is_decided:
                        transport.abort()
                        return None
                    self.dials += 1
                    return await self._introduce(transport)
            except BaseException:
                transport.abort()
                raise
        round_.is_late = True
        doing = "answered the hello" if transport else "took the connection"
        raise Unreachable(f"nobody at {address} {doing} within {timeout_s:.3g} s", address=address)

    async def _introduce(self, transport: Transport) -> _Connected:
        await transport.send([ACK.pack(0), codec.encode_frame(Kind.HELLO, 0, self._hello())])
        message = await transport.receive()
        frames = [(kind, body) for kind, _, _, _, body in codec.read_frames(message)]
        if len(frames) != 1:
            raise ProtocolMismatch(f"the peer answered the hello with {len(frames)} frames instead of one")
        answer, blobs = codec.decode_message(frames[0][1])
        if isinstance(answer, Refuse):
            raise _RefusedByPeer(check_refuse(answer, self.expects, codec.error_from_dict(answer.error)))
        if not isinstance(answer, Welcome) or not blobs:
            raise ProtocolMismatch(f"the peer answered the hello with {type(answer).__name__}")
        check_welcome(answer, self.expects)
        return _Connected(transport, answer, bytes(blobs[0]))

    def _hello(self) -> bytes:
        channel = self.channel
        hello = Hello(
            protocol=PROTOCOL,
            session=self.session,
            incarnation=self.incarnation,
            resume=channel is not None,
            instance=self.life,
            received=channel.inbox.received if channel else 0,
            expects=self.expects,
            dial=self.dials,
        )
        return codec.encode_message(hello, [self.greeting()])


@define(eq=False)
class _ConnectAttempt:
    """One attempt at all addresses."""

    failures: list[Failure] = field(factory=list)
    connected: _Connected | None = None
    is_late: bool = False
    """An address has not answered in time."""
    introducing: trio.Lock = field(factory=trio.Lock)
    """One hello at a time: a listener that has two keeps the later, whichever of them we would."""

    @property
    def is_decided(self) -> bool:
        return self.connected is not None or any(failure.final for failure in self.failures)


class _RefusedByPeer(Exception):
    """The listener said no, with this error: no use in dialing again."""

    def __init__(self, error: FrayError) -> None:
        super().__init__(str(error))
        self.error = error
