"""Actors in the process of their maker: threads that fetch calls from a `Mailbox` and answer them."""

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
    """Instance of an actor, and the threads that call it."""

    def __init__(self, name: str, instance: Any, context: Context, at_once: int) -> None:
        self.instance = instance
        self._name, self._context = name, context
        self._threads = BoundedThreads(at_once, f"actor {name!r} has ended")
        self.mailbox: Any = None

    def begin(self, mailbox: Any) -> None:
        """Answer calls until the mailbox has ended."""
        self.mailbox = mailbox
        threading.Thread(target=self._serve, name=f"{self._name} calls", daemon=True).start()

    def end(self, outcome: ActorOutcome) -> None:
        """End the actor at its own request."""
        if self.mailbox is not None:
            self.mailbox.end.remote(outcome)

    def _serve(self) -> None:
        while (calls := self._fetch()) is not None:
            for number, method, args, kwargs in calls:
                call = partial(self._call, method, args, kwargs)
                future = self._threads.submit(self._context.copy(), call, f"{self._name}.{method}")
                future.add_done_callback(partial(self._answer, number))

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self.instance, method)(*args, **kwargs)

    def _fetch(self) -> Any:
        try:
            return ray.get(self.mailbox.take.remote())
        except (RayError, RuntimeError):  # the mailbox has ended, or Ray has
            return None

    def _answer(self, number: int, done: Future[Any]) -> None:
        error = done.exception()
        try:
            if error is None:
                self.mailbox.answer.remote(number, None, done.result())
            else:
                self.mailbox.answer.remote(number, packed(error), None)
        except TypeError as unpicklable:
            self.mailbox.answer.remote(number, packed(unpicklable), None)
        except (RayError, RuntimeError):
            pass  # the mailbox has ended, and the caller with it


def serve(
    name: str, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], at_once: int, client: Any
) -> HostedCallServer:
    """Make the instance in this thread; raise what its constructor raises."""
    spec = ActorSpec("", name, "", name, 0, frozenset(), {}, handle=RayActorHandle(name))
    servers: list[HostedCallServer] = []
    context, _ = context_of(spec, client, lambda outcome: servers[0].end(outcome))
    server = HostedCallServer(name, context.copy().run(cls, *args, **kwargs), context, at_once)
    servers.append(server)
    return server
