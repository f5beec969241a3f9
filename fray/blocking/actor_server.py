"""Servers of actors that are objects of this process, for sync code."""

from __future__ import annotations

from typing import Any

from fray.api import actor_server as native
from fray.blocking.bridge.background_loop import is_in_process, portal_of
from fray.blocking.cluster import Cluster
from fray.errors import InvalidRequest
from fray.model.ids import ActorId


class ActorServer:
    """Serve objects of this process as actors, under names that several servers may share.

    Their sync methods run on a thread of each actor's own; a first parameter named ``ctx`` gets an `ActorContext`. A
    ``with`` block, or `shutdown`, ends it; the cluster's end ends it too.

    Args:
        cluster: where the names are registered.
        host: address to bind. Default loopback; beyond it, and None, as for `fray.ActorServer`.
        port: 0 picks one.
    """

    def __init__(self, cluster: Cluster, host: str | None = "127.0.0.1", port: int = 0) -> None:
        self._cluster = cluster
        self._portal = portal_of(cluster._runtime)
        self._native = native.ActorServer(cluster._native, host, port)

    def __enter__(self) -> ActorServer:
        self._portal.call(self._native._listen)
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    @property
    def address(self) -> str:
        """``host:port`` once it listens (after entering, or after the first `register`). Raises FrayError before."""
        return self._native.address

    @property
    def token(self) -> str:
        """What a `FixedResolver` of another process must know to call these actors. Keep it secret."""
        return self._native.token

    def register(self, name: str, actor: Any, metadata: dict[str, str] | None = None, **options: Any) -> ActorId:
        """Serve ``actor`` under ``name``; returns its unique id. Options are those of `fray.ActorServer.register`.

        Raises:
            InvalidRequest: the name has blanks or other forbidden characters.
            ConnectionFailed: the conversation with the controller has ended.
        """
        return self._portal.call(lambda: self._native.register(name, actor, metadata, **options))

    def unregister(self, name: str) -> None:
        """Take every actor this server has under ``name`` (or with this id) off the registry and stop serving it."""
        self._portal.call(self._native.unregister, name)

    def serve(self) -> None:
        """Serve until `shutdown` (by another thread), or until the job is asked to end.

        Raises:
            ScopeCancelled: the scope, cluster or (in ``local``) job around this code is ending.
        """
        self._portal.call(self._native.serve)

    def serve_background(self) -> None:
        """Begin to listen and return: calls are served while the cluster is open."""
        self._portal.call(self._native._listen)

    def shutdown(self, grace_period: float = 5.0) -> None:
        """Take the names back, let running calls finish for ``grace_period`` seconds, then end them."""
        self._portal.call(self._native.shutdown, grace_period)


class LocalActorServer(ActorServer):
    """An `ActorServer` of a `local` cluster that opens no port: whoever calls its actors is a thread or a job of this
    process. Arguments and results are pickled all the same.

    Args:
        cluster: where the names are registered.
        host, port: there so that it can stand for an `ActorServer`; unused.

    Raises:
        InvalidRequest: the cluster has other processes, which could not reach it.
    """

    def __init__(self, cluster: Cluster, host: str = "127.0.0.1", port: int = 0) -> None:
        if not is_in_process(cluster._runtime):
            raise InvalidRequest(
                f"a LocalActorServer is for clusters of one process, such as LocalCluster(); jobs of {cluster!r} are "
                "processes of their own: use ActorServer"
            )
        super().__init__(cluster, host, port)
        self._native = native.InProcessActorServer(cluster._native, host, port)
