"""What all futures have in common: settled once, awaited by any number of tasks, opened by whoever asks first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trio.lowlevel import Abort, Task, current_task, reschedule, wait_task_rescheduled

from fray.errors import FrayError

PENDING, VALUE, ERROR = range(3)
"""States of a future. Those beyond are its kind's own: settled, and not opened yet."""


class FutureBase:
    """Its state, who awaits it, and who is called when it is settled."""

    __slots__ = ("_callbacks", "_state", "_tasks", "_value")

    def __init__(self) -> None:
        self._state = PENDING
        self._value: Any = None
        self._tasks: list[Task] = []
        self._callbacks: list[Callable[[Any], object]] = []

    @property
    def what(self) -> str:
        """Of what it is the result, for people."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Ask for its end; returns at once."""
        raise NotImplementedError

    def closed(self) -> tuple[bool, bytes]:
        """Of a settled one: whether it is a result, and the pickled result, or the error as `dump_error` packs it."""
        raise NotImplementedError

    def done(self) -> bool:
        """Whether a result or an error is there."""
        return self._state != PENDING

    def result(self) -> Any:
        """The result of one that is `done`; raises what awaiting it raises."""
        if self._state > ERROR:
            self._open()
        if self._state == VALUE:
            return self._value
        if self._state == ERROR:
            raise self._value
        raise FrayError(f"{self!r} has no result yet: await it")

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(self)`` in the loop when it is settled; at once if it is."""
        if self._state:
            callback(self)
        else:
            self._callbacks.append(callback)

    def remove_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Do not call it after all."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    def __reduce__(self) -> tuple[Any, ...]:
        """Where it arrives it comes to the same; see `fray.runtime.objects.exports`."""
        from fray.runtime.objects.imported_future import export_future

        return export_future(self, self.what)

    def _open(self) -> None:
        """Make a value or an error of what it was settled with."""
        raise NotImplementedError

    async def _park(self) -> None:
        """Wait for `_wake_tasks`."""
        task = current_task()
        self._tasks.append(task)

        def abort(_: Any) -> Abort:
            self._tasks.remove(task)
            return Abort.SUCCEEDED

        await wait_task_rescheduled(abort)

    def _wake_tasks(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            reschedule(task)

    def _wake(self) -> None:
        """It has been settled."""
        self._wake_tasks()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
