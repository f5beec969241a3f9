"""An actor server that is reached within its process alone."""

from __future__ import annotations

from fray.api.actors import handle as native
from fray.blocking.actors import ActorServer
from fray.blocking.bridge.background_loop import is_in_process
from fray.blocking.cluster import Cluster
from fray.errors import InvalidRequest
from fray.runtime.actors.server import host_of


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
        self._native = _InProcess(cluster._native, host, port)


class _InProcess(native.ActorServer):
    async def _listen(self) -> None:
        if self._address is None:
            self._address = await host_of(self._runtime).listen_local()
