"""Client side of the connection to the controller: requests, and subscriptions that survive any interruption.

Invariant: the set of this process's subscriptions is stored here. When the controller, or its next incarnation, does
not have this session, `on_reset` marks the whole set as missing there, and one task subscribes again; requests without
an answer are sent again by `fray.net.channel.requests`. So a controller restart is only a pause.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import trio
from attrs import evolve

from fray.errors import ChannelClosed, FrayError, SessionEnded, Unauthorized, Unreachable
from fray.model.ids import JobId
from fray.model.messages.client import (
    ClientHello,
    ControllerHello,
    CreateReservation,
    EndSession,
    FollowLogs,
    JobChanged,
    JobMeasured,
    Launch,
    LogAppended,
    LogLines,
    Names,
    Register,
    ReservationChanged,
    Role,
    Watch,
)
from fray.model.specs import EndReason, Outcome
from fray.net.channel.public import Channel, RedialPolicy, run_dialed
from fray.net.channel.requests import Requests, copy_error
from fray.net.channel.session import STALE_S
from fray.net.codec import Bytes, Kind, decode_message, encode_message
from fray.net.transport import AnyCredential, Network
from fray.net.tunnels.transport import Tunnels
from fray.runtime.controller_client.jobs import JobTracker
from fray.runtime.controller_client.logs import LogSubscriptions, OnLog
from fray.runtime.controller_client.names import NameSubscription, NameSubscriptions
from fray.runtime.controller_client.request import OnAnswer
from fray.runtime.controller_client.reservations import ReservationTracker


class ControllerClient:
    """Channel to the controller, with the trackers and subscriptions that use it."""

    def __init__(self, hello: ClientHello, *, on_log: OnLog | None = None, tunnels: Tunnels | None = None) -> None:
        self.hello = hello
        self._needed = trio.Event()
        """Set when something is to be sent; the connection of a job is dialed then, of a driver at once."""
        # A driver owns a session from the start; a job may never need the controller.
        if hello.role is not Role.JOB:
            self._needed.set()
        self.jobs = JobTracker(self.request_blobs)
        self.reservations = ReservationTracker(self.request_blobs)
        self.names = NameSubscriptions(self.notify, self.resubscribe)
        self.logs = LogSubscriptions(hello.session, self.request_blobs, self.resubscribe, on_log)
        self.tunnels = tunnels
        if tunnels is not None:
            tunnels.on_use = self._needed.set
        """Tunnels relayed over this channel."""
        self.controller: ControllerHello | None = None
        self.ended: FrayError | None = None
        self.ready = trio.Event()
        """Event set when the controller has answered for the first time, or the session has ended before."""
        self._channel: Channel | None = None
        self._requests: Requests | None = None
        self._resubscribe_event = trio.Event()
        self._subscribed_event = trio.Event()
        """Event set when the controller has, for the first time, all subscriptions, or the session has ended before."""
        self._resets = 0
        self._established = False
        """Flag: the controller has accepted something of this session.

        It is part of the hello: a controller that does not have such a session refuses it, instead of starting another
        one under the same id.
        """
        self.on_session_end: Callable[[FrayError], None] = lambda error: None
        """Callback, called first when the session has ended, unless this process has ended it: calls fail with its
        error before the ends of jobs cancel the scopes in which they are awaited."""
        self.on_moved: Callable[[], None] = lambda: None
        """Callback, called when the controller sees this process at another address than before."""
        self._was_seen_from = ""
        self.closed = trio.Event()
        """Event set when the session has ended, for any reason."""
        self.is_closing = False
        """Flag: this process is ending its session, so that later ends of its jobs are not errors."""

    # The channel's handler -------------------------------------------------------------------------------------------

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        if kind == Kind.NOTICE:
            self._on_notice(*decode_message(body))
        # Requests know their own frames; what they do not take belongs to the tunnels.
        elif self._requests is not None and self._requests.on_frame(kind, flags, target, ref, body):
            pass
        elif self.tunnels is not None:
            self.tunnels.on_frame(kind, flags, target, ref, body)

    def on_batch(self) -> None:
        pass

    def on_reset(self, greeting: Bytes) -> None:
        message, _ = decode_message(greeting)
        assert isinstance(message, ControllerHello)
        self.controller = message
        self.names.is_away = False
        if self._requests is not None:
            # Requests before subscriptions: a launch that was not answered must be known before its job is watched.
            self._requests.on_reset()
        if self.tunnels is not None:
            self.tunnels.on_reset()
        # A counter and not a flag: the subscribing task may be waiting for an answer and must not miss a reset
        # meanwhile.
        self._resets += 1
        # Hints may have been lost with the connection, so every log reader looks again.
        self.logs.on_appended(None)
        self._resubscribe_event.set()
        self.ready.set()
        self._check_address()

    def on_suspended(self, why: str) -> None:
        self._on_silence(True)

    def on_resumed(self) -> None:
        self._on_silence(False)
        self._check_address()

    def _check_address(self) -> None:
        if self.seen_from != self._was_seen_from:
            self._was_seen_from = self.seen_from
            self.on_moved()

    def _on_silence(self, is_silent: bool) -> None:
        self.names.is_away = is_silent

    def on_end(self, error: FrayError) -> None:
        if self.hello.role is Role.JOB and error.details.get("key_refused"):
            # Its key counts while its attempt does. `Unauthorized` would reach its callers, whose keys are right.
            reason = "the controller has given up the attempt of this process, and accepts its key no longer"
            error = SessionEnded(reason, session=self.hello.session, reason=reason)
        # All waiters are woken: nothing that waits for this session may outlive it (P3).
        self.ended = error
        if not self.is_closing:
            self.on_session_end(error)
        if self._requests is not None:
            self._requests.on_end(error)
        if self.tunnels is not None:
            self.tunnels.on_end(error)
        self.jobs.lose_all(error)
        self.reservations.lose_all(error)
        self._resubscribe_event.set()
        self._subscribed_event.set()
        self.ready.set()
        self.closed.set()

    def _on_notice(self, message: Any, blobs: Sequence[Bytes]) -> None:
        if isinstance(message, JobChanged):
            self.jobs.on_job_changed(message.job, blobs[0] if blobs else None)
        elif isinstance(message, JobMeasured):
            self.jobs.on_measured(message)
        elif isinstance(message, ReservationChanged):
            self.reservations.on_reservation_changed(message.reservation)
        elif isinstance(message, Names):
            self.names.on_names(message, blobs)
        elif isinstance(message, LogAppended):
            self.logs.on_appended(message)
        elif isinstance(message, LogLines):
            self.logs.on_lines(message, blobs[0] if blobs else b"")

    # Lifecycle -------------------------------------------------------------------------------------------------------

    async def run(
        self,
        network: Network,
        addresses: Sequence[str],
        credential: AnyCredential,
        *,
        policy: RedialPolicy,
        rng: random.Random,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run the session until it ends; reports started at once, before the controller answers."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_subscribed)
            task_status.started()
            # Started without a connection: most jobs of a large map never talk to the controller.
            await self._needed.wait()
            await run_dialed(
                network,
                addresses,
                credential,
                greeting=self._greeting,
                handler=self._attach,
                incarnation=self.hello.session,
                policy=policy,
                rng=rng,
            )
            nursery.cancel_scope.cancel()

    def _greeting(self) -> bytes:
        # Read at each dial, as both change during the session.
        return encode_message(evolve(self.hello, established=self._established, leaving=self.is_closing))

    def _attach(self, channel: Channel) -> ControllerClient:
        self._channel = channel
        channel.silence_changed = self._on_silence
        if self.hello.role is Role.JOB:
            # Like a host of actors, a job drops orders that lay unread while it was stopped; a driver executes none.
            channel.stale_s = STALE_S
        self._requests = Requests(channel)
        if self.tunnels is not None:
            self.tunnels.attach(channel)
        return self

    @property
    def seen_from(self) -> str:
        """IP address from which the controller sees this process; empty: none, or not connected yet."""
        return self._channel.seen_from if self._channel is not None else ""

    @property
    def in_doubt(self) -> bool:
        """Return whether this process was suspended for minutes and its session has not been confirmed since."""
        return self._channel is not None and self._channel.in_doubt

    async def connect(self) -> ControllerHello | None:
        """Connect unless connected, and return the controller's first answer; None: the session ended before it."""
        self._needed.set()
        await self.ready.wait()
        return self.controller

    async def wait_ready(self, within_s: float) -> ControllerHello:
        """Wait for the controller's hello and return it.

        Raises:
            ConnectionFailed: it refused the session (the subclass says why), or did not answer within ``within_s``.
        """
        self._needed.set()
        with trio.move_on_after(within_s):
            await self.ready.wait()
        if self.ended is not None:
            raise self.ended
        if self.controller is None:
            raise Unreachable(f"no answer from the controller within {within_s:g} s; is fray-controller running there?")
        return self.controller

    async def wait_subscribed(self, within_s: float) -> None:
        """Wait until the controller has the subscriptions made so far, but not longer than ``within_s``."""
        with trio.move_on_after(within_s):
            await self._subscribed_event.wait()

    async def close(self, reason: str, within_s: float) -> None:
        """End everything this session owns, then the session. Bounded; the caller shields it."""
        # Before the request: ends of jobs that it causes arrive before its answer.
        self.is_closing = True
        with trio.move_on_after(within_s):
            # Without a first answer the controller has nothing of this session that would have to end.
            if self.ended is None and self.ready.is_set():
                try:
                    await self.request(EndSession(reason=reason))
                except FrayError:
                    pass  # the session ended first: the controller ends everything it owned
        if self._channel is not None and self.ended is None:
            with trio.move_on_after(1):
                # After the reply: a channel that closes earlier could take the request with it.
                await self._channel.close(reason)

    # Requests --------------------------------------------------------------------------------------------------------

    async def request(self, message: Any, blobs: Sequence[Bytes] = (), *, timeout_s: float | None = None) -> Any:
        """Send a request and return the reply without its attachments; see `request_blobs`."""
        return (await self.request_blobs(message, blobs, timeout_s=timeout_s))[0]

    async def request_blobs(
        self,
        message: Any,
        blobs: Sequence[Bytes] = (),
        *,
        timeout_s: float | None = None,
        on_answer: OnAnswer | None = None,
    ) -> tuple[Any, Sequence[Bytes]]:
        """Send a request and return the reply with its attachments.

        State in a reply that may change must be read in ``on_answer``: a notice that arrived right behind the reply is
        handled before the task that awaits the reply runs, and must not be undone by it.

        Raises:
            FrayError: the controller's error, DeadlineExceeded, or the error that ended the session.
        """
        await self.connect()
        if self.ended is not None:
            # A copy for each waiter, so that their tracebacks stay apart.
            raise copy_error(self.ended)
        if self._requests is None:
            raise ChannelClosed("not connected to the controller yet", reason="closed")
        answer = await self._requests.request(message, blobs, timeout_s=timeout_s, on_answer=on_answer)
        # Only what would be lost with the session counts; a query leaves nothing behind.
        self._established = self._established or isinstance(message, Launch | Register | CreateReservation)
        return answer

    def notify(self, message: Any) -> None:
        """Send a message without a reply, which may be lost."""
        # Before the first answer there is nothing to undo by a notice.
        if self._channel is not None and self.ended is None and self.ready.is_set():
            try:
                self._channel.notice(message)
            except FrayError:
                pass  # full or ending

    # Subscribing again -----------------------------------------------------------------------------------------------

    def resubscribe(self) -> None:
        """Wake the task that sends the subscriptions the controller does not have."""
        self._resubscribe_event.set()
        self._needed.set()

    async def _keep_subscribed(self) -> None:
        """Send the controller every subscription it does not have, again after each reset."""
        await self.ready.wait()
        # Compared by identity of the subscription: one that was dropped and made again has to be sent again.
        sent: dict[str, NameSubscription] = {}
        sent_logs: dict[JobId | None, bool] = {}
        resets = 0
        while self.ended is None:
            # Replaced before the sets are compared, so that a change from here on wakes the next wait.
            self._resubscribe_event = trio.Event()
            if resets != (now := self._resets):  # a reset while these lines wait is found in the next round
                # Not at the first welcome: no job is known before it.
                if resets:
                    await self.jobs.resubscribe()
                    await self.reservations.resubscribe()
                resets, sent, sent_logs = now, {}, {}
            sent = {key: watch for key, watch in sent.items() if self.names.watched.get(key) is watch}
            missing = {key: watch for key, watch in self.names.watched.items() if key not in sent}
            missing_logs = {job: on for job, on in self.logs.followed.items() if sent_logs.get(job) != on}
            if not missing and not missing_logs:
                self._subscribed_event.set()
                await self._resubscribe_event.wait()
                continue
            # All at once: a process may watch a thousand names, and one round trip each would take seconds.
            await self._subscribe(tuple(missing), missing_logs)
            sent |= missing
            sent_logs |= missing_logs

    async def _subscribe(self, keys: Sequence[str], logs: dict[JobId | None, bool]) -> None:
        async def send(message: Any) -> None:
            try:
                # In the order of arrival: a change that follows the reply must not be overwritten by it.
                await self.request_blobs(message, on_answer=self._on_subscribed)
            except Unauthorized as error:
                # As an end: calls of an actor that is not shared with this user must not wait for it.
                if isinstance(message, Watch):
                    refused = Outcome(cause=EndReason.FAILURE, message=str(error))
                    self.names.on_names(Names(key=message.key, endpoints=(), ended=refused), ())
            except FrayError:
                return  # the session has ended (`on_end` notifies all waiters) or the controller has no such key

        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(send, Watch(key=key))
            for job, on in logs.items():
                nursery.start_soon(send, FollowLogs(job=job, on=on))

    def _on_subscribed(self, reply: Any, blobs: Sequence[Bytes]) -> None:
        if isinstance(reply, Names):
            self.names.on_names(reply, blobs)
