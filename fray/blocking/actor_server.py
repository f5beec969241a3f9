"""Servers of actors that are objects of this process, for sync code."""

from __future__ import annotations

from fray.api import actor_server as native
from fray.blocking.bridge.background_loop import is_in_process, portal_of
from fray.blocking.bridge.mirror import make_blocking
from fray.blocking.cluster import Cluster
from fray.errors import InvalidRequest


class ActorServer:
    """Server of actors that are objects of this process, under names that several servers may share.

    Each actor's sync methods run on a thread of its own; a first parameter named ``ctx`` gets an `ActorContext`. The
    ``with`` block, or `shutdown`, ends it; the end of the cluster ends it too.

    Args:
        cluster: where the names are registered.
        host: address to bind; default and other values as for `fray.ActorServer`.
        port: default 0: a free one.
    """

    def __init__(self, cluster: Cluster, host: str | None = native.AUTO, port: int = 0) -> None:
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
        """``host:port``, once the server listens (after entering it, or after the first `register`). Raises FrayError
        before.
        """
        return self._native.address

    @property
    def token(self) -> str:
        """Secret with which a `FixedResolver` of another process may call these actors."""
        return self._native.token

    register = make_blocking(native.ActorServer.register)
    unregister = make_blocking(native.ActorServer.unregister)
    serve = make_blocking(native.ActorServer.serve)

    def serve_background(self) -> None:
        """Start to listen and return: calls are served while the cluster is open."""
        self._portal.call(self._native._listen)

    shutdown = make_blocking(native.ActorServer.shutdown)


class LocalActorServer(ActorServer):
    """`ActorServer` of a `local` cluster, without a port: only threads and jobs of this process can call its actors.
    Arguments and results are pickled all the same.

    Args:
        cluster: where the names are registered.
        host, port: unused; for compatibility with `ActorServer`.

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
