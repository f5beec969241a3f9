"""Fray: jobs and actors on fleets of machines, on Trio's structured concurrency.

The names of this package are re-exports, listed in `fray.public_names`. Each is imported when it is used: the command
line, the controller and the nodes are in this package too and need none of them. From the bottom up:

    errors, model       exceptions, and the values that processes exchange; no I/O
    net                 channels between two processes, bulk buffers, tunnels, storage
    scheduler           the scheduler, a pure state machine; used by the controller
    controller, node    the daemons: `fray-controller`, and `fray-node` on every machine
    runtime             client side in a driver or job: controller connection, actors, calls, objects
    api, blocking, aio  what users hold: the async API on Trio, and the same for sync code and for asyncio
    deploy              opens the cluster that a spec names, starting a local one where needed
    job, v2             the interfaces of other libraries on top of `blocking` and `api`
    cli, testing        the `fray` command; fakes and test helpers for users
"""

import importlib
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from fray.import_hooks import after_import

if TYPE_CHECKING:
    from fray.public_names import *  # noqa: F403
    from fray.public_names import __all__ as __all__

logging.getLogger("fray").addHandler(logging.NullHandler())

if "FRAY_COORDINATOR_ADDRESS" in os.environ:  # this program is a member of a gang
    importlib.import_module("fray.runtime.process.jax_distributed").install()


def _register_with_joblib(joblib: Any) -> None:
    def make(**params: Any) -> Any:
        return importlib.import_module("fray.blocking.joblib_backend").FrayBackend(**params)

    joblib.register_parallel_backend("fray", make)


after_import("joblib.parallel", _register_with_joblib)

__version__ = "0.1.0"

_loading = threading.RLock()


def load() -> None:
    """Import the names that most programs use. A zygote calls this for all jobs that it will start."""
    with _loading:
        public = importlib.import_module("fray.public_names")
        globals().update({name: value for name, value in vars(public).items() if name in public.__all__})
        globals()["__all__"] = public.__all__


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'fray' has no attribute {name!r}")  # asked for by inspect and doctest, not users
    modules = importlib.import_module("fray.name_modules").modules_of_names()
    if name == "__all__":
        return sorted(modules)
    if name in modules:
        # Its module alone: `open_cluster` starts the processes of a cluster and imports the rest meanwhile.
        with _loading:  # else two threads, each importing modules that the other needs, would deadlock
            return globals().setdefault(name, getattr(importlib.import_module(modules[name]), name))
    try:
        return importlib.import_module(f"fray.{name}")  # a sub-package or module: `import fray; fray.v2`
    except ModuleNotFoundError as error:
        if error.name != f"fray.{name}":
            raise
    missing = importlib.import_module("fray.missing_names")
    raise missing.missing_name("module 'fray'", name, __dir__(), missing.MODULE_LINES)


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet, and the interfaces."""
    return sorted(
        [
            *importlib.import_module("fray.name_modules").modules_of_names(),
            "__version__",
            "aio",
            "blocking",
            "job",
            "testing",
            "v2",
        ]
    )
