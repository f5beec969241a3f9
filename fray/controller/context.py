"""What the conversations of one controller share: the state to look into, the inbox to write to, blobs and keys."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from attrs import Factory, define, evolve, field

from fray.controller.join_tokens import JoinTokens
from fray.controller.log_cache import LogCache
from fray.controller.metrics.attempt_metrics import AttemptMetricsStore
from fray.controller.metrics.usage_history import UsageHistory
from fray.controller.secret_store import SecretStore
from fray.controller.store import Store
from fray.controller.workspaces.bundles import BundleStore
from fray.model.ids import AttemptId, BlobId
from fray.model.messages.client import Names
from fray.model.specs import RESULT_GONE, JobInfo, Outcome
from fray.net.transport import Bytes
from fray.scheduler.effects import Event
from fray.scheduler.state.state import State
from fray.scheduler.views import names_under


class EventInbox(Protocol):
    """Where events go (`fray.controller.loop.Loop`)."""

    now: float

    def current_time(self) -> float:
        """The law's time at this moment; `now` is that of its last turn."""

    def submit(self, event: Event) -> None:
        """A peer's request. Raises ChannelFull when too many wait."""

    def post(self, event: Event) -> None:
        """What the context observed."""


@define(eq=False)
class ControllerContext:
    """Made once per life of the controller."""

    state: State
    store: Store
    cluster_id: str
    epoch: int
    secret: bytes = field(repr=False)
    bundles: BundleStore = field(repr=False)
    same_pid_namespace: bool = False
    """The controller before this one saw the same processes under the same numbers."""
    log_cache: LogCache = field(factory=LogCache)
    attempt_metrics: AttemptMetricsStore = field(factory=AttemptMetricsStore)
    usage_history: UsageHistory = field(factory=UsageHistory)
    secrets: SecretStore = field(factory=SecretStore)
    env_vars: dict[str, str] = field(factory=dict)
    """Variables of every job."""
    in_place: bool = False
    """Jobs run where their authors do: no workspace travels."""
    join_tokens: JoinTokens = field(
        default=Factory(lambda self: JoinTokens(self.secret, self.store, {}), takes_self=True), repr=False
    )
    inbox: EventInbox = field(init=False)
    """Set by the loop, before anybody can connect."""
    _pinned_by_event: dict[int, tuple[BlobId, ...]] = field(factory=dict, repr=False)
    _pin_counts: Counter[BlobId] = field(factory=Counter, repr=False)

    def attempt_key(self, attempt_id: AttemptId) -> str:
        """With which the process of an attempt dials us; any controller on this store makes the same."""
        return hmac.new(self.secret, attempt_id.encode(), hashlib.sha256).hexdigest()

    # Blobs: those of an event are held until the law has decided whether a row refers to them

    @contextmanager
    def hold_blobs(self, blobs: Sequence[Bytes]) -> Iterator[list[BlobId]]:
        """Store attachments and give their names; those that nothing refers to or waits for at the end are dropped.

        Raises:
            MessageTooLarge: one of them is over 8 MiB.
        """
        names: list[BlobId] = []
        try:
            for data in blobs:
                names.append(self.store.put_blob(data))  # noqa: PERF401  # those before a bad one are dropped again
            yield names
        finally:
            self.drop_unreferenced(names)

    def submit_with_blobs(self, event: Event, blobs: Sequence[BlobId]) -> None:
        """`Inbox.ask`, with blobs that must not be forgotten before the event was stepped."""
        self.pin_blobs(event, blobs)
        try:
            self.inbox.submit(event)
        except BaseException:
            self.unpin_blobs((event,))
            raise

    def pin_blobs(self, event: Event, blobs: Sequence[BlobId]) -> None:
        if blobs:
            self._pinned_by_event[id(event)] = tuple(blobs)
            self._pin_counts.update(blobs)

    def unpin_blobs(self, events: Iterable[Event]) -> None:
        """These events have been stepped: what no row refers to now is forgotten."""
        for event in events:
            blobs = self._pinned_by_event.pop(id(event), ())
            self._pin_counts.subtract(blobs)
            self.drop_unreferenced(blobs)

    def drop_unreferenced(self, blobs: Iterable[BlobId]) -> None:
        """Delete those that no row and no event in the inbox refers to."""
        for blob in blobs:
            if self._pin_counts[blob] <= 0:
                del self._pin_counts[blob]
                if not self.state.is_blob_used(blob):
                    self.store.delete_blobs((blob,))

    # Values of ended jobs and actors

    def attach_value(self, info: JobInfo) -> tuple[JobInfo, list[Bytes]]:
        """The value to attach. The info names no value that is not attached."""
        data = None if info.value is None else self.store.blob(info.value)
        if data is not None:
            return info, [data]
        if info.value is None:
            return info, []
        return evolve(info, value=None, error_message=info.error_message or RESULT_GONE), []

    def attach_error(self, outcome: Outcome | None) -> tuple[Outcome | None, list[Bytes]]:
        """The same for an actor's end."""
        if outcome is None or outcome.value is None:
            return outcome, []
        data = self.store.blob(outcome.value)
        return (outcome, [data]) if data is not None else (evolve(outcome, value=None), [])

    def current_names(self, key: str) -> tuple[Names, list[Bytes]]:
        """All endpoints under a key; of an actor that has ended, how."""
        names = names_under(self.state, key)
        ended, error = self.attach_error(names.ended)
        return evolve(names, ended=ended), error
