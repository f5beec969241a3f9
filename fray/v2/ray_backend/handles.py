"""Handles of jobs and actors on Ray: names and ids, which the registry of the process resolves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from fray.errors import ActorUnavailableError
from fray.tracebacks import short_traceback
from fray.v2.interface import ActorHandle
from fray.v2.job import JobHandle, JobStatus, output_of
from fray.v2.ray_backend.errors import own_error
from fray.v2.ray_backend.registry_access import find_registry, registry_call
from fray.v2.ray_backend.specs import ActorOutcome, FoundActor

APPEAR_S = 60.0
"""Seconds that the first use of a handle waits for an actor of its name."""
WAIT_S = 20.0
"""Longest call of the registry that waits; a longer wait repeats it, so that Ray never holds a call forever."""


class RayJobHandle:
    """Job on Ray; pickles to its id. See `fray.v2.JobHandle`."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._last: ActorOutcome | None = None
        """Final outcome, once it is known."""

    @property
    def job_id(self) -> str:
        return self._job_id

    def status(self) -> JobStatus:
        return self._outcome(lambda found: found.status.remote(self._job_id)).status

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        """Wait for the end. See `fray.v2.JobHandle.wait`; after `terminate`, return at once."""
        until = None if timeout is None else monotonic() + timeout
        while True:
            left = WAIT_S if until is None else min(WAIT_S, max(0.0, until - monotonic()))
            found = self._outcome(partial(self._wait_ended, left))
            if JobStatus.finished(found.status) or (until is not None and monotonic() >= until):
                break
        if raise_on_failure and found.failure is not None:
            raise found.failure.unpacked()
        if raise_on_failure and not JobStatus.finished(found.status):
            raise TimeoutError(f"job {self._job_id} has not ended within {timeout:g} s")
        return found.status

    def _wait_ended(self, within_s: float, found: Any) -> Any:
        return found.wait_ended.remote(self._job_id, within_s)

    def terminate(self) -> None:
        """End the job's process; the status is STOPPED at once."""
        # First, so that the status is STOPPED at once, whatever the registry hears later.
        self._last = ActorOutcome(JobStatus.STOPPED)
        registry_call(find_registry().stop.remote(self._job_id))

    def logs(self, max_lines: int | None = None) -> Any:
        """Return the last million characters that the job has printed through Python, or as a program. See
        `fray.v2.JobHandle.logs`."""
        text = str(registry_call(find_registry().logs.remote(self._job_id)))
        return text if max_lines is None else output_of(text.splitlines(), max_lines)

    def freeze(self) -> None:
        """Store the status for good, before Ray shuts down: STOPPED if the job has not ended."""
        if not JobStatus.finished(self.status()):
            self._last = ActorOutcome(JobStatus.STOPPED)

    def _outcome(self, ask: Callable[[Any], Any]) -> ActorOutcome:
        if self._last is not None:
            return self._last
        heard: ActorOutcome | None = registry_call(ask(find_registry()))
        if self._last is not None:  # stopped meanwhile, by another thread
            return self._last
        if heard is None:
            raise RuntimeError(f"unknown job {self._job_id}: it belongs to another driver, or ended long ago")
        if JobStatus.finished(heard.status):
            self._last = heard
        return heard

    def __reduce__(self) -> tuple[Any, ...]:
        return RayJobHandle, (self._job_id,)

    def __repr__(self) -> str:
        return f"<RayJobHandle {self._job_id}{f' {self._last.status.value}' if self._last else ''}>"


# Actors --------------------------------------------------------------------------------------------------------------


def _check_initialized(handle: RayActorHandle) -> None:
    """Raise RuntimeError if Ray is not initialized: a call would make Ray start a new cluster."""
    if not ray.is_initialized():
        raise RuntimeError(f"{handle!r} is dead: its RayClient has ended")


class RayFuture:
    """Pending answer of a call. See `fray.v2.ActorFuture`."""

    def __init__(self, ref: Any, handle: RayActorHandle) -> None:
        self._ref, self._handle = ref, handle

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer. Its arrays are read-only, as they lie in Ray's memory.

        Raises:
            TimeoutError: not within ``timeout`` seconds; `result` may be called again.
            RuntimeError: the actor died.
            BaseException: the error that the method raised.
        """
        _check_initialized(self._handle)
        try:
            return ray.get(self._ref, timeout=timeout)
        except GetTimeoutError:
            raise TimeoutError(f"{self._handle!r} has not answered within {timeout:g} s") from None
        except RayError as error:
            # The name may have another actor by now, which the next use finds.
            if isinstance(error, RayActorError):
                self._handle._forget()
            raise own_error(error, repr(self._handle)) from None


class RayActorMethod:
    """Method of an actor on Ray. See `fray.v2.ActorMethod`."""

    def __init__(self, handle: RayActorHandle, host: Any, name: str) -> None:
        self._handle, self._host, self._name = handle, host, name

    def remote(self, *args: Any, **kwargs: Any) -> RayFuture:
        """Start a call. Raises TypeError: an argument cannot be pickled; Ray's text says which."""
        _check_initialized(self._handle)
        try:
            return RayFuture(self._host.call.remote(self._name, *args, **kwargs), self._handle)
        except RayActorError as error:
            self._handle._forget()
            raise own_error(error, repr(self._handle)) from None

    submit = remote

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.remote(*args, **kwargs).result()


