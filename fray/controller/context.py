"""State shared by all connections of one controller: the scheduler's state, its inbox, blobs and keys."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from attrs import Factory, define, evolve, field

from fray.controller.audit_log import AuditLog
from fray.controller.join_tokens import JoinTokens
from fray.controller.log_cache import LogCache
from fray.controller.metrics.attempt_metrics import AttemptMetricsStore
from fray.controller.metrics.job_counts import JobCounts
from fray.controller.metrics.loop_delay import LoopDelayMeter
from fray.controller.metrics.usage_history import UsageHistory
from fray.controller.people import People
from fray.controller.secret_store import SecretStore
from fray.controller.store import Store
from fray.controller.workspaces.bundles import BundleStore
from fray.model.ids import AttemptId, BlobId
from fray.model.messages.client import Names
from fray.model.specs import RESULT_GONE, JobInfo, Outcome
from fray.net.auth import derive_key
from fray.net.transport import Bytes
from fray.scheduler.effects import Event
from fray.scheduler.state.state import State
from fray.scheduler.views import names_under


class EventInbox(Protocol):
    """Inbox of the scheduler's events (`fray.controller.loop.Loop`)."""

    def current_time(self) -> float:
        """Return the scheduler's time at this moment, seconds since the epoch; its state has that of the last turn."""

    def submit(self, event: Event) -> None:
        """Queue a peer's request. Raises ChannelFull when too many are pending."""

    def post(self, event: Event) -> None:
        """Queue an event that the controller observed."""

    @property
    def is_empty(self) -> bool:
        """Return whether the state has all events that were queued."""


class CertificateIssuer(Protocol):
    """Certificate authority (`fray.controller.certificate_authority`)."""

    def sign(self, node: str, request: str) -> tuple[str, str]:
        """Return the certificate for a node's signing request, and the authorities' certificates, all in PEM.

        Raises:
            InvalidRequest: the request is damaged.
        """


class NameFilter(Protocol):
    """Filter of what a client may see of the registry."""

    def filter_names(self, names: Names) -> Names:
        """Return the endpoints without those of others."""


