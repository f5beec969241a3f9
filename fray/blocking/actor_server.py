"""Servers of actors that are objects of this process, for sync code."""

from __future__ import annotations

from fray.api import actor_server as native
from fray.blocking.bridge.background_loop import is_in_process, portal_of
from fray.blocking.bridge.mirror import make_blocking
from fray.blocking.cluster import Cluster
from fray.errors import InvalidRequest


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

    register = make_blocking(native.ActorServer.register)
    unregister = make_blocking(native.ActorServer.unregister)
    serve = make_blocking(native.ActorServer.serve)

    def serve_background(self) -> None:
        """Begin to listen and return: calls are served while the cluster is open."""
        self._portal.call(self._native._listen)

    shutdown = make_blocking(native.ActorServer.shutdown)


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
