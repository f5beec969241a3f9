"""Handles of jobs and actors on Ray: each is a name or an id, and finds the rest by the registry of where it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from fray.v2.interface import ActorHandle
from fray.v2.job import JobHandle, JobStatus
from fray.v2.ray_backend.errors import own_error
from fray.v2.ray_backend.registry_access import find_registry, registry_call
from fray.v2.ray_backend.specs import ActorOutcome, FoundActor

NAMED_WITHIN_S = 60.0
"""How long the first use of a handle waits for somebody to have its name."""
ASK_AGAIN_S = 20.0
"""A wait is asked anew so often: Ray is not asked to keep one forever."""


class RayJobHandle:
    """A job on Ray. As `fray.v2.JobHandle`; it pickles to its id."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._last: ActorOutcome | None = None
        """How it ended, once that is known."""

    @property
    def job_id(self) -> str:
        return self._job_id

    def status(self) -> JobStatus:
        return self._heard(lambda found: found.status.remote(self._job_id)).status

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
        """As `fray.v2.JobHandle.wait`; after `terminate` it returns at once."""
        until = None if timeout is None else monotonic() + timeout
        while True:
            left = ASK_AGAIN_S if until is None else min(ASK_AGAIN_S, max(0.0, until - monotonic()))
            found = self._heard(partial(self._ended, left))
            if JobStatus.finished(found.status) or (until is not None and monotonic() >= until):
                break
        if raise_on_failure and found.failure is not None:
            raise found.failure.unpacked()
        if raise_on_failure and not JobStatus.finished(found.status):
            raise TimeoutError(f"job {self._job_id} has not ended within {timeout:g} s")
        return found.status

    def _ended(self, within_s: float, found: Any) -> Any:
        return found.ended.remote(self._job_id, within_s)

    def terminate(self) -> None:
        """End its process; it is STOPPED at once."""
        self._last = ActorOutcome(JobStatus.STOPPED)
        registry_call(find_registry().stop.remote(self._job_id))

    def logs(self) -> str:
        """What it has printed by Python or, as a program, at all: the last million characters."""
        return str(registry_call(find_registry().logs.remote(self._job_id)))

    def settle(self) -> None:
        """Know for good how it stands, now: Ray will not be there any more."""
        if not JobStatus.finished(self.status()):
            self._last = ActorOutcome(JobStatus.STOPPED)

    def _heard(self, ask: Callable[[Any], Any]) -> ActorOutcome:
        if self._last is not None:
            return self._last
        said: ActorOutcome | None = registry_call(ask(find_registry()))
        if self._last is not None:  # stopped meanwhile, by another thread
            return self._last
        if said is None:
            raise RuntimeError(f"job {self._job_id} is not known here: it belongs to another driver, or ended long ago")
        if JobStatus.finished(said.status):
            self._last = said
        return said

    def __reduce__(self) -> tuple[Any, ...]:
        return RayJobHandle, (self._job_id,)

    def __repr__(self) -> str:
        return f"<RayJobHandle {self._job_id}{f' {self._last.status.value}' if self._last else ''}>"


# Actors --------------------------------------------------------------------------------------------------------------


def _need_ray(handle: RayActorHandle) -> None:
    """Ray would start a new one of its own, where nobody is."""
    if not ray.is_initialized():
        raise RuntimeError(f"{handle!r} is dead: its RayClient has ended")


class RayFuture:
    """The answer of a call. As `fray.v2.ActorFuture`."""

    def __init__(self, ref: Any, handle: RayActorHandle) -> None:
        self._ref, self._handle = ref, handle

    def result(self, timeout: float | None = None) -> Any:
        """Wait for it. Arrays in it are read-only: they are Ray's memory.

        Raises:
            TimeoutError: not within ``timeout`` seconds; ask again.
            RuntimeError: the actor died.
            BaseException: what the method raised, as itself.
        """
        _need_ray(self._handle)
        try:
            return ray.get(self._ref, timeout=timeout)
        except GetTimeoutError:
            raise TimeoutError(f"{self._handle!r} has not answered within {timeout:g} s") from None
        except RayError as error:
            if isinstance(error, RayActorError):
                self._handle._forget()
            raise own_error(error, repr(self._handle)) from None


