"""One attempt on a node: from its ticket to its outcome, through what it needs, its keeper, and its keeper's words.

Law: what an attempt needs is made ready before a keeper is asked for. A stop gives that up; after it, the keeper ends
the job by the ladder. The outcome is known once the keeper has said that nothing is left below it, or, if the keeper
was killed, once the orphans it left have been swept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import trio
from attrs import asdict, define, field

from fray.model.specs import AttemptSpec, EndReason, ObservedAttempt, Outcome, Phase
from fray.net.codec import to_json
from fray.node.attempts.shim_connection import ShimConnection
from fray.node.job_process.outcome_file import load
from fray.node.launcher import STOPPED_MEANWHILE, OnObserved, OnSaid
from fray.node.logs.redact import Redactor
from fray.node.logs.store import AttemptLogWriter
from fray.node.ports import ports_in_use, ports_taken
from fray.node.prepare import (
    EnvironmentServices,
    NotPrepared,
    PreparedEnvironment,
    Preparer,
)
from fray.node.resources.allocation import Allocation
from fray.node.resources.allocator import ResourceAllocator
from fray.node.resources.attempt_limit import AttemptLimiter
from fray.node.shim.progress_pipe import said_of
from fray.node.zygotes.manager import ZygoteManager
from fray.node.zygotes.pool import PooledZygote, ZygotePool

START_S = 30.0
"""An attempt whose keeper says nothing for so long could not be started."""
START_TRIES = 3

log = logging.getLogger("fray.node")


@define(eq=False)
class RunningAttempt:
    """One attempt, as its node holds it."""

    ticket: AttemptSpec
    directory: Path
    log: AttemptLogWriter | None = None
    """What it prints; None if the disk has no room for it."""
    phase: Phase = Phase.STARTING
    pid: int | None = None
    preparing: trio.CancelScope | None = None
    """Set while what it needs is made ready."""
    control: ShimConnection | None = None
    """Set while the keeper listens."""
    zygote: int | None = None
    """Pid of the zygote that was asked for the keeper, until the keeper has said its own."""
    keeper: int | None = None
    keeper_pidfd: int = -1
    pipes: dict[str, int] = field(factory=dict)
    """The keeper's ends of the job's output, held here too: what is in them outlives a keeper that is killed."""
    stop_asked: bool = False
    kill_asked: bool = False
    forget_asked: bool = False
    captured: trio.Event = field(factory=trio.Event)
    """Set when a capture is there, and replaced."""
    left: int = 0
    """Processes of it that its keeper could not end yet."""
    ended: trio.Event = field(factory=trio.Event)

    @property
    def attempt_id(self) -> str:
        return self.ticket.attempt_id

    @property
    def unwanted(self) -> bool:
        return self.stop_asked or self.kill_asked

    def say(self, text: str) -> None:
        """Write lines of Fray's own (stream ``sys``) into its log, whether it has a process yet or not."""
        if self.log is not None:
            self.log.say(text)

    def ask(self, what: str, value: float = 1) -> bool:
        """Pass ``stop``, ``notice`` or ``kill`` on to whoever works on it; False if its process is not there yet."""
        if self.preparing is not None:
            self.preparing.cancel()
        if self.control is not None:
            self.control.tell(**{what: value})
        return self.control is not None


class AttemptServices(Protocol):
    """Where attempts are: what one needs of its launcher."""

    entry: str
    offered: dict[str, int]
    holdings: ResourceAllocator
    preparer: Preparer
    household: EnvironmentServices
    broods: ZygotePool
    room: AttemptLimiter
    on_observed: OnObserved
    on_said: OnSaid

    def sweep_adopted(self, dead: int | None = None) -> bool:
        """See `ProcessLauncher.sweep_adopted`."""
        ...

    def gets_namespace(self, ticket: AttemptSpec) -> bool:
        """Whether its processes have a PID namespace of their own."""
        ...

    in_doubt: Callable[[], bool]
    """See `fray.node.launcher.Doubting`."""

    def note_hatched(self) -> None:
        """One that was asked for has said its pid, or never will."""
        ...

    async def wait_hatched(self) -> None: ...


