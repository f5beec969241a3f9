"""An actor in the process of its maker: threads that take its calls out of a `Mailbox` and answer them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextvars import Context
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from fray.threads import BoundedThreads
from fray.v2.ray_backend.actor_host import context_of
from fray.v2.ray_backend.errors import packed
from fray.v2.ray_backend.handles import RayActorHandle
from fray.v2.ray_backend.specs import ActorOutcome, ActorSpec


class HostedCallServer:
    """An instance, and the threads that call it."""

    def __init__(self, name: str, instance: Any, context: Context, at_once: int) -> None:
        self.instance = instance
        self._name, self._context = name, context
        self._threads = BoundedThreads(at_once, f"actor {name!r} has ended")
        self.mailbox: Any = None

    def begin(self, mailbox: Any) -> None:
        """Answer until the mailbox has ended."""
        self.mailbox = mailbox
        threading.Thread(target=self._take, name=f"{self._name} calls", daemon=True).start()

    def end(self, outcome: ActorOutcome) -> None:
        """The actor itself wants to end."""
        if self.mailbox is not None:
            self.mailbox.end.remote(outcome)

    def _take(self) -> None:
        while (calls := self._taken()) is not None:
            for number, method, args, kwargs in calls:
                call = partial(self._call, method, args, kwargs)
                future = self._threads.submit(self._context.copy(), call, f"{self._name}.{method}")
                future.add_done_callback(partial(self._give, number))

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self.instance, method)(*args, **kwargs)

    def _taken(self) -> Any:
        try:
            return ray.get(self.mailbox.take.remote())
        except (RayError, RuntimeError):  # it has ended, or Ray has
            return None

    def _give(self, number: int, done: Future[Any]) -> None:
        error = done.exception()
        try:
            if error is None:
                self.mailbox.give.remote(number, None, done.result())
            else:
                self.mailbox.give.remote(number, packed(error), None)
        except TypeError as unpicklable:
            self.mailbox.give.remote(number, packed(unpicklable), None)
        except (RayError, RuntimeError):
            pass  # nobody is left to hear it


def serve(
    name: str, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], at_once: int, client: Any
) -> HostedCallServer:
    """Make the instance, here and now; what its constructor raises comes out."""
    spec = ActorSpec("", name, "", name, 0, frozenset(), {}, handle=RayActorHandle(name))
    ending: list[HostedCallServer] = []
    context, _ = context_of(spec, client, lambda outcome: ending[0].end(outcome))
    answering = HostedCallServer(name, context.copy().run(cls, *args, **kwargs), context, at_once)
    ending.append(answering)
    return answering
