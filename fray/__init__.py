"""Fray: jobs and actors on fleets of machines, on Trio's structured concurrency.

The names are those of `fray.names`. They are imported together, when the first of them is asked for: the command line,
the controller and the nodes are of this package too, and need none of them.
"""

import importlib
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fray.names import *  # noqa: F403
    from fray.names import __all__ as __all__

logging.getLogger("fray").addHandler(logging.NullHandler())

if "FRAY_COORDINATOR_ADDRESS" in os.environ:  # a program that is a member of a gang
    importlib.import_module("fray.runtime.process.jax_distributed").install()

__version__ = "0.1.0"

_loading = threading.RLock()


def load() -> None:
    """Import all names now; a zygote does, for all jobs to come."""
    with _loading:  # threads that import one another's halves would meet in the middle
        names = importlib.import_module("fray.names")
        globals().update({name: value for name, value in vars(names).items() if name in names.__all__})
        globals()["__all__"] = names.__all__


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'fray' has no attribute {name!r}")
    load()
    if name in globals():
        return globals()[name]
    names = importlib.import_module("fray.names")
    if name in names.__all__:  # one that is imported by itself
        return globals().setdefault(name, getattr(names, name))
    try:
        return importlib.import_module(f"fray.{name}")  # as if it had come along with the names
    except ModuleNotFoundError as error:
        if error.name != f"fray.{name}":
            raise
    raise AttributeError(f"module 'fray' has no attribute {name!r}")
