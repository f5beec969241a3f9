"""The conversation with one node: reports come up and become events, wishes go down as they are in the saved state.

Law: what goes down is read from the state when it is sent, so a slow node is told the latest and never a detour. The
whole set goes first on each connection; attempts it does not hold yet follow with their payloads as there is room.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import inf
from typing import Protocol

import trio
from attrs import evolve

from fray.controller.context import ControllerContext
from fray.controller.process_watch import ProcessWatch
from fray.controller.secret_store import WAIT_S
from fray.errors import ChannelClosed, ChannelFull, ConnectionFailed, FrayError, ProtocolMismatch, Refused
from fray.model.ids import AttemptId, BlobId
from fray.model.log_records import LogChunk
from fray.model.messages.bundles import FetchBundle, FetchPiece
from fray.model.messages.node import (
    AttemptAnnotation,
    AttemptLog,
    AttemptMetricsReport,
    CaptureRequest,
    DesiredState,
    NodeDetails,
    NodeGoodbye,
    NodeHello,
    NodeLeaves,
    ObservedState,
    Probe,
    ProbeResult,
    StackCapture,
)
from fray.model.messages.tunnels import OpenTunnel
from fray.model.specs import BLOB_LIMIT_BYTES, DesiredAttempt, EndReason, ObservedAttempt, Outcome, Phase
from fray.net.channel.public import Channel
from fray.net.channel.requests import Requests
from fray.net.channel.session import SILENT_PERIODS
from fray.net.codec import Kind, decode_message
from fray.net.transport import Bytes
from fray.net.tunnels.multiplexer import TunnelEndpoint, TunnelFlow, TunnelMultiplexer
from fray.scheduler.effects import AttemptAnnotated, NodeDied, NodeJoined, NodeLeaving, NodeReported, NodeSilent

WANTED_CHUNK_BYTES = 12 * 1024 * 1024
"""Payloads in one `Wanted`, about; the rest follows when there is room."""
WANTED_CHUNK_WISHES = 1_000
"""New attempts in one `Wanted`."""

PROBE_S = 60.0
"""For the answer to a `Probe`."""
FINISH_LIMIT_S = 7 * 86_400.0
"""Which a leaving node may give to what it runs."""

_log = logging.getLogger("fray.controller.connections.node")


class Front(Protocol):
    """What a link tells those who made it."""

    def node_gone(self, link: NodeConnection) -> None:
        """Its channel has ended."""

    def log_moved(self, attempt: AttemptId) -> None:
        """There are new lines in the book."""

    def captured(self, link: NodeConnection, message: StackCapture) -> None:
        """An answer to `NodeConnection.ask_stacks`."""

    def next_revision(self) -> int:
        """Grows with each `Wanted` of this life of the controller."""

    def start_soon(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run a task that may outlive the conversation."""


def _measured(observed: ObservedAttempt, sizes: Mapping[BlobId, int]) -> ObservedAttempt:
    """With the size of its value, as far as that has come with it."""
    outcome = observed.outcome
    if outcome is None or outcome.value is None or outcome.value not in sizes:
        return observed
    return evolve(observed, outcome=evolve(outcome, value_bytes=sizes[outcome.value]))


def _refuse_tunnel(lane: TunnelFlow, message: OpenTunnel, greeting: Bytes, window_bytes: int) -> TunnelEndpoint:
    raise Refused("a node asks for no tunnels")


