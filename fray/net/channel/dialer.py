"""Dialing end of a channel: dial, say hello, serve, and dial again until there is a reason to stop."""

from __future__ import annotations

import logging
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
    HEARTBEAT_S,
    PROTOCOL,
    UNANSWERED_S,
    check_refuse,
    check_welcome,
)
from fray.net.channel.versions import is_version_refusal, own_fields, release_of
from fray.net.codec import ACK, Kind
from fray.net.limited_log import LimitedLog
from fray.net.transport import (
    AnyCredential,
    Credential,
    CredentialSource,
    Network,
    Transport,
    current_credential,
    is_relayed,
)

RELAY_AFTER_S = 0.5
"""Head start of direct addresses before the relay is tried in parallel; it is tried at once when they all have
failed."""
RELAY_EVERY_S = 2.0
"""Pause between attempts by the relay while a direct dial is under way."""
RELAY_SOON_S = 0.5
RELAY_SOON_TIMES = 6
"""The same pause, and the longest between rounds, for so many answers that the peer has no connection, after a tunnel
was lost or the relay did not answer: the controller was restarted, and the peer, which pauses up to 2 s between its
dials, is about to be connected to it again."""
SUSPENDED_S = 2.5
"""Delay of a wake-up from which on this process is assumed to have been suspended."""
AFTER_SUSPENSION_S = 30.0
"""Seconds of dialing after a suspension longer than ``give_up_s`` (`RedialPolicy.excludes_suspension`)."""
CREDENTIAL_CHECK_S = 10.0
"""Seconds between looks at a credential that may be replaced."""
PROTOCOL_ERRORS_LIMIT = 3
"""Connections in a row that end by a protocol error, without any progress, after which the channel ends."""
_refusals = LimitedLog(logging.getLogger("fray.net"), logging.WARNING)


@frozen(kw_only=True)
class RedialPolicy:
    """Time-outs and back-off of a dialer.

    The pause after the n-th failure is ``first_s * 2**n``, at most ``most_s``, times a random number between 0.5 and 1,
    so that peers that lost their connections together do not dial together.
    """

    refused_is_final: bool
    """Connections refused at all addresses prove the peer's death (a listener lives exactly as long as its process),
    if they are of this machine, or the controller is among those that refuse."""
    give_up_s: float | None
    """Seconds without a connection after which the channel ends; None: never."""
    excludes_suspension: bool = True
    """True: time in which this process was suspended does not count. False: it does, except for the last 30 s."""
    first_s: float = 0.05
    most_s: float = 2.0
    dial_timeout_s: float = 5.0
    """Time-out of a dial and the answer to the hello. Doubled with each round in which it was too short, up to
    ``dial_timeout_most_s``: when thousands of nodes reconnect to a restarted controller at once, it accepts them one by
    one, and a node that gives up too early loses its position in the queue."""
    dial_timeout_most_s: float = 60.0

    def timeout_s(self, late: int) -> float:
        """Return the time-out of one dial, after so many rounds that were too short."""
        return max(self.dial_timeout_s, backoff_s(self.dial_timeout_s, self.dial_timeout_most_s, late + 1))

    def pause_s(self, failures: int, rng: random.Random) -> float:
        """Return the pause after so many failures in a row (from 1)."""
        return backoff_s(self.first_s, self.most_s, failures) * rng.uniform(0.5, 1.0)


@frozen
class Failure:
    """Failure at one address. ``final``: retrying is useless."""

    error: FrayError
    final: bool
    proves_end: bool = False
    """True for a refusal on the peer's own machine, where no firewall answers in its place."""
    by_controller: bool = False
    """True for an answer of the controller, at a relayed address."""


def decide_outcome(failures: Sequence[Failure], refused_ends: bool) -> Failure:
    """Return the outcome of a round over all addresses: a final error wins, then refusal by all, then another error."""
    # The end of a connection proves nothing, and neither does a time-out: the peer may be cut off or suspended. Only a
    # refused connection, a hello of another incarnation or the controller's report ends calls as dead.
    for failure in failures:
        if failure.final:
            return failure
    if refused_ends and failures and all(isinstance(failure.error, Refused) for failure in failures):
        # Between machines a firewall may refuse for a living process, so its own address proves nothing.
        final = all(failure.proves_end for failure in failures) or any(failure.by_controller for failure in failures)
        return Failure(failures[-1].error, final)
    # A refusal at one of several addresses explains less than, say, a time-out at another.
    others = [failure for failure in failures if not isinstance(failure.error, Refused)]
    return (others or list(failures))[-1]


