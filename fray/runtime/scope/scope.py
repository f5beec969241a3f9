"""Scope of children on any machine: a Trio nursery with one watcher task per child.

Implements structured concurrency (P2) by the rules of a nursery: a watcher whose child fails raises, which cancels
its siblings and the body; a cancelled watcher ends its child and waits, bounded, for the acknowledgement. The table of
children and of the errors they owe is `fray.runtime.scope.children`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

import trio
from attrs import evolve

from fray.errors import FrayError, InvalidRequest, is_scope_error
from fray.model.environment import Secret, plain_variables, secret_names
from fray.model.job_groups import JobGroupSpec
from fray.model.messages.client import Role, Terminate
from fray.model.specs import EndReason, JobInfo, JobSpec
from fray.runtime import tracing, waits
from fray.runtime.background import open_background_nursery
from fray.runtime.controller_client.jobs import JobRecord
from fray.runtime.controller_client.large_results import upload_payloads
from fray.runtime.notebook_cells import KERNEL, remember_launch
from fray.runtime.runtime import Runtime
from fray.runtime.scope.child_environment import prepare_specs
from fray.runtime.scope.children import (
    ChildKind,
    ChildTable,
    OnChildFailure,
    ScopeChild,
    owes_error,
)
from fray.runtime.scope.wait_reports import report_waits
from fray.runtime.serialization.errors import scope_error
from fray.runtime.serialization.values import Value
from fray.tracebacks import prepend_traceback

if TYPE_CHECKING:
    from fray.runtime.tracing_sdk import LaunchSpan

LAUNCH_TRIES = 3
"""Number of times that a launch is sent whose content the controller lacks."""
CONFIRM_S = 10.0
"""Seconds, beyond the termination grace periods, that a scope waits for the confirmed end of a child.

After that the controller continues on its own.
"""


Decide: TypeAlias = Callable[[JobRecord, BaseException], OnChildFailure]
"""Decision about a child's error; called in the task of its scope."""