class RayActorMethod:
    """A method of an actor on Ray. As `fray.v2.ActorMethod`."""

    def __init__(self, handle: RayActorHandle, host: Any, name: str) -> None:
        self._handle, self._host, self._name = handle, host, name

    def remote(self, *args: Any, **kwargs: Any) -> RayFuture:
        """Begin a call. Raises TypeError: an argument cannot be pickled; Ray says which."""
        _need_ray(self._handle)
        try:
            return RayFuture(self._host.call.remote(self._name, *args, **kwargs), self._handle)
        except RayActorError as error:
            self._handle._forget()
            raise own_error(error, repr(self._handle)) from None

    submit = remote

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.remote(*args, **kwargs).result()


class RayActorHandle:
    """An actor on Ray, by name: found at its first use, which waits a minute for it. As `fray.v2.ActorHandle`.

    Raises:
        RuntimeError: at use: it has ended, or was not made within that minute.
        AttributeError: at use: what is no public method of it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: FoundActor | None = None

    def __getattr__(self, method_name: str) -> RayActorMethod:
        if method_name.startswith("_"):
            raise AttributeError(f"{method_name!r}: names with a leading underscore are not for others to call")
        found = self._resolved()
        if method_name not in found.methods and not self._has(found, method_name):
            raise AttributeError(f"actor {self._name!r} has no method {method_name!r}, and only methods can be called")
        return RayActorMethod(self, found.host, method_name)

    def _resolved(self) -> FoundActor:
        if self._found is None:
            found: FoundActor | None = registry_call(find_registry().find.remote(self._name, NAMED_WITHIN_S))
            if found is None or found.host is None:
                raise RuntimeError(f"actor {self._name!r} is dead: it has ended, or was never made")
            self._found = found
        return self._found

    def _has(self, found: FoundActor, method_name: str) -> bool:
        """An attribute of this one instance, then."""
        return bool(RayFuture(found.host.has.remote(method_name), self).result())

    def _forget(self) -> None:
        """Who had the name is dead; somebody else may have it by now."""
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
    """Actors on Ray, each a job of its own. As `fray.v2.ActorGroup`; it pickles to names."""

    def __init__(self, name: str, job_ids: Sequence[str]) -> None:
        self._name = name
        self._jobs = [RayJobHandle(job_id) for job_id in job_ids]
        self._handles = [RayActorHandle(f"{name}-{index}") for index in range(len(job_ids))]
        self._given: set[int] = set()

    @property
    def ready_count(self) -> int:
        return len(self._ready(0, 0.0))

    def wait_ready(self, count: int | None = None, timeout: float = 300.0) -> list[ActorHandle]:
        wanted = len(self._jobs) if count is None else count
        ready = self._ready(wanted, timeout)
        if len(ready) < wanted:
            raise TimeoutError(f"{len(ready)} of {wanted} members of {self._name!r} are ready within {timeout:g} s")
        self._given.update(ready[:wanted])
        return [self._handles[index] for index in ready[:wanted]]

    def discover_new(self) -> list[ActorHandle]:
        new = [index for index in self._ready(0, 0.0) if index not in self._given]
        self._given.update(new)
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
        """End all members: STOPPED at once; calls that run have ten seconds."""
        for job in self._jobs:
            job.terminate()

    def __reduce__(self) -> tuple[Any, ...]:
        return RayActorGroup, (self._name, [job.job_id for job in self._jobs])

    def __repr__(self) -> str:
        return f"<RayActorGroup {self._name!r}, {len(self._jobs)} members>"