@define(eq=False)
class ControllerContext:
    """Shared state of one run of the controller."""

    state: State
    store: Store
    cluster_id: str
    epoch: int
    secret: bytes = field(repr=False)
    bundles: BundleStore = field(repr=False)
    same_pid_namespace: bool = False
    """True if the previous controller saw the same processes under the same numbers."""
    log_cache: LogCache = field(factory=LogCache)
    attempt_metrics: AttemptMetricsStore = field(factory=AttemptMetricsStore)
    usage_history: UsageHistory = field(factory=UsageHistory)
    loop_delay: LoopDelayMeter = field(factory=LoopDelayMeter)
    job_counts: JobCounts = field(default=Factory(lambda self: JobCounts(self.state), takes_self=True))
    secrets: SecretStore = field(factory=SecretStore)
    env_vars: dict[str, str] = field(factory=dict)
    """Variables of every job."""
    in_place: bool = False
    """True if jobs run in the processes of their drivers, so that no workspace is uploaded."""
    join_tokens: JoinTokens = field(
        default=Factory(lambda self: JoinTokens(self.secret, self.store, {}), takes_self=True), repr=False
    )
    authority: CertificateIssuer | None = None
    """Issuer of the certificates of nodes; None without TLS."""
    people: People = field(
        default=Factory(lambda self: People(self.store, random.SystemRandom()), takes_self=True), repr=False
    )
    audit: AuditLog = field(default=Factory(lambda self: AuditLog(self.store.path), takes_self=True), repr=False)
    inbox: EventInbox = field(init=False)
    """Set by the loop, before any peer can connect."""
    _pinned_by_event: dict[int, tuple[BlobId, ...]] = field(factory=dict, repr=False)
    _pin_counts: Counter[BlobId] = field(factory=Counter, repr=False)

    def attempt_key(self, attempt_id: AttemptId) -> str:
        """Return the key with which the processes of an attempt authenticate. It is derived from the store's secret and
        the attempt's id, so none is stored and any controller on this store derives the same."""
        return derive_key(self.secret, "attempt", attempt_id)

    # Blobs: those of an event are pinned until the scheduler has decided whether a row refers to them

    @contextmanager
    def hold_blobs(self, blobs: Sequence[Bytes]) -> Iterator[list[BlobId]]:
        """Store attachments and give their ids. At the end those to which no row and no pending event refers are
        dropped.

        Raises:
            MessageTooLarge: one of them exceeds 8 MiB.
        """
        names: list[BlobId] = []
        try:
            for data in blobs:
                # Not a comprehension: if one is too large, those before it are in the list, and are dropped again.
                names.append(self.store.put_blob(data))  # noqa: PERF401
            # A request that is refused within the block leaves nothing in the store: by then no row and no pin refers
            # to its blobs.
            yield names
        finally:
            self.drop_unreferenced(names)

    def submit_with_blobs(self, event: Event, blobs: Sequence[BlobId]) -> None:
        """Submit an event whose blobs must not be dropped before it was stepped.

        Raises:
            ChannelFull: too many requests are pending.
        """
        # Pinned first: the block of `hold_blobs` ends before the loop steps the event and a row refers to the blobs.
        self.pin_blobs(event, blobs)
        try:
            self.inbox.submit(event)
        except BaseException:
            self.unpin_blobs((event,))
            raise

    def pin_blobs(self, event: Event, blobs: Sequence[BlobId]) -> None:
        if blobs:
            # By identity: two equal events (a repeated launch) are pinned separately. An id is not reused meanwhile,
            # since the inbox and then the loop's batch refer to the event.
            self._pinned_by_event[id(event)] = tuple(blobs)
            # Counted: two clients may send the same payload at the same time, and it is one blob.
            self._pin_counts.update(blobs)

    def unpin_blobs(self, events: Iterable[Event]) -> None:
        """Release the blobs of events that have been stepped; drop those to which no row refers."""
        for event in events:
            blobs = self._pinned_by_event.pop(id(event), ())
            self._pin_counts.subtract(blobs)
            self.drop_unreferenced(blobs)

    def drop_unreferenced(self, blobs: Iterable[BlobId]) -> None:
        """Delete the blobs to which no row and no pending event refers."""
        for blob in blobs:
            if self._pin_counts[blob] <= 0:
                # Allowed for a missing key of a Counter; without it, zeros would pile up for every blob there ever was.
                del self._pin_counts[blob]
                # Asked again although the scheduler has named the blob as unused: a launch that is pending may bring it
                # back.
                if not self.state.is_blob_used(blob):
                    if self.store.has_blob(blob):
                        self.store.delete_blobs((blob,))
                    else:
                        self.bundles.release(blob)

    def has_blob(self, blob: BlobId) -> bool:
        """Return whether a payload or value is stored, small or large."""
        return self.store.has_blob(blob) or self.bundles.has(blob)

    # Values of ended jobs and actors

    def attach_value(self, info: JobInfo) -> tuple[JobInfo, list[Bytes]]:
        """Return the job and the value to attach; a large one is fetched by those who wait for it (`FetchValue`).

        A value that is no longer stored is removed from the info, with a message that says so.
        """
        data = None if info.value is None else self.store.blob(info.value)
        if data is not None:
            return info, [data]
        if info.value is None or self.bundles.has(info.value):
            return info, []
        # An error and not None, which would look like the result of a function that returned nothing.
        return evolve(info, value=None, error_message=info.error_message or RESULT_GONE), []

    def attach_error(self, outcome: Outcome | None) -> tuple[Outcome | None, list[Bytes]]:
        """Return the outcome of an actor and the error to attach, as `attach_value` does for jobs."""
        if outcome is None or outcome.value is None:
            return outcome, []
        data = self.store.blob(outcome.value)
        return (outcome, [data]) if data is not None else (evolve(outcome, value=None), [])

    def current_names(self, key: str, scope: NameFilter | None = None) -> tuple[Names, list[Bytes]]:
        """Return all endpoints under a key (in a scope) and, for an actor that has ended, how it ended."""
        names = names_under(self.state, key)
        if scope is not None:
            names = scope.filter_names(names)
        # Attached at this moment and not by the scheduler, whose rows and effects carry names of blobs only.
        ended, error = self.attach_error(names.ended)
        return evolve(names, ended=ended), error