def is_final(error: FrayError) -> bool:
    """Return whether a failed dial proves more than that there is no connection now."""
    # Exact types: Unauthorized and ProtocolMismatch are subclasses, and repeating the dial does not change them.
    return not isinstance(error, ConnectionFailed) or type(error) not in (
        ConnectionFailed,
        Unreachable,
        Refused,
        ChannelClosed,
    )


async def run_dialed(
    network: Network,
    addresses: Sequence[str] | Callable[[], Sequence[str]],
    credential: AnyCredential,
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
    """Run a channel to the listener at ``addresses`` (tried in order) until it ends.

    Reports the channel as started after the first welcome (after `Handler.on_reset`) and returns when it has ended
    (after `Handler.on_end`). If it is cancelled it sends queued frames and its goodbye, within 1 s.

    Args:
        addresses: a function is called before each round over them: the peer may have other ones then.
        greeting: called for each hello; passed to the listener's ``on_greeting`` when it does not know the session.
        handler: handler of the channel; or a function that makes one for it.
        incarnation: incarnation of this process.
        expects: incarnation of the listener's process; another one ends the channel with `ActorDied`. None: any.
        session: name of the session, random by default.

    Raises:
        FrayError: the first connection failed, for this reason. The handler was not called.
    """
    dialer = _Dialer(
        network=network,
        find_addresses=addresses if callable(addresses) else lambda: addresses,
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


@define
class _DialedAhead:
    """Outcome of dialing beside a silent connection."""

    connection: Connection
    connected: _Connected | None = None
    error: FrayError | None = None


def _do_nothing() -> None:
    pass


@define(kw_only=True)
class _Dialer:
    network: Network
    find_addresses: Callable[[], Sequence[str]]
    credential: AnyCredential
    greeting: Callable[[], bytes]
    handler: Handler | HandlerFactory
    incarnation: str
    expects: str | None
    policy: RedialPolicy
    rng: random.Random
    session: str
    dialed: Credential | None = None
    """Credential of the last dial."""
    channel: Channel | None = None
    instance: str = ""
    dials: int = 0
    failures: int = 0
    """Failures in a row. A connection without progress counts; a short one leaves one failure."""
    late: int = 0
    """Rounds in a row in which an address timed out."""
    relay_soon: int = 0
    """Answers of the relay after which it is asked again soon (`RELAY_SOON_TIMES`)."""
    protocol_errors: int = 0
    suspended_since: float | None = None
    """Time of the last message before a suspension of this process ended the connection."""
    answered: set[str] = field(factory=set)
    """Addresses at which the listener has answered before."""
    direct: tuple[str, ...] = ()
    """Addresses of this round, apart from those of the relay."""
    by_relay: tuple[str, ...] = ()
    kept: Connection | None = None
    """A silent connection beside which another is dialed."""
    lost_at: float = float("-inf")
    """Time when a connection was lost beside which another was being dialed."""
    _before_hello: Callable[[], None] = _do_nothing
    _scope: trio.CancelScope = field(factory=trio.CancelScope)

    async def run(self, task_status: trio.TaskStatus[Channel]) -> None:
        try:
            with self._scope:
                await self._serve(task_status)
        except FrayError as error:
            # Before the first welcome there is no handler to be informed, so the caller of `run_dialed` gets the error
            # itself.
            if self.channel is None:
                raise
            self.channel.end(error)
        finally:
            if self.channel is not None:
                self.channel.end(ChannelClosed("this side has closed the channel", reason="cancelled"))

    async def _serve(self, task_status: trio.TaskStatus[Channel]) -> None:
        connected, started = await self._connect(), False
        while True:
            channel, connection = self._attach(connected)
            if not started:
                started = True
                task_status.started(channel)
            connected = await self._run_connection(connection, channel)

    # Serving

    async def _run_connection(self, connection: Connection, channel: Channel) -> _Connected:
        """Serve a connection until it is lost or replaced, and return the next one.

        A silent connection is kept while another is dialed: its peer may be busy, and what is under way on it need not
        be sent again. The listener's proof of its key on the new one shows that the peer lives and the old one is dead.
        """
        ahead = _DialedAhead(connection)
        async with trio.open_nursery() as nursery:
            connection.on_silent = lambda: nursery.start_soon(self._dial_ahead, ahead, channel)
            watching = trio.CancelScope()
            if not isinstance(self.credential, Credential | None):
                nursery.start_soon(self._watch_credential, self.credential, connection, watching)
            await connection.run()
            watching.cancel()
            ahead.error = ahead.error or self._on_connection_lost(connection, channel)
            if ahead.error is not None:
                nursery.cancel_scope.cancel()
        # The nursery has waited for a dial that was under way.
        if ahead.error is not None:
            raise ahead.error
        return ahead.connected or await self._connect()

    async def _watch_credential(
        self, source: CredentialSource, connection: Connection, scope: trio.CancelScope
    ) -> None:
        """Drop the connection when the credential was replaced: the next one proves that this side has the new one."""
        with scope:
            while True:
                await trio.sleep(CREDENTIAL_CHECK_S)
                if source.current() != self.dialed:
                    connection.drop(Unreachable("its credential was replaced"))

    async def _dial_ahead(self, ahead: _DialedAhead, channel: Channel) -> None:
        failures, late = self.failures, self.late
        self.kept = ahead.connection
        with trio.CancelScope() as scope:
            ahead.connection.on_heard = scope.cancel
            # The old connection ends before the hello says what was received by it: nothing more is read from it then,
            # and `on_heard` is not called any more.
            self._before_hello = lambda: self._leave(ahead.connection, channel)
            try:
                ahead.connected = await self._connect()
            except FrayError as error:
                ahead.error = error
                ahead.connection.drop(error)
        self._before_hello = _do_nothing
        if scope.cancelled_caught:
            self.failures, self.late, self.kept = failures, late, None

    def _leave(self, connection: Connection, channel: Channel) -> None:
        connection.on_heard = self.kept = None
        connection.drop(Unreachable("it was silent, and its peer has answered on another connection"))
        channel.suspend(connection)

    def _attach(self, connected: _Connected) -> tuple[Channel, Connection]:
        welcome = connected.welcome
        if self.channel is None:
            self.channel = self._new_channel(connected)
        channel = self.channel
        # An instance that is offered again is not resumed: this side never had it, and has to begin with `on_reset`.
        resumed = welcome.resumed and welcome.instance == self.instance
        if resumed:
            channel.outbox.rewind(welcome.received)
        else:
            channel.outbox.clear()
            channel.inbox.clear()
        self.instance = welcome.instance
        # A restarted peer has another incarnation, and the next connection may use another address.
        channel.incarnation, channel.remote = welcome.incarnation, connected.transport.peer.remote
        channel.peer_release, channel.seen_from = release_of(welcome), welcome.seen_from
        # From the peer, so it is bounded.
        if welcome.heartbeat_s is not None:
            channel.waiting_heartbeat_s = min(HEARTBEAT_S, max(UNANSWERED_S, welcome.heartbeat_s))
        connection = Connection(channel, connected.transport, polite=True)
        channel.attach(connection, None if resumed else connected.greeting)
        return channel, connection

    def _new_channel(self, connected: _Connected) -> Channel:
        channel = Channel(
            session=self.session, incarnation=connected.welcome.incarnation, remote=connected.transport.peer.remote
        )
        handler: Any = self.handler
        channel.begin(handler if hasattr(handler, "on_frame") else handler(channel))
        channel.on_ended = self._scope.cancel
        return channel

    def _on_connection_lost(self, connection: Connection, channel: Channel) -> FrayError | None:
        """Suspend the channel; return an error if dialing again is useless."""
        channel.suspend(connection)
        self.suspended_since = connection.received_at if connection.process_was_suspended else None
        # A dial beside it that is under way has been waiting for longer, but the peer counts as unreachable from now.
        self.lost_at = float("-inf") if self.kept is None else self._waiting_since()
        connection.on_heard = self.kept = None
        lasted_s = trio.current_time() - connection.began
        # A listener that accepts and drops connections must not be dialed in a tight loop, nor one that drops them
        # soon.
        if not connection.received_any:
            self.failures += 1
        else:
            self.failures = 0 if lasted_s >= self.policy.most_s else 1
        # Damage after a valid message is repaired by the resume. A peer that never sends a valid one speaks another
        # protocol.
        broken = isinstance(connection.error, ProtocolMismatch | MessageTooLarge) and not connection.received_any
        self.protocol_errors = self.protocol_errors + 1 if broken else 0
        return connection.error if self.protocol_errors >= PROTOCOL_ERRORS_LIMIT else None

    # Dialing

    async def _connect(self) -> _Connected:
        """Return a welcomed connection.

        Raises:
            FrayError: dialing again is useless.
        """
        since = self._waiting_since()
        last: FrayError | None = None
        if self.channel is not None and is_relayed(self.channel.remote):
            self.relay_soon = RELAY_SOON_TIMES
        while True:
            began = trio.current_time()
            if self.failures:
                since = self._exclude_suspension(since, await self._pause(since))
            # At least one round is made, also after a suspension that has used up all the time.
            if last is not None and self._remaining_s(since) <= 0:
                raise self._give_up_error(last)
            self.direct, self.by_relay = self._split_addresses()
            round_ = _ConnectAttempt()
            await (self._race(round_, since) if self.by_relay and self.direct else self._try_all(round_, since))
            if round_.connected is not None:
                self.late = 0
                return round_.connected
            # While dialing, no connection notices a suspension of this process; a round that takes so long indicates
            # one.
            if self.channel is not None and trio.current_time() - began >= self.channel.stale_s:
                self.channel.process_was_suspended = True
            self.late = self.late + 1 if round_.is_late else 0
            outcome = decide_outcome(round_.failures, self.policy.refused_is_final)
            if outcome.final:
                raise outcome.error
            self.failures += 1
            last = outcome.error

    def _split_addresses(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the direct addresses of the peer at present, and those of the relay."""
        addresses = self.find_addresses()
        by_relay = tuple(filter(is_relayed, addresses))
        return tuple(address for address in addresses if address not in by_relay), by_relay

    def _waiting_since(self) -> float:
        """Return the time from which ``give_up_s`` counts."""
        now, suspended_since = trio.current_time(), self.suspended_since
        if self.policy.excludes_suspension or suspended_since is None:
            return now
        # A suspension begins unnoticed, so time counts from the last message before it.
        return self._exclude_suspension(suspended_since, now - suspended_since)

    def _exclude_suspension(self, since: float, suspended_s: float) -> float:
        """Return the time from which ``give_up_s`` counts after a suspension of this process (a laptop slept)."""
        if self.policy.excludes_suspension or not suspended_s or self.policy.give_up_s is None:
            return since + suspended_s
        # The controller's lease for a node does not pause with the node's machine. But without some seconds of dialing,
        # a machine that wakes could never learn whether its lease is still valid.
        return max(since, trio.current_time() - self.policy.give_up_s + AFTER_SUSPENSION_S)

    async def _pause(self, since: float) -> float:
        """Wait before the next round; return for how long this process was suspended meanwhile."""
        pause_s = min(self.policy.pause_s(self.failures, self.rng), self._remaining_s(since))
        if self.relay_soon:
            pause_s = min(pause_s, RELAY_SOON_S)
        before = trio.current_time()
        await trio.sleep(pause_s)
        # Only a sleep shows a suspension for certain: a slow dial may as well be due to the network.
        late_s = trio.current_time() - before - pause_s
        return late_s if late_s > SUSPENDED_S else 0.0

    async def _try_all(self, round_: _ConnectAttempt, since: float) -> None:
        await self._try(round_, self.direct + self.by_relay, since)

    async def _race(self, round_: _ConnectAttempt, since: float) -> None:
        """Try direct addresses first, and the relay in parallel when none has answered for `RELAY_AFTER_S`."""
        async with trio.open_nursery() as nursery:
            direct_done = trio.Event()

            async def try_direct() -> None:
                await self._try(round_, self.direct, since)
                direct_done.set()
                # An answer at a direct address, or the proof that the peer has ended, makes the relay superfluous.
                if round_.is_decided:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(try_direct)
            with trio.move_on_after(0 if self.relay_soon and self.failures else RELAY_AFTER_S):
                await direct_done.wait()
            # Direct dials continue meanwhile: the first connection that is welcomed wins.
            while not round_.is_decided:
                await self._try(round_, self.by_relay, since)
                if direct_done.is_set() or round_.is_decided:
                    break
                # A direct dial may wait for a minute, and meanwhile the relay may learn more about the peer.
                with trio.move_on_after(RELAY_SOON_S if self.relay_soon else RELAY_EVERY_S):
                    await direct_done.wait()
            if round_.is_decided:
                nursery.cancel_scope.cancel()

    async def _try(self, round_: _ConnectAttempt, addresses: Sequence[str], since: float) -> None:
        for address in addresses:
            try:
                found = await self._dial(
                    address, min(self.policy.timeout_s(self.late), self._remaining_s(since)), round_
                )
            # Both ends have proven their key before the hello, so this is the listener's own answer, at whatever
            # address.
            except _RefusedByPeer as refusal:
                # Started by mistake, a listener of a release too far away ends nothing: it may be replaced in time.
                final = self.channel is None or not is_version_refusal(refusal.error)
                if not final:
                    _refusals.write("%s refuses this process, which dials again: %s", address, refusal.error)
                round_.failures.append(Failure(refusal.error, final))
            except FrayError as error:
                round_.failures.append(self._classify(address, error))
                if is_relayed(address):
                    # Only the controller's own answers name the peer.
                    has_answered = "incarnation" in error.details
                    self.relay_soon = max(0, self.relay_soon - 1) if has_answered else RELAY_SOON_TIMES
            else:
                if found is not None:
                    round_.connected = found
                    self.answered.add(address)
            if round_.connected is not None:
                return

    def _classify(self, address: str, error: FrayError) -> Failure:
        """Classify a failure at an address."""
        # Where there is a relay, a direct address may never have led to the listener: behind NAT, 10.0.0.5 is another
        # machine, and proxies answer for addresses without any. So until the listener has answered there, no answer
        # from there proves anything.
        if self.channel is not None and not self.policy.refused_is_final and error.details.get("impostor"):
            # What cannot prove the listener's key or certificate says nothing about it. Otherwise a machine on the
            # path, which cannot read or change anything, could still end a node's membership with all it runs.
            return Failure(error, False)
        if error.details.get("key_refused") and not isinstance(self.credential, Credential | None):
            # A token is replaced in one file after the other: a peer that had the right one gets it again.
            has_other = self.credential.on_refused(was_accepted=self.channel is not None)
            if has_other or self.channel is not None:
                return Failure(error, False)
        proves_end = isinstance(error, Refused) and error.details.get("proves_end") is True
        if not self.by_relay or is_relayed(address) or not self.policy.refused_is_final:
            return Failure(error, is_final(error), proves_end, by_controller=is_relayed(address))
        if address in self.answered:
            return Failure(error, is_final(error) or proves_end, proves_end)
        if not is_final(error):
            return Failure(error, False)
        different = Refused(f"a different server is listening on {address}: {error}", address=address)
        different.__cause__ = error
        return Failure(different, False)

    def _remaining_s(self, since: float) -> float:
        """Return the seconds left before giving up."""
        # A peer that is silent may be busy: it counts as unreachable only once its connection is lost.
        if self.policy.give_up_s is None or self.kept is not None:
            return float("inf")
        return max(0.0, max(since, self.lost_at) + self.policy.give_up_s - trio.current_time())

    def _give_up_error(self, last: FrayError) -> FrayError:
        addresses = self.direct + self.by_relay
        where = ", ".join(addresses)
        error = Unreachable(
            f"no connection to {where} for {self.policy.give_up_s} s; the last attempt: {last}",
            addresses=list(addresses),
            give_up_s=self.policy.give_up_s,
        )
        error.__cause__ = last
        return error

    async def _dial(self, address: str, timeout_s: float, round_: _ConnectAttempt) -> _Connected | None:
        transport = None
        # Includes the answer to the hello: a listener may be suspended, or overloaded, right after the handshake.
        with trio.move_on_after(timeout_s):
            self.dialed = current_credential(self.credential)
            transport = await self.network.dial(address, self.dialed, timeout_s=timeout_s)
            try:
                async with round_.hello_lock:
                    # The other one of two parallel dials has decided the round. This one has not sent its hello yet, so
                    # nothing has to be undone.
                    if round_.is_decided:
                        transport.abort()
                        return None
                    self._before_hello()
                    # Counted in the order of the hellos, by which the listener recognizes a stale one.
                    self.dials += 1
                    return await self._say_hello(transport)
            # Also when cancelled: `Transport` requires an abort after a cancelled send.
            except BaseException:
                transport.abort()
                raise
        round_.is_late = True
        missing = "answer to the hello" if transport else "connection"
        raise Unreachable(f"no {missing} from {address} within {timeout_s:.3g} s", address=address)

    async def _say_hello(self, transport: Transport) -> _Connected:
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
        # Made for each dial: counts and greeting may differ from those of the last one.
        hello = Hello(
            protocol=PROTOCOL,
            session=self.session,
            incarnation=self.incarnation,
            resume=channel is not None,
            instance=self.instance,
            received=channel.inbox.received if channel else 0,
            expects=self.expects,
            dial=self.dials,
            **own_fields(),
        )
        return codec.encode_message(hello, [self.greeting()])


@define(eq=False)
class _ConnectAttempt:
    """One round over all addresses."""

    failures: list[Failure] = field(factory=list)
    connected: _Connected | None = None
    is_late: bool = False
    """An address has timed out."""
    hello_lock: trio.Lock = field(factory=trio.Lock)
    """Lock for one hello at a time: of two hellos a listener keeps the later one, which might be the wrong one."""

    @property
    def is_decided(self) -> bool:
        return self.connected is not None or any(failure.final for failure in self.failures)


class _RefusedByPeer(Exception):
    """Refusal by the listener, with this error: dialing again is useless."""

    def __init__(self, error: FrayError) -> None:
        super().__init__(str(error))
        self.error = error