@define
class AttemptRunner:
    """The way of one attempt through its place."""

    attempt: RunningAttempt
    place: AttemptServices

    async def run(self) -> tuple[Outcome, bytes | None]:
        """Its outcome, and the value that this names."""
        brood: PooledZygote | None = None
        try:
            prepared, brood = await self._prepare()
            return await self._run(prepared, brood)
        except NotPrepared as error:
            return Outcome(cause=error.cause, message=str(error)), None
        finally:
            if brood is not None:
                brood.release()
            self.place.household.release(self.attempt.attempt_id)
            self.place.room.leave(self.attempt.attempt_id)

    async def _run(self, prepared: PreparedEnvironment, brood: PooledZygote | None) -> tuple[Outcome, bytes | None]:
        given = await self._take()
        ticket = self.attempt.ticket
        taken = ports_in_use(ticket.ports.values())
        if taken and not self.attempt.unwanted:
            return ports_taken(ticket, taken), None
        for _ in range(START_TRIES):
            if brood is None or self.attempt.unwanted:
                return Outcome(cause=EndReason.STOPPED, message="stopped before it started"), None
            if self.place.in_doubt():
                return STOPPED_MEANWHILE, None
            control = await self._have_keeper(prepared, given, brood.zygotes)
            if control is not None:
                with contextlib.closing(control):
                    return await self._converse(control, prepared, brood.zygotes)
        return unstarted(f"node {ticket.node} cannot start a process; its log says why"), None

    async def _prepare(self) -> tuple[PreparedEnvironment, PooledZygote | None]:
        """What it starts from, and the zygote that forks it: None if it was stopped meanwhile."""
        attempt = self.attempt
        if attempt.unwanted:
            return PreparedEnvironment(), None
        with trio.CancelScope() as attempt.preparing:
            try:
                await self.place.room.enter(attempt.attempt_id, self._say)
                prepared = await self._make_ready(attempt.ticket)
                return prepared, await self.place.broods.take(prepared)
            finally:
                attempt.preparing = None
        return PreparedEnvironment(), None

    async def _make_ready(self, ticket: AttemptSpec) -> PreparedEnvironment:
        """What jobs bring along is anybody's: an error nobody thought of costs this attempt, and not the node."""
        try:
            return await self.place.preparer.prepare(ticket, self._say)
        except NotPrepared:
            raise
        except Exception as error:
            log.exception("%s cannot be made ready", ticket.attempt_id)
            raise NotPrepared(
                f"what it needs cannot be made ready: {error!r}; the log of node {ticket.node} says where"
            ) from error

    def _say(self, line: str) -> None:
        self.attempt.say(line)

    async def _take(self) -> Allocation:
        attempt, place = self.attempt, self.place
        fenced = place.gets_namespace(attempt.ticket)
        return await place.holdings.take(attempt.ticket, lambda: attempt.keeper, fenced=fenced)

    async def _have_keeper(
        self, prepared: PreparedEnvironment, given: Allocation, zygotes: ZygoteManager
    ) -> ShimConnection | None:
        """The control socket of a new keeper; None if it could not be forked (the zygote died, no process left)."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            log.error("%s: no socket for its keeper: %s", self.attempt.attempt_id, error)
            return None
        control, greeted = ShimConnection(ours), False
        try:
            with trio.move_on_after(START_S) as patience, theirs:
                self.attempt.zygote = await self._ask_for_keeper(theirs, zygotes)
                theirs.close()
                greeted = await self._greet(control, prepared, given)
            if patience.cancelled_caught:
                zygotes.replace(self.attempt.zygote)
        finally:
            self.attempt.zygote = None
            self.place.note_hatched()
            if not greeted:
                control.close()
        self.place.sweep_adopted()
        return control if greeted else None

    async def _ask_for_keeper(self, theirs: socket.socket, zygotes: ZygoteManager) -> int:
        namespace = self.place.gets_namespace(self.attempt.ticket)
        return await zygotes.keep(theirs, namespace=namespace)

    async def _greet(self, control: ShimConnection, prepared: PreparedEnvironment, given: Allocation) -> bool:
        attempt = self.attempt
        start = {"ticket": to_json(attempt.ticket), "entry": self.place.entry, "offered": self.place.offered}
        log_of = attempt.log.for_keeper() if attempt.log is not None else None
        try:
            await control.send({**start, "prepared": prepared.told(), "given": asdict(given), "log": log_of})
        except OSError as error:
            log.debug("%s: no keeper: %s", attempt.attempt_id, error)
            return False
        greeting = await control.receive()
        if greeting is None:
            return False
        attempt.keeper, attempt.keeper_pidfd = greeting["keeper"], control.take_descriptor()
        return True

    async def _converse(
        self, control: ShimConnection, prepared: PreparedEnvironment, zygotes: ZygoteManager
    ) -> tuple[Outcome, bytes | None]:
        attempt = self.attempt
        attempt.control = control
        if attempt.log is not None:
            attempt.log.tell_keeper = lambda text: control.tell(say=text)
        if attempt.unwanted:
            control.tell(**{"kill" if attempt.kill_asked else "stop": 1})
        try:
            while (message := await control.receive()) is not None:
                if "running" in message:
                    attempt.pid = message["running"]
                    attempt.pipes = control.take_descriptors("out", "err")
                    self.observe(Phase.STOPPING if attempt.stop_asked else Phase.RUNNING)
                elif "log" in message:
                    self._pass_on()
                elif "said" in message:
                    control.tell(heard=1)
                    for said in said_of(message["said"]):
                        self.place.on_said(attempt.attempt_id, said)
                elif "captured" in message:
                    attempt.captured.set()
                    attempt.captured = trio.Event()
                elif "ended" in message:
                    return self._ended(message)
        finally:
            attempt.control = None
            if attempt.log is not None:
                attempt.log.tell_keeper = None
        return await self._keeper_lost(prepared, zygotes)

    def observe(self, phase: Phase) -> None:
        attempt = self.attempt
        attempt.phase = phase
        self.place.on_observed(ObservedAttempt(attempt_id=attempt.attempt_id, phase=phase, pid=attempt.pid), None)

    def _pass_on(self) -> None:
        if self.attempt.log is not None:
            self.attempt.log.pass_on()

    def _ended(self, message: dict[str, Any]) -> tuple[Outcome, bytes | None]:
        self._pass_on()
        self.attempt.left = message["left"]
        if message["swept"] or message["left"]:
            words = self.attempt.attempt_id, message["swept"], message["left"]
            log.info("%s: ended %d processes that it left behind; %d are left", *words)
        return load(self.attempt.directory, message.get("outcome")) or (unstarted("the keeper left no outcome"), None)

    async def _keeper_lost(self, prepared: PreparedEnvironment, zygotes: ZygoteManager) -> tuple[Outcome, bytes | None]:
        """The keeper was killed: wait until it is dead, then until its orphans are."""
        attempt = self.attempt
        if attempt.keeper_pidfd >= 0:
            await trio.lowlevel.wait_readable(attempt.keeper_pidfd)
        self.place.sweep_adopted(dead=attempt.keeper)
        await zygotes.sweep()
        await self.place.household.clean_up(prepared, attempt.attempt_id)
        while not self.place.sweep_adopted(dead=attempt.keeper):
            await self.place.wait_hatched()
        if attempt.log is not None:
            attempt.log.finish(attempt.pipes, Redactor(attempt.ticket.secrets).hide)
        lost = Outcome(
            cause=EndReason.STOPPED if attempt.unwanted else EndReason.KILLED,
            message="its keeper process was killed, and the job with it",
            signal=signal.SIGKILL,
        )
        return load(attempt.directory) or (lost, None)


def unstarted(message: str) -> Outcome:
    """The outcome of an attempt that this machine could not start, whatever it was."""
    return Outcome(cause=EndReason.ENVIRONMENT, message=message, machine_fault=True)


def close_keeper(attempt: RunningAttempt) -> None:
    """Let go of what was held of its keeper."""
    if attempt.keeper_pidfd >= 0:
        os.close(attempt.keeper_pidfd)
        attempt.keeper_pidfd = -1
    for pipe in attempt.pipes.values():
        os.close(pipe)
    attempt.pipes = {}
