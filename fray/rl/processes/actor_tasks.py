"""Tasks of an actor that end with it, and not with the call that began them.

Fray cancels a call whose caller has ended. The processes of a run as a job work on when the controller has ended, so
what they do is a task of theirs, and a call attaches to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any, Generic, TypeVar

import trio

from fray.errors import ActorDied

T = TypeVar("T")


class ActorTask(Generic[T]):
    """Task of an actor, for any number of calls that wait for its result."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._results: list[T] = []
        self._error: BaseException | None = None

    async def run(self) -> None:
        """Do the work; its error is raised where its result is waited for."""
        try:
            with self._scope:
                self._results.append(await self._work())
        # In a task of Trio's own, an error that is not caught would end the process without a word about its cause.
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the code of the user, too)
            self._error = error
        finally:
            self._ended.set()

    async def wait(self) -> T:
        """Return the result of the work; the task continues when this is cancelled.

        Raises:
            ActorDied: the task was cancelled.
            BaseException: the error of the work.
        """
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        if not self._results:
            raise ActorDied("the actor has ended what it did")
        return self._results[0]

    async def cancel(self) -> None:
        """End the task; return when it has ended."""
        self._scope.cancel()
        await self._ended.wait()


class ActorTasks:
    """The tasks of one actor; to be made in its constructor, and closed in its cleanup hook."""

    def __init__(self) -> None:
        # That of the constructor: `current_actor` works in the tasks, and they belong to no call.
        self._context = copy_context()
        self._tasks: list[ActorTask[Any]] = []

    def start(self, work: Callable[[], Awaitable[T]]) -> ActorTask[T]:
        """Begin a task."""
        task = ActorTask(work)
        self._tasks.append(task)
        trio.lowlevel.spawn_system_task(self._run, task, context=self._context.copy())
        return task

    async def _run(self, task: ActorTask[T]) -> None:
        await task.run()
        self._tasks.remove(task)

    async def aclose(self) -> None:
        """End all tasks; return when they have ended."""
        for task in list(self._tasks):
            await task.cancel()
