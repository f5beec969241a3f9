"""This process's conversation with the controller: requests, and the subscriptions that survive any interruption.

The law: whatever this process has subscribed to is a set kept here. When the controller (or its next life) does not
remember us, `on_reset` marks the whole set as owed and one task subscribes again; requests without an answer are sent
again by `fray.net.channel.requests`. So a controller restart is a pause, nothing more.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import trio
from attrs import evolve

from fray.errors import ChannelClosed, FrayError, Unreachable
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
from fray.net.channel.public import Channel, RedialPolicy, run_dialed
from fray.net.channel.requests import Requests, copy_error
from fray.net.channel.session import STALE_S
from fray.net.codec import Bytes, Kind, decode_message, encode_message
from fray.net.transport import Credential, Network
from fray.net.tunnels.transport import Tunnels
from fray.runtime.controller_client.jobs import JobTracker
from fray.runtime.controller_client.logs import LogSubscriptions, OnLog
from fray.runtime.controller_client.names import NameSubscription, NameSubscriptions
from fray.runtime.controller_client.request import OnAnswer
from fray.runtime.controller_client.reservations import ReservationTracker


class ControllerClient:
    """The channel to the controller and all that rides on it."""

    def __init__(self, hello: ClientHello, *, on_log: OnLog | None = None, tunnels: Tunnels | None = None) -> None:
        self.hello = hello
        self.jobs = JobTracker(self.request_blobs)
        self.reservations = ReservationTracker(self.request_blobs)
        self.names = NameSubscriptions(self.notify, self.resubscribe)
        self.logs = LogSubscriptions(hello.session, self.request_blobs, self.resubscribe, on_log)
        self.tunnels = tunnels
        """What is relayed over this conversation."""
        self.controller: ControllerHello | None = None
        self.ended: FrayError | None = None
        self.ready = trio.Event()
        """Set when the controller first answered, or the conversation ended before."""
        self._channel: Channel | None = None
        self._requests: Requests | None = None
        self._owed = trio.Event()
        self._resets = 0
        self._settled = False
        """Something of this session has been accepted."""
        self.closed = trio.Event()
        """Set when the conversation has ended, for whatever reason."""
        self.is_closing = False
        """This side has begun to say goodbye: what ends from now on is nobody's error."""

    # The channel's handler -------------------------------------------------------------------------------------------

    def on_frame(self, kind: int, flags: int, target: int, ref: int, body: Bytes) -> None:
        if self._requests is not None and self._requests.on_frame(kind, flags, target, ref, body):
            return
        if self.tunnels is not None and self.tunnels.on_frame(kind, flags, target, ref, body):
            return
        if kind == Kind.NOTICE:
            message, blobs = decode_message(body)
            self._notice(message, blobs)

    def on_batch(self) -> None:
        pass

    def on_reset(self, greeting: Bytes) -> None:
        message, _ = decode_message(greeting)
        assert isinstance(message, ControllerHello)
        self.controller = message
        if self._requests is not None:
            self._requests.on_reset()
        if self.tunnels is not None:
            self.tunnels.on_reset()
        self._resets += 1
        self.logs.on_appended(None)
        self._owed.set()
        self.ready.set()

    def on_suspended(self, why: str) -> None:
        pass

    def on_resumed(self) -> None:
        pass

    def on_end(self, error: FrayError) -> None:
        self.ended = error
        if self._requests is not None:
            self._requests.on_end(error)
        if self.tunnels is not None:
            self.tunnels.on_end(error)
        self.jobs.lose_all(error)
        self.reservations.lose_all(error)
        self._owed.set()
        self.ready.set()
        self.closed.set()

    def _notice(self, message: Any, blobs: Sequence[Bytes]) -> None:
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

    # Life ------------------------------------------------------------------------------------------------------------

    async def run(
        self,
        network: Network,
        addresses: Sequence[str],
        credential: Credential | None,
        *,
        policy: RedialPolicy,
        rng: random.Random,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Hold the conversation until it ends; reports started at once, before the controller answers."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_subscribed)
            task_status.started()
            await run_dialed(
                network,
                addresses,
                credential,
                greeting=self._greeting,
                handler=self._opened,
                incarnation=self.hello.session,
                policy=policy,
                rng=rng,
            )
            nursery.cancel_scope.cancel()

    def _greeting(self) -> bytes:
        return encode_message(evolve(self.hello, established=self._settled, leaving=self.is_closing))

    def _opened(self, channel: Channel) -> ControllerClient:
        self._channel = channel
        if self.hello.role is Role.JOB:
            channel.stale_s = STALE_S
        self._requests = Requests(channel)
        if self.tunnels is not None:
            self.tunnels.attach(channel)
        return self

    @property
    def in_doubt(self) -> bool:
        """This process was stopped for minutes, and the controller has not said since that its session still stands."""
        return self._channel is not None and self._channel.in_doubt

    async def wait_ready(self, within_s: float) -> ControllerHello:
        """The controller's greeting.

        Raises:
            ConnectionFailed: it refused us (the subclass says why), or nobody answered within ``within_s``.
        """
        with trio.move_on_after(within_s):
            await self.ready.wait()
        if self.ended is not None:
            raise self.ended
        if self.controller is None:
            raise Unreachable(f"no answer from the controller within {within_s:g} s; is fray-controller running there?")
        return self.controller

    async def close(self, reason: str, within_s: float) -> None:
        """Goodbye: end all this session owns, then the conversation. Bounded; shielded by the caller."""
        self.is_closing = True
        with trio.move_on_after(within_s):
            if self.ended is None and self.ready.is_set():
                try:
                    await self.request(EndSession(reason=reason))
                except FrayError:
                    pass  # the conversation ended first: the controller ends what we own by itself
        if self._channel is not None and self.ended is None:
            with trio.move_on_after(1):
                await self._channel.close(reason)

    # Requests --------------------------------------------------------------------------------------------------------

    async def request(self, message: Any, blobs: Sequence[Bytes] = (), *, timeout_s: float | None = None) -> Any:
        """Ask and wait for the reply (without its attachments); see `request_blobs`."""
        return (await self.request_blobs(message, blobs, timeout_s=timeout_s))[0]

    async def request_blobs(
        self,
        message: Any,
        blobs: Sequence[Bytes] = (),
        *,
        timeout_s: float | None = None,
        on_answer: OnAnswer | None = None,
    ) -> tuple[Any, Sequence[Bytes]]:
        """Ask and wait for the reply with its attachments.

        What a reply says of things that change is learnt in ``on_answer``: a notice that came right behind it is heard
        before the task that awaits the reply runs, and must not be undone by it.

        Raises:
            FrayError: what the controller answered, DeadlineExceeded, or why the conversation ended.
        """
        await self.ready.wait()
        if self.ended is not None:
            raise copy_error(self.ended)
        if self._requests is None:
            raise ChannelClosed("the conversation with the controller has not begun", reason="closed")
        answer = await self._requests.request(message, blobs, timeout_s=timeout_s, on_answer=on_answer)
        self._settled = self._settled or isinstance(message, Launch | Register | CreateReservation)
        return answer

    def notify(self, message: Any) -> None:
        """Say something that nobody has to hear."""
        if self._channel is not None and self.ended is None and self.ready.is_set():
            try:
                self._channel.notice(message)
            except FrayError:
                pass  # full or ending

    # Subscribing again -----------------------------------------------------------------------------------------------

    def resubscribe(self) -> None:
        """There is a subscription that the controller may not know."""
        self._owed.set()

    async def _keep_subscribed(self) -> None:
        """Tell the controller every subscription it does not know, again after each reset."""
        await self.ready.wait()
        told: dict[str, NameSubscription] = {}
        told_follow: dict[JobId | None, bool] = {}
        resets = 0
        while self.ended is None:
            self._owed = trio.Event()
            if resets != (now := self._resets):  # one that comes meanwhile is another: what was told is forgotten again
                if resets:
                    await self.jobs.resubscribe()
                    await self.reservations.resubscribe()
                resets, told, told_follow = now, {}, {}
            told = {key: watch for key, watch in told.items() if self.names.watched.get(key) is watch}
            owed = {key: watch for key, watch in self.names.watched.items() if key not in told}
            owed_logs = {job: on for job, on in self.logs.followed.items() if told_follow.get(job) != on}
            if not owed and not owed_logs:
                await self._owed.wait()
                continue
            await self._subscribe(tuple(owed), owed_logs)
            told |= owed
            told_follow |= owed_logs

    async def _subscribe(self, keys: Sequence[str], logs: dict[JobId | None, bool]) -> None:
        async def one(message: Any) -> None:
            try:
                await self.request_blobs(message, on_answer=self._learn_answer)
            except FrayError:
                return  # the conversation has ended (`on_end` tells everybody) or the controller knows no such key

        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(one, Watch(key=key))
            for job, on in logs.items():
                nursery.start_soon(one, FollowLogs(job=job, on=on))

    def _learn_answer(self, reply: Any, blobs: Sequence[Bytes]) -> None:
        if isinstance(reply, Names):
            self.names.on_names(reply, blobs)
