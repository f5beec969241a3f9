"""Process of a node whose cluster is embedded in a driver: ``python -m fray.node.embedded_main CONFIG_FD MARK``.

It imports once, forks the zygote, and becomes the node: one interpreter starts where two would (a cold driver takes 510
ms instead of 800). Invariants: the fork comes before there is a loop, and before the config is read, which has the
token that no job may know. The driver runs it in the environment that its jobs are to have
(`fray.node.job_process.inherited_environ.node_environ`), and with the argument by which they are recognised.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from fray.node.zygotes.zygote import ForkedZygote


def main() -> NoReturn:
    """Run the node. Exit status: 0 after SIGTERM or SIGINT or the driver's end, 1 if the cluster does not accept it."""
    # Before the first import: what is imported stays, and collecting garbage in it takes a tenth of the start.
    gc.disable()
    from fray.node.job_process.bootstrap import PRELOAD
    from fray.node.zygotes.zygote import fork_zygote, import_all

    import_all(name.partition(":")[0] for name in PRELOAD)
    status = _be_node(int(sys.argv[1]), fork_zygote(PRELOAD))
    sys.stderr.flush()
    os._exit(status)  # tearing down the interpreter would add 20 ms to the cluster's end


def _be_node(config_fd: int, zygote: ForkedZygote) -> int:
    import trio

    from fray.errors import FrayError
    from fray.net import daemon_logging
    from fray.net.codec import from_json
    from fray.net.switch_interval import SWITCH_INTERVAL_S
    from fray.node.config import NodeConfig
    from fray.node.daemon import serve_daemon

    gc.freeze()
    gc.enable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with open(config_fd, "rb") as file:
            config = from_json(NodeConfig, file.read())
        daemon_logging.configure(None)
        if config.preload:
            _end(zygote)
        trio.run(serve_daemon, config, None if config.preload else zygote)
    except (FrayError, OSError) as error:
        print(f"fray-node: {error}", file=sys.stderr)
        return 1
    return 0


def _end(zygote: ForkedZygote) -> None:
    """End the zygote, which has imported too little: the node starts another one, in an interpreter of its own."""
    zygote.link.close()
    os.waitpid(zygote.pid, 0)


if __name__ == "__main__":
    from fray.node import embedded_main

    embedded_main.main()