class RayActorHandle:
    """Reference to an actor on Ray by name; the first use looks it up, and waits a minute for it. See
    `fray.v2.ActorHandle`.

    Raises:
        RuntimeError: at use: the actor has ended, or was not made within that minute.
        AttributeError: at use: the actor has no such public method.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: FoundActor | None = None

    @short_traceback
    def __getattr__(self, method_name: str) -> RayActorMethod:
        if method_name.startswith("_"):
            raise AttributeError(f"{method_name!r}: names with a leading underscore cannot be called remotely")
        found = self._resolved()
        # Methods may be set on the instance, which only its process can tell.
        if method_name not in found.methods and not self._has_method(found, method_name):
            raise AttributeError(f"actor {self._name!r} has no method {method_name!r}; only methods can be called")
        return RayActorMethod(self, found.host, method_name)

    def _resolved(self) -> FoundActor:
        if self._found is None:
            found: FoundActor | None = registry_call(find_registry().find.remote(self._name, APPEAR_S))
            if found is None or found.host is None:
                raise ActorUnavailableError(f"actor {self._name!r} is dead: it has ended, or was never made")
            self._found = found
        return self._found

    def _has_method(self, found: FoundActor, method_name: str) -> bool:
        """Return whether the instance has the method, although its class does not."""
        return bool(RayFuture(found.host.has.remote(method_name), self).result())

    def _forget(self) -> None:
        """Look the actor up again at the next use: it has died, and another may have its name."""
        self._found = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RayActorHandle, (self._name,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RayActorHandle) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return f"RayActorHandle({self._name!r})"


class RayActorGroup:
    """Group of actors on Ray, each a separate job; pickles to names. See `fray.v2.ActorGroup`."""

    def __init__(self, name: str, job_ids: Sequence[str]) -> None:
        self._name = name
        self._jobs = [RayJobHandle(job_id) for job_id in job_ids]
        self._handles = [RayActorHandle(f"{name}-{index}") for index in range(len(job_ids))]
        self._returned: set[int] = set()

    @property
    def _job_id(self) -> str:
        """Id of the first member's job; see `fray.v2.fray.groups`."""
        return self._jobs[0].job_id if self._jobs else self._name

    @property
    def ready_count(self) -> int:
        return len(self._ready(0, 0.0))

    def wait_ready(self, count: int | None = None, timeout: float = 300.0) -> list[ActorHandle]:
        wanted = len(self._jobs) if count is None else count
        ready = self._ready(wanted, timeout)
        if len(ready) < wanted:
            raise TimeoutError(f"{len(ready)} of {wanted} members of {self._name!r} are ready within {timeout:g} s")
        self._returned.update(ready[:wanted])
        return [self._handles[index] for index in ready[:wanted]]

    def discover_new(self, target: int | None = None) -> list[ActorHandle]:
        new = [index for index in self._ready(0, 0.0) if index not in self._returned]
        new = new if target is None else new[: max(0, target - len(self._returned))]
        self._returned.update(new)
        return [self._handles[index] for index in new]

    def _ready(self, count: int, within_s: float) -> list[int]:
        ids = [job.job_id for job in self._jobs]
        ready, failure = registry_call(find_registry().ready.remote(ids, count, within_s))
        if failure is not None:
            raise RuntimeError(f"group {self._name!r} cannot have {count} members: {failure}") from failure.unpacked()
        return list(ready)

    def is_done(self) -> bool:
        return all(JobStatus.finished(status) for status in self.statuses())

    @property
    def jobs(self) -> list[JobHandle]:
        return list(self._jobs)

    def statuses(self) -> list[JobStatus]:
        return [job.status() for job in self._jobs]

    def shutdown(self) -> None:
        """End all members: STOPPED at once; running calls have ten seconds to finish."""
        for job in self._jobs:
            job.terminate()

    def __reduce__(self) -> tuple[Any, ...]:
        return RayActorGroup, (self._name, [job.job_id for job in self._jobs])

    def __repr__(self) -> str:
        return f"<RayActorGroup {self._name!r}, {len(self._jobs)} members>"
