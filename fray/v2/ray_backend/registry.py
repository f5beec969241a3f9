"""Registry of a driver: the Ray actor that starts its jobs and actors and finds them by name.

It owns what it starts, so all of that ends with it, and it ends with the driver that made it. It also ends what a job
has made when the job ends, which Ray alone would not, as its worker processes live on. A supervisor per job would cost
a process each, and Ray's own job API needs its dashboard. It passes on the code of
users without unpickling it. Its methods are coroutines of one loop, so its state changes only at an await.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

import ray
from ray.exceptions import TaskCancelledError
from ray.util import remove_placement_group

from fray.v2.job import JobStatus
from fray.v2.ray_backend.actor_host import CONTROL, Mailbox, RayActorHost
from fray.v2.ray_backend.errors import PickledError, RetryableError, carried
from fray.v2.ray_backend.gangs import lead_job
from fray.v2.ray_backend.job_runner import run_job
from fray.v2.ray_backend.process_context import untyped
from fray.v2.ray_backend.specs import (
    ActorOutcome,
    ActorSpec,
    FoundActor,
    RayJobSpec,
)

MAX_ENDED = 1_000
"""Ended jobs and actors that are stored; the oldest are dropped."""
MAX_CHARACTERS = 1 << 20
"""Characters of the output of each that are stored; the oldest are dropped."""
FINISH_S = 10.0
"""Seconds that running calls have to finish when their actor is ended; then its process is killed."""
NAME_FREE_S = FINISH_S + 5.0
"""Seconds that Ray may need to free the name of an actor that has just ended."""


class _Entry:
    """Job or actor: its outcome, and the objects of Ray that belong to it."""

    def __init__(self, spec: RayJobSpec | ActorSpec, work: list[Any]) -> None:
        self.spec = spec
        self.work: list[Any] | None = work
        """Reference to its code, stored while it may restart: Ray frees values without references."""
        self.outcome = ActorOutcome(JobStatus.PENDING)
        self.ended = asyncio.Event()
        """Set when the code has ended, or its end was requested."""
        self.ref: Any = None
        self.host: Any = None
        self.groups: list[Any] = []
        self.failures = 0
        self.printed: deque[str] = deque()
        self.characters = 0

    @property
    def status(self) -> JobStatus:
        return self.outcome.status

    def print(self, text: str) -> None:
        self.printed.append(text)
        self.characters += len(text)
        while self.characters > MAX_CHARACTERS and len(self.printed) > 1:
            self.characters -= len(self.printed.popleft())


class RayRegistry:
    """Starts jobs and actors. Clients reach it through `fray.v2.ray_backend.registry_access.find_registry`."""

    def __init__(self) -> None:
        self._me = ray.get_runtime_context().current_actor
        self._entries: dict[str, _Entry] = {}
        self._jobs: dict[str, _Entry] = {}
        """Last job of each name."""
        self._actors: dict[str, _Entry] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # Jobs ------------------------------------------------------------------------------------------------------------

    async def submit(self, spec: RayJobSpec, work: list[Any]) -> str:
        """Start a job and return its id; if a living job has its name, return that job's id."""
        named = self._jobs.get(spec.name)
        if named is not None and not named.ended.is_set():
            return named.spec.job_id
        entry = self._entries[spec.job_id] = self._jobs[spec.name] = _Entry(spec, work)
        if spec.is_gang:
            remote, options = ray.remote(lead_job), {"num_cpus": 0}
        else:
            remote, options = ray.remote(max_calls=1 if spec.own_process else 0)(run_job), spec.options
        # Only the error that says so: Ray would otherwise repeat every failure of the job's own code.
        retrying = {"max_retries": spec.tries, "retry_exceptions": [RetryableError], "name": spec.name}
        entry.ref = remote.options(**(options | retrying)).remote(spec, self._me, work)
        self._spawn(self._watch_job(entry))
        return spec.job_id

    async def _watch_job(self, entry: _Entry) -> None:
        try:
            await entry.ref
        except TaskCancelledError:
            self._end(entry, ActorOutcome(JobStatus.STOPPED))
        except Exception as error:  # noqa: BLE001 (any error that Ray raises is the outcome)
            self._end(entry, ActorOutcome(JobStatus.FAILED, carried(error)))
        else:
            self._end(entry, ActorOutcome(JobStatus.SUCCEEDED))

    # Asked before user code runs: a job that was stopped while Ray was starting it must not begin.
    async def began(self, job_id: str) -> bool:
        """Record the start of an attempt; return False if the job shall not start."""
        entry = self._entries[job_id]
        if not entry.ended.is_set():
            entry.outcome = ActorOutcome(JobStatus.RUNNING)
        return not entry.ended.is_set()

    async def leader_started(self, job_id: str) -> bool:
        """Record the start of a leader's attempt, and release the placement groups of earlier ones; return False if it
        shall not start."""
        entry = self._entries[job_id]
        self._release(entry)
        return not entry.ended.is_set()

    async def add_placement_group(self, job_id: str, group: Any) -> None:
        """Record a placement group that the leader has reserved."""
        entry = self._entries[job_id]
        entry.groups.append(group)
        # Ended while the machines were being reserved: nothing else would release them.
        if entry.ended.is_set():
            self._release(entry)

    async def count_failure(self, job_id: str) -> bool:
        """Count a failure of the job's own code; return whether the job may restart."""
        entry = self._entries[job_id]
        entry.failures += 1
        return not entry.ended.is_set() and entry.failures <= entry.spec.failures  # type: ignore[union-attr]

    # Jobs and actors --------------------------------------------------------------------------------------------------

    async def status(self, job_id: str) -> ActorOutcome | None:
        """Return the outcome so far; None if the entry is no longer stored."""
        entry = self._entries.get(job_id)
        return entry.outcome if entry else None

    async def wait_ended(self, job_id: str, within_s: float | None) -> ActorOutcome | None:
        """Wait for the end; return the outcome so far in any case."""
        entry = self._entries.get(job_id)
        if entry is None:
            return None
        try:
            await asyncio.wait_for(entry.ended.wait(), within_s)
        except TimeoutError:
            pass
        return entry.outcome

    async def stop(self, job_id: str) -> None:
        """Mark the job or actor STOPPED, and end its code."""
        entry = self._entries.get(job_id)
        if entry is None:
            return
        # STOPPED at once, whatever the code does until it has ended.
        before, entry.outcome = entry.ended.is_set(), ActorOutcome(JobStatus.STOPPED)
        if before:
            return
        self._end(entry, entry.outcome)
        if entry.host is not None:
            self._spawn(self._end_host(entry), job_id)
        elif entry.ref is not None:
            ray.cancel(entry.ref, force=True)

    async def printed(self, job_id: str, text: str) -> None:
        entry = self._entries.get(job_id)
        if entry is not None and text:
            entry.print(text)

    async def logs(self, job_id: str) -> str:
        entry = self._entries.get(job_id)
        return "".join(entry.printed) if entry else ""

    async def end_all_of(self, owner: str, wait: bool) -> None:
        """End everything that this owner made; with ``wait``, after its jobs and the running calls of its actors."""
        if wait:
            for entry in self._living_of(owner):
                if isinstance(entry.spec, RayJobSpec):
                    await entry.ended.wait()
        ending = list(self._living_of(owner))
        for entry in ending:
            await self.stop(entry.spec.job_id)
        if wait and self._tasks:
            hosts = [task for task in self._tasks if task.get_name() in {entry.spec.job_id for entry in ending}]
            await asyncio.gather(*hosts)

    def _living_of(self, owner: str) -> list[_Entry]:
        living = [entry for entry in self._entries.values() if not entry.ended.is_set()]
        return [entry for entry in living if entry.spec.owner == owner or entry.spec.owner.startswith(f"{owner}/")]

    def _end(self, entry: _Entry, outcome: ActorOutcome) -> None:
        """Record the first end of an entry, and end what it made."""
        if entry.ended.is_set():
            return
        entry.outcome, entry.work = outcome, None
        entry.ended.set()
        self._release(entry)
        self._notify()
        # Ray would leave them: its worker processes outlive the task that made them.
        for child in self._living_of(entry.spec.job_id):
            self._spawn(self.stop(child.spec.job_id))
        ended = [job_id for job_id, entry in self._entries.items() if entry.ended.is_set()]
        for job_id in ended[: len(ended) - MAX_ENDED]:
            self._forget(self._entries.pop(job_id))

    def _forget(self, entry: _Entry) -> None:
        for names in (self._jobs, self._actors):
            if names.get(entry.spec.name) is entry:
                del names[entry.spec.name]

    def _release(self, entry: _Entry) -> None:
        groups, entry.groups = entry.groups, []
        for group in groups:
            remove_placement_group(group)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _spawn(self, what: Coroutine[Any, Any, None], name: str = "") -> None:
        task = asyncio.get_running_loop().create_task(what, name=name or None)
        self._tasks.add(task)
        # asyncio holds tasks weakly, so a reference has to be kept until they end.
        task.add_done_callback(self._tasks.discard)

    # Actors ----------------------------------------------------------------------------------------------------------

    async def create(self, specs: Sequence[ActorSpec], work: list[Any]) -> str | None:
        """Start actors, all or none; return the name that a living actor has already, or None."""
        for spec in specs:
            named = self._actors.get(spec.name)
            if named is not None and not named.ended.is_set():
                return spec.name
        entries = [_Entry(spec, work) for spec in specs]
        for entry in entries:
            self._entries[entry.spec.job_id] = self._actors[entry.spec.name] = entry
        for entry in entries:
            if not await self._start_host(entry, work):
                # All or none.
                for other in entries:
                    await self.stop(other.spec.job_id)
                return entry.spec.name
            self._spawn(self._watch_actor(entry), entry.spec.job_id)
        self._notify()
        return None

    async def _start_host(self, entry: _Entry, work: list[Any]) -> bool:
        spec = entry.spec
        assert isinstance(spec, ActorSpec)
        host = ray.remote(Mailbox) if spec.hosted else untyped.remote(concurrency_groups={CONTROL: 4})(RayActorHost)
        until = asyncio.get_running_loop().time() + NAME_FREE_S
        while True:
            try:
                entry.host = host.options(name=spec.name, **spec.options).remote(spec, self._me, work)
            except ValueError:  # a Ray actor has this name, perhaps not for long
                if asyncio.get_running_loop().time() > until:
                    return False
                await asyncio.sleep(0.02)
            else:
                return True

    async def _watch_actor(self, entry: _Entry) -> None:
        try:
            failure = await entry.host.ready.remote()
            if failure is None and not entry.ended.is_set():
                entry.outcome = ActorOutcome(JobStatus.RUNNING)
                self._notify()
            outcome = ActorOutcome(JobStatus.FAILED, failure) if failure else await entry.host.life.remote()
        except Exception as error:  # noqa: BLE001 (the error is why the actor died)
            outcome = ActorOutcome(JobStatus.FAILED, carried(error))
        if not entry.ended.is_set():
            self._end(entry, outcome)
            # Its process would otherwise stay, as Ray's actors live as long as there are handles.
            ray.kill(entry.host)

    async def _end_host(self, entry: _Entry) -> None:
        """Let running calls finish, then kill the process."""
        try:
            await asyncio.wait_for(entry.host.end.remote(), FINISH_S)
        except Exception:  # noqa: BLE001 (late, or dead already)
            pass
        ray.kill(entry.host)

    async def find(self, name: str, within_s: float) -> FoundActor | None:
        """Return the actor that has or had this name; None if there is none within this time."""
        until = asyncio.get_running_loop().time() + within_s
        while (entry := self._actors.get(name)) is None or (entry.host is None and not entry.ended.is_set()):
            if not await self._wait_for_change(until):
                return None
        assert isinstance(entry.spec, ActorSpec)
        return FoundActor(None if entry.ended.is_set() else entry.host, entry.spec.methods)

    async def ready(self, job_ids: Sequence[str], count: int, within_s: float) -> tuple[list[int], PickledError | None]:
        """Wait until ``count`` actors can be called, or for ``within_s`` seconds.

        Returns their indices, and the error of an actor that has ended if ``count`` can never be reached.
        """
        until = asyncio.get_running_loop().time() + within_s
        while True:
            entries = [self._entries.get(job_id) for job_id in job_ids]
            ready = [index for index, entry in enumerate(entries) if entry and entry.status == JobStatus.RUNNING]
            if len(ready) >= count:
                return ready, None
            ended = [entry for entry in entries if entry is None or entry.ended.is_set()]
            if len(job_ids) - len(ended) < count:
                why = [entry.outcome.failure for entry in ended if entry and entry.outcome.failure]
                return ready, why[0] if why else PickledError(None, "its members have ended")
            if not await self._wait_for_change(until):
                return ready, None

    async def _wait_for_change(self, until: float) -> bool:
        left = until - asyncio.get_running_loop().time()
        if left <= 0:
            return False
        try:
            await asyncio.wait_for(self._changed.wait(), left)
        except TimeoutError:
            return False
        return True
