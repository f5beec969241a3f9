"""The registry: the one Ray actor of a driver that begins its jobs and actors, and knows them by their names.

It owns what it began, so all of that ends with it, and it ends with the driver that made it. What it is given to run
it passes on unopened. Its methods are coroutines of one loop: between two awaits nothing changes.
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

KEPT_ENTRIES = 1_000
"""Of those that have ended, the last."""
KEPT_CHARACTERS = 1 << 20
"""Of what one of them has printed, the last."""
FINISH_S = 10.0
"""For calls that run when their actor is ended; then its process is killed."""
NAME_FREE_S = FINISH_S + 5.0
"""For Ray to give the name of an actor free that was ended just now."""


class _Entry:
    """A job or an actor: how it stands, and what there is of it in Ray."""

    def __init__(self, spec: RayJobSpec | ActorSpec, work: list[Any]) -> None:
        self.spec = spec
        self.work: list[Any] | None = work
        """Held as long as it may begin again: Ray frees values that nobody holds."""
        self.outcome = ActorOutcome(JobStatus.PENDING)
        self.over = asyncio.Event()
        """Its code has ended, or was told to."""
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
        while self.characters > KEPT_CHARACTERS and len(self.printed) > 1:
            self.characters -= len(self.printed.popleft())


class RayRegistry:
    """See above. Clients call it by `fray.v2.ray_backend.registry_access.find_registry`."""

    def __init__(self) -> None:
        self._me = ray.get_runtime_context().current_actor
        self._entries: dict[str, _Entry] = {}
        self._jobs: dict[str, _Entry] = {}
        """The last of each name."""
        self._actors: dict[str, _Entry] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # Jobs ------------------------------------------------------------------------------------------------------------

    async def submit(self, spec: RayJobSpec, work: list[Any]) -> str:
        """Begin it, unless a living job has its name: then that one's id."""
        named = self._jobs.get(spec.name)
        if named is not None and not named.over.is_set():
            return named.spec.job_id
        entry = self._entries[spec.job_id] = self._jobs[spec.name] = _Entry(spec, work)
        if spec.gang:
            remote, options = ray.remote(lead_job), {"num_cpus": 0}
        else:
            remote, options = ray.remote(max_calls=1 if spec.own_process else 0)(run_job), spec.options
        retrying = {"max_retries": spec.tries, "retry_exceptions": [RetryableError], "name": spec.name}
        entry.ref = remote.options(**(options | retrying)).remote(spec, self._me, work)
        self._begin(self._watch_job(entry))
        return spec.job_id

    async def _watch_job(self, entry: _Entry) -> None:
        try:
            await entry.ref
        except TaskCancelledError:
            self._end(entry, ActorOutcome(JobStatus.STOPPED))
        except Exception as error:  # noqa: BLE001 (whatever Ray raises is how it ended)
            self._end(entry, ActorOutcome(JobStatus.FAILED, carried(error)))
        else:
            self._end(entry, ActorOutcome(JobStatus.SUCCEEDED))

    async def began(self, job_id: str) -> bool:
        """An attempt of its code begins; False: it shall not."""
        entry = self._entries[job_id]
        if not entry.over.is_set():
            entry.outcome = ActorOutcome(JobStatus.RUNNING)
        return not entry.over.is_set()

    async def leads(self, job_id: str) -> bool:
        """An attempt of its leader begins; False: it shall not. What an earlier one held is given back."""
        entry = self._entries[job_id]
        self._give_back(entry)
        return not entry.over.is_set()

    async def holds(self, job_id: str, group: Any) -> None:
        """Its leader holds a placement group."""
        entry = self._entries[job_id]
        entry.groups.append(group)
        if entry.over.is_set():
            self._give_back(entry)

    async def failed_and_may_begin_again(self, job_id: str) -> bool:
        entry = self._entries[job_id]
        entry.failures += 1
        return not entry.over.is_set() and entry.failures <= entry.spec.failures  # type: ignore[union-attr]

    # All -------------------------------------------------------------------------------------------------------------

    async def status(self, job_id: str) -> ActorOutcome | None:
        """None: it is no longer known."""
        entry = self._entries.get(job_id)
        return entry.outcome if entry else None

    async def ended(self, job_id: str, within_s: float | None) -> ActorOutcome | None:
        """Wait for its end, and say how it stands in any case."""
        entry = self._entries.get(job_id)
        if entry is None:
            return None
        try:
            await asyncio.wait_for(entry.over.wait(), within_s)
        except TimeoutError:
            pass
        return entry.outcome

    async def stop(self, job_id: str) -> None:
        """It is STOPPED from now on, and its code ends."""
        entry = self._entries.get(job_id)
        if entry is None:
            return
        before, entry.outcome = entry.over.is_set(), ActorOutcome(JobStatus.STOPPED)
        if before:
            return
        self._end(entry, entry.outcome)
        if entry.host is not None:
            self._begin(self._bury(entry), job_id)
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
        """End all that this owner made; ``wait`` for its jobs before, and for calls that run."""
        if wait:
            for entry in self._of(owner):
                if isinstance(entry.spec, RayJobSpec):
                    await entry.over.wait()
        burying = list(self._of(owner))
        for entry in burying:
            await self.stop(entry.spec.job_id)
        if wait and self._tasks:
            hosts = [task for task in self._tasks if task.get_name() in {entry.spec.job_id for entry in burying}]
            await asyncio.gather(*hosts)

    def _of(self, owner: str) -> list[_Entry]:
        living = [entry for entry in self._entries.values() if not entry.over.is_set()]
        return [entry for entry in living if entry.spec.owner == owner or entry.spec.owner.startswith(f"{owner}/")]

    def _end(self, entry: _Entry, outcome: ActorOutcome) -> None:
        """Its first end is the one that counts; and what it made ends with it."""
        if entry.over.is_set():
            return
        entry.outcome, entry.work = outcome, None
        entry.over.set()
        self._give_back(entry)
        self._tell()
        for child in self._of(entry.spec.job_id):
            self._begin(self.stop(child.spec.job_id))
        ended = [job_id for job_id, entry in self._entries.items() if entry.over.is_set()]
        for job_id in ended[: len(ended) - KEPT_ENTRIES]:
            self._forget(self._entries.pop(job_id))

    def _forget(self, entry: _Entry) -> None:
        for names in (self._jobs, self._actors):
            if names.get(entry.spec.name) is entry:
                del names[entry.spec.name]

    def _give_back(self, entry: _Entry) -> None:
        groups, entry.groups = entry.groups, []
        for group in groups:
            remove_placement_group(group)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _begin(self, what: Coroutine[Any, Any, None], name: str = "") -> None:
        task = asyncio.get_running_loop().create_task(what, name=name or None)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Actors ----------------------------------------------------------------------------------------------------------

    async def create(self, specs: Sequence[ActorSpec], work: list[Any]) -> str | None:
        """Begin them, all or none: the name that somebody living has already, or None."""
        for spec in specs:
            named = self._actors.get(spec.name)
            if named is not None and not named.over.is_set():
                return spec.name
        entries = [_Entry(spec, work) for spec in specs]
        for entry in entries:
            self._entries[entry.spec.job_id] = self._actors[entry.spec.name] = entry
        for entry in entries:
            if not await self._host(entry, work):
                for other in entries:
                    await self.stop(other.spec.job_id)
                return entry.spec.name
            self._begin(self._watch_actor(entry), entry.spec.job_id)
        self._tell()
        return None

    async def _host(self, entry: _Entry, work: list[Any]) -> bool:
        spec = entry.spec
        assert isinstance(spec, ActorSpec)
        host = ray.remote(Mailbox) if spec.hosted else untyped.remote(concurrency_groups={CONTROL: 4})(RayActorHost)
        until = asyncio.get_running_loop().time() + NAME_FREE_S
        while True:
            try:
                entry.host = host.options(name=spec.name, **spec.options).remote(spec, self._me, work)
            except ValueError:  # a Ray actor has this name, perhaps for a moment more
                if asyncio.get_running_loop().time() > until:
                    return False
                await asyncio.sleep(0.02)
            else:
                return True

    async def _watch_actor(self, entry: _Entry) -> None:
        try:
            failure = await entry.host.ready.remote()
            if failure is None and not entry.over.is_set():
                entry.outcome = ActorOutcome(JobStatus.RUNNING)
                self._tell()
            outcome = ActorOutcome(JobStatus.FAILED, failure) if failure else await entry.host.life.remote()
        except Exception as error:  # noqa: BLE001 (it is dead, and that is why)
            outcome = ActorOutcome(JobStatus.FAILED, carried(error))
        if not entry.over.is_set():
            self._end(entry, outcome)
            ray.kill(entry.host)

    async def _bury(self, entry: _Entry) -> None:
        """Let calls that run finish; then its process goes."""
        try:
            await asyncio.wait_for(entry.host.end.remote(), FINISH_S)
        except Exception:  # noqa: BLE001 (late, or dead already)
            pass
        ray.kill(entry.host)

    async def find(self, name: str, within_s: float) -> FoundActor | None:
        """Who has this name, or had it; None: nobody, not within this time."""
        until = asyncio.get_running_loop().time() + within_s
        while (entry := self._actors.get(name)) is None or (entry.host is None and not entry.over.is_set()):
            if not await self._a_change(until):
                return None
        assert isinstance(entry.spec, ActorSpec)
        return FoundActor(None if entry.over.is_set() else entry.host, entry.spec.methods)

    async def ready(self, job_ids: Sequence[str], count: int, within_s: float) -> tuple[list[int], PickledError | None]:
        """The indices of those that can be called: as soon as they are so many, or it is late; and the error of one
        that has ended, if so many can never be."""
        until = asyncio.get_running_loop().time() + within_s
        while True:
            entries = [self._entries.get(job_id) for job_id in job_ids]
            ready = [index for index, entry in enumerate(entries) if entry and entry.status == JobStatus.RUNNING]
            if len(ready) >= count:
                return ready, None
            ended = [entry for entry in entries if entry is None or entry.over.is_set()]
            if len(job_ids) - len(ended) < count:
                why = [entry.outcome.failure for entry in ended if entry and entry.outcome.failure]
                return ready, why[0] if why else PickledError(None, "its members have ended")
            if not await self._a_change(until):
                return ready, None

    async def _a_change(self, until: float) -> bool:
        left = until - asyncio.get_running_loop().time()
        if left <= 0:
            return False
        try:
            await asyncio.wait_for(self._changed.wait(), left)
        except TimeoutError:
            return False
        return True