class ChildScope:
    """Children of one ``async with``; made by `open_child_scope`."""

    def __init__(self, runtime: Runtime, name: str, nursery: trio.Nursery) -> None:
        self.runtime = runtime
        self.name = name
        self.variables: Mapping[str, str | Secret] = {}
        """Environment variables of all children; their own take precedence."""
        self.children = ChildTable()
        self._nursery = nursery
        self._actors: dict[str, trio.CancelScope] = {}
        self._settled = trio.Event()
        self._loss_raised = False
        """Flag: one watcher has raised the end of the session with the controller, for all of them."""

    async def launch(
        self,
        specs: Sequence[JobSpec],
        payloads: Sequence[Value],
        kind: ChildKind,
        supervision: OnChildFailure | Decide,
        error_of: Callable[[JobRecord], BaseException],
        attach_existing: bool = False,
        group: JobGroupSpec | None = None,
    ) -> list[JobRecord]:
        """Launch children, all or none, each watched from before the request leaves.

        Args:
            attach_existing: attach to a job of such an id that exists already, no matter which process launched it.
            group: the job group of which these are all the members.
        """
        specs = [_with_variables(spec, self.variables) for spec in specs] if self.variables else specs
        decide = (lambda record, error: supervision) if isinstance(supervision, OnChildFailure) else supervision
        # Checked before the request: a child launched now would have no task that ends it.
        if self.children.ending:
            raise FrayError(f"scope {self.name!r} is ending: nothing can be launched in it any more", scope=self.name)
        # Entered before the request leaves, so that leaving the scope waits for launches that are under way.
        for spec in specs:
            if not spec.outlives_scope:
                known = supervision if isinstance(supervision, OnChildFailure) else OnChildFailure.ESCALATE
                self.children.add(ScopeChild(spec.job_id, kind, known))
        if self.runtime.role is Role.JOB:
            report_waits(self.runtime)
        # Of an actor the cell that calls it is shown, not the one that created it.
        if kind is ChildKind.JOB and KERNEL in sys.modules:
            remember_launch(spec.job_id for spec in specs)
        # Needed only if the launch fails: attaching to a job must not end it.
        known_before = {
            record.info.job_id for record in self.runtime.client.jobs.known([spec.job_id for spec in specs])
        }
        specs, spans = tracing.start_launches(specs)
        try:
            specs, records = await self._send_launch(specs, payloads, group)
        except BaseException as error:
            for span in spans:
                span.fail(error)
            # The launch may have been accepted although its wait was cancelled; its jobs would then run without an
            # owner's watcher.
            with trio.CancelScope(shield=True):
                await self._abandon(specs, known_before, nothing_done=attach_existing and isinstance(error, FrayError))
            raise
        for spec, record in zip(specs, records, strict=True):
            launched_here = record.info.owner in (self.runtime.session, self.runtime.attempt_id)
            # A request attached to an existing job; the scope of its launcher watches that one.
            if record.info.job_id != spec.job_id or (attach_existing and not launched_here):
                self._remove(spec.job_id)  # it existed already, and belongs to the process that launched it
            elif not spec.outlives_scope:
                scope = trio.CancelScope()
                # Only actors are ended one by one when the scope is left; jobs are waited for.
                if kind is ChildKind.ACTOR:
                    self._actors[spec.job_id] = scope
                child = self.children.children[spec.job_id]
                self._nursery.start_soon(self._watch, child, scope, spec, record, decide, error_of)
        for spec, record, span in zip(specs, records, spans, strict=False):  # none where none are recorded
            is_child = record.info.job_id == spec.job_id and not spec.outlives_scope
            _end_with_job(span, record) if is_child else span.end(record.info)
        return records

    async def _send_launch(
        self, specs: Sequence[JobSpec], payloads: Sequence[Value], group: JobGroupSpec | None
    ) -> tuple[Sequence[JobSpec], list[JobRecord]]:
        """Upload what the jobs need and launch them; return the specs as they were sent, and the records.

        Raises:
            InvalidRequest: among others: they are of several users.
        """
        users = {spec.user for spec in specs}
        if len(users) > 1:
            raise InvalidRequest(
                f"jobs that are launched together have one user, not {', '.join(map(repr, sorted(users)))}"
            )
        on_behalf_of = "".join(users - {self.runtime.user})
        for tried in count(1):
            ready = await prepare_specs(self.runtime, specs)
            attached = [payload for payload in payloads if isinstance(payload, bytes)]
            if len(attached) < len(payloads):
                attached = await upload_payloads(self.runtime.client, payloads)
            try:
                return ready, await self.runtime.client.jobs.launch(ready, attached, group, on_behalf_of)
            except InvalidRequest as error:
                # A controller that was restarted after the upload does not know any more who has sent what.
                if "not_uploaded" not in error.details or tried == LAUNCH_TRIES:
                    raise
        raise AssertionError("unreachable")

    async def _abandon(self, specs: Sequence[JobSpec], known_before: Container[str], nothing_done: bool) -> None:
        """End whatever took effect of a launch that was refused, or cancelled half-way.

        Jobs that this process knew before, or that other processes launched, are left alone.
        """
        fresh = [spec.job_id for spec in specs if spec.job_id not in known_before]
        if fresh and not nothing_done:
            # Bounded: leaving may be what the user waits for. If the request is lost, jobs end with the session at the
            # latest.
            with trio.move_on_after(1):
                await self._request_end(fresh, "launch was abandoned", own=True)
        for spec in specs:
            self._remove(spec.job_id)

    async def _watch(
        self,
        child: ScopeChild,
        end_requested: trio.CancelScope,
        spec: JobSpec,
        record: JobRecord,
        decide: Decide,
        error_of: Callable[[JobRecord], BaseException],
    ) -> None:
        # Distinguishes two cancellations: that of this scope (the actor is ended in order) and that of the nursery (an
        # error or the end).
        with end_requested:
            try:
                await record.ended.wait()
            except trio.Cancelled:
                # The wait for the child's end, bounded in `_end`: leaving a scope while children run would break
                # ownership.
                with trio.CancelScope(shield=True):
                    await self._end(spec, record)
                raise
            finally:
                # Whatever the outcome, and before an error is raised: the body may wait for an empty scope.
                self._remove(child.job_id)
        # All children are lost at once when the session ends. One error is enough, and none when this process ends it.
        if record.lost is not None and (
            self.runtime.client.is_closing or self._loss_raised or self._is_driver_scope_of_ended_session
        ):
            return
        if record.lost is not None:
            self._loss_raised = True
            raise record.lost
        requested = end_requested.cancel_called or record.end_requested or record.info.absorbed
        if owes_error(child, record.info.cause or EndReason.FAILURE, requested):
            # Before the error is built from the record.
            await _fetch_large_error(record)
            error = error_of(record)
            # The user's function decides last, and sees the error as the scope would raise it.
            if decide(record, error) is OnChildFailure.ESCALATE:
                raise error

    @property
    def _is_driver_scope_of_ended_session(self) -> bool:
        """Return whether this is a driver's scope and its session has ended; `fray.runtime.open` raises that error."""
        runtime = self.runtime
        return runtime.client.ended is not None and self._nursery is runtime.nursery and runtime.role is not Role.JOB

    async def _end(self, spec: JobSpec, record: JobRecord) -> None:
        # Each step of the child's termination has its own limit on its node; the rest is for the network and the
        # controller.
        with trio.move_on_after(spec.termination.cancel_s + spec.termination.term_s + CONFIRM_S):
            await self._request_end([spec.job_id], f"scope {self.name!r} ended")
            await record.ended.wait()

    async def _request_end(self, job_ids: Sequence[str], why: str, *, own: bool = False) -> None:
        """Request the end of jobs. If this wait is cancelled, the request continues in the background.

        So a caller does not wait forever for a controller that is away, and the jobs still end when it is back.
        """
        terminate = partial(_terminate, self.runtime, job_ids, why, own=own)
        try:
            await terminate()
        except trio.Cancelled:
            # In the runtime's nursery, which outlives this scope.
            self.runtime.nursery.start_soon(terminate)
            raise

    def _remove(self, job_id: str) -> None:
        self.children.remove(job_id)
        self._actors.pop(job_id, None)
        self._settled.set()

    async def wait_jobs_then_end_actors(self) -> None:
        """Leave the scope in order."""
        with waits.waiting():
            while self.children.living(ChildKind.JOB):
                self._settled = trio.Event()
                await self._settled.wait()
        # Only when the jobs have ended, since they may still call the actors.
        self.end_actors()

    async def wait_empty(self) -> None:
        """Wait until no child is left."""
        with waits.waiting():
            while self.children.children:
                self._settled = trio.Event()
                await self._settled.wait()

    def end_actors(self) -> None:
        """Request the end of every actor, and accept no more children."""
        # First: an actor launched after the loop below would never be asked to end.
        self.children.ending = True
        for scope in list(self._actors.values()):
            scope.cancel()

    def living_infos(self) -> list[JobInfo]:
        """Return the states of all living children, in order of launch."""
        return [record.info for record in self.runtime.client.jobs.known(list(self.children.children))]

    def start_soon(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run a task that lives as long as this scope."""
        self._nursery.start_soon(task, *args)


def _end_with_job(span: LaunchSpan, record: JobRecord) -> None:
    """End the span when the job ends; that of one that has ended now."""
    if record.ended.is_set():
        span.end(record.info)
    else:
        record.callbacks.append(lambda: span.end(record.info))


async def _fetch_large_error(record: JobRecord) -> None:
    """Fetch the error of a job from storage if it is too large for messages; if that fails, its text has to do."""
    # Late import, as few errors exceed a message.
    if record.info.stored is not None:
        from fray.runtime.controller_client.large_results import fetch

        with suppress(FrayError):
            await fetch(record)


def _with_variables(spec: JobSpec, variables: Mapping[str, str | Secret]) -> JobSpec:
    secrets = {name: Secret(secret) for name, secret in spec.secrets.items()}
    # Variables of the scope, then of the job: the nearest one wins.
    merged: dict[str, str | Secret] = {**variables, **spec.env_vars, **secrets}
    return evolve(spec, env_vars=plain_variables(merged), secrets=secret_names(merged))


async def _terminate(runtime: Runtime, job_ids: Sequence[str], reason: str, own: bool = False) -> None:
    try:
        await runtime.client.request(Terminate(jobs=tuple(job_ids), reason=reason, own=own))
    except FrayError:
        pass  # the session has ended: the controller ends everything it owned


@asynccontextmanager
async def open_child_scope(runtime: Runtime, name: str) -> AsyncIterator[ChildScope]:
    """Open a scope of children: leaving waits for its jobs, then ends its actors; an error or cancellation ends both.

    Errors are raised in an ExceptionGroup that names the scope, each failure once; Ctrl-C as a plain KeyboardInterrupt.
    """
    try:
        async with trio.open_nursery() as nursery, _run_body(ChildScope(runtime, name, nursery)) as scope:
            yield scope
        return
    except BaseExceptionGroup as group:
        interrupts = [each for each in _with_members(group) if isinstance(each, KeyboardInterrupt)]
        error = interrupts[0] if interrupts else _error_of_scope(name, group)
    raise error from None  # what the body raised is among its members


def _error_of_scope(name: str, group: BaseExceptionGroup[BaseException]) -> BaseExceptionGroup[BaseException]:
    """Return the error that names the scope and its failed jobs, with the members of the errors of inner scopes."""
    members: list[BaseException] = []
    for error in _each_once(group):
        if is_scope_error(error):
            for member in error.exceptions:
                _pass_on(error, member)
                members.append(member)
        else:
            members.append(error)
    return scope_error(name, members)


def _pass_on(outer: BaseException, member: BaseException) -> None:
    """Give a member of a group what the group alone has: its place in the code, and notes that were added to it."""
    prepend_traceback(member, outer)
    for note in getattr(outer, "__notes__", ()):
        member.add_note(note)


def _each_once(group: BaseExceptionGroup[BaseException]) -> Sequence[BaseException]:
    """Return the members without the failures of children that the body, which waited for them, raises as well."""
    by_body = [each for error in group.exceptions if not _is_of_watcher(error) for each in _with_members(error)]
    return [
        error
        for error in group.exceptions
        if not (_is_of_watcher(error) and any(_is_same_failure(error, each) for each in by_body))
    ]


def _is_of_watcher(error: BaseException) -> bool:
    # By its traceback: Trio makes new groups from those that it takes Cancelled out of, so that objects do not tell.
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is ChildScope._watch.__code__ for frame, _ in frames)


def _with_members(error: BaseException) -> Iterator[BaseException]:
    yield error
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _with_members(member)


def _is_same_failure(error: BaseException, other: BaseException) -> bool:
    """Return whether both tell of one failure: each wait for a child builds an error of its own from its record."""

    def text(each: BaseException) -> object:
        # A note, or the text of a `JobFailed`, names the job.
        members = [text(member) for member in each.exceptions] if isinstance(each, BaseExceptionGroup) else ()
        return type(each).__qualname__, str(each), getattr(each, "__notes__", None), members

    return text(error) == text(other)


@asynccontextmanager
async def open_service_scope(runtime: Runtime, name: str) -> AsyncIterator[ChildScope]:
    """Open a scope of children that serve the body: a single error is raised as it is, not in a group."""
    async with open_background_nursery() as nursery, _run_body(ChildScope(runtime, name, nursery)) as scope:
        yield scope


@asynccontextmanager
async def _run_body(scope: ChildScope) -> AsyncIterator[ChildScope]:
    try:
        yield scope
        # Inside the nursery: while it waits, a failing child cancels this wait like the body.
        await scope.wait_jobs_then_end_actors()
        await scope.wait_empty()
    finally:
        # Also after an error, while the watchers end the children.
        scope.children.ending = True