class NodeConnection:
    """Handler of one node's channel."""

    def __init__(
        self, house: ControllerContext, front: Front, hello: NodeHello, channel: Channel, witness: ProcessWatch | None
    ) -> None:
        self.hello = hello
        self.node = hello.node
        self.incarnation = hello.incarnation
        self.channel = channel
        self.witness = witness
        self.requests = Requests(channel)
        """What it is asked; it answers as long as it is there, so give each a bound."""
        self.superseded = False
        """A later channel speaks for this node."""
        self._house = house
        self._front = front
        # a machine is suspect ``suspect_s`` after its last word: its silence must be noticed before that
        channel.heartbeat_s = min(channel.heartbeat_s, house.state.rules.suspect_s / (SILENT_PERIODS + 1))
        self.carrier = TunnelMultiplexer(channel, dialled=False, on_open=_refuse_tunnel)
        """Of tunnels to ports of its jobs."""
        self._held = set(hello.holds)
        self._joined = False
        self._whole = False
        self._moved: dict[AttemptId, None] = {}
        self._waiting: dict[AttemptId, float] = {}
        """Until when attempts wait for secrets that only their drivers know."""
        self._told: dict[AttemptId, ObservedAttempt] | None = None
        """What it has reported on this channel; None before it has told everything."""
        self._lost = False
        self._over = False
        self._wake = trio.Event()

    def __repr__(self) -> str:
        state = "connected" if self.channel.connected else "silent"
        return f"<NodeConnection {self.node} ({self.incarnation}) {state}: {len(self._moved)} wishes waiting>"

    # The channel's handler

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        if self.requests.on_frame(kind, flags, target, ref, body):
            return
        if self.carrier.on_frame(kind, flags, target, ref, body) or kind not in (Kind.NOTICE, Kind.REQUEST):
            return
        message, blobs = decode_message(body)
        if kind == Kind.REQUEST:
            self._asked(ref, message, blobs)
        elif isinstance(message, ObservedState):
            self._reported(message, blobs)
        elif isinstance(message, AttemptLog):
            self._printed(message, blobs)
        elif isinstance(message, AttemptMetricsReport):
            mine = [vital for vital in message.vitals if self._is_mine(vital.attempt_id)]
            self._house.vitals.hear(mine, self._house.inbox.time())
        elif isinstance(message, AttemptAnnotation):
            self._noted(message)
        elif isinstance(message, NodeDetails):
            self._house.vitals.hear_node(self.node, message.told)
        elif isinstance(message, StackCapture):
            self._front.captured(self, message)
        elif isinstance(message, NodeLeaves):
            self._leaves(message)
        elif isinstance(message, NodeGoodbye):
            self.died(message.reason or "it left in order")

    def _asked(self, ref: int, message: object, blobs: Sequence[Bytes]) -> None:
        try:
            if not isinstance(message, FetchBundle | FetchPiece):
                raise ProtocolMismatch(f"{type(message).__name__} is nothing a node asks a controller")
            self._house.bundles.admit(message, blobs)
        except FrayError as error:
            self.refuse(ref, error)
        else:
            self._front.start_soon(self._house.bundles.serve, self, ref, message, blobs)

    def reply(self, ref: int, message: object, blobs: Sequence[Bytes] = ()) -> None:
        self._send(lambda: self.channel.reply(ref, message, blobs))

    def refuse(self, ref: int, error: FrayError) -> None:
        self._send(lambda: self.channel.fail(ref, error))

    def on_batch(self) -> None:
        pass

    def on_reset(self, greeting: bytes) -> None:
        self.requests.on_reset()
        self._join()

    def on_suspended(self, why: str) -> None:
        if self.proven_dead():
            self.died("its process is gone")
        else:
            self._lose(why)

    def on_resumed(self) -> None:
        self._join()
        if self._told is not None:  # the channel has lost nothing: what it said last still stands
            self._tell_report(ObservedState(full=True, observed=tuple(self._told.values())))

    def on_end(self, error: FrayError) -> None:
        self.carrier.on_lost(ConnectionFailed(f"node {self.node} has left the relay: {error}"))
        self.requests.on_end(error)
        self._front.node_gone(self)
        self._wake.set()
        self._lose(str(error))

    def _join(self) -> None:
        self._lost = False
        process = self.hello.process if self.witness is not None else None
        self._house.inbox.tell(NodeJoined(hello=evolve(self.hello, process=process)))

    def _lose(self, why: str) -> None:
        if not self._lost and not self._over and not self.superseded:
            self._lost = True
            _log.warning("node %s is silent: %s", self.node, why, extra={"node": self.node})
            silent_s = max(0.0, trio.current_time() - self.channel.heard_at)
            self._house.inbox.tell(NodeSilent(node=self.node, incarnation=self.incarnation, silent_s=silent_s))

    def proven_dead(self) -> bool:
        """It has said goodbye, or its process is on this machine and gone."""
        return self._over or (self.witness is not None and self.witness.dead())

    def died(self, reason: str) -> None:
        """Proof: what it held is gone for good."""
        if not self._over and not self.superseded:
            self._over = True
            self._house.inbox.tell(NodeDied(node=self.node, incarnation=self.incarnation, reason=reason))

    # Up

    def _reported(self, report: ObservedState, blobs: Sequence[Bytes]) -> None:
        """Values are in the store before the law hears of them; one that is too large or missing is no success."""
        small = [blob for blob in blobs if len(blob) <= BLOB_LIMIT_BYTES]
        with self._house.holding(small) as attached:
            kept = set(attached)
            report = evolve(report, observed=tuple(self._with_kept_value(one, kept) for one in report.observed))
            sizes = dict(zip(attached, map(len, small), strict=True))
            report = (
                evolve(report, observed=tuple(_measured(one, sizes) for one in report.observed)) if sizes else report
            )
            self._note(report)
            self._tell_report(report, tuple(kept))

    def _tell_report(self, report: ObservedState, values: Sequence[BlobId] = ()) -> None:
        event = NodeReported(node=self.node, incarnation=self.incarnation, report=report)
        self._house.pin(event, values)
        self._house.inbox.tell(event)

    def _note(self, report: ObservedState) -> None:
        if report.full:
            self._told = {}
        if self._told is not None:
            self._told |= {one.attempt_id: one for one in report.observed}
            for attempt_id in report.gone:
                self._told.pop(attempt_id, None)

    def _with_kept_value(self, observed: ObservedAttempt, kept: set[BlobId]) -> ObservedAttempt:
        outcome = observed.outcome
        if outcome is None or outcome.value is None or outcome.value in kept:
            return observed
        if self._house.store.has_blob(outcome.value):
            kept.add(outcome.value)
            return observed
        outcome = evolve(outcome, value=None)
        if outcome.cause is EndReason.SUCCEEDED:
            message = f"its result did not reach the controller: over {BLOB_LIMIT_BYTES} bytes, or lost on its node"
            outcome = evolve(outcome, cause=EndReason.FAILURE, message=message)
        return evolve(observed, outcome=outcome)

    def _printed(self, message: AttemptLog, blobs: Sequence[Bytes]) -> None:
        if self._is_mine(message.attempt_id):
            data = bytes(blobs[0]) if blobs else b""
            self._house.book.add(message.attempt_id, LogChunk(message.first, message.end, data), closed=message.over)
            self._front.log_moved(message.attempt_id)

    def _noted(self, message: AttemptAnnotation) -> None:
        self._house.inbox.tell(
            AttemptAnnotated(
                node=self.node,
                incarnation=self.incarnation,
                attempt_id=message.attempt_id,
                what=message.what,
                text=message.text,
            )
        )

    def _leaves(self, message: NodeLeaves) -> None:
        finish_s = min(max(0.0, message.finish_s), FINISH_LIMIT_S)
        self._house.inbox.tell(
            NodeLeaving(node=self.node, incarnation=self.incarnation, finish_s=finish_s, reason=message.reason)
        )

    def _is_mine(self, attempt_id: AttemptId) -> bool:
        attempt = self._house.state.attempts.get(attempt_id)
        return attempt is not None and attempt.node == self.node

    # Down

    def ask_stacks(self, asked: CaptureRequest) -> bool:
        """Ask the node to look into attempts; False: it has no conversation now."""
        if not self.channel.connected:
            return False
        self._send(lambda: self.channel.notice(asked))
        return True

    async def probe(self) -> str:
        """Have the node look whether its machine is well: what is wrong; empty: nothing."""
        try:
            reply, _ = await self.requests.request(Probe(), timeout_s=PROBE_S)
        except FrayError as error:
            return f"it could not be asked: {error}"
        return reply.trouble if isinstance(reply, ProbeResult) else f"it answered with {type(reply).__name__}"

    def joined(self) -> None:
        """The law has heard of this connection: send everything."""
        self._joined = self._whole = True
        self._wake.set()

    def wishes_moved(self, attempts: Sequence[AttemptId]) -> None:
        self._moved.update(dict.fromkeys(attempts))
        self._wake.set()

    async def run(self) -> None:
        """Send wishes as there is room, until the channel has ended."""
        try:
            while self.channel.error is None:
                with trio.move_on_at(min(self._waiting.values(), default=inf)):
                    await self._wake.wait()
                self._wake = trio.Event()
                self._give_up_waiting()
                while self.channel.error is None and self._joined and (self._whole or self._moved):
                    await self.channel.wait_room()
                    self._send(self._send_whole if self._whole else self._send_delta)
        except ChannelClosed:
            pass  # `on_end` has been told

    def _send(self, send: Callable[[], None]) -> None:
        try:
            send()
        except ChannelClosed:
            pass
        except ChannelFull as error:
            _log.warning("node %s does not keep up: %s", self.node, error, extra={"node": self.node})
            self.channel.end(error)  # without a word: it dials again and gets the whole set

    def _send_whole(self) -> None:
        """All it shall hold and holds already; what it lacks waits its turn, as deltas."""
        wishes = self._house.state.wanted(self.node)
        later = {wish.attempt_id: None for wish in wishes if self._payload_of(wish) is not None or self._lacks(wish)}
        held = [wish for wish in wishes if wish.attempt_id not in later]
        self._whole, self._moved = False, later
        chunk, payloads = self._take_chunk()
        self._notice(True, [*held, *chunk], (), payloads)

    def _send_delta(self) -> None:
        gone = tuple(attempt for attempt in self._moved if self._wish(attempt) is None)
        for attempt in gone:
            del self._moved[attempt]
            self._held.discard(attempt)
        chunk, payloads = self._take_chunk()
        self._notice(False, chunk, gone, payloads)

    def _wish(self, attempt_id: AttemptId) -> DesiredAttempt | None:
        attempt = self._house.state.attempts.get(attempt_id)
        if attempt is None or attempt.node != self.node or attempt.incarnation != self.incarnation:
            return None
        return self._house.state.wish(attempt_id)

    def _take_chunk(self) -> tuple[list[DesiredAttempt], dict[BlobId, bytes]]:
        """The next moved wishes, with the payloads they need; at least one."""
        wishes: list[DesiredAttempt] = []
        payloads: dict[BlobId, bytes] = {}
        size_bytes = 0
        for attempt_id in list(self._moved):
            if size_bytes >= WANTED_CHUNK_BYTES or len(wishes) >= WANTED_CHUNK_WISHES:
                break
            wish = self._wish(attempt_id)
            del self._moved[attempt_id]
            if wish is None:
                self._waiting.pop(attempt_id, None)
                continue
            if self._lacks(wish):
                self._waiting.setdefault(attempt_id, trio.current_time() + WAIT_S)
                continue
            self._waiting.pop(attempt_id, None)
            blob = self._payload_of(wish)
            if blob is not None and blob not in payloads:
                data = self._house.store.blob(blob)
                if data is None:
                    self._cannot_start(wish, "its payload is damaged in the controller's store")
                    continue
                payloads[blob] = data
                size_bytes += len(data)
            wishes.append(wish)
        return wishes, payloads

    # Secrets

    def secrets_moved(self) -> None:
        """Some are known again."""
        self._moved.update(dict.fromkeys(self._waiting))
        self._wake.set()

    def _lacks(self, wish: DesiredAttempt) -> bool:
        """It shall start, and a secret of its is known neither here nor to the node."""
        if wish.stop or not wish.spec.secrets or wish.attempt_id in self._held:
            return False
        return bool(self._house.secrets.missing(wish.spec, self.hello.secrets))

    def _give_up_waiting(self) -> None:
        now = trio.current_time()
        for attempt_id in [attempt_id for attempt_id, until in self._waiting.items() if until <= now]:
            del self._waiting[attempt_id]
            wish = self._wish(attempt_id)
            if wish is not None and self._lacks(wish):
                names = ", ".join(self._house.secrets.missing(wish.spec, self.hello.secrets))
                self._cannot_start(
                    wish,
                    f"nobody knows its secret {names} any more: the controller was restarted, its driver has not come "
                    f"back within {WAIT_S:g} s, and node {self.node} has none of this name",
                )

    def _cannot_start(self, wish: DesiredAttempt, why: str) -> None:
        """The node has not heard of it and never will."""
        outcome = Outcome(cause=EndReason.ENVIRONMENT, message=why)
        ended = ObservedAttempt(attempt_id=wish.attempt_id, phase=Phase.ENDED, outcome=outcome)
        self._tell_report(ObservedState(full=False, observed=(ended,)))

    def _keyed(self, wish: DesiredAttempt) -> DesiredAttempt:
        """With what no state has: its key, and what its author has entrusted us with for its start."""
        starts = wish.attempt_id not in self._held and not wish.stop
        secrets = self._house.secrets.of(wish.spec) if starts and wish.spec.secrets else {}
        return evolve(wish, key=self._house.attempt_key(wish.attempt_id), secrets=secrets)

    def _payload_of(self, wish: DesiredAttempt) -> BlobId | None:
        """What must be attached for this wish."""
        return None if wish.attempt_id in self._held or wish.stop else wish.spec.payload

    def _notice(
        self, full: bool, wishes: Sequence[DesiredAttempt], gone: tuple[AttemptId, ...], payloads: dict[BlobId, bytes]
    ) -> None:
        keyed = tuple(map(self._keyed, wishes))
        wanted = DesiredState(
            epoch=self._house.epoch, revision=self._front.next_revision(), full=full, wishes=keyed, gone=gone
        )
        self.channel.notice(wanted, list(payloads.values()))
        self._held.update(wish.attempt_id for wish in wishes if not wish.stop)
