"""Actors: a server of objects, and its clients."""

from __future__ import annotations

import threading
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import cloudpickle

from iris.controller import KEY


class ActorServer:
    def __init__(self, host: str = "0.0.0.0", port: int = 0) -> None:
        self._listener = Listener((host, port), authkey=KEY, backlog=64)
        self.port = int(self._listener.address[1])
        self._actors: dict[str, Any] = {}
        self._over = threading.Event()

    def register(self, name: str, actor: Any) -> str:
        self._actors[name] = actor
        return name

    def serve_background(self) -> None:
        threading.Thread(target=self._accept, name="iris-actors", daemon=True).start()

    def wait_for_termination(self) -> None:
        self._over.wait()

    def stop(self) -> None:
        self._over.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            with suppress(OSError, EOFError):
                connection = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(EOFError, OSError):
            name, method, args, kwargs = cloudpickle.loads(connection.recv_bytes())
            try:
                answer = (True, getattr(self._actors[name], method)(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 (the caller raises it)
                answer = (False, error)
            connection.send_bytes(cloudpickle.dumps(answer))


class ActorClient:
    """Calls ``name`` at the address that the resolver returns, with a connection for each call."""

    def __init__(self, resolver: Any, name: str) -> None:
        self._resolver, self._name = resolver, name

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = self._resolver.resolve(self._name)
            if found.is_empty:
                raise ConnectionError(f"no endpoint for {self._name}")
            host, _, port = found.addresses[0].rpartition(":")
            try:
                with Client((host, int(port)), authkey=KEY) as connection:
                    connection.send_bytes(cloudpickle.dumps((self._name, method, args, kwargs)))
                    well, answer = cloudpickle.loads(connection.recv_bytes())
            except (OSError, EOFError) as error:
                raise ConnectionError(f"{self._name} at {host}:{port} does not answer") from error
            if not well:
                raise answer
            return answer

        return call
